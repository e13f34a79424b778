"""What is seen of a boundary's values as they pass: whether they are finite, and how large they are.

Outputs are looked at too; there −inf is legal where it is kept as it is: a mask in logits. Context is data.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from zgstore.format.tensorfile import offsets_of

# Elements looked at together: in fp32 they stay in the core's cache, and numpy's loops over them are long enough to
# leave Python's lock to others. Torch, and BLAS from 100,000 elements on, would start threads: on the writing thread
# they would wait busily beside the teacher's (docs/LOG.md, "What a build adds to a teacher that is faster than the
# disk").
_PIECE: Final = 96 << 10
_UPPER: Final = np.uint32(0xFFFF0000)
_SIXTEEN: Final = np.uint32(16)
_LARGEST: Final = 1e16  # squares of what is larger would leave fp32's range


@dataclass(frozen=True, slots=True)
class Statistics:
    """Of some rows of a boundary; ``a + b`` is of a's rows followed by b's.

    Args:
        rows: How many.
        nonfinite: Those (ascending, counted from 0) that hold NaN or Inf where numbers were promised.
        count: Finite elements.
        square_sum: Of finite elements.
        low: The least finite element; inf where there is none.
        high: The greatest; −inf where there is none.
    """

    rows: int = 0
    nonfinite: tuple[int, ...] = ()
    count: int = 0
    square_sum: float = 0.0
    low: float = math.inf
    high: float = -math.inf

    def __add__(self, other: Statistics) -> Statistics:
        return Statistics(
            self.rows + other.rows,
            (*self.nonfinite, *(self.rows + row for row in other.nonfinite)),
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


def stats(tensor: Tensor, lengths: Tensor | None = None, *, masks: bool = False) -> Statistics:
    """Statistics of some rows; of integers nothing is counted, and all are finite.

    Args:
        tensor: ``[rows, …]``, or ``[sum of lengths, …]`` with ``lengths``.
        lengths: Integer ``[rows]`` of a ragged tensor.
        masks: Whether −inf stands for what is masked, and is no fault.
    """
    rows = len(tensor) if lengths is None else len(lengths)
    if not tensor.numel() or not tensor.is_floating_point():
        return Statistics(rows=rows)
    flat = tensor.detach().cpu().resolve_neg().reshape(-1).contiguous()
    found = Statistics()
    for values in _pieces(flat):
        found += _of(values)
    nonfinite = _nonfinite_rows(tensor, lengths, masks=masks) if found.count < len(flat) else ()
    return replace(found, rows=rows, nonfinite=nonfinite)


def _of(values: NDArray[np.floating[Any]]) -> Statistics:
    low, high = float(values.min()), float(values.max())
    # NaN and Inf reach the extremes; only then are elements looked at one by one.
    if not (math.isfinite(low) and math.isfinite(high)):
        values = values[np.isfinite(values)]
        if not len(values):
            return Statistics()
        low, high = float(values.min()), float(values.max())
    if max(-low, high) > _LARGEST:
        values = values.astype(np.float64)
    with np.errstate(over="ignore"):  # the square of 1e200 is infinite, and so is the rms
        square_sum = float(np.dot(values, values))
    return Statistics(count=len(values), square_sum=square_sum, low=low, high=high)


def _pieces(flat: Tensor) -> Iterator[NDArray[np.floating[Any]]]:
    """The elements in fp32, or in fp64 what has it, a piece after the other; each until the next is asked for."""
    if flat.dtype == torch.bfloat16:
        yield from _pieces_of_bf16(flat.view(torch.int16).numpy().view(np.uint16))
        return
    for at in range(0, len(flat), _PIECE):
        piece = flat[at : at + _PIECE]
        yield (piece if piece.dtype in {torch.float32, torch.float64} else piece.to(torch.float32)).numpy()


def _pieces_of_bf16(bits: NDArray[np.uint16]) -> Iterator[NDArray[np.float32]]:
    """bf16 as fp32, whose upper half its bits are: two numbers of each pair, by a mask and by a shift.

    First one of each pair, then the other of each, for order is nothing here; all in memory that the next piece takes
    over. Torch's cast takes no less time, and threads.
    """
    pairs = bits[: len(bits) // 2 * 2].view(np.uint32)
    wide = np.empty(min(_PIECE, 2 * len(pairs)), np.uint32)
    values = wide.view(np.float32)
    for at in range(0, len(pairs), _PIECE // 2):
        piece = pairs[at : at + _PIECE // 2]
        np.bitwise_and(piece, _UPPER, out=wide[: len(piece)])
        np.left_shift(piece, _SIXTEEN, out=wide[len(piece) : 2 * len(piece)])
        yield values[: 2 * len(piece)]
    if len(bits) % 2:
        yield (bits[-1:].astype(np.uint32) << _SIXTEEN).view(np.float32)


def _nonfinite_rows(tensor: Tensor, lengths: Tensor | None, *, masks: bool) -> tuple[int, ...]:
    values = tensor.to(torch.float32) if tensor.dtype.itemsize == 1 else tensor  # torch knows too little of fp8
    right = torch.isfinite(values)
    if masks:
        right |= values == -math.inf
    bad = ~right.reshape(len(tensor), -1).all(1)
    if lengths is None:
        return tuple(torch.nonzero(bad).flatten().tolist())
    bounds = offsets_of(lengths.cpu()).tolist()
    return tuple(row for row, (start, end) in enumerate(pairwise(bounds)) if bool(bad[start:end].any()))
