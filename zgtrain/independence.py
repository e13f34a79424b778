"""Independence, measured in the run: gradient that left the block, and parameters that have no business being alive."""

from __future__ import annotations

import gc
import resource
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from zgtrain.ranks import is_sharded


def leaving_gradient_bytes(loss: Tensor, block: nn.Module) -> int:
    """Bytes of gradient that a backward pass from ``loss`` would leave outside of the block's parameters.

    The graph is walked to its leaves: a source that asks for a gradient, or a parameter of a neighbour, is one. A
    sharded parameter stands there as the whole that FSDP gathered for the forward and has let go since: there is one
    such leaf for each, of its shape.
    """
    own = {id(parameter) for parameter in block.parameters()}
    gathered = Counter(parameter.shape for parameter in block.parameters() if is_sharded(parameter))
    found: dict[int, int] = {}
    seen: set[Any] = set()
    todo = [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor) and leaf.requires_grad and id(leaf) not in own:
            if gathered[leaf.shape] and not _has_values(leaf):
                gathered[leaf.shape] -= 1
                continue
            found[id(leaf)] = leaf.nbytes
        todo.extend(below for below, _ in node.next_functions)
    return sum(found.values())


def live_parameters(*belonging: Iterable[Tensor]) -> int:
    """Elements of the parameters alive in this process that belong to none of the given.

    Every object that Python's collector knows is looked at: a teacher that somebody still holds is counted wherever
    it hides.
    """
    known = {id(parameter) for parameters in belonging for parameter in parameters}
    alive = _alive(known)
    if alive:  # perhaps only garbage that nobody has collected yet
        gc.collect()
        alive = _alive(known)
    return alive


def _alive(known: set[int]) -> int:
    objects = gc.get_objects()
    # By their types first: asking a lazy module's proxy for its class would load the module.
    tensors = {kind for kind in set(map(type, objects)) if issubclass(kind, Tensor)}
    found = (each for each in objects if type(each) in tensors and isinstance(each, nn.Parameter))
    return sum(each.numel() for each in found if id(each) not in known and _has_values(each))


def _has_values(parameter: Tensor) -> bool:
    """Not on meta, nor FSDP's place for what is gathered only while it is used."""
    if parameter.is_meta or is_sharded(parameter):
        return not parameter.is_meta
    return parameter.untyped_storage().nbytes() > 0 or not parameter.numel()


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory held: of the device, or on a CPU of the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
