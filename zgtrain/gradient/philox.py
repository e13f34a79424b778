"""Random words from counters: any of them at once, on every device the same, with no generator whose state would count.

Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011: four words are
a function of a counter of four words and a key of two. All words are unsigned 32 bits, held in int64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from torch import Tensor

WORD: Final = 0xFFFFFFFF
ROUNDS: Final = 10
_FACTORS: Final = 0xD2511F53, 0xCD9E8D57
_WEYL: Final = 0x9E3779B9, 0xBB67AE85

Key = tuple[int, int]


def philox(counter: Sequence[Tensor], key: Key) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four words of each counter.

    Args:
        counter: Four int64 tensors of words that broadcast to one shape.
        key: Two words.

    Returns:
        Four int64 tensors of words, of that shape.
    """
    a, b, c, d = counter
    first, second = key
    for _ in range(ROUNDS):
        high_a, low_a = _product(a, _FACTORS[0])
        high_c, low_c = _product(c, _FACTORS[1])
        a, b, c, d = high_c ^ b ^ first, low_c, high_a ^ d ^ second, low_a
        first, second = (first + _WEYL[0]) & WORD, (second + _WEYL[1]) & WORD
    return a, b, c, d


def _product(word: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """High and low word of the product, by halves of a word: the whole would not fit into 63 bits."""
    low = (word & 0xFFFF) * factor
    high = (word >> 16) * factor + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)
