"""Physical cores: the parts of a block that a device computes, and that a zeroth-order gradient only queries.

What is not a core is digital: linear maps above all, whose weights' gradient is an outer product of the stored input
and the estimated cotangent, as ordinary automatic differentiation has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from torch import Tensor, nn

from zgtrain.gradient.blackbox import Asking, Core, put_in

_NOW: Final[ContextVar[Asking | None]] = ContextVar("zgtrain_asking", default=None)


class PhysicalCore(nn.Module):
    """A core of a block of one's own: it is what it is given, and under a zeroth-order gradient a black box.

    A block that has one is digital but for its cores; a block that has none is a black box as a whole.

    Args:
        function: Of rows. Of one axis more in front too: several probes are queried at a time.
        scores: Whether its rows are as long as the sequence, so that ``score_chunk`` holds.
    """

    def __init__(self, function: Callable[..., Tensor], *, scores: bool = False) -> None:
        super().__init__()
        self.function, self.scores = function, scores

    def forward(self, *inputs: Tensor, active: Tensor | None = None) -> Tensor:
        """The function of its inputs, and of ``active`` where that is given.

        Args:
            inputs: Tensors whose axes are alike but for the last.
            active: bool, broadcasting to the one input: the coordinates that it depends on.
        """
        return physical(self.function, *inputs, active=active, scores=self.scores)


def physical(
    function: Callable[..., Tensor], *inputs: Tensor, active: Tensor | None = None, scores: bool = False
) -> Tensor:
    """A function of rows: within `asking` as a black box, else as it is."""

    def called(*given: Tensor) -> Tensor:
        return function(*given) if active is None else function(*given, active)

    asking = _NOW.get()
    if asking is None:
        return called(*inputs)
    chunk = asking.spec.score_chunk if scores else asking.spec.probe_chunk
    return put_in(Core(called, asking, asking.next_key(), chunk, active), *inputs)


@contextmanager
def asking(now: Asking) -> Iterator[None]:
    """Within it, physical cores are black boxes."""
    token = _NOW.set(now)
    try:
        yield
    finally:
        _NOW.reset(token)
