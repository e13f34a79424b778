"""The trained blocks of a job assembled and judged; the result lies beside them as JSON."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

import zgstore
from zgtrain.assembler import gather, joined_student
from zgtrain.blockreport import EVALUATION
from zgtrain.blocks import boundaries_of
from zgtrain.devices import device_of
from zgtrain.files import write_json
from zgtrain.gates import finite
from zgtrain.job import Job
from zgtrain.journal import FILE_NAME as LOG_NAME
from zgtrain.journal import read_lines
from zgtrain.judgement import Evaluation, Progress, judge
from zgtrain.noise import without_target


def evaluate(job: Job, *, device: str | None = None, progress: Progress | None = None) -> Evaluation:
    """Assemble the student of a trained job and judge it; the result also lies in the job's output, as JSON.

    Args:
        job: All of its blocks are trained.
        device: Where; default CUDA if there is one.
        progress: Told what is being done.

    Raises:
        zgstore.Invalid: if the job does not say what to judge with.
        zgstore.Refused: if its blocks do not belong together.
    """
    needed = {
        "student.assemble": job.student.assemble, "student.teacher": job.student.teacher,
        "evaluate.data": job.evaluate.data, "evaluate.prompts": job.evaluate.prompts,
    }  # fmt: skip
    for key, target in needed.items():
        if target is None:
            raise zgstore.Invalid(
                f"{job.path.name}: {key} is missing, and no gate may be left out",
                hint=f'name it: {key.partition(".")[2]} = "module:function" under [{key.partition(".")[0]}]',
            )
    say = progress or (lambda _: None)
    say("assembling")
    gathered = gather(job)
    assert job.student.assemble is not None  # all four were seen above
    assert job.student.teacher is not None
    assert job.evaluate.data is not None
    assert job.evaluate.prompts is not None
    student = joined_student(job, gathered.blocks)
    interface = None if job.student.interface is None else job.student.interface.call(job.student.args)
    say("loading the teacher")
    teacher = job.student.teacher.call(job.student.args)
    args = job.evaluate.args or job.student.args
    forward = without_target(None if job.train.forward is None else job.train.forward.resolve())
    place = device_of(device)
    store = zgstore.Store.open(job.snapshot.store)
    names = boundaries_of(job, store)
    # Blocks of diffusion hand on no boundaries that a teacher has: there are none to be held against its own.
    chain, met = ((), names[:1]) if job.train.diffusion else (gathered.blocks, names)
    judged = judge(
        student=student.to(place).eval(), teacher=teacher.to(place).eval(),
        blocks=[block.to(place).eval() for block in chain], call=forward,
        interface=None if interface is None else interface.to(place).eval(),
        boundaries=met, capturer=_capturer(job, teacher, met),
        data=job.evaluate.data.call(args), prompts=list(job.evaluate.prompts.call(args)),
        reports=gathered.reports, losses=_losses_not_finite(job, len(gathered.blocks)),
        sweep_rows=job.evaluate.sweep_rows, say=say,
    )  # fmt: skip
    write_json(job.output / EVALUATION, judged.as_value())
    return judged


def _capturer(job: Job, teacher: nn.Module, names: Sequence[str]) -> zgstore.capture.Capturer:
    """What takes the boundaries from the teacher: hooks where they are named after points, else the recipe's way."""
    if job.snapshot.recipe is not None:
        spec = zgstore.load_recipe(job.snapshot.recipe).capture
        if spec.extractor is not None:
            return zgstore.capture.Extraction(teacher, spec.extractor.resolve(), spec.args)
    return zgstore.capture.Capture(teacher, names)


def _losses_not_finite(job: Job, blocks: int) -> int:
    """Losses in the blocks' logs that are no numbers; a training stops at its first, so it is one at most a block."""
    lines = [line for block in range(blocks) for line in read_lines(job.folder(block) / LOG_NAME)]
    losses = [value for line in lines for name, value in line.items() if name.endswith("loss") and value is not None]
    return sum(finite(float(value)) is None for value in losses)
