"""What is seen of a boundary's values as they pass: whether they are finite, and how large they are.

Outputs are looked at too; there −inf is legal where it is kept as it is: a mask in logits. Context is data.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from zgstore.format.tensorfile import offsets_of

# Elements looked at together: in fp32 they stay in the core's cache, and numpy's loops over them are long enough to
# leave Python's lock to others. Numpy and not torch: on the writing thread a second pool of threads would wait busily
# beside the teacher's (docs/LOG.md: what was seen).
_CHUNK: Final = 1 << 17
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
        return {"rms": self.rms, "min": self.low, "max": self.high} if self.count else {}


def stats(tensor: Tensor, lengths: Tensor | None = None, *, masks: bool = False) -> Statistics:
    """Statistics of a chunk.

    Args:
        tensor: ``[rows, …]``, or ``[sum of lengths, …]`` with ``lengths``.
        lengths: Integer ``[rows]`` of a ragged chunk.
        masks: Whether −inf stands for what is masked, and is no fault.
    """
    rows = len(tensor) if lengths is None else len(lengths)
    if not tensor.numel() or not tensor.is_floating_point():
        return Statistics(rows=rows)
    flat = tensor.detach().cpu().reshape(-1)
    widen = _widening(flat.dtype, min(_CHUNK, len(flat)))
    count, square_sum, low, high = 0, 0.0, math.inf, -math.inf
    for at in range(0, len(flat), _CHUNK):
        values = widen(flat[at : at + _CHUNK])
        least, most = float(values.min()), float(values.max())
        # NaN and Inf reach the extremes; only then are elements looked at one by one.
        if not (math.isfinite(least) and math.isfinite(most)):
            values = values[np.isfinite(values)]
            if not len(values):
                continue
            least, most = float(values.min()), float(values.max())
        if max(-least, most) > _LARGEST:
            values = values.astype(np.float64)
        count += len(values)
        square_sum += float(np.dot(values, values))
        low, high = min(low, least), max(high, most)
    nonfinite = _nonfinite_rows(tensor, lengths, masks=masks) if count < len(flat) else ()
    return Statistics(rows, nonfinite, count, square_sum, low, high)


def _widening(dtype: torch.dtype, room: int) -> Callable[[Tensor], NDArray[np.floating[Any]]]:
    """Pieces as fp32 or fp64, in memory that the next piece takes over: up to ``room`` elements."""
    if dtype in {torch.float32, torch.float64}:
        return lambda piece: piece.numpy()
    if dtype is not torch.bfloat16:
        return lambda piece: piece.to(torch.float32).numpy()
    values = np.zeros(room, np.float32)
    high_halves = values.view(np.uint16)[1::2] if sys.byteorder == "little" else values.view(np.uint16)[::2]

    def widen(piece: Tensor) -> NDArray[np.floating[Any]]:
        high_halves[: len(piece)] = piece.view(torch.int16).numpy().view(np.uint16)
        return values[: len(piece)]

    return widen


def _nonfinite_rows(tensor: Tensor, lengths: Tensor | None, *, masks: bool) -> tuple[int, ...]:
    right = torch.isfinite(tensor)
    if masks:
        right |= (tensor.to(torch.float32) if tensor.dtype.itemsize == 1 else tensor) == -math.inf
    bad = ~right.reshape(len(tensor), -1).all(1)
    if lengths is None:
        return tuple(torch.nonzero(bad).flatten().tolist())
    bounds = offsets_of(lengths.cpu()).tolist()
    return tuple(row for row, (start, end) in enumerate(pairwise(bounds)) if bool(bad[start:end].any()))
