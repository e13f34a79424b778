"""The gradient that a job asks for, as an object with two functions: forward, and backward."""

from __future__ import annotations

from torch import nn

from zgtrain.gradient.backprop import Backprop
from zgtrain.gradient.blackbox import Forward
from zgtrain.gradient.zeroth_order import ZerothOrder
from zgtrain.job import Arguments, GradientSpec
from zgtrain.jobfile import gradient_of

Method = Backprop | ZerothOrder


def make_method(
    spec: GradientSpec | Arguments | str, block: nn.Module, *, forward: Forward, number: int = 0, replica: int = 0
) -> Method:
    """The way to a block's gradient.

    Args:
        spec: From the job, its name alone, or the job file's table.
        block: The block.
        forward: ``(block, source, context) -> prediction``.
        number: b.
        replica: Which of the processes that share rows out this is.

    Raises:
        zgstore.Invalid: for a name, or a number, that a job file may not say.
    """
    spec = gradient_of(spec)
    if spec.name == "backprop":
        return Backprop(block, forward=forward)
    return ZerothOrder(spec, block, forward=forward, number=number, replica=replica)
