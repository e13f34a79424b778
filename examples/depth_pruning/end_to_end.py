"""The ordinary way, to compare with: the whole pruned student distilled by the logits of a teacher that runs beside it.

The same student, the same rows in the same steps; embedding, norm and head stay the teacher's, as for the blocks.
It goes on at its last mark when it is run again after a kill. Evaluation is not in the seconds.

    python examples/depth_pruning/end_to_end.py [--set train.steps=128]
"""

from __future__ import annotations

import argparse
import json
import time
from types import SimpleNamespace

import torch
from pieces import blocks_of, cross_entropy, heldout_rows, judged, load_job, student_of, teacher_of, training_rows
from running import peak_bytes

from zgtrain.objective import token_kl
from zgtrain.optimizing import make_optimizer, rate, set_rate

MARKS = (64, 128, 256)  # steps at which the held-out cross entropy is looked at, beside the last
WINDOW = 32


def distil(job):
    steps = job.train.steps
    rows, heldout = list(training_rows(job)), list(heldout_rows(job))
    teacher = teacher_of(job).requires_grad_(requires_grad=False)
    blocks = blocks_of(job)
    student = student_of(job, blocks)  # of the blocks' own memory
    parameters = [
        each.requires_grad_()
        for key, each in student.requires_grad_(requires_grad=False).named_parameters()
        if ".layers." in key
    ]
    optimizer = make_optimizer(job.train.optimizer, parameters)
    file = job.output / "state.pt"
    done = {"step": 0, "losses": [], "seconds": 0.0, "teacher_seconds": 0.0, "curve": []}
    if file.exists():
        saved = torch.load(file, weights_only=True)
        student.load_state_dict(saved["student"], strict=False)
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["done"]

    for step in range(done["step"], steps):
        began = time.perf_counter()
        batch = rows[step % len(rows)]
        given = {key: batch[key] for key in ("input_ids", "attention_mask")}
        with torch.no_grad():
            wanted = teacher(**given).logits
        told = time.perf_counter()
        loss = token_kl(student(**given, use_cache=False).logits, wanted)[batch["attention_mask"] == 1].mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        set_rate(optimizer, rate(job.train.schedule, step, steps))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        done["losses"].append(loss.item())
        done["seconds"] += time.perf_counter() - began
        done["teacher_seconds"] += told - began
        done["step"] = step + 1
        if step + 1 in {*MARKS, steps}:
            ce = cross_entropy(student, heldout)
            done["curve"].append({"step": step + 1, "seconds": done["seconds"], "ce": ce})
            print(
                f"step {step + 1:4d}  loss {loss.item():.4f}  held-out CE {ce:.4f}  {done['seconds']:.0f} s", flush=True
            )
            file.parent.mkdir(parents=True, exist_ok=True)
            layers = {key: each for key, each in student.state_dict().items() if ".layers." in key}
            torch.save({"student": layers, "optimizer": optimizer.state_dict(), "done": done}, file.with_suffix(".new"))
            file.with_suffix(".new").replace(file)

    peak = peak_bytes()  # before the gates
    first, last = (sum(each) / len(each) for each in (done["losses"][:WINDOW], done["losses"][-WINDOW:]))
    report = SimpleNamespace(
        job="", snapshot="", state_digest="", first_window_mean_loss=first, last_window_mean_loss=last
    )
    return {
        "way": "end-to-end", "steps": steps, "critical_seconds": done["seconds"],
        "device_seconds": done["seconds"], "teacher_seconds": done["teacher_seconds"], "curve": done["curve"],
        "peak_memory_bytes": peak, "evaluation": judged(job, student, teacher, blocks, [report]),
    }  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[])
    print(json.dumps(distil(load_job(["train.lr=3e-4", *parser.parse_args().set], "alone")), indent=2))
