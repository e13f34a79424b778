"""A student in memory judged against its teacher: its quality, its gates, what each boundary loses on the way.

B blocks; N rows, T tokens, V vocabulary. Losses are in nats per token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

import zgstore
from zgtrain.alpha import Boundaries, Call
from zgtrain.blockreport import BlockReport
from zgtrain.gates import (
    Gate,
    coherence_gate,
    context_gate,
    finite,
    finite_gate,
    local_learning_gate,
    quality_gate,
    teacher_scored_gate,
)
from zgtrain.measures import Scored, continuation_ce, greedy, labels_of, logits_of, swapped

GENERATED_TOKENS: Final = 64
_PROMPTS: Final = (
    "let [evaluate] prompts give mappings: input_ids, one row of at least one id, int64 [T]; perhaps content, a bool "
    "for each of them, [T]"
)

Prompt = Mapping[str, Any]
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A student's verdicts, and the numbers behind them.

    Args:
        job: The job's identity.
        snapshot: Full digest of what the blocks learned from.
        blocks: For each block its ``state_digest``.
        data: What the held-out rows depend on, as their factory pins it.
        rows: Held-out rows.
        tokens: Scored tokens of them.
        teacher: ``ce``, ``perplexity``, ``accuracy``.
        student: Likewise, of the assembled student.
        gates: All of them.
        boundaries: For each block ``teacher_input_fit``, ``assembled_predecessor_error``, ``assembled_output_error``.
        sweep: For each block and α: ``mse``, ``relative_mse``, ``cosine``, ``norm_error``, ``ce``.
        sweep_rows: Rows that boundaries and sweep are measured on.
        generations: For each prompt ``prompt``, ``student``, ``teacher``: ids, or text where the prompt can decode.
        parameters: Of ``teacher`` and ``student``.
        seconds: What it took.
    """

    job: str
    snapshot: str
    blocks: Sequence[str]
    data: Mapping[str, Any]
    rows: int
    tokens: int
    teacher: Mapping[str, Any]
    student: Mapping[str, Any]
    gates: Sequence[Gate]
    boundaries: Sequence[Mapping[str, Any]]
    sweep: Sequence[Mapping[str, Any]]
    sweep_rows: int
    generations: Sequence[Mapping[str, Any]]
    parameters: Mapping[str, int]
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether every gate passes."""
        return all(gate.passes for gate in self.gates)

    def as_value(self) -> dict[str, Any]:
        """The JSON object."""
        return {
            "ok": self.ok,
            **{name: _plain(getattr(self, name)) for name in self.__slots__ if name != "gates"},
            "gates": [gate.as_value() for gate in self.gates],
        }


def judge(
    *,
    student: nn.Module,
    teacher: nn.Module,
    blocks: Sequence[nn.Module],
    call: Call,
    interface: nn.Module | None,
    boundaries: Sequence[str],
    capturer: zgstore.capture.Capturer,
    data: Iterable[Mapping[str, Any]],
    prompts: Sequence[Prompt],
    reports: Sequence[BlockReport],
    losses: int = 0,
    sweep_rows: int = 16,
    say: Progress = lambda _: None,
) -> Evaluation:
    """Judge a student that is already in memory.

    Args:
        student: Assembled, in eval mode: its forward gives logits.
        teacher: Likewise.
        blocks: What the student is made of, in depth order.
        call: ``(block, source, context) -> prediction``.
        interface: Boundary B → logits; None: the sweep has no final CE.
        boundaries: Their names, B + 1.
        capturer: The teacher's boundaries of a batch.
        data: Held-out batches: ``input_ids``; perhaps ``attention_mask``, ``position_ids``, ``labels``, ``content``.
        prompts: ``input_ids`` ``[T]``, or ``[1, T]``; perhaps ``content`` of the same shape, ``continuation`` (ids),
            ``text``, ``decode``.
        reports: The blocks' own.
        losses: How many losses of the training were not finite.
        sweep_rows: How many rows boundaries and sweep are measured on.
        say: Told what is being done.

    Raises:
        zgstore.Invalid: if there are no rows, or no prompts, or one is not a row of ids.
    """
    began = time.perf_counter()
    if not prompts:
        raise zgstore.Invalid("there are no prompts", hint="let [evaluate] prompts give at least one")
    prompts = [_as_row(number, prompt) for number, prompt in enumerate(prompts)]
    say("held-out rows")
    measured = Boundaries(blocks, call, interface)
    held = _held_out(student, teacher, data, measured, names=boundaries, capturer=capturer, sweep_rows=sweep_rows)
    if not held.rows:
        raise zgstore.Invalid("there are no held-out rows", hint="let [evaluate] data give at least one batch")
    say("generating")
    asked = [prompt["input_ids"] for prompt in prompts]
    said = (greedy(model, asked, tokens=GENERATED_TOKENS) for model in (student, teacher))
    spoken = [_Spoken(*each) for each in zip(prompts, *said, strict=True)]
    say("scoring what was generated")
    worth = {name: _worth(model, spoken) for name, model in (("student", student), ("teacher", teacher))}
    on_student, on_itself = (
        _pooled(continuation_ce(teacher, each.prompt["input_ids"], ids) for each, ids in said)
        for said in ([(each, each.student) for each in spoken], [(each, each.teacher) for each in spoken])
    )
    gates = (
        finite_gate(
            losses=losses, parameters=sum(int((~torch.isfinite(p)).sum()) for p in student.parameters()),
            logits=held.student.not_finite,
        ),
        local_learning_gate([(each.first_window_mean_loss, each.last_window_mean_loss) for each in reports]),
        quality_gate(student_ce=held.student.ce, teacher_ce=held.teacher.ce),
        context_gate(
            student=held.student_other.ce - held.student_own.ce, teacher=held.teacher_other.ce - held.teacher_own.ce,
            prompts=worth["student"], teacher_prompts=worth["teacher"],
        ),
        coherence_gate([each.student for each in spoken], [each.teacher for each in spoken]),
        teacher_scored_gate(on_student=on_student, on_itself=on_itself),
    )  # fmt: skip
    return Evaluation(
        job=reports[0].job if reports else "", snapshot=reports[0].snapshot if reports else "",
        blocks=[each.state_digest for each in reports], data=getattr(data, "pins", {}), rows=held.rows,
        tokens=held.student.tokens, teacher=held.teacher.as_value(), student=held.student.as_value(), gates=gates,
        boundaries=held.boundaries.boundary_values(boundaries), sweep=held.boundaries.sweep_values(),
        sweep_rows=held.swept, generations=[each.as_value() for each in spoken],
        parameters={"teacher": _count(teacher), "student": _count(student)}, seconds=time.perf_counter() - began,
    )  # fmt: skip


# ---- held-out rows ----


@dataclass(slots=True)
class _Held:
    """What one pass over the held-out rows gives; ``own`` and ``other`` score the continuations alone."""

    boundaries: Boundaries
    student: Scored = field(default_factory=Scored)
    teacher: Scored = field(default_factory=Scored)
    student_own: Scored = field(default_factory=Scored)
    student_other: Scored = field(default_factory=Scored)
    teacher_own: Scored = field(default_factory=Scored)
    teacher_other: Scored = field(default_factory=Scored)
    rows: int = 0
    swept: int = 0


@torch.inference_mode()
def _held_out(
    student: nn.Module, teacher: nn.Module, data: Iterable[Mapping[str, Any]], blocks: Boundaries, *,
    names: Sequence[str], capturer: zgstore.capture.Capturer, sweep_rows: int,
) -> _Held:  # fmt: skip
    held = _Held(blocks)
    device = next(student.parameters()).device
    before: Tensor | None = None
    for host in data:
        batch = {name: each.to(device) if isinstance(each, Tensor) else each for name, each in host.items()}
        labels, other = labels_of(batch), swapped(batch, before)
        before = other.last
        for model, whole, own, swap in (
            (student, held.student, held.student_own, held.student_other),
            (teacher, held.teacher, held.teacher_own, held.teacher_other),
        ):
            whole.add(logits_of(model, batch), labels, other.labels, also=[own])
            swap.add(logits_of(model, other.batch), other.labels)
        if held.swept < sweep_rows:
            seen = capturer(host)
            if seen.ready is not None:
                seen.wait()
            columns = {**seen.columns, **seen.outputs}
            blocks.add([columns[name].to(device) for name in names], _context(batch), labels)
            held.swept += len(labels)
        held.rows += len(labels)
    return held


def _context(batch: Mapping[str, Any]) -> dict[str, Any]:
    """What a block is called with beside its source, as a reader of a snapshot has it."""
    ids, mask = batch["input_ids"], batch.get("attention_mask")
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask != 0
    counted = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    return {**batch, "mask": real, "positions": batch.get("position_ids", counted), "lengths": real.sum(1)}


# ---- generations ----


def _as_row(number: int, prompt: Prompt) -> Prompt:
    """A prompt of rows, ``[T]``, whether it came so or as a batch of one, ``[1, T]``.

    Raises:
        zgstore.Invalid: for any other shape.
    """
    if not isinstance(prompt, Mapping):
        raise zgstore.Invalid(f"prompt {number} is a {type(prompt).__name__}, and no mapping", hint=_PROMPTS)
    ids = _row(number, "input_ids", prompt.get("input_ids"))
    rows = {"input_ids": ids}
    if "content" in prompt:
        rows["content"] = _row(number, "content", prompt["content"], length=len(ids))
    if isinstance(prompt.get("continuation"), Tensor):
        rows["continuation"] = _row(number, "continuation", prompt["continuation"])
    return {**prompt, **rows}


def _row(number: int, name: str, given: Any, *, length: int | None = None) -> Tensor:
    row = given[0] if isinstance(given, Tensor) and given.dim() == 2 and len(given) == 1 else given
    one = isinstance(row, Tensor) and row.dim() == 1 and not row.is_floating_point()
    if one and 0 < len(row) == (length or len(row)):
        return row
    said = f"{list(given.shape)} of {given.dtype}" if isinstance(given, Tensor) else f"a {type(given).__name__}"
    beside = "" if length is None else f", beside {length} ids"
    raise zgstore.Invalid(f"the {name} of prompt {number} is {said}{beside}", hint=_PROMPTS)


@dataclass(frozen=True, slots=True)
class _Spoken:
    prompt: Prompt
    student: list[int]
    teacher: list[int]

    @property
    def continuation(self) -> Any:
        """What the context's worth is scored on: the prompt's own, else what the teacher says."""
        return self.prompt.get("continuation", self.teacher)

    def as_value(self) -> dict[str, Any]:
        decode = self.prompt.get("decode") or (lambda ids: [int(each) for each in ids])
        prompt = self.prompt.get("text") or decode(self.prompt["input_ids"])
        return {"prompt": prompt, "student": decode(self.student), "teacher": decode(self.teacher)}


def _worth(model: nn.Module, spoken: Sequence[_Spoken]) -> list[float]:
    """For each prompt: CE of its continuation with the next prompt's content − with its own."""
    rows = [each.prompt["input_ids"] for each in spoken]
    content = [each.prompt.get("content", torch.ones_like(each.prompt["input_ids"])).bool() for each in spoken]
    worth = []
    for at, each in enumerate(spoken):
        other = rows[(at + 1) % len(rows)][content[(at + 1) % len(rows)]]
        changed, count = rows[at].clone(), int(content[at].sum())
        if count and len(other):
            changed[content[at]] = other.repeat(-(-count // len(other)))[:count]
        without, own = (continuation_ce(model, ids, each.continuation) for ids in (changed, rows[at]))
        worth.append(without.ce - own.ce)
    return worth


def _pooled(scored: Iterable[Scored]) -> float:
    total = Scored()
    for each in scored:
        total.include(each)
    return total.ce


# ---- beside ----


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _plain(value: Any) -> Any:
    """A value as JSON can say it."""
    if isinstance(value, float):
        return finite(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(each) for each in value]
    return value
