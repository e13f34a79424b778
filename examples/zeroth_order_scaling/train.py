"""One run of the ladder, in its own folder, which holds ``run.json``; under torchrun on as many processes as there are.

    python train.py FOLDER --data DATA
    torchrun --nproc-per-node 8 train.py FOLDER --data DATA

Every step has the same rows, however many processes share them out and into however many micro-batches. What is
stopped goes on from its last checkpoint, and ends in the same bits on the same processes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from decoder import Decoder
from looking import look
from shards import Rows
from sizes import Run
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from zgtrain.gradient.blackbox import Asking
from zgtrain.gradient.cores import asking

CLIP = 1.0
ADAMW = {"betas": (0.9, 0.95), "weight_decay": 0.1}


class World:
    """The processes of a run: one, or those that torchrun started."""

    def __init__(self):
        self.rank, self.size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        has_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if has_gpu else torch.device("cpu")
        if self.size > 1:
            dist.init_process_group("nccl" if has_gpu else "gloo")

    def share(self, rows):
        """This process's part of a step's rows."""
        if len(rows) % self.size:
            raise SystemExit(f"{self.size} processes cannot share {len(rows)} rows evenly")
        each = len(rows) // self.size
        return range(self.rank * each, (self.rank + 1) * each)

    def total(self, value):
        """The sum of a number over all processes."""
        summed = torch.tensor(float(value), dtype=torch.float64, device=self.device)
        if self.size > 1:
            dist.all_reduce(summed)
        return summed.item()

    def close(self):
        if self.size > 1:
            dist.destroy_process_group()


def rate(size, step):
    """Rising in a line for ``warmup`` steps, then half a cosine down to a tenth."""
    if step < size.warmup:
        return size.lr * (step + 1) / size.warmup
    done = (step - size.warmup) / max(size.steps - size.warmup, 1)
    return size.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


class Training:
    """The run's whole state: model, optimiser, and the step that comes next."""

    def __init__(self, run, folder, rows, world, micro_rows):
        torch.manual_seed(run.seed)
        self.run, self.folder, self.rows, self.world, self.micro_rows = run, folder, rows, world, micro_rows
        self.model = Decoder(run.shape).to(world.device)
        self.parallel = DistributedDataParallel(self.model) if world.size > 1 else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=run.shape.lr, **ADAMW)
        self.step, self.seconds, self.queries = 0, 0.0, 0

    def take_step(self):
        """One step of the optimiser; what to log of it."""
        began, run, world = time.perf_counter(), self.run, self.world
        rows = self.rows.of_step(self.step, run.shape.rows, run.seed)
        mine = world.share(rows)
        for group in self.optimizer.param_groups:
            group["lr"] = rate(run.shape, self.step)
        loss = 0.0
        for start in range(mine.start, mine.stop, self.micro_rows):
            part = range(start, min(start + self.micro_rows, mine.stop))
            is_last = part.stop == mine.stop
            with contextlib.nullcontext() if is_last or world.size == 1 else self.parallel.no_sync():
                loss += self._backward([rows[at] for at in part], part)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP).item()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds += time.perf_counter() - began
        self.step += 1
        said = {"step": self.step, "loss": world.total(loss), "lr": rate(run.shape, self.step - 1), "grad_norm": norm}
        return {**said, "queries": self.queries, "seconds": round(self.seconds, 3)}

    def _backward(self, rows, places):
        """Add this part's gradient; its part of the step's mean loss. ``places`` are those of its rows in the step."""
        ids, targets = (each.to(self.world.device) for each in self.rows.read(rows))
        now = self.pass_of(places.start)
        with asking(now) if self.run.probes else contextlib.nullcontext(), self.autocast():
            logits = self.parallel(ids)
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
        loss = loss / (self.run.shape.rows * self.run.shape.length)
        (loss * self.world.size).backward()  # DDP divides by it
        self.queries += now.queries
        return loss.item()

    def pass_of(self, place):
        """A forward pass with probes of its own: those of this step, and of where its rows begin in it."""
        return Asking(self.run.gradient, (self.step, place))

    def autocast(self):
        return torch.autocast(self.world.device.type, torch.bfloat16, enabled=self.run.precision == "bf16")

    # ---- stopping and going on ----

    @property
    def file(self):
        return self.folder / "checkpoint.pt"

    def save(self):
        if self.world.rank == 0:
            state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step}
            new = self.file.with_suffix(".new")
            with new.open("wb") as file:
                torch.save({**state, "seconds": self.seconds, "queries": self.queries}, file)
                file.flush()
                os.fsync(file.fileno())
            new.replace(self.file)

    def load(self):
        if self.file.exists():
            state = torch.load(self.file, map_location=self.world.device, weights_only=True)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.step, self.seconds, self.queries = state["step"], state["seconds"], state["queries"]


class Log:
    """Lines of JSON, of the first process alone; lines that a checkpoint does not know of are dropped at the start."""

    def __init__(self, path, since, *, writes):
        self.path, self.writes = path, writes
        if writes:
            lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
            kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= since]
            path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")

    def add(self, value):
        if self.writes:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(value) + "\n")


def train(folder, data, *, micro_rows, save_every):
    """Train to the end, or to the next step after a SIGTERM.

    Returns:
        Whether it came to the end.
    """
    run = Run.from_value(json.loads((folder / "run.json").read_text(encoding="utf-8")))
    rows = Rows(data, run.shape.length, run.heldout_rows)
    if rows.digest != run.data:
        raise SystemExit(f"{data} holds {rows.digest}, and the run is of {run.data}")
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
    world = World()
    training = Training(run, folder, rows, world, micro_rows)
    training.load()
    log = Log(folder / "log.jsonl", training.step, writes=world.rank == 0)
    while training.step < run.shape.steps:
        if training.step % run.look_every == 0:
            log.add({"step": training.step, **look(training)})
        log.add(training.take_step())
        if world.total(len(stopped)):
            training.save()
            return False
        if training.step % save_every == 0:
            training.save()
    last = look(training)
    log.add({"step": training.step, **last})
    if world.rank == 0:
        told = {"run": folder.name, "processes": world.size, "machine": f"{platform.machine()}, {world.device.type}"}
        result = {**told, "steps": training.step, "seconds": training.seconds, "queries": training.queries, **last}
        (folder / "result.new").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        (folder / "result.new").replace(folder / "result.json")
    world.close()
    return True


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--micro-rows", type=int, default=8, help="rows in memory at once, of a process")
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints")
    args = parser.parse_args()
    if not train(args.folder, args.data, micro_rows=args.micro_rows, save_every=args.save_every):
        raise SystemExit(f"stopped; {args.folder} goes on where it was when it is run again")


if __name__ == "__main__":
    main()
