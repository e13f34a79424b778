"""The ordinary way: automatic differentiation through the block."""

from __future__ import annotations

from torch import Tensor, nn


def backward(loss: Tensor, block: nn.Module) -> int:  # noqa: ARG001 — other ways look into the block
    """Add the loss's gradient to ``.grad`` of the parameters that it depends on.

    Args:
        loss: A scalar of the block's forward.
        block: Whose forward it was.

    Returns:
        Forward queries that it took: none.
    """
    loss.backward()  # type: ignore[no-untyped-call]
    return 0
