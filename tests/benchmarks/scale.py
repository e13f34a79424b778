"""What each command costs as a store grows: generated stores of ten thousand, a hundred thousand, a million objects."""

from __future__ import annotations

import gc
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import zgstore
from tests.benchmarks import generated
from tests.benchmarks.measuring import Entry, compare, rounds, settle, within
from zgstore.storage.store import Store
from zgstore.upkeep import accounts, inspector

# What must hold in seconds at every size, up to a million.
BOUNDS = {"gc": 2.5, "diff": 0.010}
LS_SECONDS = 0.3
CELL_SECONDS = 25e-6
WORSE = 1.2  # than linear: what noise may feign
SLOW_SECONDS = 2.0  # what takes longer is run once: its noise is small, and there is no bound on it
MANY = 50_000

Times = dict[str, list[float]]


def operations(store: Store) -> dict[str, Callable[[], None]]:
    """What is timed in this process, by name."""
    shard = next(store.shards(store.snapshot(store.resolve("main"))))
    blob = shard.blobs[0].digest

    def verify() -> None:
        assert zgstore.verify(store, quick=True).report.ok

    def collect() -> None:
        assert not zgstore.collect(store).trashed.objects

    def diff() -> None:
        assert zgstore.diff(store, "main", "grown").shards.added == 1

    def why() -> None:
        assert accounts.why(store, blob).chains

    return {
        "gc": collect,
        "verify --quick": verify,
        "diff": diff,
        "ls": lambda: _see(inspector.listing(store)),
        "du": lambda: _see(accounts.usage(store)),
        "why": why,
    }


def _see(value: object) -> None:
    assert value


def at_size(scratch: Path, objects: int, *, n: int) -> Times:
    """Seconds of every operation on a store of so many objects."""
    folder = scratch / "scale"
    shutil.rmtree(folder, ignore_errors=True)
    store = generated.generate(folder, objects)
    settle()
    works = operations(store)
    warm = rounds(works, n=1)  # which warms the caches
    slow = {what: work for what, work in works.items() if warm[what][0] > SLOW_SECONDS and what not in BOUNDS}
    times = rounds({what: work for what, work in works.items() if what not in slow}, n=n)
    times |= rounds(slow, n=1)
    times["ls command"] = [_command("--store", str(folder), "ls") for _ in range(n)]
    times["gc of half"] = [_collect_half(store, objects) for _ in range(n if objects < MANY else 1)]  # to be made again
    shutil.rmtree(folder)
    times["build of nothing"] = _builds_of_nothing(folder, objects, n=n)
    shutil.rmtree(folder)
    return times


def _command(*words: str) -> float:
    began = time.perf_counter()
    subprocess.run([Path(sys.executable).with_name("zgstore"), *words], check=True, capture_output=True)
    return time.perf_counter() - began


def _collect_half(store: Store, objects: int) -> float:
    """Seconds of a collection that frees half of the blobs at once, their actions too; then they are made again."""
    for ref in ("main", "grown"):
        store.refs.remove(ref, "head")
    gc.collect()
    began = time.perf_counter()
    report = zgstore.collect(store, now=True)
    seconds = time.perf_counter() - began
    assert report.freed.objects >= objects // 2
    generated.generate(store.path, objects)
    return seconds


def _builds_of_nothing(folder: Path, cells: int, *, n: int) -> list[float]:
    """Seconds of a build that finds everything, without those in which it reads the inputs."""
    store, recipe = generated.generate_built(folder, cells)
    times = []
    for _ in range(n):
        gc.collect()
        report = zgstore.build(store, recipe, ref="main")
        assert not report.teacher_loaded
        assert not report.new_bytes
        times.append(
            (report.seconds["total"] - report.seconds["inputs"]) / (report.shards_reused * report.columns_reused)
        )
    return [each * cells for each in times]


def bounds(objects: int, times: Times) -> list[Entry]:
    """What must hold at the largest size measured."""
    named = f"{objects:,} objects".replace(",", " ")
    entries = [within(f"{what}, {named}", times[what], at_most=BOUNDS[what]) for what in BOUNDS]
    entries.append(within(f"ls as a command, {named}", times["ls command"], at_most=LS_SECONDS))
    each = [seconds / objects for seconds in times["build of nothing"]]
    return [
        *entries,
        within("rebuild with nothing new, a column and shard, beyond reading the inputs", each, at_most=CELL_SECONDS),
    ]


def shapes(small: int, at_small: Times, large: int, at_large: Times) -> list[Entry]:
    """Whether a cost grows faster than the objects do."""
    entries = []
    for what in at_large:
        if what == "ls command":
            continue
        grown = [seconds * large / small for seconds in at_small[what]]
        both = {"large": [statistics.median(at_large[what])], "grown": [statistics.median(grown)]}
        name = f"{what}: {large:,} objects against {large // small} times {small:,}".replace(",", " ")
        entries.append(compare(name, both, ours="large", other="grown", at_most=WORSE))
    return entries


def run(scratch: Path, *, sizes: Sequence[int], n: int) -> tuple[list[Entry], list[dict[str, Any]]]:
    """The entries, and seconds by operation and size, for a plot."""
    found = {objects: at_size(scratch, objects, n=n) for objects in sizes}
    entries = bounds(sizes[-1], found[sizes[-1]])
    for small, large in pairwise(sizes):
        entries += shapes(small, found[small], large, found[large])
    points = [
        {"operation": what, "objects": objects, "seconds": statistics.median(seconds), "n": len(seconds)}
        for objects, times in found.items()
        for what, seconds in times.items()
    ]
    return entries, points
