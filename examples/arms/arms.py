"""Blocks trained apart, and the same student trained end to end: what each gives and what it costs, as one table.

    python examples/arms/arms.py            # three seeds; two, four and eight blocks; in .arms/
    python examples/arms/arms.py --quick    # one seed, two blocks and a few steps, to see that it runs

A small language model is trained first, the teacher; its student has every second one of its layers. Arm A trains the
student end to end on the teacher's distribution: it is the job that has one block. Arm C trains each of B blocks alone
on the teacher's clean boundaries. Both take their targets from the snapshot ("cached") or from the teacher that runs
beside ("live"), and must then end in the same bits. Arms D and E are C where each block is also shown its target under
noise, cached and live; B is blocks of diffusion, which know no boundary in between; F is C, each block sharded over two
processes. What is finished is not done again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import shutil
import statistics
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import teacher
import torch
from torch import distributed

import zgstore
import zgtrain
from zgtrain.assembler import load_block
from zgtrain.blockreport import EVALUATION, finished
from zgtrain.blocks import noise_of, open_source
from zgtrain.files import write_json
from zgtrain.independence import peak_memory_bytes
from zgtrain.job import LossSpec
from zgtrain.leakage import leakage
from zgtrain.measures import Scored, labels_of, logits_of
from zgtrain.objective import Objective, make_objective

HERE = Path(__file__).resolve().parent
LAYERS = 16
END_TO_END = {"train.loss": {"boundary_weight": 0.0, "token_kl": 1.0}, "train.lr": 1e-3}
SHOWN = {"student.block": "zgtrain.causal_lm:noised_block"}
LEAK_ROWS = 32
# What every process would load for itself, by full names: transformers loads a class when it is first asked for.
PRELOADED = ["zgtrain.causal_lm", "zgtrain.evaluator", "transformers.models.llama.modeling_llama", "accelerate",
             "transformers.models.auto.tokenization_auto"]  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """A way to train a student; what it is called on each kind of targets, and what a job says of it.

    Args:
        arms: Kind of targets → the arm's letter.
        settings: Over the job file's.
        folder: What its runs lie under.
        processes: Of each block.
    """

    arms: Mapping[str, str]
    settings: Mapping[str, Any]
    folder: str = ""
    processes: int = 1


WHOLE = Kind({"live": "A", "cached": "A"}, END_TO_END)
CLEAN = Kind({"live": "C", "cached": "C"}, {})
NOISED = Kind({"live": "E", "cached": "D"}, {**SHOWN, "train.noise": 0.1}, "noised-")
SHARDED = Kind({"cached": "F"}, {"student.block": "sharded:block"}, "sharded-", processes=2)


def down(home: Path) -> Kind:
    """Blocks of diffusion, their σ in units of twice the last boundary's root mean square: σd is half of one."""
    columns = zgstore.show(zgstore.Store.open(home / ".zgstore"), "main").columns
    rms = next(each.statistics["rms"] for each in columns if each.column.name == "model.norm:in")
    unit = 2 * rms
    grid = {"sigma_min": 0.002 * unit, "sigma_max": 80.0 * unit, "p_mean": math.log(unit) - 1.2, "sigma_data": rms}
    said = {
        **SHOWN, "student.assemble": "zgtrain.causal_lm:denoiser", "train.loss": "mse",
        "train.noise": {"name": "diffusion", "overlap": 0.1, **grid},
    }  # fmt: skip
    return Kind({"cached": "B"}, said, "diffusion-")


@dataclass(frozen=True)
class Size:
    """How much of it all."""

    teacher_steps: int
    rows: int
    held_out: int
    steps: int
    seeds: Sequence[int]
    partitions: Sequence[int]
    noised: int


FULL = Size(teacher_steps=1500, rows=1024, held_out=96, steps=256, seeds=(0, 1, 2), partitions=(2, 4, 8), noised=4)
QUICK = Size(teacher_steps=16, rows=64, held_out=8, steps=8, seeds=(0,), partitions=(2,), noised=2)


def apart(function, *args, **keywords):
    """Call in a process of its own, so that the memory it takes is its own: a fork of one that has only imported."""
    with ProcessPoolExecutor(1, mp_context=ready()) as pool:
        return pool.submit(function, *args, **keywords).result()


def ready():
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


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


def job_of(home: Path, size: Size, kind: Kind, *, blocks: int, seed: int, source: str) -> zgtrain.Job:
    edges = list(itertools.pairwise(range(0, LAYERS + 1, LAYERS // blocks)))
    return zgtrain.load_job(
        home / "student.toml",
        {
            "output": f"runs/{kind.folder}{blocks}-blocks/seed-{seed}/{source}",
            "student.args.layers": edges,
            "student.args.keep": [list(range(*edge, 2)) for edge in edges],
            "student.boundaries": [*(f"model.layers.{start}:in" for start, _ in edges), "model.norm:in"],
            "train.seed": seed,
            "train.steps": size.steps,
            "evaluate.args.skip": size.rows,
            "evaluate.args.rows": size.held_out,
            **kind.settings,
        },
    )


def train(job: zgtrain.Job, source: str, processes: int) -> list[zgtrain.BlockReport]:
    """Every block in a process of its own, one after the other: each has the whole machine, and its time is its own."""
    blocks = range(len(job.student.boundaries) - 1)
    if processes > 1:
        return [finished(job, block) or together(job, block, processes) for block in blocks]
    return [finished(job, block) or apart(zgtrain.run, job, block=block, source=source) for block in blocks]


def together(job: zgtrain.Job, block: int, processes: int) -> zgtrain.BlockReport:
    """One block in several processes, which shard it between them; they meet in a file."""
    with TemporaryDirectory() as folder, ProcessPoolExecutor(processes, mp_context=ready()) as pool:
        ranks = [pool.submit(share, job, block, f"file://{folder}/met", rank, processes) for rank in range(processes)]
        reports = [each.result() for each in ranks]
    return reports[0]


def share(job: zgtrain.Job, block: int, place: str, rank: int, processes: int) -> zgtrain.BlockReport:
    distributed.init_process_group("gloo", init_method=place, rank=rank, world_size=processes)
    try:
        return zgtrain.run(job, block=block)
    finally:
        distributed.destroy_process_group()


def see_same_bits(job: zgtrain.Job, live: Sequence[zgtrain.BlockReport], cached: Sequence[zgtrain.BlockReport]) -> None:
    for one, other in zip(live, cached, strict=True):
        if one.state_digest != other.state_digest:
            sys.exit(f"error: block {one.block} of {job.output} and its twin on live targets ended in different bits")


def judge(job: zgtrain.Job, reports: Sequence[zgtrain.BlockReport]) -> Mapping[str, Any]:
    kept = job.output / EVALUATION
    known = json.loads(kept.read_text(encoding="utf-8")) if kept.is_file() else {"blocks": None}
    current = known["blocks"] == [report.state_digest for report in reports]
    return known if current else apart(zgtrain.evaluate, job).as_value()


def leaks(job: zgtrain.Job, reports: Sequence[zgtrain.BlockReport]) -> Mapping[str, Any]:
    """For each block what its own source is worth, by its boundary loss; for the last one by the KL in nats too."""
    path = job.output / "leakage.json"
    digests = [report.state_digest for report in reports]
    if not path.is_file() or json.loads(path.read_text(encoding="utf-8"))["blocks"] != digests:
        write_json(path, {"blocks": digests, **apart(leak, job, reports)})
    return json.loads(path.read_text(encoding="utf-8"))


def leak(job: zgtrain.Job, reports: Sequence[zgtrain.BlockReport]) -> Mapping[str, Any]:
    interface = job.student.interface.call(job.student.args)
    by_loss = make_objective(LossSpec(job.train.loss.name))
    by_kl = make_objective(LossSpec(boundary_weight=0.0, token_kl=1.0), interface)
    last = len(reports) - 1
    return {
        "loss": [leak_of(job, reports, number, by_loss) for number in range(len(reports))],
        "kl": leak_of(job, reports, last, by_kl),
    }


def leak_of(
    job: zgtrain.Job, reports: Sequence[zgtrain.BlockReport], number: int, objective: Objective
) -> Mapping[str, float]:  # fmt: skip
    with open_source(job, zgstore.Store.open(job.snapshot.store), number) as data:
        found = leakage(
            load_block(job, number, reports[number]), data, objective, rows=min(LEAK_ROWS, len(data.reader)),
            forward=job.train.forward.resolve(), device="cpu", noise=noise_of(job, number, len(reports)),
            seed=job.train.seed, block_id=number,
        )  # fmt: skip
    return asdict(found)


# ---- the table ----


def measure(home: Path, size: Size, kind: Kind, blocks: int) -> Iterator[dict[str, Any]]:
    """The rows of a partition: one for each kind of targets, with a number for each seed."""
    reports: dict[str, list[list[zgtrain.BlockReport]]] = {source: [] for source in kind.arms}
    verdicts, leaked = [], []
    for seed in size.seeds:
        jobs = {source: job_of(home, size, kind, blocks=blocks, seed=seed, source=source) for source in kind.arms}
        for source, job in jobs.items():
            reports[source].append(train(job, source, kind.processes))
        if len(jobs) > 1:
            see_same_bits(jobs["cached"], *(reports[source][-1] for source in kind.arms))
        last = reports["cached"][-1]
        verdicts.append(judge(jobs["cached"], last))  # of the same bits, and so of both
        leaked.append(leaks(jobs["cached"], last))
        said = "".join(dict.fromkeys(kind.arms.values()))
        print(f"  {said}, {blocks} blocks, seed {seed}: CE {verdicts[-1]['student']['ce']:.3f}", flush=True)
    for source, seeds in reports.items():
        spent = [[each.seconds["total"] for each in one] for one in seeds]
        read = {name for each in seeds[-1] for name in (each.source, each.target)}
        yield {
            "arm": kind.arms[source],
            "blocks": blocks,
            "targets": source,
            "ce": [verdict["student"]["ce"] for verdict in verdicts],
            "critical_path_seconds": [max(one) for one in spent],
            "all_blocks_seconds": [sum(one) for one in spent],
            "peak_memory_bytes": [max(each.peak_memory_bytes for each in one) for one in seeds],
            "bytes_read": [sum(each.bytes_read for each in one) for one in seeds],
            "bytes_stored": stored(home, read if source == "cached" else ()),
            "gates": [{gate["name"]: gate["passes"] for gate in verdict["gates"]} for verdict in verdicts],
            "leakage": leaked,
        }


def stored(home: Path, boundaries: Collection[str]) -> int:
    """Bytes in the store that a job needs: its boundaries, and masks and positions."""
    columns = zgstore.show(zgstore.Store.open(home / ".zgstore"), "main").columns
    return sum(each.bytes for each in columns if each.column.role == "context" or each.column.name in boundaries)


def as_markdown(found: Mapping[str, Any]) -> str:
    head = ["arm", "B", "targets", "held-out CE", "critical path, s", "all blocks, s", "peak memory, MB", "read, MB",
            "stored, MB", "last block's KL", "with another's source", "gates passed"]  # fmt: skip
    rows = [[
        each["arm"], str(each["blocks"]), each["targets"], spread(each["ce"], 3),
        spread(each["critical_path_seconds"], 1), spread(each["all_blocks_seconds"], 1),
        f"{max(each['peak_memory_bytes']) / 1e6:.0f}", f"{statistics.fmean(each['bytes_read']) / 1e6:.1f}",
        f"{each['bytes_stored'] / 1e6:.1f}", *(spread([one["kl"][which] for one in each["leakage"]], 3)
                                               for which in ("own", "other")), gates(each["gates"]),
    ] for each in found["arms"]]  # fmt: skip
    table = "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])
    ce, built = found["before_ce"], found["snapshot"]
    return f"""{table}

Mean of the seeds ± half of their range. CE in nats a token: the teacher's is {ce["teacher"]:.3f}, the student's before
training {ce["untrained"]:.3f}. A process that has only imported takes {found["idle_memory_bytes"] / 1e6:.0f} MB. The
snapshot took {built["seconds"]["total"]:.0f} s once, and the teacher's training {found["teacher_seconds"]:.0f} s. On
cached and on live targets every block ended in the same bits, so what a student is worth is measured once for both.
The last block's KL, in nats a token, is its answer's divergence from the teacher on stored states, of B, D and E with
the noisy target shown; with another sample's source, it is shown the same.
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
    for name in ("cache.toml", "student.toml", "sharded.py"):
        shutil.copy(HERE / name, home)

    taught = once(home / "teacher.json", teacher.train, home / "teacher", rows=size.rows, steps=size.teacher_steps)
    print(f"the teacher is trained, in {taught:.0f} s", flush=True)
    built = once(home / "snapshot.json", build, home, size.rows)
    print(f"the snapshot has {built['bytes']['total'] / 1e6:.0f} MB, in {built['seconds']['total']:.0f} s", flush=True)
    whole = job_of(home, size, WHOLE, blocks=1, seed=0, source="cached")
    arms = [(WHOLE, 1), *((CLEAN, blocks) for blocks in size.partitions), (down(home), size.noised),
            (NOISED, size.noised), (SHARDED, 2)]  # fmt: skip
    found = {
        "teacher_seconds": taught,
        "snapshot": built,
        "before_ce": once(home / "before.json", before, whole),
        "idle_memory_bytes": apart(idle),
        "arms": [row for kind, blocks in arms for row in measure(home, size, kind, blocks)],
    }
    page = as_markdown(found)
    write_json(home / "arms.json", found)
    (home / "arms.md").write_text(page, encoding="utf-8")
    print(f"\n{page}", end="")


if __name__ == "__main__":
    main()
