"""Sets of digests that lie joined in one ``bytes``: a few thousand in Python's own, a million in sorted arrays.

numpy takes as long to import as the whole of a command on a small store; at a million digests Python's own sets take
three times as long as arrays (docs/LOG.md). So numpy is imported where there are many.

A mask is a ``bytes`` with one byte, 0 or 1, for each digest.
"""

from __future__ import annotations

from functools import cached_property
from itertools import compress
from typing import TYPE_CHECKING, Final

from zgstore.format.digest import DIGEST_BYTES
from zgstore.format.fields import all_u64, raw_digests

if TYPE_CHECKING:  # it imports numpy
    from zgstore.upkeep.digesttable import DigestTable

MANY: Final = 1 << 15
_NOT: Final = bytes([1, 0, *[0] * 254])  # what a mask's bytes translate to in its complement


class DigestSet:
    """Distinct digests.

    Args:
        joined: Raw digests, 32 bytes each; some may be equal.
    """

    def __init__(self, joined: bytes) -> None:
        self._joined = joined

    def mask(self, joined: bytes) -> bytes:
        """Whether each of ``joined`` is in the set."""
        if _are_many(joined) or _are_many(self._joined):
            return self._table.mask(joined)
        return bytes(map(self._few.__contains__, raw_digests(joined)))

    def __contains__(self, raw: bytes) -> bool:
        return self.mask(raw) == b"\1"

    def within(self, joined: bytes) -> bytes:
        """Those of ``joined`` that are in the set, joined."""
        return chosen(joined, self.mask(joined))

    def without(self, joined: bytes) -> bytes:
        """Those of ``joined`` that are not in the set, joined."""
        return chosen(joined, inverse(self.mask(joined)))

    def firsts(self) -> bytes:
        """Which of the digests given are the first of those equal to them, as a mask."""
        if _are_many(self._joined):
            return self._table.firsts()
        count = len(self._joined) // DIGEST_BYTES
        if len(self._few) == count:  # as nearly always: no two are equal
            return b"\1" * count
        mask = bytearray(count)
        for at in {raw: at for at, raw in reversed(list(enumerate(raw_digests(self._joined))))}.values():
            mask[at] = 1
        return bytes(mask)

    @cached_property
    def _few(self) -> frozenset[bytes]:
        return frozenset(raw_digests(self._joined))

    @cached_property
    def _table(self) -> DigestTable:
        from zgstore.upkeep.digesttable import DigestTable  # noqa: PLC0415 - numpy is imported only where there are many

        return DigestTable(self._joined)


def singles(joined: bytes) -> bytes:
    """Which of the digests stand there only once, as a mask: they are the first of their kind, and the last."""
    return both(DigestSet(joined).firsts(), DigestSet(joined[::-1]).firsts()[::-1])


def chosen(joined: bytes, mask: bytes, *, each: int = DIGEST_BYTES) -> bytes:
    """The items of ``joined`` where the mask is 1, joined.

    Args:
        joined: Items of ``each`` bytes.
        mask: As many.
        each: 32 for digests, 8 for sizes.
    """
    if mask.count(1) == len(mask):
        return joined
    starts = compress(range(0, len(joined), each), mask)
    return b"".join([joined[at : at + each] for at in starts])


def total(sizes: bytes, mask: bytes) -> int:
    """The sum of the sizes (u64, packed) where the mask is 1."""
    found = all_u64(sizes)
    return sum(found if mask.count(1) == len(mask) else compress(found, mask))


def both(a: bytes, b: bytes) -> bytes:
    """Where both masks are 1."""
    return (int.from_bytes(a) & int.from_bytes(b)).to_bytes(len(a))


def inverse(mask: bytes) -> bytes:
    """Where the mask is 0."""
    return mask.translate(_NOT)


def _are_many(joined: bytes) -> bool:
    return len(joined) >= MANY * DIGEST_BYTES
