"""Many digests at once, as a sorted array: a million take a third of a second."""

from __future__ import annotations

import sys

import numpy as np
from numpy.typing import NDArray

from zgstore.format.digest import DIGEST_BYTES


class DigestTable:
    """Distinct digests, sorted by their first 8 bytes and compared by all 32.

    Args:
        joined: Raw digests, 32 bytes each; some may be equal.
    """

    def __init__(self, joined: bytes) -> None:
        words, heads = _words(joined), _heads(joined)
        order = np.argsort(heads, kind="stable")
        rows, heads = words[order], heads[order]
        alike = heads[1:] == heads[:-1]
        if np.any(alike & np.any(rows[1:] != rows[:-1], axis=1)):
            # Digests that differ only after 8 bytes do not happen, but can be made: then all bytes sort them.
            order = np.lexsort((words[:, 3], words[:, 2], words[:, 1], _heads(joined)))
            rows, heads = words[order], _heads(joined)[order]
        new = np.ones(len(rows), bool)
        new[1:] = np.any(rows[1:] != rows[:-1], axis=1)
        self._rows, self._heads = rows[new], heads[new]
        self._first, self._given = order[new], len(rows)
        starts = np.flatnonzero(np.append(True, self._heads[1:] != self._heads[:-1]))
        self._most_alike = int(np.diff(np.append(starts, len(self._rows))).max(initial=0))

    def mask(self, joined: bytes) -> bytes:
        """Whether each of ``joined`` is in the table, a byte for each."""
        wanted = _words(joined)
        found = np.zeros(len(wanted), bool)
        at = np.searchsorted(self._heads, _heads(joined))
        for step in range(self._most_alike):
            place = np.minimum(at + step, len(self._rows) - 1)
            found |= np.all(self._rows[place] == wanted, axis=1)
        return found.tobytes()

    def firsts(self) -> bytes:
        """Which of the digests given are the first of those equal to them, a byte for each."""
        mask = np.zeros(self._given, bool)
        mask[self._first] = True
        return mask.tobytes()


def _words(joined: bytes) -> NDArray[np.uint64]:
    return np.frombuffer(joined, "<u8").reshape(-1, DIGEST_BYTES // 8)


def _heads(joined: bytes) -> NDArray[np.uint64]:
    """The first 8 bytes of each, as numbers that sort as folders are listed: so a listing is found in one sweep."""
    return _words(joined)[:, 0].byteswap() if sys.byteorder == "little" else _words(joined)[:, 0].copy()
