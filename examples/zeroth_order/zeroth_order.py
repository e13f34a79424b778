"""One block of SmolLM2 trained by backprop, and by gradients that are only asked for, side by side. One command:

    python examples/zeroth_order/zeroth_order.py

It works in `.zeroth/`, beside `examples/`. A way that has a result is not done again. `--set KEY=VALUE` goes over the
job of each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import table
import torch
from torch.nn import functional

import zgstore
import zgtrain
from zgtrain.blocks import make_block, open_source
from zgtrain.causal_lm import unpack
from zgtrain.files import write_json
from zgtrain.gradient.method import make_method
from zgtrain.objective import BOUNDARY, make_objective

HERE = Path(__file__).resolve().parent
SCRATCH = HERE.parent.parent / ".zeroth"
WAYS = {"backprop": 0, "n4": 4, "n16": 16, "n64": 64}  # probes of each estimate
BLOCK = 1


def prepare(recipe):
    """The snapshot, and the teacher as a folder of which a block reads its own tensors alone."""
    zgstore.build(zgstore.Store.init(SCRATCH / "store"), recipe, ref="main")
    unpack(recipe.teacher.args["path"], SCRATCH / "teacher")


def job_of(name, sets):
    asked = ["train.gradient.name=zeroth-order", f"train.gradient.probes={WAYS[name]}"] if WAYS[name] else []
    return zgtrain.load_job(HERE / "student.toml", [*asked, *sets, f"output={SCRATCH / 'runs' / name}"])


def trained(name, sets):
    """Train in one way: what it gave, and what a step of it took of the processor."""
    job, lines, took = job_of(name, sets), [], []
    before = time.process_time()

    def look(line):
        nonlocal before
        took.append(time.process_time() - before)
        lines.append(line)
        before = time.process_time()

    report = zgtrain.run(job, block=BLOCK, fresh=True, progress=look)
    steps = [seconds for line, seconds in zip(lines, took, strict=True) if "loss" in line]
    return {
        "probes": WAYS[name], "steps": report.steps, "queries": report.gradient_queries,
        "step_seconds": statistics.median(steps[1:]),  # loading is in the first
        "losses": [(line["step"], line["loss"]) for line in lines if "loss" in line],
        "held_out": [(line["step"], line["validation_loss"]) for line in lines if "validation_loss" in line],
        "cosine": cosine(job),
    }  # fmt: skip


def cosine(job):
    """Of the gradient that the job has and the exact one, before the first step, over its rows: the mean over matrices.

    All parameters as one vector would tell of the norms' few numbers, whose gradients are the largest.
    """
    block, objective = make_block(job, BLOCK), make_objective(job.train.loss)
    forward, first = job.train.forward.resolve(), job.validate.rows
    with open_source(job, zgstore.Store.open(job.snapshot.store), BLOCK) as data:
        batch = data.batch(range(first, first + job.train.batch_size))
    found = []
    for spec in (job.train.gradient, "backprop"):
        block.zero_grad()
        method = make_method(spec, block, forward=forward, number=BLOCK)
        prediction = method.forward(batch.source, batch.context, (0, 0))
        method.backward(objective.sums(prediction, batch.target, batch.context)[BOUNDARY])
        found.append([each.grad.flatten().double() for each in block.parameters() if each.dim() == 2])
    return statistics.mean(float(functional.cosine_similarity(*pair, dim=0)) for pair in zip(*found, strict=True))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", dest="sets", action="append", default=[], metavar="KEY=VALUE", help="over each job")
    sets = parser.parse_args().sets
    torch.set_num_threads(1)  # seconds of one core
    prepare(zgstore.load_recipe(HERE / "cache.toml"))
    found = {}
    for name in WAYS:
        file = SCRATCH / "results" / f"{name}.json"
        if not file.exists():
            print(f"{name} …", flush=True)
            write_json(file, trained(name, sets))
        found[name] = json.loads(file.read_text(encoding="utf-8"))
    table.write(found, SCRATCH / "results")


if __name__ == "__main__":
    main()
