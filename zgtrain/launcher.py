"""All blocks of a job: planned as a value, then run as processes; one that fails never stops the others."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import zgstore
from zgtrain.blockreport import finished
from zgtrain.blocks import boundaries_of, ends_of, make_block, refuse_shared, refuse_source, resolve_snapshot
from zgtrain.crew import FAILED, BlockRun, Crew, as_error
from zgtrain.devices import parse_device
from zgtrain.gradient.zeroth_order import count_cores
from zgtrain.job import BlockLaunch, Job
from zgtrain.progress import block_status, status
from zgtrain.source import CACHED

__all__ = ["BlockPlan", "BlockRun", "LaunchReport", "Plan", "launch", "plan", "status"]

_LOOK_SECONDS: Final = 0.05


# ---- the plan ----


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """What there is to do for a block.

    Args:
        block: b.
        source: Column of boundary b.
        target: Column of boundary b + 1.
        parameters: Of the block.
        trained_parameters: Those with ``requires_grad``.
        step: What is done.
        steps: What is to be done in all.
        bytes_to_read: By the steps that are left.
        processes: Of this block.
        cores: Black boxes that a zeroth-order gradient asks in it; 0 where it is one as a whole, None for backprop.
    """

    block: int
    source: str
    target: str
    parameters: int
    trained_parameters: int
    step: int
    steps: int
    bytes_to_read: int
    processes: int = 1
    cores: int | None = None

    @property
    def done(self) -> bool:
        return self.step >= self.steps


@dataclass(frozen=True, slots=True)
class Plan:
    """What a launch would do.

    Args:
        job: The job's identity.
        snapshot: Full digest.
        pins: Digest of its pins.
        rows: Of the snapshot.
        blocks: In depth order.
        parallel: Processes at a time.
        devices: That they are spread over.
    """

    job: str
    snapshot: str
    pins: str
    rows: int
    blocks: tuple[BlockPlan, ...]
    parallel: int
    devices: tuple[str, ...]

    def as_value(self) -> dict[str, Any]:
        """The JSON object."""
        return {**asdict(self), "blocks": [{**asdict(each), "done": each.done} for each in self.blocks]}


def plan(job: Job, *, parallel: int | None = None, devices: Sequence[str] = ()) -> Plan:
    """What a launch would do; each block is made and let go, and no teacher is loaded.

    Raises:
        zgstore.Invalid: for a name that is no device's.
        zgstore.NotFound: if there is no such snapshot.
        zgstore.Refused: if its pins are not the lock file's, or a parameter is shared between blocks.
    """
    devices = _devices(job, devices)
    store = zgstore.Store.open(job.snapshot.store)
    digest = resolve_snapshot(job, store)
    shown = zgstore.show(store, digest)
    rows = shown.snapshot.samples
    size = {facts.column.name: _row_bytes(facts.column, facts.bytes, rows) for facts in shown.columns}
    context = sum(size[facts.column.name] for facts in shown.columns if facts.column.role == "context")
    names = boundaries_of(job, store)
    refuse_shared(job, len(names) - 1)
    blocks = []
    for block in range(len(names) - 1):
        source, target = ends_of(job, names, block)
        module = make_block(job, block)
        made = [(each.numel(), each.requires_grad) for each in module.parameters()]
        step = _steps_done(job, block, str(digest))
        each_row = size[source] + size[target] + context
        left = (job.train.steps - step) * job.train.batch_size * job.train.accumulate
        blocks.append(
            BlockPlan(
                block, source, target, sum(count for count, _ in made),
                sum(count for count, trained in made if trained), step, job.train.steps, round(left * each_row),
                job.launch.blocks.get(block, BlockLaunch()).processes,
                None if job.train.gradient.name == "backprop" else count_cores(module),
            )
        )  # fmt: skip
        del module  # else it would be alive beside the next one
    return Plan(
        job.identity(), str(digest), str(shown.snapshot.pins.digest()), rows, tuple(blocks),
        min(_width(job, parallel, devices), len(blocks)), devices,
    )  # fmt: skip


def _row_bytes(column: zgstore.Column, stored: int, rows: int) -> float:
    """Bytes that a row of a column takes: as it is declared; of rows of many lengths, and coded ones, their mean."""
    width = re.search(r"\d+$", column.dtype)
    if column.codec != "raw" or any(size is None for size in column.shape):
        return stored / max(1, rows)
    return math.prod(size or 1 for size in column.shape) * (int(width[0]) // 8 if width else 1)


def _steps_done(job: Job, block: int, snapshot: str) -> int:
    report = finished(job, block)
    if report is not None and report.snapshot == snapshot:
        return job.train.steps
    return min(block_status(job, block, snapshot=snapshot).checkpoint_step or 0, job.train.steps - 1)


def _devices(job: Job, given: Sequence[str]) -> tuple[str, ...]:
    """Those that are given, else the job's; a name that is none is refused before a block begins."""
    chosen = tuple(given) or job.launch.devices
    for name in chosen:
        parse_device(name)
    return chosen


def _width(job: Job, parallel: int | None, devices: Sequence[str]) -> int:
    if parallel is not None and parallel < 1:
        raise zgstore.Invalid(f"{parallel} blocks at a time train nothing", hint="say 1 or more after --parallel")
    return parallel or max(job.launch.parallel, len(devices))


# ---- the launch ----


@dataclass(frozen=True, slots=True)
class LaunchReport:
    """What became of all.

    Args:
        job: The job's identity.
        snapshot: What they were trained on; empty if none is done.
        blocks: In depth order.
        build: What the build beside them said; None if there was none.
        seconds: In all.
        stopped: Whether it was asked to stop.
    """

    job: str
    snapshot: str
    blocks: tuple[BlockRun, ...]
    build: dict[str, Any] | None
    seconds: float
    stopped: bool

    @property
    def error(self) -> zgstore.ZgError | None:
        """What is wrong; None if every block is done."""
        failed = [run for run in self.blocks if run.state == FAILED]
        if not failed:
            return interrupted([run.block for run in self.blocks if run.unsaved]) if self.stopped else None
        first = failed[0].error or {}
        names = ", ".join(str(run.block) for run in failed)
        what = f"block {names} of {len(self.blocks)}" if len(failed) == 1 else f"blocks {names} of {len(self.blocks)}"
        message = f"{what} failed: {first.get('message', 'it ended without a word')}"
        return as_error(first, message, blocks=[run.block for run in failed])

    def as_value(self) -> dict[str, Any]:
        """The JSON object."""
        return {**asdict(self), "blocks": [_as_value(run) for run in self.blocks]}


def _as_value(run: BlockRun) -> dict[str, Any]:
    wanted = ("steps", "first_window_mean_loss", "last_window_mean_loss", "state_digest", "resumed_from", "seconds")
    told = {name: run.report[name] for name in wanted if name in run.report} if run.report else {}
    return {**asdict(run), "report": told or None}


def launch(
    job: Job,
    *,
    parallel: int | None = None,
    devices: Sequence[str] = (),
    follow: Path | str | None = None,
    source: str = CACHED,
    retries: int | None = None,
    on_change: Callable[[Sequence[BlockRun]], None] = lambda _: None,
    stop: Callable[[], bool] = lambda: False,
) -> LaunchReport:
    """Train all blocks, each in a process of its own.

    Args:
        job: The job.
        parallel: Processes at a time; default ``[launch] parallel``, or as many as there are devices.
        devices: Spread over the processes in turn.
        follow: A recipe: one build of it runs beside the jobs.
        source: ``cached`` or ``live``.
        retries: Further attempts of a block that fails; default ``[launch] retries``.
        on_change: Told how the blocks are, several times a second.
        stop: Asked whether to stop all blocks, their states saved.

    Raises:
        zgstore.Invalid: if the job's order cannot follow a build, or there is no such source.
        zgstore.NotFound: if there is no snapshot, and no recipe to follow.
        zgstore.Refused: if a parameter is shared between blocks, or pins are not the lock file's.
    """
    began = time.monotonic()
    refuse_source(source)
    if retries is not None and retries < 0:
        raise zgstore.Invalid(f"{retries} further attempts are none", hint="say 0 or more after --retries")
    if follow is not None and job.train.order == "shuffled":
        raise zgstore.Invalid(
            "a build is followed in its own order, and train.order is 'shuffled'",
            hint="add --set train.order=sequential-first: as stored in epoch 0, shuffled from then on",
        )
    devices = _devices(job, devices)
    crew = Crew(
        job, _width(job, parallel, devices), devices, source,
        follow=None if follow is None else Path(follow).absolute(),
        retries=job.launch.retries if retries is None else retries,
    )  # fmt: skip
    stopped = False
    with crew.ended_at_last():
        while crew.advance():
            if not stopped and stop():
                stopped = True
                crew.terminate()
            on_change(crew.runs)
            time.sleep(_LOOK_SECONDS)
    on_change(crew.runs)
    snapshots = {run.report["snapshot"] for run in crew.runs if run.report}
    return LaunchReport(
        job.identity(), next(iter(snapshots), ""), tuple(crew.runs), crew.build_value, time.monotonic() - began, stopped
    )


def interrupted(unsaved: Sequence[int] = ()) -> zgstore.Interrupted:
    """What a launch says that was asked to stop.

    Args:
        unsaved: Blocks whose process ended without saying that it has saved.
    """
    again = "run the same launch again: it resumes"
    if not unsaved:
        return zgstore.Interrupted("stopped; the state of every block that ran is saved", hint=again)
    names = ", ".join(map(str, unsaved))
    message = f"stopped; block {names} did not say that it has saved, and goes on from its last checkpoint"
    return zgstore.Interrupted(message, hint=again, unsaved=list(unsaved))
