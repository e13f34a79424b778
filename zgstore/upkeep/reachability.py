"""What keeps what: the roots, and everything that they reach."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zgstore.errors import Corrupt, Missing, NotFound
from zgstore.format import canonical
from zgstore.format.digest import DIGEST_BYTES, Digest, digest_of
from zgstore.format.fields import all_digests, raw_digests
from zgstore.format.manifest import Snapshot
from zgstore.format.pages import LeafPage, RootPage, RowsRoot
from zgstore.storage.refs import LogEntry, Ref
from zgstore.storage.store import Store

DAY_SECONDS: Final = 86400.0
RETENTION_SECONDS: Final = 30 * DAY_SECONDS

# What reaches an object that several roots reach is the first of these.
ROOT_KINDS: Final = ("head", "tag", "hold", "reflog", "lease", "measurement")
# What a metadata file's bytes are hashed as, by the kind that they state.
HASHED_AS: Final = {
    "snapshot": "snapshot", "record": "record",
    "root": "page", "leaf": "page", "dropped": "page", "rows": "page", "rows-root": "page",
}  # fmt: skip


# --- Many digests at once ------------------------------------------------------------------------------------------


class DigestTable:
    """Distinct digests, sorted by their first 8 bytes and compared by all 32: a million take a third of a second.

    Args:
        joined: Raw digests, 32 bytes each; of equal ones the first counts.
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
        self.first: NDArray[np.int64] = order[new]  # where among ``joined`` each distinct digest stood first
        starts = np.flatnonzero(np.append(True, self._heads[1:] != self._heads[:-1]))
        self._most_alike = int(np.diff(np.append(starts, len(self._rows))).max(initial=0))

    def __len__(self) -> int:
        return len(self._rows)

    def find(self, joined: bytes) -> NDArray[np.int64]:
        """Where each of ``joined`` (32 bytes each) stands in the table; −1 where it does not."""
        wanted = _words(joined)
        found = np.full(len(wanted), -1, np.int64)
        at = np.searchsorted(self._heads, _heads(joined))
        for step in range(self._most_alike):
            place = np.minimum(at + step, len(self._rows) - 1)
            equal = np.all(self._rows[place] == wanted, axis=1)
            found[equal] = place[equal]
        return found

    def has(self, joined: bytes) -> NDArray[np.bool_]:
        """Whether each of ``joined`` is in the table."""
        return self.find(joined) >= 0

    def raw(self) -> bytes:
        """Its digests joined, in its order."""
        return self._rows.tobytes()


def _words(joined: bytes) -> NDArray[np.uint64]:
    return np.frombuffer(joined, "<u8").reshape(-1, DIGEST_BYTES // 8)


def _heads(joined: bytes) -> NDArray[np.uint64]:
    """The first 8 bytes of each, as numbers that sort as folders are listed: so a listing is found in one sweep."""
    return _words(joined)[:, 0].byteswap() if sys.byteorder == "little" else _words(joined)[:, 0].copy()


def chosen(joined: bytes, mask: NDArray[np.bool_]) -> bytes:
    """The digests of ``joined`` where the mask is true, joined."""
    return _words(joined)[mask].tobytes()


# --- Roots ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Retention:
    """Which reflog entries keep their snapshots.

    An entry ages from the moment its value was replaced. So the newest never does, and what a ref pointed to yesterday
    is kept however long it had pointed there.

    Args:
        seconds: Entries younger than this are kept; None: age keeps none.
        keep_last: So many of each ref are kept, however old; None: their number keeps none.
    """

    seconds: float | None = RETENTION_SECONDS
    keep_last: int | None = None

    @classmethod
    def chosen(cls, *, seconds: float | None, keep_last: int | None) -> Retention:
        """As a command's options say: their number alone replaces the age; both keep what either keeps."""
        if seconds is None and keep_last is None:
            return cls()
        return cls(seconds, keep_last)

    def kept(self, log: Sequence[LogEntry], now: float) -> int:
        """How many of the entries, newest first, are kept."""
        count = max(min(len(log), self.keep_last or 0), min(len(log), 1))
        if self.seconds is not None:
            while count < len(log) and log[count - 1].time_seconds > now - self.seconds:
                count += 1
        return count


@dataclass(frozen=True, slots=True)
class Root:
    """One name that keeps an object.

    Args:
        kind: One of ``ROOT_KINDS``.
        name: Of the ref, tag or hold; ``NAME@{N}`` of a reflog entry; the lease's UUID.
        digest: The snapshot; of a reflog entry also the record.
    """

    kind: str
    name: str
    digest: Digest


@dataclass(frozen=True, slots=True)
class Roots:
    """Everything that keeps something: names, and what live leases name (raw digests joined, by the lease)."""

    named: tuple[Root, ...]
    leased: tuple[tuple[str, bytes], ...]


def log_of(store: Store, ref: Ref, *, damaged: list[Corrupt] | None = None) -> list[LogEntry]:
    """A listed ref's log; nothing if it was removed since: removing one waits for nobody."""
    try:
        return store.refs.log(ref.name, ref.kind, damaged=damaged)
    except NotFound:
        return []


def roots(store: Store, *, retention: Retention, now: float) -> Roots:
    """The roots as they are; callers hold the store lock where a moment's truth is needed.

    Raises:
        Corrupt: if a ref, reflog entry or hold is torn.
    """
    named = []
    for ref in store.refs.list():
        named.append(Root(ref.kind, ref.name, ref.snapshot))
        log = log_of(store, ref)
        for at, entry in enumerate(log[: retention.kept(log, now)]):
            name = f"{ref.name}@{{{at}}}"
            named.append(Root("reflog", name, entry.new))
            if entry.record is not None:
                named.append(Root("reflog", name, entry.record))
    named += [Root("hold", hold.name, hold.snapshot) for hold in store.refs.holds()]
    leased = tuple((lease.uuid, lease.digests) for lease in store.leases.all() if lease.alive)
    order = {kind: at for at, kind in enumerate(ROOT_KINDS)}
    return Roots(tuple(sorted(named, key=lambda root: order[root.kind])), leased)


# --- Reach ---------------------------------------------------------------------------------------------------------


class Met(NamedTuple):
    """One metadata object that was reached: the kind it states, its file's size, and the kind of root that did."""

    kind: str
    size_bytes: int
    reason: str


class Reach:
    """What was reached so far: it grows root by root, and credits each object to the first that reached it."""

    def __init__(self, store: Store, *, beyond: Reach | None = None) -> None:
        self._store = store
        self._beyond = beyond  # what that one reached is not reached again
        self.meta: dict[bytes, Met] = {}
        self._digests: list[bytes] = []
        self._sizes: list[NDArray[np.uint64]] = []
        self._reasons: list[str] = []
        self._table: tuple[DigestTable, NDArray[np.uint64], NDArray[np.int64]] | None = None
        self._last: tuple[bytes, DigestTable, NDArray[np.int64]] | None = None

    def add(self, digest: Digest, reason: str) -> None:
        """Reach an object whose kind is not known: what a ref, a hold or a lease names.

        Raises:
            Missing: if it is no metadata that is there.
            Corrupt: if it, or anything that it refers to, cannot be parsed.
        """
        if not self.met(digest):
            kind, body = read_any(self._store, digest)
            self._visit(digest, kind, body, reason)

    def add_blobs(self, joined: bytes, sizes: NDArray[np.uint64], reason: str) -> None:
        """Reach blobs themselves (raw digests joined, and their sizes)."""
        if joined:
            self._digests.append(joined)
            self._sizes.append(sizes)
            self._reasons.append(reason)
            self._table = None

    def met(self, digest: Digest) -> bool:
        """Whether this metadata was reached."""
        return digest.raw in self.meta or (self._beyond is not None and self._beyond.met(digest))

    def has(self, joined: bytes, family: str) -> NDArray[np.bool_]:
        """Whether each of ``joined`` (raw digests of one family) was reached."""
        if family == "meta":
            reached = np.fromiter((raw in self.meta for raw in raw_digests(joined)), bool, len(joined) // DIGEST_BYTES)
        else:
            reached = self._found(joined) >= 0
        return reached | self._beyond.has(joined, family) if self._beyond is not None else reached

    def blobs(self) -> tuple[bytes, NDArray[np.uint64]]:
        """Every blob reached, once: raw digests joined, and sizes."""
        table, sizes, _ = self._blobs()
        return table.raw(), sizes

    def credit(self, joined: bytes) -> Iterator[tuple[str, int, int]]:
        """Of the blobs in ``joined`` that were reached: (reason, objects, bytes) for each reason."""
        _, sizes, reasons = self._blobs()
        found = self._found(joined)
        found = found[found >= 0]
        for at, reason in enumerate(dict.fromkeys(self._reasons)):
            mine = found[reasons[found] == at]
            if len(mine):
                yield reason, len(mine), int(sizes[mine].sum())

    def _found(self, joined: bytes) -> NDArray[np.int64]:
        """``find`` in the blobs; of a whole listing it is asked for more than once."""
        table = self._blobs()[0]
        if self._last is None or self._last[0] is not joined or self._last[1] is not table:
            self._last = (joined, table, table.find(joined))
        return self._last[2]

    def _blobs(self) -> tuple[DigestTable, NDArray[np.uint64], NDArray[np.int64]]:
        if self._table is None:
            table = DigestTable(b"".join(self._digests))
            number = {reason: at for at, reason in enumerate(dict.fromkeys(self._reasons))}
            sizes = np.concatenate([np.zeros(0, np.uint64), *self._sizes])
            counts = [len(each) for each in self._sizes]
            reasons = np.repeat(np.array([number[each] for each in self._reasons], np.int64), counts)
            self._table = (table, sizes[table.first], reasons[table.first])
        return self._table

    def _visit(self, digest: Digest, kind: str, body: bytes, reason: str) -> None:
        """What it refers to first, then itself: an object is only met once everything below it is."""
        if kind == "snapshot":
            self._snapshot(Snapshot.decode(body), reason)
        elif kind == "root":
            for leaf in all_digests(RootPage.decode(body).leaves):
                self._page(leaf, reason)
        elif kind == "leaf":
            page = LeafPage.decode(body)
            self.add_blobs(b"".join(page.blobs), np.frombuffer(b"".join(page.sizes), "<u8"), reason)
        elif kind == "rows-root":
            for page_digest in all_digests(RowsRoot.decode(body).pages):
                self._unread(page_digest, "rows", reason)
        self.meta[digest.raw] = Met(kind, len(body), reason)

    def _snapshot(self, snapshot: Snapshot, reason: str) -> None:
        self._page(snapshot.root, reason)
        if snapshot.dropped is not None:
            self._unread(snapshot.dropped, "dropped", reason)
        rows = self._store.rows_root_of(snapshot)
        if rows is not None:
            self._page(rows, reason)
        for constant in snapshot.constants:
            self.add_blobs(constant.blob.raw, np.array([constant.size], np.uint64), reason)

    def _page(self, digest: Digest, reason: str) -> None:
        if not self.met(digest):
            body = self._store.objects.read_meta(digest, "page")
            self._visit(digest, stated_kind(body), body, reason)

    def _unread(self, digest: Digest, kind: str, reason: str) -> None:
        """A page that refers to nothing: that it is there is enough."""
        if not self.met(digest):
            found = self._store.objects.stat(digest, "meta")
            if found is None:
                raise missing_meta(digest, kind)
            self.meta[digest.raw] = Met(kind, found.size, reason)


def reach(store: Store, snapshots: Iterable[Digest]) -> Reach:
    """Everything that the snapshots refer to, directly or not.

    Raises:
        Missing, Corrupt: if metadata on the way is not there, or not what its name says.
    """
    reached = Reach(store)
    for digest in snapshots:
        reached.add(digest, "head")
    return reached


def stated_kind(body: bytes) -> str:
    """The kind that a metadata file states; ``""`` if it states none."""
    value = canonical.decode(body, what="metadata")
    kind = value.get("kind") if isinstance(value, dict) else None
    return kind if isinstance(kind, str) else ""


def read_any(store: Store, digest: Digest) -> tuple[str, bytes]:
    """A metadata file whose kind is not known: the kind it states, and its bytes, which hash to its name.

    Raises:
        Missing: if there is no such metadata.
        Corrupt: if it is not what its name says, or states a kind that metadata does not have.
    """
    handle = store.objects.open(digest, "meta")
    with os.fdopen(handle, "rb") as file:
        body = file.read(canonical.MAX_BYTES + 1)
    kind = stated_kind(body)
    hashed = HASHED_AS.get(kind)
    if hashed is None or digest_of(hashed, body) != digest:
        raise Corrupt(
            f"the metadata {digest.short} is not what its name says",
            hint="run `zgstore verify` to see what it hurts and what mends it",
            object=str(digest), expected=str(digest), actual=kind or "no kind",
            path=str(store.objects.path(digest, "meta")),
        )  # fmt: skip
    return kind, body


def missing_meta(digest: Digest, kind: str) -> Missing:
    return Missing(
        f"the {kind} page {digest.short} is referred to and not there",
        hint="run `zgstore verify` to see what it hurts and what mends it",
        object=str(digest),
    )


def place_in(joined: bytes, digest: Digest) -> int | None:
    """Which of the joined digests it is, the first; None if none."""
    at = joined.find(digest.raw)
    while at >= 0 and at % DIGEST_BYTES:
        at = joined.find(digest.raw, at + 1)
    return None if at < 0 else at // DIGEST_BYTES
