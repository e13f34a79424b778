"""What is seen of a boundary's values as they pass: how large they are, and which rows are not finite.

Outputs are looked at too; there −inf is legal where it is kept as it is: a mask in logits. Context is data.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor

from zgstore.format.tensorfile import offsets_of

_PIECE: Final = 1 << 18  # elements widened together: in fp32 they stay in the cores' caches
_LEAST, _LARGEST = 1e-16, 1e16  # in fp32 the squares of smaller elements vanish, and of larger ones are infinite


@dataclass(frozen=True, slots=True)
class Seen:
    """What was seen of some values; ``a + b`` is of both.

    Args:
        count: Finite elements.
        square_sum: Of finite elements.
        low: The least finite element; inf where there is none.
        high: The greatest; −inf where there is none.
    """

    count: int = 0
    square_sum: float = 0.0
    low: float = math.inf
    high: float = -math.inf

    def __add__(self, other: Seen) -> Seen:
        return Seen(
            self.count + other.count,
            self.square_sum + other.square_sum,
            min(self.low, other.low),
            max(self.high, other.high),
        )

    @property
    def rms(self) -> float:
        """Root mean square of the finite elements."""
        return math.sqrt(self.square_sum / self.count) if self.count else 0.0

    def as_value(self) -> dict[str, float]:
        """``rms``, ``min`` and ``max`` as an action holds them; empty where nothing is finite."""
        return {"rms": self.rms, "min": self.low + 0.0, "max": self.high + 0.0} if self.count else {}  # +0 of ±0


def look(tensor: Tensor) -> Seen:
    """Look at all elements of a tensor of any shape; of integers nothing is counted.

    By torch, whose threads are awake where a teacher has just run: on another thread they would wait busily beside the
    teacher's, and numpy's many short calls would have both threads wait for Python's lock (docs/LOG.md, "What a build
    adds to a teacher that is faster than the disk").
    """
    return _look(_pieces(tensor.detach().cpu().reshape(-1).contiguous()))


def fill(tensor: Tensor, source: Tensor) -> Seen:
    """Copy ``source`` into a contiguous tensor of its shape and look at what came of it, while the caches have it."""
    if not source.is_contiguous():
        return look(tensor.copy_(source))
    pieces = zip(_pieces(tensor.view(-1)), _pieces(source.detach().view(-1)), strict=True)
    return _look(piece.copy_(given) for piece, given in pieces)


def _pieces(flat: Tensor) -> Iterator[Tensor]:
    return (flat[at : at + _PIECE] for at in range(0, len(flat), _PIECE))


def _look(pieces: Iterable[Tensor]) -> Seen:
    seen, wide = Seen(), torch.empty(0, device="cpu")
    for piece in pieces:
        if not piece.is_floating_point():
            continue
        if piece.dtype in {torch.float32, torch.float64}:
            seen += _of(piece)
        else:
            if not len(wide):  # the first piece is the largest
                wide = torch.empty(len(piece), dtype=torch.float32, device="cpu")
            seen += _of(wide[: len(piece)].copy_(piece))
    return seen


def _of(values: Tensor) -> Seen:
    low, high = map(float, torch.aminmax(values))
    # NaN and Inf reach the extremes; only then are elements looked at one by one.
    if not (math.isfinite(low) and math.isfinite(high)):
        values = values[torch.isfinite(values)]
        if not len(values):
            return Seen()
        low, high = map(float, torch.aminmax(values))
    if not _LEAST < max(-low, high) < _LARGEST:
        values = values.to(torch.float64)
    return Seen(len(values), float(torch.dot(values, values)), low, high)


def nonfinite_rows(tensor: Tensor, lengths: Tensor | None = None, *, masks: bool = False) -> tuple[int, ...]:
    """Rows (ascending, counted from 0) that hold NaN or Inf where numbers were promised.

    Args:
        tensor: Floating ``[rows, …]``, or ``[sum of lengths, …]`` with ``lengths``.
        lengths: Integer ``[rows]`` of a ragged tensor.
        masks: Whether −inf stands for what is masked, and is no fault.
    """
    values = tensor.to(torch.float32) if tensor.dtype.itemsize == 1 else tensor  # torch knows too little of fp8
    right = torch.isfinite(values)
    if masks:
        right |= values == -math.inf
    bad = ~right.reshape(len(tensor), -1).all(1)
    if lengths is None:
        return tuple(torch.nonzero(bad).flatten().tolist())
    bounds = offsets_of(lengths.cpu()).tolist()
    return tuple(row for row, (start, end) in enumerate(pairwise(bounds)) if bool(bad[start:end].any()))
