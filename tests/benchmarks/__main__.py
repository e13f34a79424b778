"""``make bench``: a table for people, ``bench.json`` for programs."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from tests.benchmarks import build, cost, ingest, int8, read, results, reuse, scale, startup, training
from tests.benchmarks.measuring import Entry, prefault, settle


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much each benchmark works on.

    Args:
        n: Rounds.
        pairs: Rounds of builds beside their teacher.
        gib: GiB of boundaries for ingest, verify and read.
        blob_mib: MiB of their blobs.
        rows: Sequences of 128 tokens for the build of the real model.
        stored_gb: GB stored beside the fastest synthetic teacher.
        memory_gib: GiB of the builds whose memory is compared.
        objects: Of the generated stores.
        batches: Of the build that is appended to.
        shorter: Rows of builds with synthetic teachers have so many times fewer positions than is measured.
        repeats: How often the int8 states are repeated.
        commands: Those whose start is timed; all if none is named.
        bare: Those that start without compiled files.
        real: Whether the real model takes part.
    """

    n: int = 5
    pairs: int = 7
    gib: float = 1.0
    blob_mib: int = 64
    rows: int = 80
    stored_gb: float = 2.0
    memory_gib: tuple[float, ...] = (1, 10)
    objects: tuple[int, ...] = (10_000, 100_000)
    batches: int = 40
    shorter: int = 1
    repeats: int = 16
    commands: tuple[str, ...] = ()
    bare: tuple[str, ...] = startup.BARE
    real: bool = True


BIG: Final = (10_000, 100_000, 1_000_000)
TINY: Final = Sizes(
    n=1, pairs=1, gib=0.02, blob_mib=4, stored_gb=0.004, memory_gib=(0.05,), objects=(100, 200), batches=10, shorter=16,
    repeats=1, commands=("zgstore ls", "zgstore unhold"), bare=("zgstore ls",), real=False,
)  # fmt: skip


def shards(sizes: Sizes) -> list[list[Tensor]]:
    """The boundaries of ingest, verify and read."""
    return ingest.tensors(sizes.gib, blob_mib=sizes.blob_mib)


def states(sizes: Sizes) -> dict[str, Tensor]:
    """What int8 is tried on."""
    return int8.real_states(16) if sizes.real else {"random numbers": torch.randn(8, 32, 96)}


def run_build(scratch: Path, sizes: Sizes) -> list[Entry]:
    """Without the real model nothing is left of it: ``cost`` has the synthetic teachers."""
    return build.run(scratch, rows=sizes.rows, n=sizes.pairs) if sizes.real else []


def run_training(scratch: Path, sizes: Sizes) -> list[Entry]:
    """A step of anything smaller would say nothing of what a step can hide."""
    return training.run(scratch, rows=sizes.rows, n=sizes.n) if sizes.real else []


def run_cost(scratch: Path, sizes: Sizes) -> list[Entry]:
    """Without the real model, beside teachers of some plausible cost."""
    real = cost.real_seconds_for_gb() if sizes.real else 10.0
    beside = cost.added(scratch, real=real, gb=sizes.stored_gb, n=sizes.pairs, length=cost.LENGTH // sizes.shorter)
    return [*beside, *cost.memory(scratch, gib=sizes.memory_gib)]


Found = tuple[list[Entry], dict[str, Any]]  # the entries, and what else ``bench.json`` has of it


def run_scale(scratch: Path, sizes: Sizes) -> Found:
    """Its points too, for the plot."""
    entries, points = scale.run(scratch, sizes=sizes.objects, n=sizes.n)
    return entries, {"scale": points}


BENCHMARKS: Final[dict[str, Callable[[Path, Sizes], list[Entry] | Found]]] = {
    "build": run_build,
    "cost": run_cost,
    "ingest": lambda scratch, sizes: ingest.run(scratch, shards=shards(sizes), n=sizes.n),
    "read": lambda scratch, sizes: read.run(scratch, shards=shards(sizes), n=sizes.n),
    "training": run_training,
    "reuse": lambda scratch, sizes: reuse.run(
        scratch, count=sizes.batches, n=sizes.n, length=reuse.LENGTH // sizes.shorter
    ),
    "scale": run_scale,
    "startup": lambda scratch, sizes: startup.run(scratch, n=sizes.n, names=sizes.commands, bare=sizes.bare),
    "int8": lambda scratch, sizes: int8.run(scratch, states=states(sizes), repeats=sizes.repeats, n=sizes.n),
}


def measure(name: str, scratch: Path, sizes: Sizes) -> Found:
    """One benchmark, on a settled disk."""
    settle()
    found = BENCHMARKS[name](scratch, sizes)
    return found if isinstance(found, tuple) else (found, {})


def sizes_of(given: argparse.Namespace) -> Sizes:
    """What the command line says."""
    sizes = TINY if given.tiny else Sizes()
    chosen = {name: getattr(given, name) for name in ("n", "pairs", "gib", "rows") if getattr(given, name) is not None}
    return replace(sizes, **chosen, **({"objects": BIG} if given.big else {}))


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("only", nargs="*", metavar="NAME", help=f"{', '.join(BENCHMARKS)}; all if none is named")
    parser.add_argument("--n", type=int, help="rounds")
    parser.add_argument("--pairs", type=int, help="rounds of builds beside their teacher")
    parser.add_argument("--gib", type=float, help="GiB of boundaries for ingest, verify and read")
    parser.add_argument("--rows", type=int, help="sequences of 128 tokens for the build of the real model")
    parser.add_argument("--big", action="store_true", help="a million objects too, which takes half an hour")
    parser.add_argument("--tiny", action="store_true", help="see that everything runs; the numbers say nothing")
    parser.add_argument("--scratch", type=Path, help="folder on the disk to measure (default: here)")
    given = parser.parse_args()
    unknown = set(given.only) - set(BENCHMARKS)
    if unknown:
        parser.error(f"there is no benchmark {', '.join(unknown)}: the names are {', '.join(BENCHMARKS)}")
    sizes, entries = sizes_of(given), []
    with tempfile.TemporaryDirectory(dir=given.scratch or Path.cwd(), prefix=".bench-") as scratch:
        prefault(int(4 * sizes.gib * 2**30))
        for name in given.only or BENCHMARKS:
            found, more = measure(name, Path(scratch), sizes)
            entries += found
            if not given.tiny:
                results.keep(name, found, **more)
    results.show(entries)


if __name__ == "__main__":
    main()
