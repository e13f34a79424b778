"""Two snapshots compared: pins, then columns, then shards by digest; their values only where that is asked."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from zgstore.format.digest import DIGEST_BYTES, Digest
from zgstore.format.manifest import Record, Snapshot
from zgstore.storage.store import Store
from zgstore.upkeep.shardjoin import join

if TYPE_CHECKING:  # it loads torch
    from zgstore.upkeep.distances import ValueDiff

NO_RECORD: Final = "no record says where they were made"


@dataclass(frozen=True, slots=True)
class Change:
    """One field that differs, its path joined by dots; None where a side has none."""

    field: str
    a: Any
    b: Any

    def as_json(self) -> dict[str, Any]:
        return {"field": self.field, "a": plain(self.a), "b": plain(self.b)}


@dataclass(frozen=True, slots=True)
class Names:
    """Names of columns or constants: only in b, only in a, in both and unequal, in both and equal."""

    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[str, ...]
    same: tuple[str, ...]

    @property
    def common(self) -> tuple[str, ...]:
        """The names that both have."""
        return (*self.changed, *self.same)

    def as_json(self) -> dict[str, list[str]]:
        return {
            "added": list(self.added),
            "removed": list(self.removed),
            "changed": list(self.changed),
            "same": list(self.same),
        }


@dataclass(frozen=True, slots=True)
class Counts:
    """Shards counted: only in b, only in a, of other inputs or blobs, equal."""

    added: int
    removed: int
    changed: int
    same: int

    def as_json(self) -> dict[str, int]:
        return {"added": self.added, "removed": self.removed, "changed": self.changed, "same": self.same}


@dataclass(frozen=True, slots=True)
class Shares:
    """Bytes of blobs, each counted once.

    A page that both have is not opened: its bytes are counted as the root page gives them.
    """

    shared: int
    only_a: int
    only_b: int

    def as_json(self) -> dict[str, int]:
        return {"shared": self.shared, "only_a": self.only_a, "only_b": self.only_b}


@dataclass(frozen=True, slots=True)
class Diff:
    """What differs between snapshots a and b.

    Args:
        a: Digest of the first.
        b: Digest of the second.
        pins: Fields of teacher, data and capture that differ.
        head: Further fields of the snapshots that differ: cut, samples, dropped.
        columns: A common column is changed where its definition or an aligned shard's blob is.
        definitions: Of each column that is changed by its definition, what that says otherwise: role, dtype, codec,
            shape.
        constants: Likewise.
        shards: Shards are aligned by their inputs, else by their place; a shard is the same where its inputs and the
            blobs of all common columns are.
        bytes: Of blobs.
        cause: Why one recipe gave two snapshots; None where pins or definitions tell.
        values: Per common column, where asked for.
        skipped: Columns whose values cannot be compared, with the reason.
    """

    a: Digest
    b: Digest
    pins: tuple[Change, ...]
    head: tuple[Change, ...]
    columns: Names
    definitions: Mapping[str, tuple[Change, ...]]
    constants: Names
    shards: Counts
    bytes: Shares
    cause: str | None = None
    values: Mapping[str, ValueDiff] | None = None
    skipped: Mapping[str, str] = field(default_factory=dict)

    @property
    def same(self) -> bool:
        """Whether they are one snapshot."""
        return self.a == self.b

    def as_json(self) -> dict[str, Any]:
        values = None if self.values is None else {name: each.as_json() for name, each in self.values.items()}
        return {
            "same": self.same,
            "a": str(self.a),
            "b": str(self.b),
            "pins": [change.as_json() for change in self.pins],
            "head": [change.as_json() for change in self.head],
            "columns": self.columns.as_json(),
            "definitions": {name: [each.as_json() for each in said] for name, said in self.definitions.items()},
            "constants": self.constants.as_json(),
            "shards": self.shards.as_json(),
            "bytes": self.bytes.as_json(),
            "cause": self.cause,
            **({} if values is None else {"values": values, "skipped": dict(self.skipped)}),
        }


def diff(
    store: Store,
    a: str | Digest,
    b: str | Digest,
    *,
    values: bool = False,
    samples: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Diff:
    """Compare two snapshots of one store.

    Without ``values`` no blob is opened, and of the pages only those that are not in both.

    Args:
        store: Where both are.
        a: REV of the first, or its digest.
        b: REV of the second, or its digest.
        values: Compare the common columns' values too, streaming.
        samples: Compare this many rows, spread evenly, instead of all.
        progress: Told the bytes of values read, as they are.

    Raises:
        NotFound: if a REV names nothing.
        Missing, Corrupt: if a page, or with ``values`` a blob, is not there or not what its name says.
    """
    digests = tuple(rev if isinstance(rev, Digest) else store.resolve(rev) for rev in (a, b))
    sides = (_Side(digests[0], store.snapshot(digests[0])), _Side(digests[1], store.snapshot(digests[1])))
    joined = join(store, sides[0].snapshot, sides[1].snapshot)
    definitions = _definitions(*sides)
    structure = Diff(
        a=digests[0],
        b=digests[1],
        pins=_pins(*sides),
        head=_head(*sides),
        columns=_columns(*sides, joined.unequal | definitions.keys()),
        definitions=definitions,
        constants=_constants(*sides),
        shards=Counts(joined.added, joined.removed, joined.changed, joined.same),
        bytes=Shares(joined.shared_bytes, joined.only_a_bytes, joined.only_b_bytes),
        cause=_cause(store, *sides) if joined.conflicts else None,
    )
    if not values:
        return structure
    from zgstore.upkeep import valuediff  # noqa: PLC0415 - torch is loaded only where values are compared

    common = [column.name for column in sides[0].snapshot.columns if column.name in structure.columns.common]
    found, skipped = valuediff.compare(
        store, structure.a, structure.b, columns=common, samples=samples, progress=progress
    )
    return replace(structure, values=found, skipped=skipped)


@dataclass(frozen=True, slots=True)
class _Side:
    digest: Digest
    snapshot: Snapshot


def _columns(a: _Side, b: _Side, unequal: Collection[str]) -> Names:
    names_a, names_b = ([column.name for column in side.snapshot.columns] for side in (a, b))
    return _names(names_a, names_b, unequal)


# A column's depth says where it stands among those kept: another boundary beside it does not change it.
_DEFINITION: Final = ("role", "dtype", "codec", "shape")


def _definitions(a: _Side, b: _Side) -> dict[str, tuple[Change, ...]]:
    """What the two say otherwise of the columns that both have."""
    of_b = {column.name: column.as_value() for column in b.snapshot.columns}
    pairs = [(column.as_value(), of_b[column.name]) for column in a.snapshot.columns if column.name in of_b]
    found = {
        one["name"]: tuple(Change(name, one[name], other[name]) for name in _DEFINITION if one[name] != other[name])
        for one, other in pairs
    }
    return {name: changes for name, changes in found.items() if changes}


def _names(a: Iterable[str], b: Iterable[str], unequal: Collection[str]) -> Names:
    a, b = list(a), list(b)
    common = [name for name in a if name in set(b)]
    return Names(
        added=tuple(name for name in b if name not in set(a)),
        removed=tuple(name for name in a if name not in set(b)),
        changed=tuple(name for name in common if name in unequal),
        same=tuple(name for name in common if name not in unequal),
    )


def _constants(a: _Side, b: _Side) -> Names:
    values_a = {constant.name: constant.as_value() for constant in a.snapshot.constants}
    values_b = {constant.name: constant.as_value() for constant in b.snapshot.constants}
    return _names(values_a, values_b, {name for name in values_a if values_a[name] != values_b.get(name)})


def _pins(a: _Side, b: _Side) -> tuple[Change, ...]:
    pins_a, pins_b = a.snapshot.pins, b.snapshot.pins
    return tuple(
        change
        for part in ("teacher", "data", "capture")
        for change in _changes(part, getattr(pins_a, part), getattr(pins_b, part))
    )


def _head(a: _Side, b: _Side) -> tuple[Change, ...]:
    fields = ("cut", "samples", "dropped", "requires")
    pairs = ((name, getattr(a.snapshot, name), getattr(b.snapshot, name)) for name in fields)
    return tuple(Change(name, of_a, of_b) for name, of_a, of_b in pairs if of_a != of_b)


def _changes(path: str, a: Any, b: Any) -> Iterator[Change]:
    """Fields that differ, maps entered; a list is one field."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in sorted(a.keys() | b.keys()):
            yield from _changes(f"{path}.{key}", a.get(key), b.get(key))
    elif type(a) is not type(b) or a != b:
        yield Change(path, a, b)


def plain(value: Any) -> Any:
    """A canonical value as JSON can hold it: 32 bytes are a digest, other bytes are hex, what is not finite is text."""
    if isinstance(value, Digest):
        return str(value)
    if isinstance(value, bytes):
        return str(Digest(value)) if len(value) == DIGEST_BYTES else value.hex()
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _cause(store: Store, a: _Side, b: _Side) -> str | None:
    """Why the same teacher over the same inputs gave other bytes; None where something pinned tells."""
    if a.snapshot.pins.encode() != b.snapshot.pins.encode() or a.snapshot.columns != b.snapshot.columns:
        return None
    records = [store.record_of(side.digest) for side in (a, b)]
    platforms = [_platforms(record) for record in records]
    if not all(platforms):
        return f"the same pins gave other bytes, and {NO_RECORD}: build one of them again to tell"
    unlike = [
        f"{key} ({' and '.join(', '.join(sorted(side.get(key, {'unknown'}))) for side in platforms)})"
        for key in sorted(platforms[0].keys() | platforms[1].keys())
        if platforms[0].get(key) != platforms[1].get(key)
    ]
    if unlike:
        return f"the same pins on unlike platforms: {'; '.join(unlike)}"
    return "the same pins on the same platform gave other bytes: the teacher is not reproducible"


def _platforms(record: Record | None) -> dict[str, set[str]]:
    """Every value that each field of the record's platforms takes."""
    listed = record.fields.get("platforms", ()) if record else ()
    found: defaultdict[str, set[str]] = defaultdict(set)
    for platform in listed.values() if isinstance(listed, Mapping) else listed:
        if isinstance(platform, Mapping):
            for key, value in platform.items():
                found[key].add(str(plain(value)))
    return dict(found)
