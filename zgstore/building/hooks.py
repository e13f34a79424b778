"""Where a teacher can be looked at, what is seen there, and how a teacher is called."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from zgstore.building.rows import Batch
from zgstore.building.rules import NOT_FOR_THE_TEACHER
from zgstore.building.teacher import device_of
from zgstore.errors import Invalid

SIDES: Final = ("in", "out")


def place(point: str, modules: Mapping[str, nn.Module]) -> tuple[nn.Module, str]:
    """The module and side of a point.

    Raises:
        Invalid: naming the nearest, if there is no such module.
    """
    path, _, side = point.rpartition(":")
    if side in SIDES and path in modules and path:
        return modules[path], side
    offered = [f"{name}:{each}" for name in modules if name for each in SIDES]
    near = difflib.get_close_matches(point, offered, n=3, cutoff=0.5)
    raise Invalid(
        f"the teacher has no point {point!r}",
        hint=f"the nearest are {', '.join(near)}" if near else "`zgstore points RECIPE` lists them",
        nearest=near,
    )


def stand(module: nn.Module, side: str, met: Callable[[Any], None]) -> Any:
    """Have ``met`` called with a module's first tensor argument or result; the handle removes the hook again.

    Arguments are looked through in the order of the forward's signature, by position or keyword; results may be a
    tensor, tuple, list, mapping or dataclass. Where there is no tensor, ``met`` gets what there is.
    """
    if side == "out":
        return module.register_forward_hook(lambda _module, _inputs, output: met(_first_tensor(output)))
    names = list(_parameters(module))

    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        met(_first_tensor((*args, *(kwargs[name] for name in sorted(kwargs, key=lambda n: _rank(names, n))))))

    return module.register_forward_pre_hook(before, with_kwargs=True)


def _parameters(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(module.forward).parameters
    except (TypeError, ValueError):  # compiled code that does not say
        return {}


def _rank(names: Sequence[str], name: str) -> int:
    return names.index(name) if name in names else len(names)


def _first_tensor(value: Any) -> Any:
    """The tensor itself, or the first one of a tuple, list, mapping or dataclass; else the value as it is."""
    if isinstance(value, Tensor):
        return value
    items = list(_items(value))
    for item in items:
        if isinstance(item, Tensor):
            return item
    for item in items:
        found = _first_tensor(item)
        if isinstance(found, Tensor):
            return found
    return value


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, tuple | list):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return (getattr(value, each.name) for each in dataclasses.fields(value))
    return ()


def said(value: Any) -> str:
    """What a value is, for a message."""
    return f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, tuple | list | Mapping) else "")


def call_teacher(teacher: nn.Module, batch: Batch, inputs: Sequence[str] | None) -> Any:
    """Call the teacher with what its forward asks for, on its own device.

    Args:
        teacher: Called with keywords; with the one tensor of a batch whose name its forward does not know.
        batch: A checked batch.
        inputs: The entries to pass; None: those that the forward names, but ``labels`` and ``id``.

    Raises:
        Invalid: if nothing fits, saying both lists.
    """
    device = device_of(teacher)
    parameters = _parameters(teacher)
    if inputs is not None:
        lacking = [name for name in inputs if name not in batch]
        if lacking:
            raise Invalid(f"the batch has no {lacking[0]!r} for the teacher", hint=f"it has {', '.join(sorted(batch))}")
    chosen = inputs if inputs is not None else [n for n in batch if n in parameters and n not in NOT_FOR_THE_TEACHER]
    if chosen:
        return teacher(**{name: moved(batch[name], device) for name in chosen})
    tensors = [name for name, value in batch.items() if isinstance(value, Tensor) and name not in NOT_FOR_THE_TEACHER]
    if len(tensors) == 1:
        return teacher(moved(batch[tensors[0]], device))
    raise Invalid(
        f"the teacher's forward takes {', '.join(parameters) or 'nothing'}, and the batch has "
        f"{', '.join(sorted(batch))}",
        hint="name the batch's entries as the forward names its parameters, or wrap the teacher in a module that does",
    )


def moved(value: Any, device: torch.device) -> Any:
    """A tensor on a device; other values as they are."""
    if isinstance(value, Tensor) and value.device != device and device.type != "meta":
        return value.to(device, non_blocking=True)
    return value
