"""The optimiser, and its learning rate as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

import zgstore
from zgtrain.job import OptimizerSpec, ScheduleSpec

INITIAL = "initial_lr"  # as torch's own schedulers call it


def make_optimizer(spec: OptimizerSpec, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimiser that a job names.

    Args:
        spec: From the job.
        parameters: Those that are trained.

    Raises:
        zgstore.Invalid: for options that it does not take, or nothing to train.
    """
    refuse_nothing(parameters)
    makers = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    make = makers[spec.name] if spec.function is None else spec.function.resolve()
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in spec.options.items()}
    try:
        optimizer = make(parameters, **options)
    except (TypeError, ValueError, LookupError, ArithmeticError, RuntimeError) as error:
        raise zgstore.Invalid(
            f"the optimizer {spec.name!r} refuses its options: {error}", hint="correct them under train.optimizer",
            key="train.optimizer",
        ) from error  # fmt: skip
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise zgstore.Invalid(
            f"{spec.name!r} returned a {type(optimizer).__name__}, not an optimizer",
            hint="return a torch.optim.Optimizer over the parameters it is given",
        )
    return optimizer


def refuse_nothing(parameters: Sequence[nn.Parameter]) -> None:
    """See that a block has parameters that are trained. Raises Invalid."""
    if not parameters:
        raise zgstore.Invalid("the block has no parameter to train", hint="leave requires_grad set on some of them")


def rate(schedule: ScheduleSpec, step: int, steps: int) -> float:
    """The fraction of the initial learning rate at a step, counted from 0."""
    if step < schedule.warmup:
        return (step + 1) / schedule.warmup
    if schedule.name == "constant":
        return 1.0
    progress = min(1.0, (step - schedule.warmup) / max(1, steps - schedule.warmup))
    left = 0.5 * (1.0 + math.cos(math.pi * progress)) if schedule.name == "cosine" else 1.0 - progress
    return schedule.final + (1.0 - schedule.final) * left


def set_rate(optimizer: torch.optim.Optimizer, fraction: float) -> float:
    """Set every group's learning rate to a fraction of its initial one; the first group's."""
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault(INITIAL, group["lr"]) * fraction
    return float(optimizer.param_groups[0]["lr"])
