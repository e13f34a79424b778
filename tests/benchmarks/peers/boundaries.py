"""The boundaries that every peer is given: in memory for libraries, as files of 4 MiB for tools.

A batch is 4 rows of COLUMNS boundaries; one boundary of one batch is a piece, 4 MiB of bf16: what a step reads of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

COLUMNS = 5
SHAPE = (4, 512, 1024)  # of a piece: rows, positions, channels
CUT = 16  # batches a shard of ours, at most: blobs of 64 MiB

Piece = NDArray[np.uint16]  # bf16 by its bits, for numpy has no such numbers


@dataclass(frozen=True, slots=True)
class Boundaries:
    """Pieces in stream order, batch by batch, and a tenth more for later.

    Args:
        first: What is taken in first, in whole shards.
        more: What comes then.
        cut: Batches a shard of ours.
    """

    first: list[Piece]
    more: list[Piece]
    cut: int

    @property
    def all(self) -> list[Piece]:
        """In the end."""
        return self.first + self.more

    @property
    def bytes(self) -> int:
        """Of what is taken in first."""
        return sum(piece.nbytes for piece in self.first)


def made(gib: float) -> Boundaries:
    """About so many GiB, and a tenth more: normal numbers, cut to bf16."""
    batches = max(1, round(gib * 2**30 / (np.prod(SHAPE) * 2 * COLUMNS)))
    cut = min(CUT, batches)
    batches -= batches % cut
    more = max(1, round(batches / 10))
    random = np.random.default_rng(0)
    pieces = [
        (random.standard_normal(SHAPE, np.float32).view(np.uint32) >> 16).astype(np.uint16)
        for _ in range((batches + more) * COLUMNS)
    ]
    return Boundaries(pieces[: batches * COLUMNS], pieces[batches * COLUMNS :], cut)


def write(folder: Path, pieces: list[Piece], *, since: int = 0) -> None:
    """A file for each piece, by its number."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, piece in enumerate(pieces, since):
        (folder / name_of(number)).write_bytes(piece.data)


def name_of(number: int) -> str:
    """The file of a piece."""
    return f"{number:06d}.bin"
