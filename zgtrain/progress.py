"""How far each block is, read from the small files beside its checkpoint; no tensor is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import zgstore
from zgtrain.blockreport import CHECKPOINT, LOCK, Noted, command, differing, finished, noted
from zgtrain.job import Job
from zgtrain.journal import FILE_NAME as LOG_NAME
from zgtrain.journal import read_lines
from zgtrain.locks import holder

TODO, RUNNING, STOPPED, DONE = "to do", "running", "stopped", "done"
_TAIL_BYTES: Final = 1 << 16

_Read = TypeVar("_Read")


@dataclass(frozen=True, slots=True)
class BlockStatus:
    """How far a block is.

    Args:
        block: b.
        state: ``to do``, ``running``, ``stopped`` or ``done``.
        step: The last one: of the report where it is done, else of the log, else of the checkpoint.
        steps: Those of the job.
        loss: Of that step.
        rate: Steps a second, lately; None before there are two looks at the device.
        eta_seconds: Until the last step, at that rate; None where there is nothing to expect.
        checkpoint_step: Of the last checkpoint; None if there is none.
        checkpoint_time: When it was written, in seconds of Unix time.
        holder: Which process trains it: ``pid 17 on host``.
        error: What is wrong with its files; None if nothing is.
    """

    block: int
    state: str
    step: int
    steps: int
    loss: float | None
    rate: float | None
    eta_seconds: float | None
    checkpoint_step: int | None
    checkpoint_time: float | None
    holder: str | None
    error: str | None = None

    def as_value(self) -> dict[str, Any]:
        """The JSON object."""
        return asdict(self)


def status(job: Job) -> list[BlockStatus]:
    """Every block's, in depth order."""
    found = _snapshot(job)
    now = "" if found is None else str(found.digest)
    return [block_status(job, block, snapshot=now) for block in range(_count(job, found))]


def block_status(job: Job, block: int, *, snapshot: str = "") -> BlockStatus:
    """One block's; a file that cannot be read, or is of another job or snapshot, is named, and taken not to be there.

    Args:
        job: The job.
        block: b.
        snapshot: Full digest of the job's; empty: whichever.
    """
    folder = job.folder(block)
    errors: list[str] = []

    def seen(read: Callable[[], _Read]) -> _Read | None:
        try:
            return read()
        except zgstore.ZgError as error:
            errors.append(error.message)
            return None

    lines = seen(lambda: read_lines(folder / LOG_NAME, tail_bytes=_TAIL_BYTES)) or []
    losses = [line for line in lines if None not in (line.get("loss"), line.get("seconds"))]
    told = seen(lambda: noted(folder / CHECKPOINT))
    done = seen(lambda: finished(job, block))
    if told is not None and (other := _other(job, told, snapshot)):
        what = seen(partial(differing, job, block, told.job)) if other == "job" else ""
        again = f"`{command(job, block, fresh=True)}` begins anew"
        errors.append(f"the checkpoint in {folder} is of another {other}{what and f' ({what})'}: {again}")
        told, done, losses = None, None, []
    by = seen(lambda: holder(folder / LOCK))
    step = done.steps if done is not None else losses[-1]["step"] if losses else told.step if told else 0
    rate = _rate(losses)
    running = by is not None and done is None
    left = max(0, job.train.steps - step)
    begun = told is not None or bool(losses)
    return BlockStatus(
        block=block,
        state=DONE if done is not None else RUNNING if running else STOPPED if begun else TODO,
        step=step,
        steps=job.train.steps,
        loss=losses[-1]["loss"] if losses else None,
        rate=rate,
        eta_seconds=left / rate if running and rate else None,
        checkpoint_step=told.step if told else None,
        checkpoint_time=told.time if told else None,
        holder=by if running else None,
        error="; ".join(errors) or None,
    )


def count_blocks(job: Job) -> int:
    """B: by the job's boundaries, else by the snapshot's, else by the folders that are there.

    Raises:
        zgstore.NotFound: if nothing says.
    """
    return _count(job, None if job.student.boundaries else _snapshot(job))


def _count(job: Job, found: _Found | None) -> int:
    if job.student.boundaries:
        return len(job.student.boundaries) - 1
    if found is not None:
        return sum(column.role == "boundary" for column in found.snapshot.columns) - 1
    names = [folder.name.removeprefix("block-") for folder in job.output.glob("block-*")]
    if not (numbers := [int(name) for name in names if name.isdecimal()]):
        raise zgstore.NotFound(
            f"nothing says how many blocks {job.path.name} has: neither its snapshot nor its output is there",
            hint="build the snapshot, or name the columns: boundaries = […] under [student]",
        )
    return max(numbers) + 1


class _Found(NamedTuple):
    digest: zgstore.Digest
    snapshot: zgstore.Snapshot


def _snapshot(job: Job) -> _Found | None:
    """The job's, if it is here."""
    try:
        store = zgstore.Store.open(job.snapshot.store)
        rev = job.snapshot.rev
        name = rev.removeprefix("lock:")
        digest = store.resolve(rev) if rev == name else zgstore.locked(name, job.directory).snapshot
        return _Found(digest, store.snapshot(digest))
    except zgstore.NotFound:
        return None


def _other(job: Job, told: Noted, snapshot: str) -> str:
    """What of a checkpoint is not the job's; empty if all is."""
    if told.job != job.identity():
        return "job"
    return "snapshot" if snapshot and told.snapshot and told.snapshot != snapshot else ""


def _rate(lines: list[dict[str, Any]]) -> float | None:
    """Steps a second between the first and the last look at the device that the lines come from."""
    if not lines or lines[-1]["seconds"] <= lines[0]["seconds"]:
        return None
    # Lines come in bursts of one look; the first burst's last line is where its time was taken.
    first = max(line["step"] for line in lines if line["seconds"] == lines[0]["seconds"])
    rate: float = (lines[-1]["step"] - first) / (lines[-1]["seconds"] - lines[0]["seconds"])
    return rate or None
