"""A job's whole state in one atomic file; the previous one stays until the new one is durable."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

import zgstore
from zgtrain.files import disk_heard, opened, placed
from zgtrain.ranks import whole

FORMAT: Final = 1
_SEAL: Final = "seal"
_REMEDY: Final = "remove it, or run the block with --fresh, to train it from its start; other blocks are not touched"
_ZIP: Final = b"PK\x03\x04"
# What torch.load has been seen to raise for files with a flipped bit.
_UNREADABLE: Final = (RuntimeError, EOFError, ValueError, KeyError, IndexError, TypeError, AttributeError, OSError)


def save(path: Path, state: Mapping[str, Any]) -> None:
    """Write a state: a temporary file, ``fsync``, rename, ``fsync`` of the folder.

    Args:
        path: Where; its folder is made.
        state: Mappings, lists, tensors, numbers and text.

    Raises:
        OSError: what the disk said; the previous state is still there.
    """
    with placed(path, by="new") as file, disk_heard():
        torch.save({**state, "format": FORMAT, _SEAL: _seal(state)}, file)


def load(path: Path) -> dict[str, Any] | None:
    """The state in a file, on the CPU; None if there is no file.

    Raises:
        zgstore.Corrupt: if it is not what was saved.
    """
    file = opened(path, remedy=_REMEDY)
    if file is None:
        return None
    with file:
        if file.read(len(_ZIP)) != _ZIP:  # torch would try to read it as what it wrote years ago
            raise _corrupt(path, "it is no archive as torch.save writes it")
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except _UNREADABLE as error:
        raise _corrupt(path, str(error).split("\n")[0]) from error
    except Exception as error:  # torch raises its own UnpicklingError; it cannot be named without importing pickle
        if type(error).__name__ != "UnpicklingError":
            raise
        raise _corrupt(path, str(error).split("\n")[0]) from error
    if not isinstance(state, dict) or state.pop("format", None) != FORMAT:
        raise _corrupt(path, f"it is of no format that this version knows ({FORMAT})")
    if state.pop(_SEAL, None) != _seal(state):
        raise _corrupt(path, "its content does not match its own digest")
    return state


def _corrupt(path: Path, why: str) -> zgstore.Corrupt:
    return zgstore.Corrupt(
        f"{path} is no whole checkpoint: {why}",
        hint=_REMEDY,
        object=path.name,
        path=str(path),
    )


# ---- a block's state ----


def block_state(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, those that ``state_dict`` leaves out too; the tensors themselves."""
    return {name: tensor.detach() for name, tensor in _tensors(module)}


def passing_buffers(module: nn.Module) -> list[str]:
    """Names of the buffers that ``state_dict`` leaves out: a block may make them, or make them longer, as it runs."""
    kept = module.state_dict()
    return [name for name, _ in module.named_buffers() if name not in kept]


@torch.no_grad()
def restore_block(module: nn.Module, state: Mapping[str, Tensor], *, passing: Collection[str] = ()) -> None:
    """Put a state back, in place.

    Args:
        module: The block.
        state: Of `block_state`.
        passing: Of `passing_buffers` when the state was taken; these, and the block's own, need not be alike.

    Raises:
        zgstore.Refused: if the block has other tensors.
    """
    _renew_buffers(module, state, dict.fromkeys((*passing, *passing_buffers(module))))
    mine = dict(_tensors(module))
    for name in (*mine, *state):
        said = [_said(each.get(name)) for each in (mine, state)]
        if said[0] != said[1]:
            raise zgstore.Refused(
                f"the block has {said[0]} for {name!r}, and the checkpoint {said[1]}",
                hint="if the block's code or arguments changed, restore them, or train with --fresh; a buffer that a "
                "block makes or changes as it runs is to be registered with persistent=False",
                name=name,
            )
    for name, tensor in mine.items():
        if _indirect(tensor):
            tensor.data = _copied(state[name], tensor.device)
        else:
            tensor.copy_(state[name])


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _renew_buffers(module: nn.Module, state: Mapping[str, Tensor], names: Collection[str]) -> None:
    """Register the buffers of these names anew that the state has otherwise, or that one of the two has not."""
    mine = dict(_tensors(module))
    device = next(iter(mine.values())).device if mine else None
    for name in names:
        if _said(mine.get(name)) == _said(state.get(name)):
            continue
        path, _, own = name.rpartition(".")
        tensor = _copied(state[name], device) if name in state else None
        with contextlib.suppress(AttributeError, KeyError):  # what has no place for it is refused by name
            module.get_submodule(path).register_buffer(own, tensor, persistent=False)


def _said(tensor: Tensor | None) -> str:
    return "nothing" if tensor is None else f"{list(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"


def _indirect(tensor: Tensor) -> bool:
    """Whether its elements do not lie in its memory each as it is: of ``expand``, or a conjugate that is only said.

    Into the one nothing can be written, and of the other a file of weights would have what it is the conjugate of.
    """
    shared = any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return shared or tensor.is_conj() or tensor.is_neg()


def _copied(tensor: Tensor, device: torch.device | None) -> Tensor:
    """A copy that lies as the tensor does, if that is not indirect: kernels may round by how their operands lie."""
    return tensor.detach().to(device).resolve_conj().resolve_neg().clone()


def state_digest(module: nn.Module) -> str:
    """The digest of a block's parameters and buffers: names, dtypes, shapes and bytes."""
    state = block_state(module)
    return _digest({name: state[name] for name in sorted(state)}, kind="block")


def _seal(state: Mapping[str, Any]) -> str:
    return _digest({key: value for key, value in state.items() if key not in {_SEAL, "format"}}, kind="checkpoint")


def _digest(value: Any, *, kind: str) -> str:
    return str(zgstore.digest_of(None, f"zgtrain 1 {kind}\0".encode(), *_chunks(value)))


def _chunks(value: Any) -> Iterator[bytes | memoryview]:
    """A value as bytes so that no two values are written alike."""
    if isinstance(value, Mapping):
        yield f"map {len(value)}\0".encode()
        for key, each in value.items():
            yield f"{key!r}\0".encode()
            yield from _chunks(each)
    elif isinstance(value, list | tuple):
        yield f"list {len(value)}\0".encode()
        for each in value:
            yield from _chunks(each)
    elif isinstance(value, Tensor):
        tensor = whole(value.detach()).cpu().resolve_conj().resolve_neg().contiguous()
        yield f"{tensor.dtype} {list(tensor.shape)}\0".encode()
        yield tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b""
    else:
        yield f"{value!r}\0".encode()


# ---- random state ----


def capture_rng() -> dict[str, Any]:
    """The state of the generators of Python, NumPy, torch and CUDA."""
    kind, keys, *rest = np.random.get_state(legacy=True)  # noqa: NPY002 — the global generator is what blocks may use
    return {
        "python": random.getstate(),
        "numpy": [kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_rng(state: Mapping[str, Any]) -> None:
    """Put the generators back."""
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    kind, numbers, *rest = state["numpy"]
    np.random.set_state((kind, numbers.numpy().astype(np.uint32), *rest))  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


def seed_all(seed: int) -> None:
    """Seed the generators of Python, NumPy, torch and CUDA."""
    random.seed(seed)
    np.random.seed(seed % (1 << 32))  # noqa: NPY002
    torch.manual_seed(seed)


@contextlib.contextmanager
def rng_kept() -> Iterator[None]:
    """Whatever runs inside draws from the generators without moving them."""
    state = capture_rng()
    try:
        yield
    finally:
        restore_rng(state)
