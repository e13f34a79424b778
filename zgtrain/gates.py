"""The gates that a student passes or does not: each with its numbers, their thresholds and a verdict.

A good cross entropy with collapsed generation has been published: no gate is dropped because the others pass. Nothing
here knows tensors. Losses are in nats per token.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

MOST_QUALITY_LOST: Final = 0.5  # nats
LEAST_CONTEXT_KEPT: Final = 0.5  # of the teacher's own
LEAST_PROMPTS: Final = 0.75  # 3 of 4
LARGEST_SHARE: Final = 0.20
MOST_REPEATED: Final = 0.30
SLACK: Final = 0.10  # above the teacher's own
MOST_TEACHER_SCORED: Final = 1.0  # nats


@dataclass(frozen=True, slots=True)
class Measure:
    """One number against its threshold.

    Args:
        name: What is measured.
        number: The student's.
        relation: ``≤``, ``≥``, ``<`` or ``>``: what ``number`` must be to ``threshold``.
        threshold: Where it may just be.
    """

    name: str
    number: float
    relation: str
    threshold: float

    @property
    def passes(self) -> bool:
        """Whether it holds; never for what is no number."""
        number, threshold = self.number, self.threshold
        held = {
            "≤": number <= threshold, "≥": number >= threshold, "<": number < threshold, ">": number > threshold,
        }  # fmt: skip
        return held[self.relation]

    def as_value(self) -> dict[str, Any]:
        """The JSON object."""
        return {
            "name": self.name, "number": finite(self.number), "relation": self.relation,
            "threshold": finite(self.threshold), "passes": self.passes,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Gate:
    """A verdict; it passes if all of its measures do.

    Args:
        name: As its page calls it.
        measures: At least one.
        detail: What else there is to see.
    """

    name: str
    measures: tuple[Measure, ...]
    detail: Mapping[str, Any]

    @property
    def passes(self) -> bool:
        """Whether every measure does."""
        return all(each.passes for each in self.measures)

    def as_value(self) -> dict[str, Any]:
        """The JSON object; ``number`` and ``threshold`` are of the first measure that fails, else of the first."""
        decisive = next((each for each in self.measures if not each.passes), self.measures[0]).as_value()
        return {
            "name": self.name,
            "passes": self.passes,
            **{key: decisive[key] for key in ("number", "relation", "threshold")},
            "measures": [each.as_value() for each in self.measures],
            "detail": dict(self.detail),
        }


def finite(number: float) -> float | None:
    """A number as JSON can say it: None for what is none."""
    return number if math.isfinite(number) else None


# ---- the six ----


def finite_gate(*, losses: int, parameters: int, logits: int) -> Gate:
    """No NaN and no Inf in losses, parameters or logits; counts of them."""
    counts = {"losses": losses, "parameters": parameters, "logits": logits}
    return Gate("finite", tuple(Measure(f"not finite in {name}", n, "≤", 0) for name, n in counts.items()), {})


def local_learning_gate(windows: Sequence[tuple[float, float]]) -> Gate:
    """Mean boundary loss of the last 32 steps over that of the first 32: below 1 in every block.

    Args:
        windows: For each block its first and its last mean.
    """
    measures = [
        Measure(f"block {b}: last over first", last / first if first else math.nan, "<", 1.0)
        for b, (first, last) in enumerate(windows)
    ]
    return Gate("local learning", tuple(measures), {"windows": [[finite(x) for x in each] for each in windows]})


def quality_gate(*, student_ce: float, teacher_ce: float) -> Gate:
    """Held-out cross entropy of the assembled student less the teacher's, over the same tokens."""
    return Gate(
        "quality",
        (Measure("student's CE − teacher's", student_ce - teacher_ce, "≤", MOST_QUALITY_LOST),),
        {"student_ce": finite(student_ce), "teacher_ce": finite(teacher_ce)},
    )


def context_gate(*, student: float, teacher: float, prompts: Sequence[float], teacher_prompts: Sequence[float]) -> Gate:
    """What the prompt's content is worth: CE of the continuation with another's content − with its own.

    Args:
        student: Over held-out rows.
        teacher: Likewise.
        prompts: The student's for each prompt.
        teacher_prompts: Likewise.
    """
    return Gate(
        "context use",
        (
            Measure("CE with another's content − with its own", student, "≥", LEAST_CONTEXT_KEPT * teacher),
            Measure(
                "prompts whose own content helps", sum(each > 0 for each in prompts), "≥",
                math.ceil(LEAST_PROMPTS * len(prompts)),
            ),
        ),
        {
            "teacher": finite(teacher), "prompts": [finite(each) for each in prompts],
            "teacher_prompts": [finite(each) for each in teacher_prompts],
        },
    )  # fmt: skip


def coherence_gate(student: Sequence[Sequence[int]], teacher: Sequence[Sequence[int]]) -> Gate:
    """Whether greedy generations repeat themselves, pooled over the prompts.

    Args:
        student: Ids of each generation.
        teacher: Likewise.
    """
    return Gate(
        "coherence",
        (
            Measure("largest token's share", share(student), "≤", max(LARGEST_SHARE, share(teacher) + SLACK)),
            Measure("repeated bigrams", repeated(student), "≤", max(MOST_REPEATED, repeated(teacher) + SLACK)),
        ),
        {"teacher_share": finite(share(teacher)), "teacher_repeated": finite(repeated(teacher))},
    )


def teacher_scored_gate(*, on_student: float, on_itself: float) -> Gate:
    """The teacher's cross entropy on what the student generates − on what it generates itself."""
    return Gate(
        "teacher-scored generation",
        (Measure("teacher's CE on the student's − on its own", on_student - on_itself, "≤", MOST_TEACHER_SCORED),),
        {"on_student": finite(on_student), "on_itself": finite(on_itself)},
    )


def share(generations: Sequence[Sequence[int]]) -> float:
    """The largest token's share of all generated tokens; NaN if there are none."""
    tokens = [token for ids in generations for token in ids]
    return max(map(tokens.count, set(tokens))) / len(tokens) if tokens else math.nan


def repeated(generations: Sequence[Sequence[int]]) -> float:
    """1 − distinct bigrams / bigrams, pooled; a bigram does not reach from one generation into the next."""
    bigrams = [pair for ids in generations for pair in itertools.pairwise(ids)]
    return 1 - len(set(bigrams)) / len(bigrams) if bigrams else math.nan
