"""What a cache cost and what it saved: T(K) in wall time and in device seconds, for one block and for all.

B blocks, K trainings on one cache. ``T(K) = (T_cache + Σ of the first K cached runs) / K`` stands against the mean live
run, in which each block's teacher runs to its own depth. Wall time of all blocks is that of the slowest, each on a
device of its own; device seconds are the sum. Every number is of measured reports; evaluation and validation are left
out. Nothing here knows tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import zgstore
from zgtrain.blockreport import BlockReport, command, command_for_all, read_report, shown
from zgtrain.job import BlockLaunch, Job
from zgtrain.progress import count_blocks

KS: Final = (1, 2, 4, 8, 16)
WALL, DEVICE = "wall", "device"


def amortised(cache: float, runs: Sequence[float], trainings: int) -> float:
    """T(K): what one of K trainings costs with its share of the cache, in seconds.

    Args:
        cache: What the cache cost.
        runs: Measured cached runs; those that are not measured yet are taken as the mean of the measured.
        trainings: K.
    """
    mean = math.fsum(runs) / len(runs)
    first = [*runs[:trainings], *[mean] * (trainings - len(runs))]
    return (cache + math.fsum(first)) / trainings


def break_even(cache: float, *, cached: float, live: float) -> int | None:
    """The first K at which T(K) is at most the live run, at equal epochs; None if it never is.

    Args:
        cache: T_cache.
        cached: The mean cached run.
        live: The mean live run.
    """
    saved = live - cached
    if cache <= 0:
        return 1 if saved >= 0 else None
    return max(1, math.ceil(cache / saved)) if saved > 0 else None


@dataclass(frozen=True, slots=True)
class Curve:
    """T(K) of one kind of seconds.

    Args:
        cache: T_cache.
        runs: Cached runs, in the order in which they were made.
        live: Live runs; empty: nothing to compare with.
    """

    cache: float
    runs: tuple[float, ...]
    live: tuple[float, ...]

    def at(self, trainings: int) -> float:
        """T(K)."""
        return amortised(self.cache, self.runs, trainings)

    @property
    def cached_mean(self) -> float:
        """Seconds of a mean cached run."""
        return math.fsum(self.runs) / len(self.runs)

    @property
    def live_mean(self) -> float | None:
        """Seconds of a mean live run."""
        return math.fsum(self.live) / len(self.live) if self.live else None

    @property
    def break_even(self) -> int | None:
        """K from which on the cache has paid; None if it never does, or nothing says what live costs."""
        live = self.live_mean
        return None if live is None else break_even(self.cache, cached=self.cached_mean, live=live)

    def as_value(self) -> dict[str, Any]:
        """The JSON object; ``ratio`` is T(K) over the live run."""
        live = self.live_mean
        return {
            "cache": self.cache, "runs": list(self.runs), "cached_mean": self.cached_mean, "live": list(self.live),
            "live_mean": live, "break_even": self.break_even,
            "t": [{"k": k, "seconds": self.at(k), "ratio": self.at(k) / live if live else None} for k in KS],
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds of one training: of each block, and how many devices it had."""

    blocks: tuple[float, ...]
    devices: tuple[int, ...]

    def seconds(self, kind: str, block: int | None = None) -> float:
        """Wall or device seconds of one block, or of all."""
        each = [s * (n if kind == DEVICE else 1) for s, n in zip(self.blocks, self.devices, strict=True)]
        if block is not None:
            return each[block]
        return max(each) if kind == WALL else math.fsum(each)


@dataclass(frozen=True, slots=True)
class CacheCost:
    """What building the snapshot took: ``wall`` seconds on ``devices`` devices."""

    wall: float
    devices: int = 1

    def seconds(self, kind: str) -> float:
        """Wall or device seconds."""
        return self.wall * (self.devices if kind == DEVICE else 1)


@dataclass(frozen=True, slots=True)
class Economics:
    """T(K) of all blocks and of each.

    Args:
        snapshot: Full digest.
        steps: Of each run, the same for all.
        curves: (kind, block or None) → curve.
        notes: What to know about the numbers.
    """

    snapshot: str
    steps: int
    curves: Mapping[tuple[str, int | None], Curve]
    notes: tuple[str, ...]

    def as_value(self) -> dict[str, Any]:
        """The JSON object: ``all`` and ``blocks``, each with ``wall`` and ``device``."""
        numbers = sorted({b for _, b in self.curves if b is not None})
        return {
            "snapshot": self.snapshot,
            "steps": self.steps,
            "all": {kind: self.curves[kind, None].as_value() for kind in (WALL, DEVICE)},
            "blocks": [
                {"block": b, **{kind: self.curves[kind, b].as_value() for kind in (WALL, DEVICE)}} for b in numbers
            ],
            "notes": list(self.notes),
        }


def weigh(
    cache: CacheCost,
    runs: Sequence[Spent],
    live: Sequence[Spent],
    *,
    following: Sequence[Spent] = (),
    snapshot: str,
    steps: int,
) -> Economics:
    """Economics of measured trainings.

    Args:
        cache: What the build took.
        runs: On the finished cache, the first that came after the build first.
        live: The base.
        following: Beside the growing cache. The cache then costs what it added: wall time of these over that of
            ``runs``, and the build's own device seconds. Without ``runs`` they are the runs, and nothing was added.
        snapshot: Full digest.
        steps: Of each.
    """
    measured = runs or following
    curves = {}
    for kind in (WALL, DEVICE):
        for block in (None, *range(len(measured[0].blocks))):
            own = tuple(each.seconds(kind, block) for each in measured)
            cost = cache.seconds(kind) if not following or kind == DEVICE else 0.0
            if following and runs:
                beside = [each.seconds(kind, block) for each in following]
                cost += max(0.0, math.fsum(beside) / len(beside) - math.fsum(own) / len(own))
            curves[kind, block] = Curve(cost, own, tuple(each.seconds(kind, block) for each in live))
    notes = [
        "the cache is what its last build took: what that found stored already is not in it",
        "one block alone is charged the whole build, all of its columns; a build of two columns takes less",
    ]
    if len(measured) < max(KS):
        notes.append(f"cached runs measured: {len(measured)}; beyond them T(K) takes their mean")
    if following:
        notes.append("jobs followed the build: in wall time the cache costs what it added over the jobs alone")
    if not live:
        notes.append("no live run is measured: `zgtrain launch JOB --source live --set output=runs/live` makes one")
    return Economics(snapshot, steps, curves, tuple(notes))


def economics(jobs: Job | Sequence[Job]) -> Economics:
    """Economics of trained jobs on one snapshot, from their reports and the snapshot's build record.

    Args:
        jobs: Those trained on cached or following targets are the runs, those on live targets the base.

    Raises:
        zgstore.NotFound: if a block has no report, or no record says what the build took.
        zgstore.Invalid: if no job was trained on the cache, or one is named twice.
        zgstore.Refused: if they do not compare: other snapshots, other numbers of steps, mixed targets.
    """
    jobs = [jobs] if isinstance(jobs, Job) else list(jobs)
    read = [reports_of(job, whoever=number > 0) for number, job in enumerate(jobs)]
    _see_comparable(jobs, read)
    spent = [_spent(job, reports) for job, reports in zip(jobs, read, strict=True)]
    by: dict[str, list[Spent]] = {"cached": [], "following": [], "live": []}
    for reports, each in zip(read, spent, strict=True):
        by[_targets(reports)].append(each)
    if not by["cached"] and not by["following"]:
        raise zgstore.Invalid("no job here was trained on the cache", hint="name one that was: `zgtrain launch JOB`")
    store, first = zgstore.Store.open(jobs[0].snapshot.store), read[0][0]
    return weigh(
        cache_cost(store, first.snapshot), by["cached"], by["live"], following=by["following"],
        snapshot=first.snapshot, steps=first.steps,
    )  # fmt: skip


def _targets(reports: Sequence[BlockReport]) -> str:
    """A job's: following if any of its blocks followed."""
    kinds = {each.targets for each in reports}
    return "live" if "live" in kinds else "following" if "following" in kinds else "cached"


def cache_cost(store: zgstore.Store, snapshot: str) -> CacheCost:
    """What the snapshot's build took, as its record says.

    Raises:
        zgstore.NotFound: if no record says.
    """
    record = store.record_of(store.resolve(snapshot))
    durations = {} if record is None else record.fields.get("durations", {})
    if record is None or "total" not in durations:
        raise zgstore.NotFound(
            f"no record says what building {shown(snapshot)} took",
            hint="build it here: `zgstore build RECIPE` keeps one",
        )
    return CacheCost(float(durations["total"]), int(record.fields.get("devices", 1)))


def reports_of(job: Job, *, whoever: bool = False) -> list[BlockReport]:
    """The reports of those blocks of a job that are trained, in depth order; seen to be of one job and snapshot.

    Args:
        job: The job.
        whoever: Let them be of another job, if they all are of the same.

    Raises:
        zgstore.NotFound: if there is none.
        zgstore.Refused: if one is of another job, or of another snapshot than the first.
        zgstore.Corrupt: if a file is no report.
    """
    found = [read_report(job, block) for block in range(count_blocks(job))]
    reports = [report for report in found if report is not None]
    if not reports:
        raise zgstore.NotFound(f"{job.output} has no trained block", hint=f"train them: `{command_for_all(job)}`")
    mine = reports[0].job if whoever else job.identity()
    for field, wanted in (("job", mine), ("snapshot", reports[0].snapshot)):
        for report in reports:
            if (theirs := getattr(report, field)) != wanted:
                raise zgstore.Refused(
                    f"block {report.block} in {job.output} is of {field} {shown(theirs)}, and not of {shown(wanted)}",
                    hint="say what it was trained with (--set …), or train it again: "
                    f"`{command(job, report.block or 0, fresh=True)}`",
                    field=field,
                    expected=wanted,
                    actual=theirs,
                )
    return reports


def _spent(job: Job, reports: Sequence[BlockReport]) -> Spent:
    return Spent(
        tuple(each.seconds["total"] - each.seconds.get("validation", 0.0) for each in reports),
        tuple(job.launch.blocks.get(block, BlockLaunch()).processes for block in range(len(reports))),
    )


def _see_comparable(jobs: Sequence[Job], read: Sequence[Sequence[BlockReport]]) -> None:
    first = read[0][0]
    for job, reports in zip(jobs, read, strict=True):
        if [other.output.resolve() for other in jobs].count(job.output.resolve()) > 1:
            raise zgstore.Invalid(f"{job.output} is named twice: one run would count as two", hint="name each run once")
        blocks = count_blocks(job)
        lacking = sorted({*range(blocks)} - {report.block for report in reports})
        if lacking:
            raise zgstore.NotFound(
                f"block {', '.join(map(str, lacking))} of {blocks} in {job.output} is not trained",
                hint=f"train it: `{command(job, lacking[0])}`",
                blocks=lacking,
            )
        if len(reports) != len(read[0]):
            raise zgstore.Refused(
                f"{job.output} has {len(reports)} trained blocks, and {jobs[0].output} has {len(read[0])}",
                hint="compare jobs of the same blocks",
            )
        for block, report in enumerate(reports):
            for field in ("snapshot", "steps"):
                theirs, wanted = getattr(report, field), getattr(first, field)
                if theirs != wanted:
                    raise zgstore.Refused(
                        f"block {block} of {job.output} is of {field} {shown(theirs)}, "
                        f"and the first of {jobs[0].output} of {shown(wanted)}",
                        hint="compare jobs of one snapshot and of equal steps",
                        field=field,
                    )
            if (report.targets == "live") != (reports[0].targets == "live"):
                raise zgstore.Refused(
                    f"the blocks of {job.output} mix live and stored targets",
                    hint="train live into another output: --set output=runs/live",
                )
