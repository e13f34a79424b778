"""A BLAKE3 digest as a value: the only importer of blake3."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from blake3 import blake3

from zgstore.errors import Invalid

DIGEST_BYTES: Final = 32
SHORT_DIGITS: Final = 12
SHORTEST_PREFIX: Final = 6

# Kinds keep one sort of bytes from being read as another. A blob has none: `b3sum FILE` prints its name.
KINDS: Final = frozenset(
    {
        "page",
        "snapshot",
        "record",
        "action",
        "row",
        "batch",
        "teacher",
        "files",
        "pins",
        "recipe",
        "measurement",
        "partial",
    }
)

_TEXT = re.compile(r"(?:blake3:)?([0-9a-f]{64})")
_PREFIX = re.compile(rf"(?:blake3:)?([0-9a-f]{{{SHORTEST_PREFIX},64}})")


@dataclass(frozen=True, slots=True, order=True)
class Digest:
    """256 bits that name some bytes. Text form ``blake3:`` and 64 lowercase hex digits."""

    raw: bytes

    def __post_init__(self) -> None:
        if len(self.raw) != DIGEST_BYTES:
            raise Invalid(f"a digest has {DIGEST_BYTES} bytes, not {len(self.raw)}", hint="pass the whole digest")

    def __str__(self) -> str:
        return f"blake3:{self.raw.hex()}"

    def __repr__(self) -> str:
        return f"Digest({self.short})"

    @property
    def hex(self) -> str:
        """All 64 digits, as in file names."""
        return self.raw.hex()

    @property
    def short(self) -> str:
        """The 12 digits shown to people; accepted wherever a digest is."""
        return self.raw.hex()[:SHORT_DIGITS]

    @classmethod
    def parse(cls, text: str) -> Digest:
        """Read a whole digest, with or without ``blake3:``.

        Raises:
            Invalid: if it is not 64 lowercase hex digits.
        """
        match = _TEXT.fullmatch(text)
        if match is None:
            raise Invalid(f"{text!r} is not a BLAKE3 digest", hint="give 64 lowercase hex digits, or a ref")
        return cls(bytes.fromhex(match[1]))


def digest_prefix(text: str) -> str | None:
    """The hex digits of a digest or of a prefix of at least 6 digits; None if ``text`` cannot be one."""
    match = _PREFIX.fullmatch(text)
    return match[1] if match else None


class Hasher:
    """Hashes bytes as they pass.

    Args:
        kind: One of ``KINDS``; None for a blob, whose digest is the plain BLAKE3 of its file.
        threads: Threads for large updates; more than one pays only from 1 MiB an update.
    """

    __slots__ = ("_state",)

    def __init__(self, kind: str | None = None, *, threads: int = 1) -> None:
        if kind is None:
            self._state = blake3(max_threads=threads)
        elif kind in KINDS:
            self._state = blake3(derive_key_context=f"zgstore 1 {kind}", max_threads=threads)
        else:
            raise Invalid(f"{kind!r} is not a kind of digest", hint=f"one of {', '.join(sorted(KINDS))}")

    def update(self, data: bytes | bytearray | memoryview) -> None:
        """Hash ``data`` too; releases the GIL."""
        self._state.update(data)

    def digest(self) -> Digest:
        """The digest of all bytes so far."""
        return Digest(self._state.digest())


def digest_of(kind: str | None, *chunks: bytes | bytearray | memoryview, threads: int = 1) -> Digest:
    """The digest of the chunks joined, as ``kind``; None means a blob's plain digest."""
    hasher = Hasher(kind, threads=threads)
    for chunk in chunks:
        hasher.update(chunk)
    return hasher.digest()
