"""How things are timed: variants shuffled within each round, memory prefaulted, medians over the rounds."""

from __future__ import annotations

import gc
import math
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Entry:
    """One row of the table.

    Args:
        name: What is compared, as ``ours against other``.
        ours: Median seconds (or another unit) of ours.
        other: Of the other side.
        ratio: As the bound counts it: ours / other, or other / ours for "times faster".
        bound: What it must be, as text.
        holds: Whether it is.
        n: Rounds.
        spread: (largest − smallest) / median of the ratios of single rounds.
        unit: Of ``ours`` and ``other``.
    """

    name: str
    ours: float
    other: float
    ratio: float
    bound: str
    holds: bool
    n: int
    spread: float
    unit: str = "s"


def rounds(
    variants: Mapping[str, Callable[[], float | None]],
    *,
    n: int,
    seed: int = 0,
    between: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """Run every variant once a round, in shuffled order.

    Args:
        variants: Each returns the seconds it took, or None to be timed from outside.
        n: Rounds.
        seed: Of the order.
        between: Called before each run, outside its time: settles disks and caches.

    Returns:
        Seconds of each variant, one a round.
    """
    order = random.Random(seed)
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(n):
        names = list(variants)
        order.shuffle(names)
        for name in names:
            gc.collect()
            between()
            began = time.perf_counter()
            own = variants[name]()
            times[name].append(time.perf_counter() - began if own is None else own)
    return times


def compare(
    name: str, times: Mapping[str, list[float]], *, ours: str, other: str, at_most: float | None = None,
    at_least: float | None = None, unit: str = "s",
) -> Entry:  # fmt: skip
    """One entry: with ``at_most`` the ratio is ours / other, with ``at_least`` it is how many times faster ours is."""
    mine, theirs = statistics.median(times[ours]), statistics.median(times[other])
    if at_most is not None:
        pairs = [a / b for a, b in zip(times[ours], times[other], strict=True)]
        ratio, bound, holds = mine / theirs, f"≤ {at_most:g} ×", mine / theirs <= at_most
    else:
        assert at_least is not None
        pairs = [b / a for a, b in zip(times[ours], times[other], strict=True)]
        ratio, bound, holds = theirs / mine, f"≥ {at_least:g} ×", theirs / mine >= at_least
    spread = (max(pairs) - min(pairs)) / statistics.median(pairs)
    return Entry(name, mine, theirs, ratio, bound, holds, len(pairs), spread, unit)


def within(name: str, values: Sequence[float], *, at_most: float, unit: str = "s") -> Entry:
    """One entry that has no other side: ``other`` is what is allowed, the ratio how much of that is taken."""
    mine = statistics.median(values)
    spread = (max(values) - min(values)) / abs(mine) if mine else 0.0
    bound = f"≤ {at_most:g} {unit}".rstrip()
    return Entry(name, mine, at_most, mine / at_most, bound, mine <= at_most, len(values), spread, unit)


def told(name: str, ours: Sequence[float], other: Sequence[float], *, unit: str = "s") -> Entry:
    """One entry that nothing is promised of: the ratio is ours / other, and always holds."""
    sides = {"ours": list(ours), "other": list(other)}
    entry = compare(name, sides, ours="ours", other="other", at_most=math.inf, unit=unit)
    return replace(entry, bound="—")


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    model = platform.processor() or platform.machine()
    with Path("/proc/cpuinfo").open(encoding="utf-8") as file:
        model = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), model)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def prefault(bytes_: int) -> None:
    """Touch free memory once: a guest's first touch of a page costs more than the page's use."""
    block = bytearray(bytes_)
    block[::4096] = b"\x01" * len(block[::4096])
    del block


def settle() -> None:
    """Let earlier writes reach the disk, so that they are not another run's work."""
    os.sync()
