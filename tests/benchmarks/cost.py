"""What a build adds to its teacher: seconds for each GB stored, with teachers of several speeds, and memory."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

import torch

import zgstore
from tests.benchmarks import build, synthetic
from tests.benchmarks.measuring import Entry, told, within
from zgstore.building.shards import QUEUE_BYTES

ROWS, LENGTH, LAYERS = 4, 1024, 4
ALONE_BATCHES = 8  # after which the memory of a teacher alone has come to its peak
SPEEDS = {10: 0.25, 35: 0.5, 200: 1.0}  # times faster than the real teacher → share of `gb` to store with it


def batch_bytes(length: int) -> int:
    """Of a batch's bf16 boundaries; 40 MiB at the length that is measured."""
    return ROWS * length * synthetic.WIDTH * 2 * (LAYERS + 1)


def real_seconds_for_gb() -> float:
    """Seconds of SmolLM2-135M for each GB of its five boundaries, on this machine."""
    rows = 8
    build.teacher_alone(rows)
    stored = rows * 128 * 576 * 2 * 5
    return min(build.teacher_alone(rows) for _ in range(3)) / stored * 1e9


def added(scratch: Path, *, real: float, gb: float, n: int, length: int = LENGTH) -> list[Entry]:
    """Seconds that a build adds for each GB stored.

    Args:
        scratch: Where the stores go.
        real: Seconds for a GB that the real teacher takes.
        gb: GB to store beside the fastest teacher.
        n: Pairs.
        length: Positions of a row.
    """
    entries = []
    for speed, share in SPEEDS.items():
        folder = scratch / "cost"
        folder.mkdir(parents=True, exist_ok=True)
        wanted = real / speed * batch_bytes(length) / 1e9
        hidden = synthetic.hidden_for(wanted, rows=ROWS, length=length, layers=LAYERS)
        count = max(1, round(gb * share * 1e9 / batch_bytes(length)))
        recipe = synthetic.recipe(folder, count=count, rows=ROWS, length=length, hidden=hidden, layers=LAYERS)
        times, stored = build.pairs(folder, recipe, lambda recipe=recipe: synthetic.alone(recipe), n=n)
        extra = [1e9 * (a - b) / stored for a, b in zip(times["build"], times["teacher"], strict=True)]
        teacher = [1e9 * seconds / stored for seconds in times["teacher"]]
        name = f"a teacher {speed} × faster than the real one"
        entries += [
            within(f"seconds a build adds for each GB to {name}", extra, at_most=0.7, unit="s/GB"),
            told(f"{name}, as it ran, against as it should", teacher, [real / speed] * n, unit="s/GB"),
        ]
    return entries


def memory(scratch: Path, *, gib: Sequence[float]) -> list[Entry]:
    """What a build needs beside its teacher, each in a process of its own: as much at every size, or less.

    A build that the disk keeps up with never fills the queue.
    """
    allowed = (QUEUE_BYTES + 4 * batch_bytes(LENGTH)) / 2**20
    return [
        within(
            f"memory that a build of {size:g} GiB adds to its teacher: the queue and 4 batches",
            [_added_mib(scratch, size)],
            at_most=allowed,
            unit="MiB",
        )
        for size in gib
    ]


def _added_mib(scratch: Path, gib: float) -> float:
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        done = subprocess.run(
            [sys.executable, "-m", "tests.benchmarks.cost", folder, str(gib)],
            check=True, capture_output=True, text=True,
        )  # fmt: skip
    return json.loads(done.stdout)["added_mib"]


def _peak_mib(work: Callable[[], object]) -> float:
    """The most memory this process has while it works, in MiB."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    work()
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def child(folder: Path, gib: float) -> float:
    """MiB that a build has at its peak beyond the peak of its teacher alone."""
    recipe = synthetic.recipe(
        folder, count=max(1, round(gib * 2**30 / batch_bytes(LENGTH))), rows=ROWS, length=LENGTH, layers=LAYERS
    )
    model = recipe.teacher.load()
    store = zgstore.Store.init(folder / "store")

    def alone() -> None:
        with torch.inference_mode():
            for batch in islice(recipe.data.batches(), ALONE_BATCHES):
                model(batch["input_ids"])

    alone_mib = _peak_mib(alone)
    return _peak_mib(lambda: zgstore.build(store, recipe, ref="main")) - alone_mib


if __name__ == "__main__":
    print(json.dumps({"added_mib": child(Path(sys.argv[1]), float(sys.argv[2]))}))
