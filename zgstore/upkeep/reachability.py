"""What keeps what: the roots, and everything that they reach."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from zgstore.errors import Corrupt, Missing, NotFound, ZgError
from zgstore.format import canonical
from zgstore.format.digest import DIGEST_BYTES, Digest, digest_of
from zgstore.format.fields import all_digests, pack_u64, raw_digests
from zgstore.format.manifest import Snapshot
from zgstore.format.pages import LeafPage, RootPage, RowsRoot
from zgstore.storage.refs import History, LogEntry, Ref
from zgstore.storage.store import Store
from zgstore.upkeep.digestsets import DigestSet, both, chosen, total

DAY_SECONDS: Final = 86400.0
RETENTION_SECONDS: Final = 30 * DAY_SECONDS

# What reaches an object that several roots reach is the first of these.
ROOT_KINDS: Final = ("head", "tag", "hold", "reflog", "lease", "measurement")
# What a metadata file's bytes are hashed as, by the kind that they state.
HASHED_AS: Final = {
    "snapshot": "snapshot", "record": "record",
    "root": "page", "leaf": "page", "dropped": "page", "rows": "page", "rows-root": "page",
}  # fmt: skip


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

    def keeps_coming(self, at: int, entry: LogEntry, now: float) -> bool:
        """Whether an entry that no name has come to, or none has now, is kept: by its own age, or as one of so many.

        Args:
            at: Its place in its log, from the newest.
            entry: What was logged.
            now: What ages are counted to.
        """
        is_young = self.seconds is not None and entry.time_seconds > now - self.seconds
        return is_young or at < (self.keep_last or 0)


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
    """Everything that keeps something: names, and what live leases name (raw digests joined, by the lease).

    What a ref is about to name counts as leased: of a move that never took place, not all may be there. Past is, of
    each ref, the newest reflog entry past retention: it goes with all before it.
    """

    named: tuple[Root, ...]
    leased: tuple[tuple[str, bytes], ...]
    past: tuple[tuple[Ref, LogEntry], ...]


def history_of(store: Store, ref: Ref, *, damaged: list[ZgError] | None = None) -> History:
    """A listed ref's history; nothing if it was removed since: removing one waits for nobody."""
    try:
        return store.refs.history(ref.name, ref.kind, damaged=damaged)
    except NotFound:
        return History((), ())


def lost_entries(store: Store, *, retention: Retention, now: float) -> Iterator[tuple[str, int, LogEntry]]:
    """What is logged of names that are gone, or were about to come, within retention, and there: (name, at, entry)."""
    for name, _, log in store.refs.lost():
        for at, entry in enumerate(log):
            if retention.keeps_coming(at, entry, now) and _is_here(store, entry.new):
                yield name, at, entry


def _is_here(store: Store, digest: Digest) -> bool:
    return store.objects.stats([digest], "meta", strict=False) != [None]


def roots(store: Store, *, retention: Retention, now: float, expired: bool = False) -> Roots:
    """The roots as they are; callers hold the store lock where a moment's truth is needed.

    Args:
        store: Whose.
        retention: Which reflog entries keep.
        now: What ages are counted to.
        expired: Whether what was past retention has been forgotten: then each entry that a ref still has keeps.

    Raises:
        Corrupt: if a ref, reflog entry or hold is torn.
    """
    named, coming, past = [], [], []
    for ref in store.refs.list():
        named.append(Root(ref.kind, ref.name, ref.snapshot))
        history = history_of(store, ref)
        log = history.entries
        move = history.coming
        if move is not None and retention.keeps_coming(0, move, now):
            named_by = [digest.raw for digest in (move.new, move.record) if digest is not None]
            coming.append((f"{ref.kind} {ref.name}, about to name {move.new.short}", b"".join(named_by)))
        kept = len(log) if expired else retention.kept(log, now)
        past += [(ref, entry) for entry in log[kept:][:1]]
        for at, entry in enumerate(log[:kept]):
            name = f"{ref.name}@{{{at}}}"
            named.append(Root("reflog", name, entry.new))
            if entry.record is not None:
                named.append(Root("reflog", name, entry.record))
    for name, at, entry in lost_entries(store, retention=retention, now=now):
        there = [digest for digest in (entry.new, entry.record) if digest is not None and _is_here(store, digest)]
        named += [Root("reflog", f"{name}@{{{at}}}", digest) for digest in there]
    named += [Root("hold", hold.name, hold.snapshot) for hold in store.refs.holds()]
    leased = [(lease.uuid, lease.digests) for lease in store.leases.all() if lease.alive]
    order = {kind: at for at, kind in enumerate(ROOT_KINDS)}
    return Roots(tuple(sorted(named, key=lambda root: order[root.kind])), (*leased, *coming), tuple(past))


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
        self._sizes: list[bytes] = []
        self._reasons: list[str] = []
        self._set: DigestSet | None = None

    def add(self, digest: Digest, reason: str) -> None:
        """Reach an object whose kind is not known: what a ref, a hold or a lease names.

        Raises:
            Missing: if it is no metadata that is there.
            Corrupt: if it, or anything that it refers to, cannot be parsed.
        """
        if not self.met(digest):
            kind, body = read_any(self._store, digest)
            self._visit(digest, kind, body, reason)

    def add_blobs(self, joined: bytes, sizes: bytes, reason: str) -> None:
        """Reach blobs themselves (raw digests joined, and their sizes, u64 packed)."""
        self._digests.append(joined)
        self._sizes.append(sizes)
        self._reasons.append(reason)
        self._set = None

    def met(self, digest: Digest) -> bool:
        """Whether this metadata was reached."""
        return digest.raw in self.meta or (self._beyond is not None and self._beyond.met(digest))

    def without(self, joined: bytes, family: str) -> bytes:
        """Those of ``joined`` (raw digests of one family) that were not reached, joined."""
        if family == "meta":
            loose = b"".join(raw for raw in raw_digests(joined) if raw not in self.meta)
        else:
            loose = self._blobs().without(joined)
        return self._beyond.without(loose, family) if self._beyond is not None else loose

    def blobs(self) -> tuple[bytes, bytes]:
        """Every blob reached, once: raw digests joined, and their sizes, u64 packed."""
        firsts = self._blobs().firsts()
        return chosen(b"".join(self._digests), firsts), chosen(b"".join(self._sizes), firsts, each=8)

    def credit(self, listed: DigestSet) -> dict[str, tuple[int, int]]:
        """Of the blobs reached that are listed, each once: reason → (objects, bytes)."""
        counted = both(self._blobs().firsts(), listed.mask(b"".join(self._digests)))
        credit: dict[str, tuple[int, int]] = {}
        at = 0
        for joined, sizes, reason in zip(self._digests, self._sizes, self._reasons, strict=True):
            mine = counted[at : at + len(joined) // DIGEST_BYTES]
            at += len(mine)
            if 1 in mine:
                objects, size = credit.get(reason, (0, 0))
                credit[reason] = (objects + mine.count(1), size + total(sizes, mine))
        return credit

    def _blobs(self) -> DigestSet:
        if self._set is None:
            self._set = DigestSet(b"".join(self._digests))
        return self._set

    def _visit(self, digest: Digest, kind: str, body: bytes, reason: str) -> None:
        """What it refers to first, then itself: an object is only met once everything below it is."""
        if kind == "snapshot":
            self._snapshot(Snapshot.decode(body), reason)
        elif kind == "root":
            for leaf in all_digests(RootPage.decode(body).leaves):
                self._page(leaf, reason)
        elif kind == "leaf":
            page = LeafPage.decode(body)
            self.add_blobs(b"".join(page.blobs), b"".join(page.sizes), reason)
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
            self.add_blobs(constant.blob.raw, pack_u64([constant.size]), reason)

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
