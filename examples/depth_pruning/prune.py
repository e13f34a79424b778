"""SmolLM2-135M pruned from 30 layers to 20, by blocks apart and end to end, measured side by side. One command:

    python examples/depth_pruning/prune.py

It works in `.pruning/`. What has a result is not done again; what was stopped goes on when the command is run again.
`--part` does a part alone, `--way NAME` some of the ways below, `--set KEY=VALUE` goes over the job of each.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from dataclasses import dataclass

import end_to_end
import fisher
import table
from pieces import (
    SCRATCH,
    blocks_of,
    cross_entropy,
    heldout_rows,
    load_job,
    recipe_of,
    student_of,
    teacher_of,
    training_rows,
)
from running import apart, kept, result, watching

import zgstore
import zgtrain
from zgtrain.causal_lm import unpack
from zgtrain.prefixes import relayed

FISHER_BATCHES = 24
KL = "train.loss.token_kl=1.0"
NEAR = "train.loss.name=fisher:near"
TUNED = (NEAR, KL, "train.lr=1e-3")


@dataclass(frozen=True)
class Way:
    """How a student is trained.

    Args:
        sets: Over the job, and over the base's.
        base: Of a relay: the way whose blocks it polishes. Without one it trains new blocks.
        polish: For how many steps.
    """

    sets: tuple[str, ...] = ()
    base: str = ""
    polish: int = 0


BLOCKS = {
    "clean": Way(),
    "kl": Way((KL,)),
    "fisher": Way((NEAR,)),
    "fisher-kl": Way((NEAR, KL)),
    "tuned": Way(TUNED),
    "tuned-long": Way((*TUNED, "train.steps=1152")),
}
RELAYS = {
    "clean-polish": Way(base="clean", polish=96),
    "tuned-polish": Way(base="tuned", polish=96),
    "tuned-long-polish": Way(base="tuned-long", polish=192),
    "relay": Way(),
    "tuned-relay": Way(TUNED),
}
END_TO_END = {"end-to-end": Way(("train.lr=3e-4",)), "end-to-end-128": Way(("train.lr=3e-4", "train.steps=128"))}


# ---- what all of them need ----


def prepare(sets):
    """The model unpacked, the snapshot, the Fisher information; where the student starts, and what it is held to."""
    job = load_job(sets)
    unpack(recipe_of(job).teacher.args["path"], SCRATCH / "teacher")
    kept("build", _build, job)
    kept("fisher-information", _fisher, job)
    kept("start", _start, job)


def _build(job):
    report, _, peak = apart(_write_snapshot, job)
    return {**report, "peak_memory_bytes": peak}


def _write_snapshot(job):
    store = zgstore.Store.init(job.snapshot.store)
    return zgstore.build(store, recipe_of(job), ref=job.snapshot.rev).as_value()


def _fisher(job):
    _, seconds, peak = apart(_write_fisher, job)
    return {"rows": 4 * FISHER_BATCHES, "seconds": seconds, "peak_memory_bytes": peak}


def _write_fisher(job):
    fisher.write(teacher_of(job), job.student.boundaries, itertools.islice(training_rows(job), FISHER_BATCHES))


def _start(job):
    heldout = list(heldout_rows(job))
    untrained = student_of(job, blocks_of(job))
    return {"teacher": cross_entropy(teacher_of(job), heldout), "untrained": cross_entropy(untrained, heldout)}


# ---- the ways ----


def blocks(job, _way):
    """All blocks apart, one at a time: each has the machine, and the slowest is the critical path."""
    launched = zgtrain.launch(job, on_change=watching(job))
    if launched.error is not None:
        raise launched.error
    reports = [_report(job, b) for b in range(len(launched.blocks))]
    seconds = [each["seconds"]["total"] for each in reports]
    return {
        "way": "blocks", "steps": job.train.steps, "critical_seconds": max(seconds), "device_seconds": sum(seconds),
        "fisher": "fisher" in job.train.loss.name,
        "peak_memory_bytes": max(each["peak_memory_bytes"] for each in reports),
        "evaluation": apart(_evaluate, job)[0],
    }  # fmt: skip


def relay(job, way):
    """The blocks in depth order, each on what those before it make of the data: all of it is on the critical path."""
    before = {"critical_seconds": 0.0, "device_seconds": 0.0, "peak_memory_bytes": 0}
    if way.base:
        before = result(way.base)
        if before is None:
            raise SystemExit(f"{job.output.name} polishes the blocks of {way.base}, which has no result yet")
        _begin_with(job, load_job(output=way.base))
    steps = min(way.polish, job.train.steps) or job.train.steps
    _, _, peak = apart(_relay, job, steps, not way.base)
    spent = json.loads(_spent(job).read_text(encoding="utf-8"))
    return {
        "way": "relay", "steps": steps, "critical_seconds": before["critical_seconds"] + spent,
        "device_seconds": before["device_seconds"] + spent, "fisher": "fisher" in job.train.loss.name,
        "peak_memory_bytes": max(peak, before["peak_memory_bytes"]),
        "evaluation": apart(_evaluate, relayed(job, steps=steps))[0],
    }  # fmt: skip


def _begin_with(job, base):
    """The blocks of another way in a folder of one's own, for a folder has one relay."""
    job.output.mkdir(parents=True, exist_ok=True)
    for b in range(len(job.student.boundaries) - 1):
        if not job.folder(b).exists():
            job.folder(b).symlink_to(base.folder(b))


def _relay(job, steps, from_scratch):
    spent = json.loads(_spent(job).read_text(encoding="utf-8")) if _spent(job).exists() else 0.0
    began = time.perf_counter()
    try:
        zgtrain.relay(job, steps=steps, from_scratch=from_scratch)
    finally:  # of all runs, if it is stopped and goes on
        job.output.mkdir(parents=True, exist_ok=True)
        _spent(job).write_text(json.dumps(spent + time.perf_counter() - began), encoding="utf-8")


def _spent(job):
    return job.output / "relay-seconds.json"


def _report(job, b):
    return json.loads((job.folder(b) / "report.json").read_text(encoding="utf-8"))


def _evaluate(job):
    return zgtrain.evaluate(job, progress=lambda said: print(f"  {said}", flush=True)).as_value()


def distil(job, _way):
    return apart(end_to_end.distil, job)[0]


PARTS = {"blocks": (BLOCKS, blocks), "relay": (RELAYS, relay), "end-to-end": (END_TO_END, distil)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["build", *PARTS, "report"], action="append")
    parser.add_argument("--way", choices=[name for ways, _ in PARTS.values() for name in ways], action="append")
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[])
    args = parser.parse_args()
    chosen = args.part or ["build", *PARTS, "report"]
    if "build" in chosen:
        prepare(args.set)
    for part, (ways, train) in PARTS.items():
        for name, way in ways.items():
            if part in chosen and name in (args.way or ways):
                base = BLOCKS[way.base].sets if way.base else ()
                kept(name, train, load_job((*base, *way.sets, *args.set), name), way)
    if "report" in chosen:
        table.write([name for ways, _ in PARTS.values() for name in ways])


if __name__ == "__main__":
    main()
