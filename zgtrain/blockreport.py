"""What a block's folder says to who loads no tensor: its report, the job that it is of, and how far its checkpoint is.

All that a report holds is counted or measured in the run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from shlex import quote
from typing import Any, Final, NamedTuple, get_type_hints

import zgstore
from zgtrain.files import damaged, is_of, read_json, write_json
from zgtrain.job import Job

CHECKPOINT, REPORT, LOCK = "checkpoint.pt", "report.json", ".lock"
_JOB: Final = "job.json"
EVALUATION: Final = "evaluation.json"  # of all blocks, beside their folders
_REMEDY: Final = "remove it and run the block again: its checkpoint is kept"
_SPENT: Final = ("data", "compute", "total")


@dataclass(frozen=True, slots=True)
class BlockReport:
    """What became of a block. Sums go over all runs of it, from the checkpoint that each resumed.

    Args:
        snapshot: Full digest.
        pins: Digest of its pins.
        job: The job's identity.
        block: b; None outside of a job.
        source: Column of boundary b.
        target: Column of boundary b + 1.
        targets: ``cached``, ``following`` or ``live``.
        steps: Optimiser steps taken.
        first_window_mean_loss: Over the first 32 steps.
        last_window_mean_loss: Over the last 32 steps.
        validation_loss: Of the rows held out, at the end; None if there are none.
        residual_error: Σ‖error‖² over Σ‖h_{b+1} − h_b‖² in the last window; None where the shapes differ.
        seconds: ``data`` (waited for batches), ``compute``, ``checkpoint``, ``total``.
        bytes_read: Bytes of rows that were read.
        peak_memory_bytes: Of the device; on a CPU of the whole process.
        inter_block_gradient_bytes: Most gradient that left the block in a step, counted in the backward graph.
        live_teacher_parameters: Parameters alive that belong to neither block, optimiser nor interface, counted.
        frozen_interface_parameters: Of norm, head, embedding that the token losses go through.
        trained_parameters: Of the block.
        gradient_queries: Forward queries that gradients took.
        initial_digest: The block before its first step.
        state_digest: The block now.
        resumed_from: The step that this run began at; None if it began at none.
        deterministic: Whether resuming is bitwise: asked for, or on a CPU.
        environment: Versions, device, threads.
    """

    snapshot: str
    pins: str
    job: str
    block: int | None
    source: str
    target: str
    targets: str
    steps: int
    first_window_mean_loss: float
    last_window_mean_loss: float
    validation_loss: float | None
    residual_error: float | None
    seconds: Mapping[str, float]
    bytes_read: int
    peak_memory_bytes: int
    inter_block_gradient_bytes: int
    live_teacher_parameters: int
    frozen_interface_parameters: int
    trained_parameters: int
    gradient_queries: int
    initial_digest: str
    state_digest: str
    resumed_from: int | None
    deterministic: bool
    environment: Mapping[str, Any]

    def as_value(self) -> dict[str, Any]:
        """The JSON object."""
        return asdict(self)

    def write(self, folder: Path) -> None:
        """Put it into the block's folder."""
        write_json(folder / REPORT, self.as_value())


def read_report(job: Job, block: int) -> BlockReport | None:
    """The report in a block's folder, whoever wrote it; None if there is none.

    Raises:
        zgstore.Corrupt: if the file is no report.
    """
    path = job.folder(block) / REPORT
    kinds = get_type_hints(BlockReport)
    value = read_json(path, kinds, remedy=_REMEDY)
    if value is None:
        return None
    if strange := [name for name in value if name not in kinds]:
        raise damaged(path, f"{strange[0]!r:.80} is no field of a report", _REMEDY)
    spent = value["seconds"]
    if not all(name in spent for name in _SPENT) or not all(is_of(each, float) for each in spent.values()):
        raise damaged(path, f"seconds is {spent!r:.80}", _REMEDY)
    return BlockReport(**value)


def finished(job: Job, block: int) -> BlockReport | None:
    """The report of a block that this very job has trained to its end; None if it has not.

    Raises:
        zgstore.Corrupt: if its file is no report.
        zgstore.Refused: if it was trained on since, and not to the end of that.
    """
    report = read_report(job, block)
    if report is None or report.job != job.identity() or report.steps < job.train.steps or not report.snapshot:
        return None
    see_current(job, block, report)
    return report


def see_current(job: Job, block: int, report: BlockReport) -> None:
    """See that a block was not trained on since its report, as far as its checkpoint's note says."""
    told = noted(job.folder(block) / CHECKPOINT)
    if told is not None and told.step > report.steps:
        raise behind(job, block, report.steps, told.step)


def behind(job: Job, block: int, done: int, saved: int) -> zgstore.Refused:
    """What is said of a report whose checkpoint went on without it."""
    return zgstore.Refused(
        f"block {block} was done at step {done}, and its checkpoint is at step {saved} of a longer run",
        hint=f"go on with that, to its end or further: `{command(job, block, steps=saved)}`; or begin anew: "
        f"`{command(job, block, fresh=True)}`",
        block=block,
    )


def command(job: Job, block: int | str, *, steps: int | None = None, fresh: bool = False) -> str:
    """What trains a block of a job: alone, or of a relay all of them.

    Args:
        job: The job, or its relay.
        block: b, or ``B`` for any.
        steps: To say with it; default none, of a relay what it was last given, which nothing else knows.
        fresh: To begin anew.
    """
    anew = ["--fresh"] if fresh else []
    if job.relay:
        return command_of("relay", job, *([] if fresh else [f"--steps {steps or job.train.steps}"]), *anew)
    longer = [f"--set train.steps={steps}"] if steps else []  # behind what was set: the last one counts
    return command_of("run", job, f"--block {block}", *longer, *anew)


def command_for_all(job: Job) -> str:
    """What trains all blocks that are left."""
    return command(job, "B") if job.relay else command_of("launch", job)


def command_of(verb: str, job: Job, *words: str) -> str:
    """A command about this very job: what was set over its file is said again, since without it is another job."""
    said = [f"--set {quote(each)}" for each in job.overrides]
    return " ".join([f"zgtrain {verb}", quote(str(job.path)), *said, *words])


# ---- which job it is of ----


def shown(value: Any) -> Any:
    """A digest as the 12 digits that pages show, which may be given back; anything else as it is."""
    with suppress(TypeError, zgstore.Invalid):
        return zgstore.Digest.parse(value).short
    return value


def say_job(job: Job, block: int) -> None:
    """Keep what decides what a block learns, for who finds its checkpoint under another job."""
    write_json(job.folder(block) / _JOB, {"job": job.identity(), "said": job.said()})


def differing(job: Job, block: int, identity: str) -> str:
    """What the job of that identity, of which a block's checkpoint is, says otherwise; empty if nothing tells.

    Raises:
        zgstore.Corrupt: if the file that would tell says something else.
    """
    path = job.folder(block) / _JOB
    kept = read_json(path, {"job": str, "said": dict}, remedy="remove it: nothing depends on it")
    if kept is None or kept["job"] != identity:
        return ""
    mine, theirs = (dict(_flat(each)) for each in (json.loads(json.dumps(job.said())), kept["said"]))
    names = [name for name in dict.fromkeys((*mine, *theirs)) if mine.get(name) != theirs.get(name)]
    return "; ".join(f"{name} was {theirs.get(name)!r:.80}, and is {mine.get(name)!r:.80}" for name in names)


def _flat(value: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, Any]]:
    """By dotted names; of a name with its options, both stand under its own."""
    for name, each in value.items():
        for part in each if isinstance(each, list) and any(isinstance(one, Mapping) for one in each) else [each]:
            if isinstance(part, Mapping):
                yield from _flat(part, f"{place}{name}.")
            else:
                yield f"{place}{name}", part


# ---- how far a checkpoint is ----


class Noted(NamedTuple):
    """What is said of a checkpoint.

    Args:
        step: Of the training.
        snapshot: Full digest; empty where a build is followed.
        job: The job's identity.
        time: When that was said, in seconds of Unix time.
    """

    step: int
    snapshot: str
    job: str
    time: float


def note(checkpoint: Path, *, step: int, snapshot: str, job: str) -> None:
    """Say beside a checkpoint what it holds."""
    write_json(note_of(checkpoint), {"step": step, "snapshot": snapshot, "job": job})


def noted(checkpoint: Path) -> Noted | None:
    """What is said of a checkpoint; None if nothing is.

    A kill between the two leaves what was said of the checkpoint before.

    Raises:
        zgstore.Corrupt: if the file says something else.
    """
    path = note_of(checkpoint)
    remedy, kinds = "remove it: the checkpoint is whole without it", {"step": int, "snapshot": str, "job": str}
    told = read_json(path, kinds, remedy=remedy)
    if told is None:
        return None
    try:
        return Noted(told["step"], told["snapshot"], told["job"], path.stat().st_mtime)
    except FileNotFoundError:  # gone since
        return None


def note_of(checkpoint: Path) -> Path:
    """Where that is said."""
    other = checkpoint.with_suffix(".json")
    return other if other != checkpoint else checkpoint.with_suffix(".json.json")
