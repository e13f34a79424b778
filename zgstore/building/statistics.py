"""What is seen of a boundary's values as they pass: whether they are finite, and how large they are.

Outputs are looked at too; there −inf is legal where it is kept as it is: a mask in logits. Context is data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import torch
from torch import Tensor

from zgstore.format.tensorfile import offsets_of

# Elements looked at together: fewer than torch shares out among threads (32768); numpy does the rest. This runs on the
# writing thread, where a second pool of threads would wait busily beside the teacher's (docs/LOG.md: what was seen).
_CHUNK: Final = (1 << 15) - 512


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
    total = Statistics()
    for at in range(0, len(flat), _CHUNK):
        piece = flat[at : at + _CHUNK].to(torch.float64 if flat.dtype is torch.float64 else torch.float32)
        low, high = _extremes(piece)
        # NaN and Inf reach the extremes; only then are elements looked at one by one.
        if not (math.isfinite(low) and math.isfinite(high)):
            piece = piece[torch.isfinite(piece)]
            if not len(piece):
                continue
            low, high = _extremes(piece)
        total += Statistics(0, (), len(piece), _square_sum(piece, max(-low, high)), low, high)
    nonfinite = _nonfinite_rows(tensor, lengths, masks=masks) if total.count < len(flat) else ()
    return Statistics(rows, nonfinite, total.count, total.square_sum, total.low, total.high)


def _extremes(piece: Tensor) -> tuple[float, float]:
    values = piece.numpy()
    return float(values.min()), float(values.max())


def _square_sum(piece: Tensor, largest: float) -> float:
    if largest > 1e16:  # squares would leave fp32's range
        piece = piece.to(torch.float64)
    values = piece.numpy()
    return float(np.einsum("i,i->", values, values))


def _nonfinite_rows(tensor: Tensor, lengths: Tensor | None, *, masks: bool) -> tuple[int, ...]:
    right = torch.isfinite(tensor)
    if masks:
        right |= (tensor.to(torch.float32) if tensor.dtype.itemsize == 1 else tensor) == -math.inf
    bad = ~right.reshape(len(tensor), -1).all(1)
    if lengths is None:
        return tuple(torch.nonzero(bad).flatten().tolist())
    bounds = offsets_of(lengths.cpu()).tolist()
    return tuple(row for row, (start, end) in enumerate(pairwise(bounds)) if bool(bad[start:end].any()))
