"""Pins, columns, pages, snapshots, records and actions as values.

Each value has ``encode()``, the canonical bytes that its digest is taken of, and a ``decode`` class method that
refuses what FORMAT 1 does not allow. Fixed-width fields that belong to many shards are kept as the ``bin`` they are
on disk: a page is used whole far more often than by the shard.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Self

from zgstore.errors import Corrupt, Invalid
from zgstore.format import canonical
from zgstore.format.digest import DIGEST_BYTES, Digest, digest_of

FORMAT: Final = 1
KNOWN_FEATURES: Final[frozenset[str]] = frozenset()
SHARDS_PER_LEAF: Final = 1024
ROWS_PER_PAGE: Final = 1 << 16
ROLES: Final = ("boundary", "output", "context")
CODECS: Final = ("raw", "int8")
DTYPES: Final = {  # the safetensors names, with the bytes of one element
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Pins:
    """What a snapshot was made of: the teacher, the data and the capture, each a map of canonical values.

    Args:
        teacher: ``id``, ``revision`` and ``measured`` (32 bytes).
        data: ``id``, ``revision``, ``pins`` (the named sub-pins) and ``digest`` (32 bytes, Merkle root of the rows).
        capture: hook points or extractor, ragged rule, arithmetic.
    """

    teacher: Mapping[str, Any]
    data: Mapping[str, Any]
    capture: Mapping[str, Any]

    def encode(self) -> bytes:
        return canonical.encode({"teacher": self.teacher, "data": self.data, "capture": self.capture})

    def digest(self) -> Digest:
        """The pins digest: equal pins, equal digest."""
        return digest_of("pins", self.encode())


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a snapshot.

    Args:
        name: Its name; for hooks the point, as ``model.layers.8:in``.
        role: ``boundary``, ``output`` or ``context``.
        dtype: The safetensors name of what a reader gets back (``BF16``); under ``int8`` what was encoded.
        codec: ``raw`` or ``int8``.
        shape: Of one sample; None stands for the ragged axis, which is then the first.
        depth: Order among the boundaries, from 0; None for other roles.
    """

    name: str
    role: str
    dtype: str
    codec: str
    shape: tuple[int | None, ...]
    depth: int | None = None

    @property
    def ragged(self) -> bool:
        """Whether rows have lengths of their own."""
        return bool(self.shape) and self.shape[0] is None

    def as_value(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "role": self.role,
            "dtype": self.dtype,
            "codec": self.codec,
            "shape": list(self.shape),
            "depth": self.depth,
        }

    @classmethod
    def from_value(cls, value: Any) -> Self:
        fields = _fields("column", value, name=str, role=str, dtype=str, codec=str, shape=list)
        depth = value.get("depth")
        shape = tuple(fields["shape"])
        if not all(size is None or (type(size) is int and size >= 0) for size in shape) or None in shape[1:]:
            raise _bad("column", f"shape {list(shape)}")
        if not (depth is None or type(depth) is int):
            raise _bad("column", f"depth {depth!r}")
        return cls(fields["name"], fields["role"], fields["dtype"], fields["codec"], shape, depth)


@dataclass(frozen=True, slots=True)
class Constant:
    """A blob without a row axis: the same for every batch."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    blob: Digest
    size: int

    def as_value(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "blob": self.blob.raw,
            "size": self.size,
        }

    @classmethod
    def from_value(cls, value: Any) -> Self:
        fields = _fields("constant", value, name=str, dtype=str, shape=list, blob=bytes, size=int)
        return cls(
            fields["name"], fields["dtype"], tuple(fields["shape"]), Digest(_wide("constant", fields["blob"], 1)),
            fields["size"],
        )  # fmt: skip


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
        value = _of_kind("leaf", canonical.decode(body, what="leaf page"))
        fields = _fields("leaf page", value, rows=bytes, inputs=bytes, blobs=list, sizes=list)
        count = len(fields["rows"]) // 8
        if not 0 < count <= SHARDS_PER_LEAF or len(fields["rows"]) % 8:
            raise _bad("leaf page", f"{len(fields['rows'])} bytes of row counts")
        if len(fields["blobs"]) != len(fields["sizes"]):
            raise _bad("leaf page", "as many columns of blobs as of sizes are needed")
        _wide("leaf page", fields["inputs"], count)
        for blobs, sizes in zip(fields["blobs"], fields["sizes"], strict=True):
            _wide("leaf page", blobs, count)
            _wide("leaf page", sizes, count, each=8)
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
        value = _of_kind("root", canonical.decode(body, what="root page"))
        fields = _fields("root page", value, leaves=bytes, shards=bytes, rows=bytes, bytes=list)
        if len(fields["leaves"]) % DIGEST_BYTES:
            raise _bad("root page", f"{len(fields['leaves'])} bytes of leaves")
        count = len(fields["leaves"]) // DIGEST_BYTES
        for each in (fields["shards"], fields["rows"], *fields["bytes"]):
            _wide("root page", each, count, each=8)
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
        value = _of_kind("rows", canonical.decode(body, what="rows page"))
        digests = _fields("rows page", value, digests=bytes)["digests"]
        if len(digests) % DIGEST_BYTES or not 0 < len(digests) <= ROWS_PER_PAGE * DIGEST_BYTES:
            raise _bad("rows page", f"{len(digests)} bytes of row digests")
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
        value = _of_kind("rows-root", canonical.decode(body, what="rows root page"))
        fields = _fields("rows root page", value, pages=bytes, count=int)
        _wide("rows root page", fields["pages"], -(-fields["count"] // ROWS_PER_PAGE))
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
        value = _of_kind("dropped", canonical.decode(body, what="dropped page"))
        fields = _fields(
            "dropped page", value, reasons=list, masked=bytes, masked_reasons=bytes, left_out=bytes,
            left_out_reasons=bytes,
        )  # fmt: skip
        parts: list[Any] = []
        for rows, why in (("masked", "masked_reasons"), ("left_out", "left_out_reasons")):
            _wide("dropped page", fields[why], len(fields[rows]) // 8, each=8)
            _wide("dropped page", fields[rows], len(fields[rows]) // 8, each=8)
            numbers = all_u64(fields[why])
            if any(number >= len(fields["reasons"]) for number in numbers):
                raise _bad("dropped page", "a reason it does not list")
            parts += [all_u64(fields[rows]), tuple(fields["reasons"][number] for number in numbers)]
        return cls(*parts)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """An immutable table: rows are samples, columns are boundaries, outputs and context.

    Args:
        pins: Teacher, data and capture.
        columns: In order: boundaries by depth, outputs, context.
        constants: Blobs without a row axis.
        cut: Whole batches for each shard, from the recipe.
        samples: Rows that readers see.
        dropped: Digest of the ``Dropped`` page; None where no row is missing.
        root: Digest of the root page.
        requires: Features that a reader must know.
    """

    KIND: ClassVar[str] = "snapshot"
    pins: Pins
    columns: tuple[Column, ...]
    constants: tuple[Constant, ...]
    cut: int
    samples: int
    dropped: Digest | None
    root: Digest
    requires: tuple[str, ...] = ()

    def column(self, name: str) -> tuple[int, Column]:
        """The column's place among the page's columns, and the column.

        Raises:
            Invalid: if the snapshot has none of that name.
        """
        for at, column in enumerate(self.columns):
            if column.name == name:
                return at, column
        raise Invalid(
            f"the snapshot has no column {name!r}",
            hint=f"its columns are {', '.join(column.name for column in self.columns)}",
        )

    def boundaries(self) -> tuple[Column, ...]:
        """The boundary columns in depth order."""
        return tuple(sorted((c for c in self.columns if c.role == "boundary"), key=lambda c: c.depth or 0))

    def encode(self) -> bytes:
        return canonical.encode(
            {
                "kind": "snapshot",
                "format": FORMAT,
                "requires": list(self.requires),
                "teacher": self.pins.teacher,
                "data": self.pins.data,
                "capture": self.pins.capture,
                "columns": [column.as_value() for column in self.columns],
                "constants": [constant.as_value() for constant in self.constants],
                "cut": self.cut,
                "samples": self.samples,
                "dropped": self.dropped.raw if self.dropped else None,
                "root": self.root.raw,
            }
        )

    @classmethod
    def decode(cls, body: bytes) -> Self:
        value = _of_kind("snapshot", canonical.decode(body, what="snapshot"))
        fields = _fields(
            "snapshot", value, format=int, requires=list, teacher=dict, data=dict, capture=dict, columns=list,
            constants=list, cut=int, samples=int, root=bytes,
        )  # fmt: skip
        check_features("snapshot", fields["format"], fields["requires"])
        columns = tuple(Column.from_value(each) for each in fields["columns"])
        if len({column.name for column in columns}) != len(columns):
            raise _bad("snapshot", "two columns of one name")
        dropped = value.get("dropped")
        return cls(
            pins=Pins(fields["teacher"], fields["data"], fields["capture"]),
            columns=columns,
            constants=tuple(Constant.from_value(each) for each in fields["constants"]),
            cut=fields["cut"],
            samples=fields["samples"],
            dropped=None if dropped is None else Digest(_wide("snapshot", dropped, 1)),
            root=Digest(_wide("snapshot", fields["root"], 1)),
            requires=tuple(fields["requires"]),
        )


@dataclass(frozen=True, slots=True)
class Record:
    """Circumstance, kept beside a snapshot and never inside it.

    Args:
        snapshot: What it is about.
        time_seconds: Unix time of the publication.
        fields: ``recipe`` (32 bytes), ``command``, ``user``, ``host``, ``versions``, ``platforms``, ``hardware``,
            ``durations``, ``ci``, ``message``, ``parent``, ``statistics`` … : canonical values, all optional.
    """

    KIND: ClassVar[str] = "record"
    snapshot: Digest
    time_seconds: float
    fields: Mapping[str, Any] = field(default_factory=dict)

    def encode(self) -> bytes:
        return canonical.encode(
            {
                "kind": "record",
                "snapshot": self.snapshot.raw,
                "time_seconds": float(self.time_seconds),
                "fields": self.fields,
            }
        )

    @classmethod
    def decode(cls, body: bytes) -> Self:
        value = _of_kind("record", canonical.decode(body, what="record"))
        fields = _fields("record", value, snapshot=bytes, time_seconds=float, fields=dict)
        return cls(Digest(_wide("record", fields["snapshot"], 1)), fields["time_seconds"], fields["fields"])


@dataclass(frozen=True, slots=True)
class Action:
    """The memo of one column of one shard.

    Args:
        key: Digest of everything the blob is a function of.
        blob: What came out.
        rows: Rows in the blob.
        dtype: The column's dtype, as in ``Column``.
        shape: The column's shape, as in ``Column``.
        platform: torch version, device model, CPU capability.
        nonfinite: Rows of the blob (ascending) that hold NaN or Inf where numbers were promised.
        statistics: ``rms``, ``min``, ``max`` and, under int8, ``error``: floats. Not part of any identity.
        seconds: Teacher time spent on it.
    """

    KIND: ClassVar[str] = "action"
    key: Digest
    blob: Blob
    rows: int
    dtype: str
    shape: tuple[int | None, ...]
    platform: Mapping[str, str]
    nonfinite: tuple[int, ...] = ()
    statistics: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    def encode(self) -> bytes:
        """The body and, after it, its own digest: actions are not synced, and a torn one must be seen."""
        body = canonical.encode(
            {
                "kind": "action",
                "key": self.key.raw,
                "blob": self.blob.digest.raw,
                "size": self.blob.size,
                "rows": self.rows,
                "dtype": self.dtype,
                "shape": list(self.shape),
                "platform": self.platform,
                "nonfinite": pack_u64(self.nonfinite),
                "statistics": self.statistics,
                "seconds": float(self.seconds),
            }
        )
        return body + digest_of("action", body).raw

    @classmethod
    def decode(cls, content: bytes) -> Self:
        value = _of_kind("action", decode_sealed("action", content))
        fields = _fields(
            "action", value, key=bytes, blob=bytes, size=int, rows=int, dtype=str, shape=list, platform=dict,
            nonfinite=bytes, statistics=dict, seconds=float,
        )  # fmt: skip
        return cls(
            key=Digest(_wide("action", fields["key"], 1)),
            blob=Blob(Digest(_wide("action", fields["blob"], 1)), fields["size"]),
            rows=fields["rows"],
            dtype=fields["dtype"],
            shape=tuple(fields["shape"]),
            platform=fields["platform"],
            nonfinite=all_u64(fields["nonfinite"]),
            statistics=fields["statistics"],
            seconds=fields["seconds"],
        )


def encode_sealed(kind: str, value: Mapping[str, Any]) -> bytes:
    """Canonical bytes followed by their own digest: for files that are named by a key and not by their content."""
    body = canonical.encode(value)
    return body + digest_of(kind, body).raw


def decode_sealed(kind: str, content: bytes) -> Any:
    """The value of a sealed file.

    Raises:
        Corrupt: if it is torn, or not canonical.
    """
    body, seal = content[:-DIGEST_BYTES], content[-DIGEST_BYTES:]
    if len(content) <= DIGEST_BYTES or digest_of(kind, body).raw != seal:
        raise _bad(kind, "its bytes do not match its own digest")
    return canonical.decode(body, what=kind)


def check_features(what: str, number: int, requires: Sequence[str]) -> None:
    """Refuse what a later version wrote and this one cannot read, by name."""
    unknown = [str(name) for name in requires if name not in KNOWN_FEATURES]
    if number != FORMAT or unknown:
        needs = f"format {number}" if number != FORMAT else f"the feature {unknown[0]!r}"
        raise Invalid(
            f"this {what} needs {needs}, which this version does not know", hint="use a newer zgstore to read it"
        )


def pack_u64(numbers: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(numbers)}Q", *numbers)


def all_u64(packed: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(packed) // 8}Q", packed)


def unpack_u64(packed: bytes, index: int) -> int:
    return int(struct.unpack_from("<Q", packed, 8 * index)[0])


def nth_digest(packed: bytes, index: int) -> Digest:
    return Digest(packed[DIGEST_BYTES * index : DIGEST_BYTES * (index + 1)])


def all_digests(packed: bytes) -> Iterator[Digest]:
    for at in range(0, len(packed), DIGEST_BYTES):
        yield Digest(packed[at : at + DIGEST_BYTES])


def _bad(what: str, why: str) -> Corrupt:
    return Corrupt(
        f"a {what} breaks format {FORMAT}: {why}",
        hint="run `zgstore verify` to see what it hurts and what mends it",
        object=what,
        expected=f"a {what} of format {FORMAT}",
        actual=why,
    )


def _of_kind(kind: str, value: Any) -> Any:
    if not isinstance(value, dict) or value.get("kind") != kind:
        raise _bad(kind, f"its kind is {value.get('kind')!r}" if isinstance(value, dict) else "it is no map")
    return value


def _fields(what: str, value: Any, **types: type) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _bad(what, "it is no map")
    for name, kind in types.items():
        if type(value.get(name)) is not kind:
            raise _bad(what, f"{name} is {value.get(name)!r:.40}, not {kind.__name__}")
    return {name: value[name] for name in types}


def _wide(what: str, packed: Any, count: int, *, each: int = DIGEST_BYTES) -> bytes:
    if not isinstance(packed, bytes) or len(packed) != count * each:
        raise _bad(what, f"a field is not {count} × {each} bytes")
    return packed
