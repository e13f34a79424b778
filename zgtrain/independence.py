"""Independence, measured in the run: gradient that left the block, and parameters that have no business being alive.

Where all of it is counted, the block's report is made of it.
"""

from __future__ import annotations

import gc
import platform
import resource
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zgtrain.blockreport import BlockReport
from zgtrain.checkpoint import state_digest
from zgtrain.ledger import Ledger
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


def report_of(
    ledger: Ledger,
    who: Mapping[str, Any],
    block: nn.Module,
    *,
    optimizer: torch.optim.Optimizer,
    interface: nn.Module | None,
    device: torch.device,
    deterministic: bool,
) -> BlockReport:
    """The report of a training that is over.

    Args:
        ledger: What it counted.
        who: What its checkpoint is of.
        block: As it is now.
        optimizer: Its parameters belong to the block.
        interface: So do its; None if there is none.
        device: Where it was trained.
        deterministic: Whether that was asked for.
    """
    first, last, residual = ledger.windows()
    frozen = [] if interface is None else list(interface.parameters())
    optimized = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    spent = ledger.seconds
    beside = spent["data"] + spent["validation"] + spent["checkpoint"]
    return BlockReport(
        **{name: who[name] for name in ("snapshot", "pins", "job", "block", "source", "target", "targets")},
        steps=ledger.step,
        first_window_mean_loss=first,
        last_window_mean_loss=last,
        validation_loss=ledger.validation,
        residual_error=residual,
        seconds={**spent, "compute": max(0.0, spent["total"] - beside)},
        bytes_read=ledger.bytes_read,
        peak_memory_bytes=peak_memory_bytes(device),
        inter_block_gradient_bytes=ledger.leaving_bytes,
        live_teacher_parameters=live_parameters(block.parameters(), optimized, frozen),
        frozen_interface_parameters=sum(parameter.numel() for parameter in frozen),
        trained_parameters=sum(parameter.numel() for parameter in block.parameters() if parameter.requires_grad),
        gradient_queries=ledger.queries,
        initial_digest=ledger.initial_digest,
        state_digest=state_digest(block),
        resumed_from=ledger.resumed_from,
        deterministic=deterministic or device.type == "cpu",
        environment={
            "python": platform.python_version(), "torch": str(torch.__version__), "machine": platform.machine(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "threads": torch.get_num_threads(),
        },
    )  # fmt: skip
