"""Blocks trained in depth order, each on what the trained blocks before it make of the data."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import torch
from torch import nn

import zgstore
from zgtrain.assembler import load_block
from zgtrain.blockreport import CHECKPOINT, BlockReport, command, finished, read_report, see_current, shown
from zgtrain.blocks import NOT_READ, boundaries_of, make_block, mending, refuse_shared, resolve_snapshot, train
from zgtrain.devices import device_of
from zgtrain.job import Job
from zgtrain.ledger import Log
from zgtrain.locks import held
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

    A block that the job has trained begins as it was left there, after however many steps; the first one, whose source
    is the teacher's either way, is taken over as it is. Everything goes into ``relay/`` in the job's output, and is
    resumed from there.

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
        zgstore.Refused: if the job was relayed before in another way or from other blocks, if one of its blocks was
            stopped halfway or is of something else, or if its data are not the snapshot's.
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
        return _relay(
            job, again, from_scratch=from_scratch, fresh=fresh, place=device_of(device), stop=stop,
            progress=progress, captured=captured,
        )  # fmt: skip


def _relay(
    job: Job, again: Job, *, from_scratch: bool, fresh: bool, place: torch.device, stop: Callable[[], bool],
    progress: Callable[[int], Log], captured: Told,
) -> list[BlockReport]:  # fmt: skip
    store = zgstore.Store.open(job.snapshot.store)
    names = boundaries_of(job, store)
    blocks = len(names) - 1
    left = [None] * blocks if from_scratch else [_left(job, store, block) for block in range(blocks)]
    refuse_shared(again, blocks)
    if fresh:  # all that can be refused has been seen: what is there is lost for nothing less
        _clear(again.output)
    _remember(again, left, from_scratch=from_scratch)
    reports: list[BlockReport] = []
    prefix: zgstore.Digest | None = None
    for block in range(blocks):
        before = [report.state_digest for report in reports]
        with mending(job), _opened(again, store, names, block, prefix) as data:
            report = _done(again, store, block, data, before)
            if report is None and block == 0:
                report = _taken_over(job, again, left[0])
            if report is None:
                module = _begun(job, block, left[block])
                report = train(
                    again, data, module, block=block, blocks=blocks, folder=again.folder(block), device=str(place),
                    stop=stop, progress=progress(block),
                )  # fmt: skip
                del module
                gc.collect()  # the next block's report counts what is alive beside it
            reports.append(report)
            if block < blocks - 1:
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
    if report is None or report.snapshot != data.snapshot:
        return None
    if not block:
        return report
    pins = prefix_pins(job, store.snapshot(resolve_snapshot(job, store)), data.source, before)
    return report if report.pins == str(pins.digest()) else None


def _taken_over(job: Job, again: Job, report: BlockReport | None) -> BlockReport | None:
    """The first block as the job has trained it; None if it has not, or on live targets, which no prefix was."""
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


def _begun(job: Job, block: int, report: BlockReport | None) -> nn.Module:
    """The block as the job has left it, else as its factory makes it.

    Raises:
        zgstore.Refused: if the job was trained on since the relay began.
    """
    if report is None:
        return make_block(job, block)
    if read_report(job, block) != report:
        raise zgstore.Refused(
            f"block {block} of {job.path.name} was trained on while it was relayed",
            hint=f"begin anew: `{command(replace(job, relay=True), block, fresh=True)}`",
            block=block,
        )
    return load_block(job, block, report).train()


def _left(job: Job, store: zgstore.Store, block: int) -> BlockReport | None:
    """The report of a block as the job has left it, however many steps it was trained for; None if it has not begun.

    Raises:
        zgstore.Refused: if the block was stopped halfway, or is of another job or snapshot.
    """
    report, folder = read_report(job, block), job.folder(block)
    why = ""
    if report is None:
        if (folder / CHECKPOINT).exists() or newest(folder) is not None:
            why = "is not trained to its end"
    elif report.job != job.identity():
        why = f"is of job {shown(report.job)}"
    elif report.snapshot != str(resolve_snapshot(job, store)):
        why = f"is of snapshot {shown(report.snapshot)}" if report.snapshot else "is of a build that was not published"
    else:
        see_current(job, block, report)
    if why:
        raise zgstore.Refused(
            f"block {block} in {job.output} {why}, and the relay would begin with it",
            hint=f"train it first: `{command(job, block)}`, with --fresh where it is of something else; "
            "or begin with new blocks: --from-scratch",
            block=block,
        )
    return report


def _remember(again: Job, left: Sequence[BlockReport | None], *, from_scratch: bool) -> None:
    """What this relay is, so that what comes later finds it; another one is refused.

    Raises:
        zgstore.Refused: if one was begun in another way, or with other blocks than the job has trained now.
    """
    begun = [None if report is None else report.state_digest for report in left]
    said = {"job": again.identity(), "steps": again.train.steps, "from_scratch": from_scratch, "begun": begun}
    known = remembered(again.output) or said
    others = {
        "job": "of another job",
        "from_scratch": "begun in another way",
        "begun": "that began with other blocks than the job has trained by now",
    }
    if known["steps"] != said["steps"] and again.train.schedule.name != "constant":
        others["job"] = f"of {known['steps']} steps, which its schedule ends with"
    for name, what in others.items():
        if known[name] != said[name]:
            raise zgstore.Refused(
                f"{again.output} holds a relay {what}",
                hint=f"run it as it was, with --steps {known['steps']}, or begin anew with --fresh",
                field=name,
                expected=said[name],
                actual=known[name],
            )
    for block in range(len(left)):  # one that was trained on with more steps is refused before these are remembered
        finished(again, block)
    remember(again.output, said)


def _clear(folder: Path) -> None:
    """Remove what is in a folder, which may be a link to one."""
    with suppress(FileNotFoundError):
        for path in folder.resolve().iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
