"""Blocks trained in depth order, each on what the trained blocks before it make of the data."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

import torch
from torch import nn

import zgstore
from zgtrain.assembler import load_block
from zgtrain.blockreport import CHECKPOINT, BlockReport, finished
from zgtrain.blocks import NOT_READ, boundaries_of, make_block, mending, refuse_shared, resolve_snapshot, train
from zgtrain.devices import device_of
from zgtrain.files import held
from zgtrain.job import Job
from zgtrain.ledger import Log
from zgtrain.prefixes import capture_prefix, joined, prefix_pins, relayed, remember, remembered
from zgtrain.sharded import newest
from zgtrain.source import LIVE, Source

_LOCK: Final = ".relay.lock"  # beside what it locks: that is removed when a relay begins anew

Told = Callable[[int, int, int], None]


def relay(
    job: Job,
    *,
    steps: int | None = None,
    from_scratch: bool = False,
    fresh: bool = False,
    device: str | None = None,
    stop: Callable[[], bool] = lambda: False,
    progress: Callable[[int], Log] = lambda _block: lambda _line: None,
    captured: Told = lambda _block, _done, _rows: None,
) -> list[BlockReport]:
    """Train the blocks of a job once more, or for the first time, on the student's own states.

    A block that the job has trained begins as it was left there; the first one, whose source is the teacher's either
    way, is taken over as it is. Everything goes into ``relay/`` in the job's output, and is resumed from there.

    Args:
        job: The job.
        steps: Of each block, those of an earlier relay that is gone on with among them; default the job's.
        from_scratch: Begin with blocks as their factory makes them.
        fresh: Forget an earlier relay.
        device: Where; default CUDA if there is one.
        stop: Asked before each step whether to save and end.
        progress: Block → what is called with each line of its log.
        captured: Told a block, its rows captured so far and its rows in all.

    Returns:
        A report of each block, in depth order.

    Raises:
        zgstore.Refused: if the job was relayed before in another way or from other blocks, or its data are not the
            snapshot's.
        zgstore.Busy: if another process relays it.
        zgstore.ZgError: what training a block raises.
    """
    if job.train.diffusion:
        raise zgstore.Invalid(
            "a relay hands a student's states on, and blocks of diffusion have none in between",
            hint="leave train.noise out, or give it the name log-uniform",
        )
    if steps is not None and steps < 1:
        raise zgstore.Invalid(f"{steps} steps train nothing", hint="say 1 or more after --steps")
    with held(job.output / _LOCK, "the job is being relayed"):
        again = relayed(job, steps=steps or job.train.steps)
        if fresh:
            shutil.rmtree(again.output, ignore_errors=True)
        return _relay(
            job, again, from_scratch=from_scratch, place=device_of(device), stop=stop, progress=progress,
            captured=captured,
        )  # fmt: skip


def _relay(
    job: Job, again: Job, *, from_scratch: bool, place: torch.device, stop: Callable[[], bool],
    progress: Callable[[int], Log], captured: Told,
) -> list[BlockReport]:  # fmt: skip
    store = zgstore.Store.open(job.snapshot.store)
    names = boundaries_of(job, store)
    _remember(job, again, len(names) - 1, from_scratch=from_scratch)
    refuse_shared(again, len(names) - 1)
    reports: list[BlockReport] = []
    prefix: zgstore.Digest | None = None
    for block in range(len(names) - 1):
        folder = again.folder(block)
        before = [report.state_digest for report in reports]
        with mending(job), _opened(again, store, names, block, prefix) as data:
            report = _done(again, store, block, data, before)
            if report is None and block == 0 and not from_scratch:
                report = _taken_over(job, again)
            if report is None:
                module = _begun(job, block, from_scratch=from_scratch)
                report = train(
                    again, data, module, block=block, blocks=len(names) - 1, folder=folder, device=str(place),
                    stop=stop, progress=progress(block),
                )  # fmt: skip
                del module
                gc.collect()  # the next block's report counts what is alive beside it
            reports.append(report)
            if block < len(names) - 2:
                module = load_block(again, block, report).to(place)
                prefix = capture_prefix(
                    again, store, resolve_snapshot(job, store), data, module,
                    before=[*before, report.state_digest], device=place, stop=stop,
                    progress=partial(captured, block),
                )  # fmt: skip
                del module
    return reports


def _opened(job: Job, store: zgstore.Store, names: list[str], block: int, prefix: zgstore.Digest | None) -> Source:
    digest = resolve_snapshot(job, store)
    columns = store.snapshot(digest).columns
    context = [column.name for column in columns if column.role == "context" and column.name not in NOT_READ]
    return joined(store, digest, prefix, names[block], names[block + 1], context=context)


def _done(job: Job, store: zgstore.Store, block: int, data: Source, before: list[str]) -> BlockReport | None:
    """The report of a block that this relay has trained on the blocks that are before it now."""
    report = finished(job, block)
    if block:
        pins = prefix_pins(job, store.snapshot(resolve_snapshot(job, store)), data.source, before)
        return report if report is not None and report.pins == str(pins.digest()) else None
    return report


def _taken_over(job: Job, again: Job) -> BlockReport | None:
    """The first block as the job has trained it; None if it has not."""
    report = finished(job, 0)
    if report is None or report.targets == LIVE:
        return None
    again.folder(0).mkdir(parents=True, exist_ok=True)
    for path in (job.folder(0) / CHECKPOINT, newest(job.folder(0))):  # of one process, or of several
        if path is not None and path.is_dir():
            shutil.copytree(path, again.folder(0) / path.name, dirs_exist_ok=True)
        elif path is not None and path.exists():
            shutil.copyfile(path, again.folder(0) / path.name)
    report = replace(report, job=again.identity())
    report.write(again.folder(0))
    return report


def _begun(job: Job, block: int, *, from_scratch: bool) -> nn.Module:
    """The block as the job has trained it, else as its factory makes it."""
    report = None if from_scratch else finished(job, block)
    return make_block(job, block) if report is None else load_block(job, block, report).train()


def _remember(job: Job, again: Job, blocks: int, *, from_scratch: bool) -> None:
    """What this relay is, so that what comes later finds it; another one is refused.

    Raises:
        zgstore.Refused: if one was begun in another way, or with other blocks than the job has trained now.
    """
    begun = [None if from_scratch else _digest(job, block) for block in range(blocks)]
    said = {"job": again.identity(), "steps": again.train.steps, "from_scratch": from_scratch, "begun": begun}
    known = remembered(again.output) or said
    for name, what in (("job", "of another job"), ("from_scratch", "begun in another way"), ("begun", "")):
        if known[name] != said[name] and known[name] is not None:
            raise zgstore.Refused(
                f"{again.output} holds a relay "
                + (what or "that began with other blocks than the job has trained by now"),
                hint="run it as it was, or begin anew with --fresh",
                field=name,
                expected=said[name],
                actual=known[name],
            )
    remember(again.output, said)


def _digest(job: Job, block: int) -> str | None:
    """The state of a block that the job has trained; None if it has not."""
    report = finished(job, block)
    return None if report is None else report.state_digest
