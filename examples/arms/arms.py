"""Blocks trained apart, and the same student trained end to end: what each gives and what it costs, as one table.

    python examples/arms/arms.py            # three seeds; two, four and eight blocks; in .arms/
    python examples/arms/arms.py --quick    # one seed, two blocks and a few steps, to see that it runs

A small language model is trained first, the teacher; its student has every second one of its layers. Arm A trains the
student end to end on the teacher's distribution: it is the job that has one block. Arm C trains each of B blocks alone
on the teacher's clean boundaries. Both take their targets from the snapshot ("cached") or from the teacher that runs
beside ("live"), and must then end in the same bits. What is finished is not done again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import teacher
import torch

import zgstore
import zgtrain
from zgtrain.blocks import finished, write_json
from zgtrain.evaluator import FILE_NAME
from zgtrain.independence import peak_memory_bytes
from zgtrain.measures import Scored, labels_of, logits_of

HERE = Path(__file__).resolve().parent
LAYERS = 16
SOURCES = ("live", "cached")
END_TO_END = {"train.loss": {"boundary_weight": 0.0, "token_kl": 1.0}, "train.lr": 1e-3}


@dataclass(frozen=True)
class Size:
    """How much of it all."""

    teacher_steps: int
    rows: int
    held_out: int
    steps: int
    seeds: Sequence[int]
    partitions: Sequence[int]


FULL = Size(teacher_steps=1500, rows=1024, held_out=96, steps=256, seeds=(0, 1, 2), partitions=(2, 4, 8))
QUICK = Size(teacher_steps=16, rows=64, held_out=8, steps=8, seeds=(0,), partitions=(2,))


def apart(function, *args, **keywords):
    """Call in a process of its own, so that the memory it takes is its own: a fork of one that has only imported."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["teacher", "zgtrain.causal_lm", "zgtrain.evaluator"])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *args, **keywords).result()


def once(path: Path, function, *args, **keywords):
    """What a step said when it was done; it is not done again."""
    if not path.is_file():
        write_json(path, apart(function, *args, **keywords))
    return json.loads(path.read_text(encoding="utf-8"))


# ---- what all arms share ----


def build(home: Path, rows: int) -> Mapping[str, Any]:
    """One snapshot of the finest partition's boundaries."""
    store = zgstore.Store.init(home / ".zgstore")
    return zgstore.build(store, zgstore.load_recipe(home / "cache.toml"), ref="main", limit=rows).as_value()


def before(job: zgtrain.Job) -> Mapping[str, float]:
    """Held-out cross entropy of the teacher, and of the student that all arms start from; the job has one block."""
    whole = job.student.block.call(job.student.args, 0)
    student = job.student.assemble.call(job.student.args, [whole])
    return {"teacher": cross_entropy(job, job.student.teacher.call(job.student.args)),
            "untrained": cross_entropy(job, student)}  # fmt: skip


@torch.inference_mode()
def cross_entropy(job: zgtrain.Job, model: torch.nn.Module) -> float:
    scored = Scored()
    for batch in job.evaluate.data.call(job.evaluate.args):
        scored.add(logits_of(model, batch), labels_of(batch))
    return scored.ce


def idle() -> int:
    """The memory of a process that has only imported, in bytes."""
    return peak_memory_bytes(torch.device("cpu"))


# ---- one student ----


def job_of(home: Path, size: Size, *, blocks: int, seed: int, source: str) -> zgtrain.Job:
    edges = list(itertools.pairwise(range(0, LAYERS + 1, LAYERS // blocks)))
    return zgtrain.load_job(
        home / "student.toml",
        {
            "output": f"runs/{blocks}-blocks/seed-{seed}/{source}",
            "student.args.layers": edges,
            "student.args.keep": [list(range(*edge, 2)) for edge in edges],
            "student.boundaries": [*(f"model.layers.{start}:in" for start, _ in edges), "model.norm:in"],
            "train.seed": seed,
            "train.steps": size.steps,
            "evaluate.args.skip": size.rows,
            "evaluate.args.rows": size.held_out,
            **(END_TO_END if blocks == 1 else {}),
        },
    )


def train(job: zgtrain.Job, source: str) -> list[zgtrain.BlockReport]:
    """Every block in a process of its own, one after the other: each has the whole machine, and its time is its own."""
    blocks = range(len(job.student.boundaries) - 1)
    return [finished(job, block) or apart(zgtrain.run, job, block=block, source=source) for block in blocks]


def see_same_bits(job: zgtrain.Job, live: Sequence[zgtrain.BlockReport], cached: Sequence[zgtrain.BlockReport]) -> None:
    for one, other in zip(live, cached, strict=True):
        if one.state_digest != other.state_digest:
            sys.exit(f"error: block {one.block} of {job.output} and its twin on live targets ended in different bits")


def judge(job: zgtrain.Job, reports: Sequence[zgtrain.BlockReport]) -> Mapping[str, Any]:
    kept = job.output / FILE_NAME
    known = json.loads(kept.read_text(encoding="utf-8")) if kept.is_file() else {"blocks": None}
    current = known["blocks"] == [report.state_digest for report in reports]
    return known if current else apart(zgtrain.evaluate, job).as_value()


# ---- the table ----


def measure(home: Path, size: Size, blocks: int) -> Iterator[dict[str, Any]]:
    """The rows of a partition: one for each kind of targets, with a number for each seed."""
    reports: dict[str, list[list[zgtrain.BlockReport]]] = {source: [] for source in SOURCES}
    verdicts = []
    for seed in size.seeds:
        jobs = {source: job_of(home, size, blocks=blocks, seed=seed, source=source) for source in SOURCES}
        for source, job in jobs.items():
            reports[source].append(train(job, source))
        see_same_bits(jobs["cached"], *(reports[source][-1] for source in SOURCES))
        verdicts.append(judge(jobs["cached"], reports["cached"][-1]))  # of the same bits, and so of both
        print(f"  {blocks} blocks, seed {seed}: CE {verdicts[-1]['student']['ce']:.3f}", flush=True)
    for source, seeds in reports.items():
        spent = [[each.seconds["total"] for each in one] for one in seeds]
        yield {
            "arm": "A" if blocks == 1 else "C",
            "blocks": blocks,
            "targets": source,
            "ce": [verdict["student"]["ce"] for verdict in verdicts],
            "critical_path_seconds": [max(one) for one in spent],
            "all_blocks_seconds": [sum(one) for one in spent],
            "peak_memory_bytes": [max(each.peak_memory_bytes for each in one) for one in seeds],
            "bytes_read": [sum(each.bytes_read for each in one) for one in seeds],
            "bytes_stored": stored(home, jobs["cached"].student.boundaries if source == "cached" else ()),
            "gates": [{gate["name"]: gate["passes"] for gate in verdict["gates"]} for verdict in verdicts],
        }


def stored(home: Path, boundaries: Sequence[str]) -> int:
    """Bytes in the store that a job needs: its boundaries, and masks and positions."""
    columns = zgstore.show(zgstore.Store.open(home / ".zgstore"), "main").columns
    return sum(each.bytes for each in columns if each.column.role == "context" or each.column.name in boundaries)


def as_markdown(found: Mapping[str, Any]) -> str:
    head = ["arm", "B", "targets", "held-out CE", "critical path, s", "all blocks, s", "peak memory, MB", "read, MB",
            "stored, MB", "gates passed"]  # fmt: skip
    rows = [[
        each["arm"], str(each["blocks"]), each["targets"], spread(each["ce"], 3),
        spread(each["critical_path_seconds"], 1), spread(each["all_blocks_seconds"], 1),
        f"{max(each['peak_memory_bytes']) / 1e6:.0f}", f"{statistics.fmean(each['bytes_read']) / 1e6:.1f}",
        f"{each['bytes_stored'] / 1e6:.1f}", gates(each["gates"]),
    ] for each in found["arms"]]  # fmt: skip
    table = "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])
    ce, built = found["before_ce"], found["snapshot"]
    return f"""{table}

Mean of the seeds ± half of their range. CE in nats a token: the teacher's is {ce["teacher"]:.3f}, the student's before
training {ce["untrained"]:.3f}. A process that has only imported takes {found["idle_memory_bytes"] / 1e6:.0f} MB. The
snapshot took {built["seconds"]["total"]:.0f} s once, and the teacher's training {found["teacher_seconds"]:.0f} s. On
cached and on live targets every block ended in the same bits, so what a student is worth is measured once for both.
"""


def spread(numbers: Sequence[float], digits: int) -> str:
    """Mean ± half of the range."""
    half = (max(numbers) - min(numbers)) / 2
    return f"{statistics.fmean(numbers):.{digits}f} ± {half:.{digits}f}"


def gates(seeds: Sequence[Mapping[str, bool]]) -> str:
    verdicts = [(name, passes) for each in seeds for name, passes in each.items()]
    failed = sorted({name for name, passes in verdicts if not passes})
    return f"{sum(passes for _, passes in verdicts)} of {len(verdicts)}{': not ' if failed else ''}{', '.join(failed)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, two blocks, a few steps")
    parser.add_argument("--output", type=Path, help="where everything goes; default .arms, or .arms/quick")
    options = parser.parse_args()
    size = QUICK if options.quick else FULL
    home = (options.output or Path(".arms/quick" if options.quick else ".arms")).absolute()
    home.mkdir(parents=True, exist_ok=True)
    for name in ("cache.toml", "student.toml"):
        shutil.copy(HERE / name, home)

    taught = once(home / "teacher.json", teacher.train, home / "teacher", rows=size.rows, steps=size.teacher_steps)
    print(f"the teacher is trained, in {taught:.0f} s", flush=True)
    built = once(home / "snapshot.json", build, home, size.rows)
    print(f"the snapshot has {built['bytes']['total'] / 1e6:.0f} MB, in {built['seconds']['total']:.0f} s", flush=True)
    whole = job_of(home, size, blocks=1, seed=0, source="cached")
    found = {
        "teacher_seconds": taught,
        "snapshot": built,
        "before_ce": once(home / "before.json", before, whole),
        "idle_memory_bytes": apart(idle),
        "arms": [row for blocks in (1, *size.partitions) for row in measure(home, size, blocks)],
    }
    page = as_markdown(found)
    write_json(home / "arms.json", found)
    (home / "arms.md").write_text(page, encoding="utf-8")
    print(f"\n{page}", end="")


if __name__ == "__main__":
    main()
