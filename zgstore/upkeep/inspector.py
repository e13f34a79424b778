"""What a store says of itself without a blob being read: a snapshot shown, its names listed, a ref's past."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zgstore.errors import Corrupt, Missing, NotFound
from zgstore.format.digest import Digest
from zgstore.format.fields import all_u64
from zgstore.format.manifest import Column, Record, Snapshot
from zgstore.format.pages import RootPage
from zgstore.storage import partials
from zgstore.storage.files import user_name
from zgstore.storage.refs import Hold, Ref
from zgstore.storage.store import Store


@dataclass(frozen=True, slots=True)
class ColumnFacts:
    """One column, its bytes in this snapshot, and what was measured of its values when they were captured.

    Of a partial copy ``here`` says whether the column is in it.
    """

    column: Column
    bytes: int
    statistics: Mapping[str, float] = field(default_factory=dict)
    here: bool = True

    def as_json(self) -> dict[str, Any]:
        return {
            **self.column.as_value(),
            "bytes": self.bytes,
            "here": self.here,
            "statistics": dict(self.statistics),
        }


@dataclass(frozen=True, slots=True)
class Shown:
    """A snapshot as ``show`` tells it.

    Args:
        digest: Its name.
        snapshot: Its head.
        recipe: Digest of the recipe it was built from; None where no record says.
        record: The newest record about it; None where there is none.
        names: Refs, tags and holds that name it.
        holds: The holds, each with who gave it, when and why.
        columns: Each with its bytes and statistics.
        shards: How many.
        masked: Rows stored that readers skip.
        left_out: Rows of the stream that never entered.
        bytes: Of all its blobs, constants too.
        bytes_here: Of those that this store means to have.
        here: The columns whose blobs this store means to have; None where it means to have all.
    """

    digest: Digest
    snapshot: Snapshot
    recipe: Digest | None
    record: Record | None
    names: tuple[str, ...]
    holds: tuple[HoldFacts, ...]
    columns: tuple[ColumnFacts, ...]
    shards: int
    masked: int
    left_out: int
    bytes: int
    bytes_here: int
    here: tuple[str, ...] | None = None

    def as_json(self) -> dict[str, Any]:
        pins = self.snapshot.pins
        return {
            "snapshot": str(self.digest),
            "recipe": str(self.recipe) if self.recipe else None,
            "pins": str(pins.digest()),
            "teacher": pins.teacher,
            "data": pins.data,
            "capture": pins.capture,
            "columns": [column.as_json() for column in self.columns],
            "constants": [constant.as_value() for constant in self.snapshot.constants],
            "samples": self.snapshot.samples,
            "dropped": {"masked": self.masked, "left_out": self.left_out},
            "cut": self.snapshot.cut,
            "shards": self.shards,
            "bytes": self.bytes,
            "bytes_here": self.bytes_here,
            "partial": None if self.here is None else list(self.here),
            "names": list(self.names),
            "holds": [hold.as_json() for hold in self.holds],
            "record": record_value(self.record),
        }


@dataclass(frozen=True, slots=True)
class HoldFacts:
    """A hold, and the name of whom its file belongs to."""

    hold: Hold
    user: str

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.hold.name,
            "snapshot": str(self.hold.snapshot),
            "user": self.user,
            "time_seconds": self.hold.time_seconds,
            "reason": self.hold.reason,
        }


@dataclass(frozen=True, slots=True)
class RefFacts:
    """A ref or a tag and, where its snapshot can be read, what that holds.

    Args:
        ref: Which.
        samples: Rows that readers see.
        columns: How many.
        bytes: Of all its blobs.
        bytes_here: Of those that this store means to have.
        here: The columns whose blobs this store means to have; None where it means to have all.
    """

    ref: Ref
    samples: int | None = None
    columns: int | None = None
    bytes: int | None = None
    bytes_here: int | None = None
    here: tuple[str, ...] | None = None

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.ref.name,
            "kind": self.ref.kind,
            "snapshot": str(self.ref.snapshot),
            "samples": self.samples,
            "columns": self.columns,
            "bytes": self.bytes,
            "bytes_here": self.bytes_here,
            "partial": None if self.here is None else list(self.here),
        }


@dataclass(frozen=True, slots=True)
class Move:
    """One entry of a reflog, newest first; ``rev`` names what the ref pointed at after it."""

    rev: str
    old: Digest | None
    new: Digest
    time_seconds: float
    record: Record | None

    def as_json(self) -> dict[str, Any]:
        return {
            "rev": self.rev,
            "old": str(self.old) if self.old else None,
            "new": str(self.new),
            "time_seconds": self.time_seconds,
            "record": record_value(self.record),
        }


def show(store: Store, rev: str | Digest) -> Shown:
    """A snapshot's pins, columns and statistics.

    Args:
        store: Where it is.
        rev: REV, or its digest.

    Raises:
        NotFound: if the REV names nothing.
        Missing, Corrupt: if its head or root page is not there or not what its name says.
    """
    digest = rev if isinstance(rev, Digest) else store.resolve(rev)
    snapshot = store.snapshot(digest)
    root = store.root(snapshot)
    record = store.record_of(digest)
    dropped = store.dropped(snapshot)
    expected = partials.expected(store.path, digest)
    columns = _columns(snapshot, root, expected, _statistics(record))
    size, size_here = _sizes(snapshot, columns)
    return Shown(
        digest=digest,
        snapshot=snapshot,
        recipe=_recipe(record),
        record=record,
        names=names_of(store, digest),
        holds=tuple(facts for facts in holds(store) if facts.hold.snapshot == digest),
        columns=columns,
        shards=sum(all_u64(root.shards)),
        masked=len(dropped.masked),
        left_out=len(dropped.left_out),
        bytes=size,
        bytes_here=size_here,
        here=_here(columns, expected),
    )


def listing(store: Store) -> list[RefFacts]:
    """All refs and tags, by name. One whose snapshot cannot be read is listed all the same: ``verify`` tells why."""
    return [_ref_facts(store, ref) for ref in sorted(store.refs.list(), key=lambda ref: (ref.kind, ref.name))]


def holds(store: Store) -> list[HoldFacts]:
    """All holds, by name.

    Raises:
        Corrupt: if one is torn.
    """
    return [HoldFacts(hold, user_name(hold.uid)) for hold in store.refs.holds()]


def log(store: Store, name: str | None = None) -> list[Move]:
    """Where a ref pointed, newest first; without a name, all refs' moves by time.

    Raises:
        NotFound: if there is no such ref.
    """
    if name is not None:
        if store.refs.get(name) is None:
            known = ", ".join(sorted(ref.name for ref in store.refs.list())) or "none"
            raise NotFound(f"there is no ref {name!r}", hint=f"the refs are: {known}", ref=name)
        return _moves(store, name)
    moves = [move for ref in store.refs.list() if ref.kind == "head" for move in _moves(store, ref.name)]
    return sorted(moves, key=lambda move: -move.time_seconds)


def names_of(store: Store, digest: Digest) -> tuple[str, ...]:
    """The refs, tags and holds that name a snapshot."""
    refs = [ref.name for ref in store.refs.list() if ref.snapshot == digest]
    holds = [f"hold {hold.name}" for hold in store.refs.holds() if hold.snapshot == digest]
    return tuple(sorted(refs) + sorted(holds))


def record_value(record: Record | None) -> dict[str, Any] | None:
    """A record for ``--json``, without what is told elsewhere or was kept for ``build --explain`` alone."""
    if record is None:
        return None
    fields = {name: value for name, value in record.fields.items() if name not in {"statistics", "keys"}}
    return {"time_seconds": record.time_seconds, **fields}


def _moves(store: Store, name: str) -> list[Move]:
    return [
        Move(f"{name}@{{{at}}}", entry.old, entry.new, entry.time_seconds, _record(store, entry.record))
        for at, entry in enumerate(store.refs.log(name))
    ]


def _record(store: Store, digest: Digest | None) -> Record | None:
    try:
        return store.record(digest) if digest else None
    except (Missing, Corrupt):
        return None


def _ref_facts(store: Store, ref: Ref) -> RefFacts:
    try:
        snapshot = store.snapshot(ref.snapshot)
        root = store.root(snapshot)
        expected = partials.expected(store.path, ref.snapshot)
    except (Missing, Corrupt):
        return RefFacts(ref)
    columns = _columns(snapshot, root, expected)
    return RefFacts(ref, snapshot.samples, len(columns), *_sizes(snapshot, columns), _here(columns, expected))


def _columns(
    snapshot: Snapshot,
    root: RootPage,
    expected: Collection[str] | None,
    statistics: Mapping[str, Mapping[str, float]] | None = None,
) -> tuple[ColumnFacts, ...]:
    return tuple(
        ColumnFacts(
            column,
            sum(all_u64(packed)),
            (statistics or {}).get(column.name, {}),
            here=expected is None or column.name in expected,
        )
        for column, packed in zip(snapshot.columns, root.column_bytes, strict=True)
    )


def _sizes(snapshot: Snapshot, columns: Sequence[ColumnFacts]) -> tuple[int, int]:
    """Bytes of all blobs, and of those that are meant to be here: constants always are."""
    constants = sum(constant.size for constant in snapshot.constants)
    here = sum(column.bytes for column in columns if column.here)
    return constants + sum(column.bytes for column in columns), constants + here


def _here(columns: Sequence[ColumnFacts], expected: Collection[str] | None) -> tuple[str, ...] | None:
    return None if expected is None else tuple(each.column.name for each in columns if each.here)


def _recipe(record: Record | None) -> Digest | None:
    recipe = record.fields.get("recipe") if record else None
    return Digest(recipe) if isinstance(recipe, bytes) else None


def _statistics(record: Record | None) -> Mapping[str, Mapping[str, float]]:
    statistics = record.fields.get("statistics") if record else None
    return statistics if isinstance(statistics, Mapping) else {}
