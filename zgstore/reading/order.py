"""Which rows come when: a permutation that is a pure function of (seed, epoch, data digest), position by position.

A keyed Feistel network over a grid of ``left × right ≥ size`` cells, each half shifted by a hash of the other modulo
its own side, so that every round is a bijection of the grid; the fewer than ``left`` cells beyond ``size`` are walked
past (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). Nothing is shuffled, stored or replayed: the
row at any position costs the same, and so does resuming there.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt
from typing import Final

import numpy as np
from numpy.typing import NDArray

from zgstore.errors import Invalid
from zgstore.format import canonical
from zgstore.format.digest import digest_of

ROUNDS: Final = 10
LARGEST: Final = 1 << 62
_KEYS_PER_DIGEST: Final = 4

# The finaliser of splitmix64 (Steele, Lea and Flood, 2014).
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX_1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2: Final = np.uint64(0x94D049BB133111EB)
_30, _27, _31, _32 = (np.uint64(bits) for bits in (30, 27, 31, 32))

Rows = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Permutation:
    """A permutation of [0, size) that is evaluated where it is asked for.

    Args:
        size: How many rows it orders.
        keys: One 64-bit key for each round.
    """

    size: int
    keys: tuple[int, ...]

    def __len__(self) -> int:
        return self.size

    def rows(self, start: int, stop: int) -> Rows:
        """The rows at positions ``start`` to ``stop``, clipped to the size; int64 ``[stop - start]``."""
        start, stop = max(start, 0), min(stop, self.size)
        return self.at(np.arange(start, max(start, stop), dtype=np.int64))

    def at(self, positions: Rows) -> Rows:
        """The rows at these positions, each in [0, size); int64 of the same shape.

        Raises:
            Invalid: if a position is out of range.
        """
        if positions.size and not (int(positions.min()) >= 0 and int(positions.max()) < self.size):
            raise Invalid(f"positions must be in [0, {self.size})", hint="take them modulo the epoch's length")
        cells = self._round_trip(positions.astype(np.uint64))
        outside = np.flatnonzero(cells >= self.size)
        while outside.size:  # a cycle that starts inside comes back inside
            cells.flat[outside] = self._round_trip(cells.flat[outside])
            outside = outside[cells.flat[outside] >= self.size]
        return cells.astype(np.int64)

    def _round_trip(self, cells: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left_side, right_side = _grid(self.size)
        left, right = cells // right_side, cells % right_side
        with np.errstate(over="ignore"):
            for number, key in enumerate(self.keys):
                if number % 2:
                    right = _shift(right, right_side, left, key)
                else:
                    left = _shift(left, left_side, right, key)
        return left * right_side + right


def permutation(seed: int, epoch: int, data: str, size: int) -> Permutation:
    """The order of an epoch: a pure function of its arguments, the same on every machine and in every version.

    Args:
        seed: Any integer of at most 64 bits.
        epoch: From 0.
        data: Text digest of the data stream.
        size: Rows to order.

    Raises:
        Invalid: if the size is negative or beyond 2**62.
    """
    if not 0 <= size <= LARGEST:
        raise Invalid(f"{size} rows cannot be put in order", hint="a size is between 0 and 2**62")
    keys: list[int] = []
    for block in range(-(-ROUNDS // _KEYS_PER_DIGEST)):
        raw = digest_of(
            None, canonical.encode({"kind": "order", "seed": seed, "epoch": epoch, "data": data, "block": block})
        ).raw
        keys += [int.from_bytes(raw[at : at + 8], "little") for at in range(0, 8 * _KEYS_PER_DIGEST, 8)]
    return Permutation(size, tuple(keys[:ROUNDS]))


def _grid(size: int) -> tuple[np.uint64, np.uint64]:
    """The sides of the smallest near-square grid with at least ``size`` cells."""
    left = isqrt(max(size, 1) - 1) + 1
    return np.uint64(left), np.uint64(-(-max(size, 1) // left))


def _shift(half: NDArray[np.uint64], side: np.uint64, other: NDArray[np.uint64], key: int) -> NDArray[np.uint64]:
    """``half + hash(other) mod side``; wraps by the smaller of two unsigned candidates instead of by division."""
    mixed = other * _GOLDEN + np.uint64(key)
    mixed = (mixed ^ (mixed >> _30)) * _MIX_1
    mixed = (mixed ^ (mixed >> _27)) * _MIX_2
    mixed ^= mixed >> _31
    moved = half + (((mixed >> _32) * side) >> _32)
    return np.minimum(moved, moved - side)
