"""What a checkpoint is of, how a training begins from one, and how it saves another."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zgstore
from zgtrain.blockreport import note, shown
from zgtrain.checkpoint import (
    block_state,
    capture_rng,
    load,
    passing_buffers,
    restore_block,
    restore_rng,
    save,
    seed_all,
    state_digest,
)
from zgtrain.ledger import Ledger, Log, not_finite
from zgtrain.ranks import Ranks, own_part
from zgtrain.sharded import load_fields, load_sharded, newest, save_sharded
from zgtrain.source import LIVE, Source


def keeper(
    path: Path | None,
    who: dict[str, Any],
    ledger: Ledger,
    *,
    data: Source,
    block: nn.Module,
    optimizer: torch.optim.Optimizer,
    initial: Mapping[str, Tensor],
    log: Log,
    ranks: Ranks,
) -> Callable[[], None]:  # fmt: skip
    """What saves everything, so that a job that ends there goes on as if it had not; what is not finite it refuses.

    Before the first step it saves nothing: there is nothing to lose, and a job that is corrected since its first batch
    was refused is another job, which would be refused in its turn.
    """
    read, kept = data.bytes_read, [-1, ""]

    def keep() -> None:
        nonlocal read, kept
        ledger.look(log, ranks)
        _refuse_not_finite(block, step=ledger.step, ranks=ranks)
        ledger.bytes_read += data.bytes_read - read
        read = data.bytes_read
        who.update(_place(data))
        if path is None or not ledger.step or kept == [ledger.step, data.snapshot]:
            return
        began = time.perf_counter()
        passing = passing_buffers(block)
        fields = {**who, "ledger": ledger.as_state(), "rng": capture_rng(), "passing": passing}
        if ranks.world > 1:
            save_sharded(path.parent, fields, block, optimizer, initial=initial, ranks=ranks)
        else:
            tensors = {"block_state": block_state(block), "initial": dict(initial), "optimizer": optimizer.state_dict()}
            save(path, {**fields, **tensors})
        if ranks.rank == 0:
            note(path, step=ledger.step, snapshot=data.snapshot, job=who["job"])
        kept = [ledger.step, data.snapshot]
        ledger.seconds["checkpoint"] += time.perf_counter() - began

    return keep


def _refuse_not_finite(block: nn.Module, *, step: int, ranks: Ranks) -> None:
    """See that a step whose loss and gradient were finite did not itself leave the numbers, as too high a rate does."""
    trained = {name: own_part(each.detach()) for name, each in block.named_parameters() if each.requires_grad}
    finite = torch.stack([each.isfinite().all() for each in trained.values()]).tolist()  # one look at the device
    if ranks.any(not all(finite)):
        names = [name for name, good in zip(trained, finite, strict=True) if not good]
        raise not_finite(f"parameter {', '.join(names[:3]) or 'shards'} of step {step} is not finite", step=step)


def begin(
    path: Path | None, who: Mapping[str, Any], block: nn.Module, optimizer: torch.optim.Optimizer,
    sampler: zgstore.Sampler, *, seed: int, anchor: float, ranks: Ranks,
) -> tuple[Ledger, Mapping[str, Tensor]]:  # fmt: skip
    """The ledger, and the parameters that an anchor pulls to: of the checkpoint if there is one, else new."""
    state = None
    if path is not None:
        _refuse_other_kind(path, several=ranks.world > 1)
        state = load(path) if ranks.world == 1 else load_fields(path.parent, ranks)
    if path is None or state is None:
        seed_all(seed)
        initial = {name: tensor.clone() for name, tensor in block_state(block).items()} if anchor else {}
        return Ledger(initial_digest=state_digest(block)), initial
    _refuse_others(path, state, who)
    if ranks.world == 1:
        restore_block(block, state["block_state"], passing=state.get("passing", ()))
        optimizer.load_state_dict(state["optimizer"])
        device = next(iter(block.parameters())).device
        initial = {name: tensor.to(device) for name, tensor in state["initial"].items()}
    else:
        initial = load_sharded(path.parent, state, block, optimizer)
    ledger = Ledger.of(state["ledger"])
    ledger.resumed_from = ledger.step or None
    if ledger.order is not None:
        sampler.load_state_dict(ledger.order)
    restore_rng(state["rng"])
    return ledger, initial


def identity_of(data: Source, block: int | None, job: str) -> dict[str, Any]:
    """What a checkpoint is of."""
    mine = {"job": job, "block": block, "source": data.source, "target": data.target, "targets": data.kind}
    return {**mine, "data": data.reader.data_digest, "pins": data.pins, **_place(data)}


def _place(data: Source) -> dict[str, Any]:
    return {"snapshot": data.snapshot, "build": data.reader.build, "shards": data.reader.shards}


def _refuse_other_kind(path: Path, *, several: bool) -> None:
    """See that what one process saved, a file, is not to be gone on with by several, who save a folder; nor back."""
    theirs = path if several else newest(path.parent)
    if theirs is not None and theirs.exists():
        kinds = ("one process", "several") if several else ("several processes", "one")
        raise zgstore.Refused(
            f"{theirs} was saved by {kinds[0]}, and {kinds[1]} would go on",
            hint="train on with as many processes as before, or begin anew with --fresh",
        )


def _refuse_others(path: Path, state: Mapping[str, Any], who: Mapping[str, Any]) -> None:
    """See that a checkpoint is of this job, block and snapshot; a build that was followed is known by its pins."""
    for name in ("job", "block", "source", "target", "data", "snapshot", "pins", "targets"):
        theirs, mine = state.get(name), who[name]
        if name == "targets":
            theirs, mine = theirs == LIVE, mine == LIVE
        if theirs != mine and not (name in {"snapshot", "pins"} and "" in {theirs, mine}):
            raise zgstore.Refused(
                f"the checkpoint {path} is of {name} {shown(state.get(name))!r}, and this is {shown(who[name])!r}",
                hint="train into another output folder, or begin anew with --fresh",
                field=name,
                expected=who[name],
                actual=state.get(name),
            )
