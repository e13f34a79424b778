"""Pages as values: shards by columns, row digests, rows that readers skip.

Fixed-width fields that belong to many shards are kept as the ``bin`` they are on disk: a page is used whole far more
often than by the shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Self

from zgstore.format import canonical
from zgstore.format.digest import DIGEST_BYTES, Digest, digest_of
from zgstore.format.fields import (
    all_u64,
    broken,
    checked_fields,
    fixed_width,
    nth_digest,
    of_kind,
    pack_u64,
    unpack_u64,
)

SHARDS_PER_LEAF: Final = 1024
ROWS_PER_PAGE: Final = 1 << 16
MAX_ROWS: Final = 1 << 48  # of a whole snapshot: positions are int64 wherever they are counted


@dataclass(frozen=True, slots=True)
class Blob:
    """A blob by name and size."""

    digest: Digest
    size: int


@dataclass(frozen=True, slots=True)
class Shard:
    """One row of a leaf page.

    Args:
        rows: Rows in each of its blobs.
        inputs: Digest of its input rows: kind ``batch`` over the batch digests joined.
        blobs: One for each column, in the snapshot's order.
    """

    rows: int
    inputs: Digest
    blobs: tuple[Blob, ...]


@dataclass(frozen=True, slots=True)
class LeafPage:
    """At most 1024 shards, field by field; u64 and digests little-endian and raw in one ``bin`` each."""

    KIND: ClassVar[str] = "page"
    rows: bytes
    inputs: bytes
    blobs: tuple[bytes, ...]
    sizes: tuple[bytes, ...]

    def __len__(self) -> int:
        return len(self.rows) // 8

    @classmethod
    def of(cls, shards: Sequence[Shard], *, columns: int) -> Self:
        return cls(
            rows=pack_u64([shard.rows for shard in shards]),
            inputs=b"".join(shard.inputs.raw for shard in shards),
            blobs=tuple(b"".join(shard.blobs[c].digest.raw for shard in shards) for c in range(columns)),
            sizes=tuple(pack_u64([shard.blobs[c].size for shard in shards]) for c in range(columns)),
        )

    def shard(self, index: int) -> Shard:
        return Shard(
            rows=unpack_u64(self.rows, index),
            inputs=nth_digest(self.inputs, index),
            blobs=tuple(
                Blob(nth_digest(blobs, index), unpack_u64(sizes, index))
                for blobs, sizes in zip(self.blobs, self.sizes, strict=True)
            ),
        )

    def encode(self) -> bytes:
        return canonical.encode(
            {
                "kind": "leaf",
                "rows": self.rows,
                "inputs": self.inputs,
                "blobs": list(self.blobs),
                "sizes": list(self.sizes),
            }
        )

    @classmethod
    def decode(cls, body: bytes) -> Self:
        value = of_kind("leaf", canonical.decode(body, what="leaf page"))
        fields = checked_fields("leaf page", value, rows=bytes, inputs=bytes, blobs=list, sizes=list)
        count = len(fields["rows"]) // 8
        if not 0 < count <= SHARDS_PER_LEAF or len(fields["rows"]) % 8:
            raise broken("leaf page", f"{len(fields['rows'])} bytes of row counts")
        if sum(all_u64(fields["rows"])) > MAX_ROWS:
            raise broken("leaf page", f"it counts more than {MAX_ROWS} rows")
        if len(fields["blobs"]) != len(fields["sizes"]):
            raise broken("leaf page", "as many columns of blobs as of sizes are needed")
        fixed_width("leaf page", fields["inputs"], count)
        for blobs, sizes in zip(fields["blobs"], fields["sizes"], strict=True):
            fixed_width("leaf page", blobs, count)
            fixed_width("leaf page", sizes, count, each=8)
        return cls(fields["rows"], fields["inputs"], tuple(fields["blobs"]), tuple(fields["sizes"]))


@dataclass(frozen=True, slots=True)
class RootPage:
    """The leaves of a snapshot, with each one's shards, rows and bytes by column."""

    KIND: ClassVar[str] = "page"
    leaves: bytes
    shards: bytes
    rows: bytes
    column_bytes: tuple[bytes, ...]

    def __len__(self) -> int:
        return len(self.leaves) // DIGEST_BYTES

    @classmethod
    def of(cls, leaves: Sequence[tuple[Digest, LeafPage]], *, columns: int) -> Self:
        return cls(
            leaves=b"".join(digest.raw for digest, _ in leaves),
            shards=pack_u64([len(leaf) for _, leaf in leaves]),
            rows=pack_u64([sum(all_u64(leaf.rows)) for _, leaf in leaves]),
            column_bytes=tuple(pack_u64([sum(all_u64(leaf.sizes[c])) for _, leaf in leaves]) for c in range(columns)),
        )

    def encode(self) -> bytes:
        return canonical.encode(
            {
                "kind": "root",
                "leaves": self.leaves,
                "shards": self.shards,
                "rows": self.rows,
                "bytes": list(self.column_bytes),
            }
        )

    @classmethod
    def decode(cls, body: bytes) -> Self:
        value = of_kind("root", canonical.decode(body, what="root page"))
        fields = checked_fields("root page", value, leaves=bytes, shards=bytes, rows=bytes, bytes=list)
        if len(fields["leaves"]) % DIGEST_BYTES:
            raise broken("root page", f"{len(fields['leaves'])} bytes of leaves")
        count = len(fields["leaves"]) // DIGEST_BYTES
        for each in (fields["shards"], fields["rows"], *fields["bytes"]):
            fixed_width("root page", each, count, each=8)
        return cls(fields["leaves"], fields["shards"], fields["rows"], tuple(fields["bytes"]))


@dataclass(frozen=True, slots=True)
class RowsPage:
    """At most 2**16 row digests, in stream order."""

    KIND: ClassVar[str] = "page"
    digests: bytes

    def encode(self) -> bytes:
        return canonical.encode({"kind": "rows", "digests": self.digests})

    @classmethod
    def decode(cls, body: bytes) -> Self:
        value = of_kind("rows", canonical.decode(body, what="rows page"))
        digests = checked_fields("rows page", value, digests=bytes)["digests"]
        if len(digests) % DIGEST_BYTES or not 0 < len(digests) <= ROWS_PER_PAGE * DIGEST_BYTES:
            raise broken("rows page", f"{len(digests)} bytes of row digests")
        return cls(digests)


@dataclass(frozen=True, slots=True)
class RowsRoot:
    """The row pages of a data stream; its digest is the data digest."""

    KIND: ClassVar[str] = "page"
    pages: bytes
    count: int

    def encode(self) -> bytes:
        return canonical.encode({"kind": "rows-root", "pages": self.pages, "count": self.count})

    @classmethod
    def decode(cls, body: bytes) -> Self:
        value = of_kind("rows-root", canonical.decode(body, what="rows root page"))
        fields = checked_fields("rows root page", value, pages=bytes, count=int)
        if not 0 <= fields["count"] <= MAX_ROWS:
            raise broken("rows root page", f"it counts {fields['count']} rows")
        fixed_width("rows root page", fields["pages"], -(-fields["count"] // ROWS_PER_PAGE))
        return cls(fields["pages"], fields["count"])


def rows_tree(digests: bytes) -> tuple[RowsRoot, list[RowsPage]]:
    """The Merkle tree over row digests joined (32 bytes each, stream order): the root and its pages."""
    step = ROWS_PER_PAGE * DIGEST_BYTES
    pages = [RowsPage(digests[at : at + step]) for at in range(0, len(digests), step)]
    names = b"".join(digest_of("page", page.encode()).raw for page in pages)
    return RowsRoot(names, len(digests) // DIGEST_BYTES), pages


@dataclass(frozen=True, slots=True)
class Dropped:
    """Rows that readers skip, and rows that never entered.

    Args:
        masked: Positions (rows counted over the blobs, ascending) of rows that are stored but skipped.
        masked_reasons: Why, one for each.
        left_out: Stream indices (ascending) of rows that an extractor left out, so that no blob has them.
        left_out_reasons: Why, one for each.
    """

    KIND: ClassVar[str] = "page"
    masked: tuple[int, ...] = ()
    masked_reasons: tuple[str, ...] = ()
    left_out: tuple[int, ...] = ()
    left_out_reasons: tuple[str, ...] = ()

    def encode(self) -> bytes:
        reasons = sorted({*self.masked_reasons, *self.left_out_reasons})
        number = {reason: at for at, reason in enumerate(reasons)}
        return canonical.encode(
            {
                "kind": "dropped",
                "reasons": reasons,
                "masked": pack_u64(self.masked),
                "masked_reasons": pack_u64([number[reason] for reason in self.masked_reasons]),
                "left_out": pack_u64(self.left_out),
                "left_out_reasons": pack_u64([number[reason] for reason in self.left_out_reasons]),
            }
        )

    @classmethod
    def decode(cls, body: bytes) -> Self:
        value = of_kind("dropped", canonical.decode(body, what="dropped page"))
        fields = checked_fields(
            "dropped page", value, reasons=list, masked=bytes, masked_reasons=bytes, left_out=bytes,
            left_out_reasons=bytes,
        )  # fmt: skip
        if not all(isinstance(reason, str) for reason in fields["reasons"]):
            raise broken("dropped page", "a reason that is no text")
        parts: list[Any] = []
        for rows, why in (("masked", "masked_reasons"), ("left_out", "left_out_reasons")):
            fixed_width("dropped page", fields[why], len(fields[rows]) // 8, each=8)
            fixed_width("dropped page", fields[rows], len(fields[rows]) // 8, each=8)
            numbers = all_u64(fields[why])
            if any(number >= len(fields["reasons"]) for number in numbers):
                raise broken("dropped page", "a reason it does not list")
            parts += [all_u64(fields[rows]), tuple(fields["reasons"][number] for number in numbers)]
        if fields["reasons"] != sorted({*parts[1], *parts[3]}):
            raise broken("dropped page", "its reasons are not those of its rows, each once and in order")
        return cls(*parts)
