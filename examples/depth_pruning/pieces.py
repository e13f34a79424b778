"""What the job names, the same for every way to a student: teacher, rows, blocks; held-out cross entropy and gates."""

from __future__ import annotations

from pathlib import Path

import torch

import zgstore
import zgtrain
from zgtrain.judgement import judge
from zgtrain.measures import Scored, labels_of, logits_of

HERE = Path(__file__).resolve().parent
SCRATCH = HERE.parent.parent / ".pruning"


def load_job(sets=(), output="clean"):
    return zgtrain.load_job(HERE / "student.toml", [*sets, f"output={SCRATCH / 'runs' / output}"])


def recipe_of(job):
    return zgstore.load_recipe(job.snapshot.recipe)


def training_rows(job):
    data = recipe_of(job).data
    return data.factory.call(data.args)


def heldout_rows(job):
    return job.evaluate.data.call(job.evaluate.args)


def teacher_of(job):
    return job.student.teacher.call(job.student.args)


def blocks_of(job):
    """As they are copied from the teacher."""
    return [job.student.block.call(job.student.args, b) for b in range(len(job.student.boundaries) - 1)]


def student_of(job, blocks):
    """The whole student; it shares the blocks' memory."""
    return job.student.assemble.call(job.student.args, blocks)


@torch.inference_mode()
def cross_entropy(model, rows):
    """Nats per token."""
    scored = Scored()
    for batch in rows:
        scored.add(logits_of(model, batch), labels_of(batch))
    return scored.ce


def judged(job, student, teacher, blocks, reports):
    """All gates for a student that no job has trained, as `zgtrain evaluate` has them for one that a job has."""
    names = job.student.boundaries
    return judge(
        student=student, teacher=teacher, blocks=blocks, call=job.train.forward.resolve(),
        interface=job.student.interface.call(job.student.args), boundaries=names,
        capturer=zgstore.capture.Capture(teacher, names), data=heldout_rows(job),
        prompts=job.evaluate.prompts.call(job.evaluate.args), reports=reports, sweep_rows=job.evaluate.sweep_rows,
    ).as_value()  # fmt: skip
