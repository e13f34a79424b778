"""Pins, columns, snapshots and records as values.

Each value has ``encode()``, the canonical bytes that its digest is taken of, and a ``decode`` class method that
refuses what FORMAT 1 does not allow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Self

from zgstore.errors import Invalid
from zgstore.format import canonical
from zgstore.format.digest import Digest, digest_of
from zgstore.format.fields import FORMAT, broken, checked_fields, fixed_width, natural, of_kind, shape_of

KNOWN_FEATURES: Final[frozenset[str]] = frozenset()
ROLES: Final = ("boundary", "output", "context")
CODECS: Final = ("raw", "int8")
DTYPES: Final = {  # the safetensors names, with the bytes of one element
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
FLOATING: Final = ("BF16", "F16", "F32", "F64", "F8_E4M3", "F8_E5M2")


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
        fields = checked_fields("column", value, name=str, role=str, dtype=str, codec=str, shape=list)
        depth = value.get("depth", "missing")
        shape = shape_of("column", fields["shape"])
        if not (depth is None or (type(depth) is int and depth >= 0)):
            raise broken("column", f"depth {depth!r:.40}")
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
        fields = checked_fields("constant", value, name=str, dtype=str, shape=list, blob=bytes, size=int)
        shape = tuple(size for size in shape_of("constant", fields["shape"], ragged=False) if size is not None)
        blob = Digest(fixed_width("constant", fields["blob"], 1))
        return cls(fields["name"], fields["dtype"], shape, blob, natural("constant", "size", fields["size"]))


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
        value = of_kind("snapshot", canonical.decode(body, what="snapshot"))
        fields = checked_fields(
            "snapshot", value, format=int, requires=list, teacher=dict, data=dict, capture=dict, columns=list,
            constants=list, cut=int, samples=int, root=bytes,
        )  # fmt: skip
        check_features("snapshot", fields["format"], fields["requires"])
        columns = tuple(Column.from_value(each) for each in fields["columns"])
        if len({column.name for column in columns}) != len(columns):
            raise broken("snapshot", "two columns of one name")
        dropped = value.get("dropped", "missing")
        return cls(
            pins=Pins(fields["teacher"], fields["data"], fields["capture"]),
            columns=columns,
            constants=tuple(Constant.from_value(each) for each in fields["constants"]),
            cut=natural("snapshot", "cut", fields["cut"], least=1),
            samples=natural("snapshot", "samples", fields["samples"]),
            dropped=None if dropped is None else Digest(fixed_width("snapshot", dropped, 1)),
            root=Digest(fixed_width("snapshot", fields["root"], 1)),
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
        value = of_kind("record", canonical.decode(body, what="record"))
        fields = checked_fields("record", value, snapshot=bytes, time_seconds=float, fields=dict)
        return cls(Digest(fixed_width("record", fields["snapshot"], 1)), fields["time_seconds"], fields["fields"])


def check_features(what: str, number: int, requires: Sequence[str]) -> None:
    """Refuse what a later version wrote and this one cannot read, by name."""
    unknown = [str(name) for name in requires if not isinstance(name, str) or name not in KNOWN_FEATURES]
    if number != FORMAT or unknown:
        needs = f"format {number}" if number != FORMAT else f"the feature {unknown[0]!r:.80}"
        raise Invalid(
            f"this {what} needs {needs}, which this version does not know", hint="use a newer zgstore to read it"
        )
