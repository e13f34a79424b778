"""Gradients from forward queries: which parts of a block are black boxes, and how they are asked.

The rule: Hugging Face's decoder layers, each an attention and a gated feed-forward, are digital but for these two
cores; so is a block that has a `PhysicalCore`, but for those. Any other block is one black box as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

import zgstore
from zgtrain.gradient.blackbox import Asking, Forward, Whole, refuse_complex
from zgtrain.gradient.cores import PhysicalCore, asking
from zgtrain.gradient.layers import find
from zgtrain.job import GradientSpec
from zgtrain.ranks import is_sharded


class ZerothOrder:
    """The gradient of one block from queries; an instance belongs to one training.

    Args:
        spec: How is asked.
        block: The block.
        forward: ``(block, source, context) -> prediction``.
        number: b, so that no two blocks have the same probes.
        replica: Which of the processes that share rows out this is.

    Raises:
        zgstore.Invalid: for a sharded block without cores, or a complex parameter.
    """

    def __init__(
        self, spec: GradientSpec, block: nn.Module, *, forward: Forward, number: int = 0, replica: int = 0
    ) -> None:
        self.spec, self._block, self._forward = spec, block, forward
        self._of_all = spec.seed, number, replica
        self._within = _cores_of(block)
        self._asking = Asking(spec, self._of_all)
        for name, each in block.named_parameters():
            if self._within is None and each.requires_grad:
                refuse_complex(f"the parameter {name!r}", each)
        if self._within is None and any(map(is_sharded, block.parameters())):
            raise zgstore.Invalid(
                "a sharded block cannot be one black box",
                hint="train it in one process, or with zgtrain.gradient.cores.PhysicalCore where its cores are",
            )

    def forward(self, source: Tensor, context: Mapping[str, Any], at: tuple[int, int]) -> Any:
        """The prediction, with black boxes in its graph.

        Args:
            source: Of the batch.
            context: Of the batch.
            at: Step, and micro-batch of it.
        """
        self._asking = Asking(self.spec, (*self._of_all, *at))
        if self._within is None:
            return Whole(self._block, self._forward, context, self._asking).predict(source)
        with self._within(self._asking):
            return self._forward(self._block, source, context)

    def backward(self, loss: Tensor) -> int:
        """Add the estimate of the loss's gradient to ``.grad`` of the parameters.

        Returns:
            Forward queries that it took.
        """
        loss.backward()  # type: ignore[no-untyped-call]
        return self._asking.queries


def count_cores(block: nn.Module) -> int:
    """How many physical cores of a block are asked; 0 if it is one black box as a whole."""
    if found := sum(isinstance(module, PhysicalCore) for module in block.modules()):
        return found
    layers = find(block)
    return 0 if layers is None else layers.count


def _cores_of(block: nn.Module) -> Callable[[Asking], AbstractContextManager[None]] | None:
    """What makes the block's cores black boxes for one forward pass; None if it has none."""
    if any(isinstance(module, PhysicalCore) for module in block.modules()):
        return asking
    layers = find(block)
    return None if layers is None else layers.asking
