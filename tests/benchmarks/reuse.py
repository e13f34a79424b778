"""What is not done twice: rows appended to a cache, and partitions of one teacher that share its boundaries."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import zgstore
from tests.benchmarks import synthetic
from tests.benchmarks.measuring import Entry, compare, rounds, settle

LAYERS = 8
PARTITIONS = (2, 4, 8)  # blocks of one teacher of LAYERS layers
HIDDEN = 512  # a teacher about ten times as dear as its bytes are to store
LENGTH = 256
SHAPE = {"rows": 4, "layers": LAYERS, "cut": 2}


def appended(folder: Path, *, count: int, n: int, length: int) -> Entry:
    """A tenth more rows, against all of the rows before."""

    def build(batches: int) -> float:
        recipe = synthetic.recipe(folder, count=batches, hidden=HIDDEN, length=length, **SHAPE)
        began = time.perf_counter()
        zgstore.build(zgstore.Store.open(folder / "store"), recipe, ref="main")
        return time.perf_counter() - began

    def fresh(batches: int) -> float:
        shutil.rmtree(folder / "store", ignore_errors=True)
        zgstore.Store.init(folder / "store")
        settle()
        return build(batches)

    def grown() -> float:
        fresh(count)
        settle()
        return build(count + count // 10)

    fresh(2)
    times = rounds({"grown": grown, "full": lambda: fresh(count)}, n=n)
    return compare("10 % appended, against a full build", times, ours="grown", other="full", at_most=0.12)


def shared(folder: Path, *, count: int, length: int) -> Entry:
    """Bytes of the partitions into 2, 4 and 8 blocks kept together, against the last alone."""

    def stored(name: str, partitions: tuple[int, ...]) -> float:
        store = zgstore.Store.init(folder / name)
        for blocks in partitions:
            points = synthetic.points(LAYERS)[:: LAYERS // blocks]
            recipe = synthetic.recipe(folder, count=count, boundaries=points, length=length, **SHAPE)
            zgstore.build(store, recipe, ref=f"blocks-{blocks}")
        return sum(path.stat().st_size for path in (store.path / "objects").rglob("*.safetensors")) / 2**20

    bytes_ = {"together": [stored("together", PARTITIONS)], "alone": [stored("alone", PARTITIONS[-1:])]}
    name = f"bytes of B = {', '.join(map(str, PARTITIONS))} kept together, against B = {PARTITIONS[-1]} alone"
    return compare(name, bytes_, ours="together", other="alone", at_most=1.0, unit="MiB")


def run(scratch: Path, *, count: int, n: int, length: int = LENGTH) -> list[Entry]:
    """Both entries, over ``count`` batches of rows of ``length`` positions."""
    folder = scratch / "reuse"
    folder.mkdir(parents=True)
    entries = [appended(folder, count=count, n=n, length=length), shared(folder, count=2, length=length)]
    shutil.rmtree(folder)
    return entries
