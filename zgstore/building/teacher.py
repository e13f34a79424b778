"""What a teacher is, measured: its weights, buffers, modules and configuration; its code, arithmetic and platform."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import platform as host
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from zgstore.building.files import FileDigests, SourcePin, file_digests
from zgstore.errors import Invalid
from zgstore.format import canonical
from zgstore.format.digest import DIGEST_BYTES, Digest, digest_of
from zgstore.format.tensorfile import as_bytes, dtype_name

# Where a teacher was loaded from, by which version and how, changes no state of its own: what it changed in weights,
# buffers and attributes is measured there.
_CIRCUMSTANCE: Final = frozenset({"transformers_version", "dtype", "torch_dtype", "name_or_path"})
_SCALARS: Final = (int, float, bool, str, type(None))
_MANY_THREADS_BYTES: Final = 1 << 20
_BETWEEN: Final = "\x1f"  # class, extra_repr and attributes of a module's description: no text of theirs holds it


@dataclass(frozen=True, slots=True)
class Measured:
    """A teacher, measured part by part so that a difference can be named.

    Args:
        weights: State dict entry → digest of its dtype, shape and bytes.
        buffers: Non-persistent buffer → the same.
        modules: Path → class, ``extra_repr`` and public scalar attributes, as text. The root's path is
            empty.
        config: Dotted key → JSON of its value.
    """

    weights: Mapping[str, Digest]
    buffers: Mapping[str, Digest]
    modules: Mapping[str, str]
    config: Mapping[str, str]

    def as_value(self) -> dict[str, Any]:
        """As a canonical value: names joined by newlines, digests by themselves, for there can be many."""
        kinds = sorted(set(self.modules.values()))
        number = {kind: at for at, kind in enumerate(kinds)}
        return {
            "weights": _packed(self.weights),
            "buffers": _packed(self.buffers),
            "modules": {
                "names": "\n".join(sorted(self.modules)),
                "kinds": "\0".join(kinds),
                "which": b"".join(number[self.modules[name]].to_bytes(8, "little") for name in sorted(self.modules)),
            },
            "config": {
                "names": "\n".join(sorted(self.config)),
                "values": "\n".join(self.config[name] for name in sorted(self.config)),
            },
        }

    @classmethod
    def from_value(cls, value: Mapping[str, Any]) -> Measured:
        """What `as_value` gave."""
        modules, config = value["modules"], value["config"]
        kinds = modules["kinds"].split("\0")
        which = [int.from_bytes(modules["which"][at : at + 8], "little") for at in range(0, len(modules["which"]), 8)]
        names = config["names"].split("\n") if config["names"] else []
        return cls(
            weights=_unpacked(value["weights"]),
            buffers=_unpacked(value["buffers"]),
            modules=dict(zip(modules["names"].split("\n"), (kinds[at] for at in which), strict=True)),
            config=dict(zip(names, config["values"].split("\n") if names else [], strict=True)),
        )

    @property
    def digest(self) -> Digest:
        """``measured`` of a snapshot's teacher pins."""
        return digest_of("teacher", canonical.encode(self.as_value()))


def _packed(digests: Mapping[str, Digest]) -> dict[str, Any]:
    names = sorted(digests)
    return {"names": "\n".join(names), "digests": b"".join(digests[name].raw for name in names)}


def _unpacked(value: Mapping[str, Any]) -> dict[str, Digest]:
    names = value["names"].split("\n") if value["names"] else []
    joined = value["digests"]
    return {name: Digest(joined[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES]) for at, name in enumerate(names)}


def measure(module: nn.Module) -> Measured:
    """Measure a teacher, tensor by tensor, on several threads where a tensor is large.

    Two loads of one teacher measure the same wherever it came from; another weight, buffer, class, attribute or
    configuration value measures differently.

    Raises:
        Invalid: for weights without values (meta), or ones that no digest can be taken of.
    """
    seen: dict[tuple[Any, ...], Digest] = {}
    state = module.state_dict()
    weights = {name: _value_digest(name, value, seen) for name, value in sorted(state.items())}
    buffers = {
        name: _value_digest(name, _at_rest(module, name, buffer), seen)
        for name, buffer in sorted(module.named_buffers(remove_duplicate=False))
        if name not in state
    }
    return Measured(weights, buffers, dict(_described(module)), dict(sorted(_configurations(module))))


def _value_digest(name: str, value: Any, seen: dict[tuple[Any, ...], Digest]) -> Digest:
    if isinstance(value, Tensor):
        return _tensor_digest(name, value, seen)
    body = value.getvalue() if isinstance(value, BytesIO) else value
    try:
        return digest_of("teacher", b"extra", canonical.encode(body))
    except Invalid as error:
        raise Invalid(
            f"the teacher's state {name!r} is a {type(value).__qualname__}, of which no digest can be taken",
            hint="let get_extra_state return tensors, numbers, text, bytes, lists and maps",
        ) from error


def _tensor_digest(name: str, tensor: Tensor, seen: dict[tuple[Any, ...], Digest]) -> Digest:
    what = f"the teacher's {name!r}"
    dtype = dtype_name(tensor, what=what)
    # A tied weight stands in the state dict twice, and is hashed once.
    key = (tensor.device, tensor.data_ptr(), dtype, tuple(tensor.shape), tensor.stride())
    if key not in seen or not tensor.numel():
        data = as_bytes(tensor, what=what)
        threads = min(8, len(os.sched_getaffinity(0))) if len(data) >= _MANY_THREADS_BYTES else 1
        seen[key] = digest_of("teacher", f"{dtype}{list(tensor.shape)}\n".encode(), data, threads=threads)
    return seen[key]


def _rolling(module: nn.Module) -> bool:
    """Whether it is a rotary embedding that adapts its frequencies to the longest sequence it has seen."""
    kind = getattr(module, "rope_type", None)
    kinds = kind.values() if isinstance(kind, Mapping) else (kind,)
    return any(isinstance(each, str) and ("dynamic" in each or each == "longrope") for each in kinds)


def _at_rest(root: nn.Module, name: str, buffer: Tensor) -> Tensor:
    """The buffer, or the one that it started from where it changes as the teacher runs."""
    path, _, last = name.rpartition(".")
    module = root.get_submodule(path)
    if last.endswith("inv_freq") and "original_" not in last and _rolling(module):
        original = getattr(module, f"{last.removesuffix('inv_freq')}original_inv_freq", None)
        if isinstance(original, Tensor):
            return original
    return buffer


def _described(root: nn.Module) -> Iterator[tuple[str, str]]:
    for path, module in root.named_modules(remove_duplicate=False):
        rolling = _rolling(module)
        attributes = {
            name: value
            for name, value in vars(module).items()
            if type(value) in _SCALARS
            and not name.startswith("_")
            and name not in {"training", "name_or_path"}
            and not (rolling and name.endswith("max_seq_len_cached"))
        }
        kind = f"{type(module).__module__}.{type(module).__qualname__}"
        said = [kind, module.extra_repr(), *(f"{name} = {attributes[name]!r}" for name in sorted(attributes))]
        yield path, _BETWEEN.join(said).replace("\0", "")


def _configurations(root: nn.Module) -> Iterator[tuple[str, str]]:
    """Dotted key → JSON, for each configuration in the tree; HF's modules share their root's."""
    seen: set[int] = set()
    for path, module in root.named_modules():
        config = vars(module).get("config")
        if config is None or id(config) in seen:
            continue
        seen.add(id(config))
        # A submodule's config that is a part of one above it (a text or vision part) is there already.
        parts = [value for value in _as_mapping(config, deep=False).values() if not isinstance(value, _SCALARS)]
        seen |= {id(part) for part in parts}
        yield from _flat(f"{path}.config" if path else "config", _as_mapping(config))


def _as_mapping(config: Any, *, deep: bool = True) -> Mapping[Any, Any]:
    if isinstance(config, Mapping):
        return config
    if deep and callable(getattr(config, "to_dict", None)):
        found = config.to_dict()
        return found if isinstance(found, Mapping) else {}
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return vars(config) if hasattr(config, "__dict__") else {"": config}


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for key in value:
            name = str(key)
            if not name.startswith("_") and name not in _CIRCUMSTANCE:
                yield from _flat(f"{prefix}.{name}".replace("\n", " "), value[key])
    else:
        yield prefix, json.dumps(value, sort_keys=True, default=_opaque)


def _opaque(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if isinstance(value, torch.dtype | torch.device | Path):
        return str(value)
    # An object's repr may hold its address: only its class is known to be the same the next time.
    kind = value if isinstance(value, type) else type(value)
    return f"{kind.__module__}.{kind.__qualname__}"


def differences(old: Measured, new: Measured) -> list[str]:
    """What differs between two measurements, each in a line that names it: configuration first, weights last."""
    lines = [
        f"{name} {old.config.get(name, 'absent')} → {new.config.get(name, 'absent')}"
        for name in sorted({*old.config, *new.config})
        if old.config.get(name) != new.config.get(name)
    ]
    for path in sorted({*old.modules, *new.modules}):
        before, after = old.modules.get(path), new.modules.get(path)
        if before != after:
            lines.append(f"module {path or '(root)'} {_change(before, after)}")
    for part, mine, theirs in (("buffer", old.buffers, new.buffers), ("weights", old.weights, new.weights)):
        for name in sorted({*mine, *theirs}):
            if mine.get(name) != theirs.get(name):
                said = " added" if name not in mine else " removed" if name not in theirs else ""
                lines.append(f"{part} {name}{said}")
    return lines


def _change(before: str | None, after: str | None) -> str:
    """The parts of a module's description that changed."""
    if before is None or after is None:
        return "added" if before is None else "removed"
    mine, theirs = before.split(_BETWEEN), after.split(_BETWEEN)
    gone, come = [each for each in mine if each not in theirs], [each for each in theirs if each not in mine]
    return f"{', '.join(gone) or 'absent'} → {', '.join(come) or 'absent'}"


def sources(
    module: nn.Module, factory: Callable[..., Any] | None = None, *, digests: FileDigests = file_digests
) -> SourcePin:
    """The source files of the classes of a module tree and their bases, and of the factory that made it.

    Args:
        module: The teacher.
        factory: What made it.
        digests: How a file's digest is had.
    """
    names = {
        base.__module__ for each in module.modules() for base in type(each).__mro__ if not _foundation(base.__module__)
    }
    made_by = {getattr(factory, "__module__", None) or "__main__"} if factory is not None else set()
    return SourcePin(_loaded(sorted(names), digests), _loaded(sorted(made_by), digests))


def _foundation(name: str) -> bool:
    """Whether a module is Python's or torch's own: the platform names their versions."""
    top = name.split(".", maxsplit=1)[0]
    return top == "torch" or (top in sys.stdlib_module_names and top != "__main__")


def _loaded(names: Sequence[str], digests: FileDigests) -> dict[str, Digest | None]:
    """Module name → digest of the file it was loaded from."""
    paths: dict[str, Path] = {}
    for name in names:
        try:
            text = inspect.getsourcefile(sys.modules[name]) or getattr(sys.modules[name], "__file__", None)
        except (KeyError, TypeError):
            continue
        if text and Path(text).is_file():
            paths[name] = Path(text)
    order = sorted(set(paths.values()))
    known = dict(zip(order, digests(order), strict=True))
    return {name: known[paths[name]] if name in paths else None for name in names}


def device_of(module: nn.Module) -> torch.device:
    """Where a module's first tensor lies; the CPU for one without any."""
    for tensor in (*module.parameters(), *module.buffers()):
        return tensor.device
    return torch.device("cpu")


def arithmetic(module: nn.Module) -> dict[str, Any]:
    """How the teacher computes, as far as it changes bits: part of the capture pins.

    Returns:
        ``compute`` (dtypes of its floating parameters), ``autocast`` (a dtype or None), ``attention`` (of a model that
        has a choice, else None), ``tf32``, ``deterministic``.
    """
    kind = device_of(module).type
    dtypes = {str(p.dtype).removeprefix("torch.") for p in module.parameters() if p.is_floating_point()}
    attention = sorted(
        {
            str(found)
            for each in module.modules()
            if (found := getattr(vars(each).get("config"), "_attn_implementation", None)) is not None
        }
    )
    autocast = torch.is_autocast_enabled(kind)
    return {
        "compute": sorted(dtypes),
        "autocast": str(torch.get_autocast_dtype(kind)).removeprefix("torch.") if autocast else None,
        "attention": ", ".join(attention) or None,
        "tf32": torch.get_float32_matmul_precision() != "highest",
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def platform(device: torch.device | str = "cpu") -> dict[str, str]:
    """What else decides the bits: torch's version, the device's model, the CPU's capability. No thread counts."""
    device = torch.device(device)
    model = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {
        "torch": str(torch.__version__),
        "device": model,
        "cpu": f"{host.machine()} {torch.backends.cpu.get_cpu_capability()}",
    }
