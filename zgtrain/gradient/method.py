"""The gradient that a job asks for, as an object with two functions: forward, and backward."""

from __future__ import annotations

from torch import nn

from zgtrain.gradient.backprop import Backprop
from zgtrain.gradient.blackbox import Forward
from zgtrain.gradient.zeroth_order import ZerothOrder
from zgtrain.job import GradientSpec

Method = Backprop | ZerothOrder


def make_method(
    spec: GradientSpec | str, block: nn.Module, *, forward: Forward, number: int = 0, replica: int = 0
) -> Method:
    """The way to a block's gradient.

    Args:
        spec: From the job, or its name alone.
        block: The block.
        forward: ``(block, source, context) -> prediction``.
        number: b.
        replica: Which of the processes that share rows out this is.
    """
    spec = GradientSpec(spec) if isinstance(spec, str) else spec
    if spec.name == "backprop":
        return Backprop(block, forward=forward)
    return ZerothOrder(spec, block, forward=forward, number=number, replica=replica)
