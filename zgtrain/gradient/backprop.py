"""The ordinary way: automatic differentiation through the block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from zgtrain.gradient.blackbox import Forward
from zgtrain.job import GradientSpec


class Backprop:
    """The gradient of one block, as autograd has it.

    Args:
        block: The block.
        forward: ``(block, source, context) -> prediction``.
    """

    def __init__(self, block: nn.Module, *, forward: Forward) -> None:
        self.spec = GradientSpec()
        self._block, self._forward = block, forward

    def forward(self, source: Tensor, context: Mapping[str, Any], at: tuple[int, int]) -> Any:  # noqa: ARG002 — others draw by it
        """The prediction."""
        return self._forward(self._block, source, context)

    def backward(self, loss: Tensor) -> int:
        """Add the loss's gradient to ``.grad`` of the parameters that it depends on.

        Returns:
            Forward queries that it took: none.
        """
        loss.backward()  # type: ignore[no-untyped-call]
        return 0
