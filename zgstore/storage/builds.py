"""A growing build's file: what followers read.

A head (its length, then sealed canonical bytes), one entry of fixed width for each durable shard, in order, and at last
an end entry with the snapshot's digest. A torn tail is ignored.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from zgstore.errors import Corrupt, Invalid
from zgstore.format.action import decode_sealed, encode_sealed
from zgstore.format.digest import DIGEST_BYTES, Digest
from zgstore.format.manifest import Column
from zgstore.format.pages import MAX_ROWS, Blob, Shard
from zgstore.storage.files import create, faults, write_all

_LENGTH: Final = struct.Struct("<Q")
_ENTRY: Final = struct.Struct("<Q32s")
_BLOB: Final = struct.Struct("<32sQ")
_END: Final = (1 << 64) - 1  # in the place of the row count


@dataclass(frozen=True, slots=True)
class Build:
    """A build as far as it is.

    Args:
        head: What the builder said when it began.
        columns: Of ``head``.
        shards: The durable ones, in order.
        snapshot: What came of it; None while it grows.
    """

    head: Mapping[str, Any]
    columns: tuple[Column, ...]
    shards: tuple[Shard, ...]
    snapshot: Digest | None


class BuildFile:
    """A build's file as its builder holds it."""

    def __init__(self, handle: int, columns: int) -> None:
        self._handle = handle
        self._columns = columns

    def append(self, shard: Shard) -> None:
        """Say that a shard is durable; its blobs' folders have been synced."""
        if len(shard.blobs) != self._columns:
            raise Invalid(f"a shard of {len(shard.blobs)} blobs, not {self._columns}", hint="give one for each column")
        blobs = b"".join(_BLOB.pack(blob.digest.raw, blob.size) for blob in shard.blobs)
        with faults("telling followers of a shard"):
            write_all(self._handle, _ENTRY.pack(shard.rows, shard.inputs.raw) + blobs)

    def finish(self, snapshot: Digest) -> None:
        """Say that the build is published."""
        with faults("telling followers of the snapshot"):
            write_all(self._handle, _ENTRY.pack(_END, snapshot.raw).ljust(_width(self._columns), b"\0"))

    def close(self) -> None:
        """Close it; the file stays."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _width(columns: int) -> int:
    return _ENTRY.size + columns * _BLOB.size


def start_build_file(folder: int, uuid: str, head: Mapping[str, Any], *, mode: int) -> BuildFile:
    """Begin the file ``uuid`` in ``folder``."""
    sealed = encode_sealed("record", head)
    handle = create(folder, uuid, mode)
    write_all(handle, _LENGTH.pack(len(sealed)) + sealed)
    return BuildFile(handle, len(head["columns"]))


def parse_build(content: bytes) -> Build:
    """The build in a file's bytes.

    Raises:
        Corrupt: if its head is torn.
    """
    size = int.from_bytes(content[: _LENGTH.size], "little")
    start = _LENGTH.size + size
    if len(content) < start or size < DIGEST_BYTES:
        raise _torn("its head is cut off")
    head = decode_sealed("record", content[_LENGTH.size : start])
    values = head.get("columns") if isinstance(head, dict) else None
    if not isinstance(values, list):
        raise _torn("its head lists no columns")
    columns = tuple(Column.from_value(value) for value in values)
    shards: list[Shard] = []
    width = _width(len(columns))
    for at in range(start, len(content) - width + 1, width):
        rows, inputs = _ENTRY.unpack_from(content, at)
        if rows == _END:
            return Build(head, columns, tuple(shards), Digest(inputs))
        if rows > MAX_ROWS:
            raise _torn(f"entry {len(shards)} counts {rows} rows")
        blobs = (_BLOB.unpack_from(content, at + _ENTRY.size + column * _BLOB.size) for column in range(len(columns)))
        shards.append(Shard(rows, Digest(inputs), tuple(Blob(Digest(raw), size) for raw, size in blobs)))
    return Build(head, columns, tuple(shards), None)


def _torn(why: str) -> Corrupt:
    return Corrupt(
        f"a build's file is torn: {why}",
        hint="the build stopped as it began: run it again",
        object="build",
        expected="a head and entries",
        actual=why,
    )
