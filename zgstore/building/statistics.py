"""What is seen of a boundary's values as they pass: whether they are finite, and how large they are.

Outputs are looked at too; there −inf is legal where it is kept as it is: a mask in logits. Context is data.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
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
    look = _of_bf16(min(_CHUNK, len(flat))) if flat.dtype == torch.bfloat16 else _of
    found = Statistics()
    for at in range(0, len(flat), _CHUNK):
        found += look(flat[at : at + _CHUNK])
    nonfinite = _nonfinite_rows(tensor, lengths, masks=masks) if found.count < len(flat) else ()
    return replace(found, rows=rows, nonfinite=nonfinite)


def _of(piece: Tensor) -> Statistics:
    values = (piece if piece.dtype in {torch.float32, torch.float64} else piece.to(torch.float32)).numpy()
    return _of_values(values, float(values.min()), float(values.max()))


def _of_values(values: NDArray[np.floating[Any]], low: float, high: float) -> Statistics:
    # NaN and Inf reach the extremes; only then are elements looked at one by one.
    if not (math.isfinite(low) and math.isfinite(high)):
        values = values[np.isfinite(values)]
        if not len(values):
            return Statistics()
        low, high = float(values.min()), float(values.max())
    if max(-low, high) > _LARGEST:
        values = values.astype(np.float64)
    return Statistics(count=len(values), square_sum=float(np.dot(values, values)), low=low, high=high)


def _of_bf16(room: int) -> Callable[[Tensor], Statistics]:
    """For pieces of up to ``room`` elements: the bits of a bf16 number are the upper half of an fp32 number's.

    So the extremes are found among whole numbers, and a pair of neighbours becomes two fp32 numbers by a mask and a
    shift, in memory that the next piece takes over. No loop here leaves the widest vectors, as a cast would.
    """
    pairs = np.empty(room // 2, np.uint32)
    values = pairs.view(np.float32)

    def look(piece: Tensor) -> Statistics:
        bits = piece.view(torch.int16).numpy()
        low, high = _extremes_of_bf16(bits)
        if not (math.isfinite(low) and math.isfinite(high) and max(-low, high) <= _LARGEST):
            return _of_values(_widened(bits.view(np.uint16)), low, high)
        given = bits[: len(bits) // 2 * 2].view(np.uint32)
        half = values[: len(given)]
        square_sum = float(_widened(bits[-1:].view(np.uint16))[0]) ** 2 if len(bits) % 2 else 0.0
        for split, by in ((np.bitwise_and, 0xFFFF0000), (np.left_shift, 16)):
            split(given, np.uint32(by), out=pairs[: len(given)])
            square_sum += float(np.dot(half, half))
        return Statistics(count=len(bits), square_sum=square_sum, low=low, high=high)

    return look


def _extremes_of_bf16(bits: NDArray[np.int16]) -> tuple[float, float]:
    """The least and the greatest number; NaN or Inf where there is one of that sign.

    Sign and magnitude: as int16 positive numbers are ordered as they are, and lie above all negative ones; as uint16
    negative ones lie above, the largest magnitude at the top. The smallest bits are the number next to zero either way.
    """
    top, bottom = int(bits.max()), int(bits.view(np.uint16).max())
    high = top if top >= 0 else int(bits.min())
    low = bottom if bottom >= 0x8000 else int(bits.min())
    least, greatest = _widened(np.array([low & 0xFFFF, high & 0xFFFF], np.uint16)).tolist()
    return least + 0.0, greatest + 0.0  # no −0


def _widened(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _nonfinite_rows(tensor: Tensor, lengths: Tensor | None, *, masks: bool) -> tuple[int, ...]:
    right = torch.isfinite(tensor)
    if masks:
        right |= (tensor.to(torch.float32) if tensor.dtype.itemsize == 1 else tensor) == -math.inf
    bad = ~right.reshape(len(tensor), -1).all(1)
    if lengths is None:
        return tuple(torch.nonzero(bad).flatten().tolist())
    bounds = offsets_of(lengths.cpu()).tolist()
    return tuple(row for row, (start, end) in enumerate(pairwise(bounds)) if bool(bad[start:end].any()))
