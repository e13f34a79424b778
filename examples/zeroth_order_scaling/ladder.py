"""Sizes × ways to have a gradient × seeds, in one command: what has a result is not run again.

    python examples/zeroth_order_scaling/ladder.py --dry-run
    python examples/zeroth_order_scaling/ladder.py                                  # the smallest size, every arm
    python examples/zeroth_order_scaling/ladder.py --sizes 60m 124m --processes 8 --precision bf16 \\
        --source hub:HuggingFaceFW/fineweb-edu/sample-10BT --tokens 10000000000 --micro-rows 16

Everything lies in ``.scaling/`` (``--output``): the tokens in ``data``, each run in a folder that its digest names, the
table and plots of all runs that are there beside them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import collecting
import shards
from sizes import ARMS, SIZES, Run

TRAIN = Path(__file__).resolve().parent / "train.py"


def planned(args, data):
    """The runs, smallest size first."""
    return [
        Run(size=size, shape=SIZES[size], probes=ARMS[arm], data=data, seed=seed, precision=args.precision)
        for size, seed, arm in itertools.product(args.sizes, args.seeds, args.arms)
    ]


def state_of(folder):
    """``done``, ``begun`` or ``new``."""
    if (folder / "result.json").exists():
        return "done"
    return "begun" if (folder / "checkpoint.pt").exists() else "new"


def show(runs, home):
    """The plan, a line for each run."""
    print(f"{'run':46} {'parameters':>11} {'steps':>7} {'tokens':>8}  state")
    for run in runs:
        sizes = f"{run.shape.parameters / 1e6:9.1f} M {run.shape.steps:7} {run.shape.tokens / 1e6:6.1f} M"
        print(f"{run.name:46} {sizes}  {state_of(home / 'runs' / run.name)}")


def train(run, args):
    """One run in processes of its own; raises SystemExit if it does not come to its end."""
    folder = args.output / "runs" / run.name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps(asdict(run), indent=2) + "\n", encoding="utf-8")
    started = [sys.executable]
    if args.processes > 1:
        started += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.processes}"]
    words = [TRAIN, folder, "--data", args.output / "data", f"--micro-rows={args.micro_rows}"]
    ran = subprocess.run([*started, *words, f"--save-every={args.save_every}"], check=False)
    if ran.returncode:
        raise SystemExit(f"{run.name} ended with {ran.returncode}; the same command goes on where it was")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["mini"])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=[*ARMS])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--source", default="python:topics", help="of the text, as shards.py has it")
    parser.add_argument("--tokens", type=int, help="stop after so many")
    parser.add_argument("--processes", type=int, default=1, help="of each run, under torchrun")
    parser.add_argument("--micro-rows", type=int, default=8, help="rows in memory at once, of a process")
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--output", type=Path, default=Path(".scaling"))
    parser.add_argument("--dry-run", action="store_true", help="print the plan; the text is tokenised, no more")
    args = parser.parse_args()
    data = shards.write(args.output / "data", args.source, tokens=args.tokens)
    runs = planned(args, data["digest"])
    show(runs, args.output)
    if args.dry_run:
        return
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # else several wait spinning
    for run in runs:
        if state_of(args.output / "runs" / run.name) != "done":
            print(f"\n{run.name}", flush=True)
            train(run, args)
    collecting.collect(args.output)


if __name__ == "__main__":
    main()
