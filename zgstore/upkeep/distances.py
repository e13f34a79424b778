"""How far apart aligned rows are: sums in fp64 over pieces that fit a cache, and the numbers that come of them.

Shapes: N tokens of one piece, E elements of each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ValueDiff:
    """How far one column of b is from the same column of a, over the rows that both have.

    Args:
        rows: Rows compared.
        unlike: Aligned rows of unequal shape, left out of the numbers.
        max_abs: Largest abs(a − b).
        mean_abs: Mean of abs(a − b) over all elements.
        rel_l2: ‖a − b‖ / ‖a‖ over all elements.
        cos_min: Smallest cosine of a row's values, flattened.
        cos_mean: Mean of the rows' cosines.
        first_row: First row that differs, as a reader of a counts; None where none does.
    """

    rows: int
    unlike: int
    max_abs: float
    mean_abs: float
    rel_l2: float
    cos_min: float
    cos_mean: float
    first_row: int | None

    def as_json(self) -> dict[str, Any]:
        numbers = {name: getattr(self, name) for name in ("max_abs", "mean_abs", "rel_l2", "cos_min", "cos_mean")}
        # JSON has no infinity: what is not finite is null.
        finite = {name: number if math.isfinite(number) else None for name, number in numbers.items()}
        return {**finite, "first_row": self.first_row, "rows": self.rows, "unlike": self.unlike}


class Piece(NamedTuple):
    """Consecutive rows: their tokens flattened ``[N, E]``, and each row's number of tokens ``[rows]``."""

    values: Tensor
    lengths: Tensor


class Sums:
    """What the numbers are made of, in fp64."""

    def __init__(self) -> None:
        self.rows = self.unlike = self.elements = 0
        self.largest = self.absolute = self.squares = self.reference = 0.0
        self.cosines, self.cosine_min = 0.0, 1.0

    def add_equal_rows(self, rows: int) -> None:
        self.rows += rows
        self.cosines += rows

    def add_equal(self, piece: Piece) -> None:
        x = _finite(piece.values.to(torch.float64))
        self.add_equal_rows(len(piece.lengths))
        self.elements += x.numel()
        self.reference += float(torch.linalg.vecdot(x, x).sum())

    def add(self, left: Piece, right: Piece) -> int | None:
        """Add aligned rows; the first that differs, counted within the piece."""
        if not torch.equal(left.lengths, right.lengths):
            return self._add_unlike(left, right)
        x, y = left.values.to(torch.float64), right.values.to(torch.float64)
        distance = (x - y).abs_()
        total = float(distance.sum())
        if not math.isfinite(total):
            equal = (x == y) | (x.isnan() & y.isnan())
            distance = torch.where(equal, 0.0, distance.nan_to_num(nan=math.inf, posinf=math.inf))
            total = float(distance.sum())
            x, y = _finite(x), _finite(y)
        unequal = (
            distance.amax(1) if distance.shape[1] else torch.zeros(len(distance), dtype=torch.float64, device="cpu")
        )
        if left.values.dtype == right.values.dtype and not left.values.is_floating_point():
            # fp64 cannot tell large integers apart.
            unequal = torch.maximum(unequal, (left.values != right.values).any(1).to(torch.float64))
        self.rows += len(left.lengths)
        self.elements += distance.numel()
        self.absolute += total
        self.squares += float(torch.linalg.vecdot(distance, distance).sum())
        if distance.numel():
            self.largest = max(self.largest, float(distance.max()))
        changed = _by_row((unequal > 0).to(torch.float64), left.lengths) > 0
        self._add_cosines(x, y, left.lengths, changed)
        where = torch.nonzero(changed)
        return int(where[0]) if len(where) else None

    def _add_cosines(self, x: Tensor, y: Tensor, lengths: Tensor, changed: Tensor) -> None:
        dots, xx, yy = (_by_row(torch.linalg.vecdot(u, v), lengths) for u, v in ((x, y), (x, x), (y, y)))
        self.reference += float(xx.sum())
        cosines = (dots / (xx * yy).sqrt()).nan_to_num(nan=0.0).clamp(-1.0, 1.0)
        cosines[~changed] = 1.0
        if len(cosines):
            self.cosines += float(cosines.sum())
            self.cosine_min = min(self.cosine_min, float(cosines.min()))

    def _add_unlike(self, left: Piece, right: Piece) -> int | None:
        """Rows of unequal lengths have no numbers; the others of the piece, one by one, do."""
        first = None
        ends = [torch.cumsum(piece.lengths, 0) for piece in (left, right)]
        for row in range(len(left.lengths)):
            pair = [
                Piece(piece.values[int(end[row] - piece.lengths[row]) : int(end[row])], piece.lengths[row : row + 1])
                for piece, end in zip((left, right), ends, strict=True)
            ]
            if torch.equal(pair[0].lengths, pair[1].lengths):
                differs = self.add(*pair) is not None
            else:
                self.unlike += 1
                differs = True
            if differs and first is None:
                first = row
        return first

    def result(self, first: int | None) -> ValueDiff:
        relative = 0.0
        if self.squares:
            relative = math.sqrt(self.squares / self.reference) if self.reference else math.inf
        return ValueDiff(
            rows=self.rows,
            unlike=self.unlike,
            max_abs=self.largest,
            mean_abs=self.absolute / self.elements if self.elements else 0.0,
            rel_l2=relative,
            cos_min=self.cosine_min,
            cos_mean=min(1.0, self.cosines / self.rows) if self.rows else 1.0,
            first_row=first,
        )


def _finite(x: Tensor) -> Tensor:
    return x.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def _by_row(of_tokens: Tensor, lengths: Tensor) -> Tensor:
    """Sums over each row's tokens."""
    if len(of_tokens) == len(lengths) and bool((lengths == 1).all()):
        return of_tokens
    rows = torch.repeat_interleave(torch.arange(len(lengths), device="cpu"), lengths)
    return torch.zeros(len(lengths), dtype=torch.float64, device="cpu").index_add_(0, rows, of_tokens)
