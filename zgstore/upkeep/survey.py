"""What a store should have: every name, snapshot and page walked, past whatever is damaged on the way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from zgstore.errors import Corrupt, Missing, ZgError
from zgstore.format.digest import Digest
from zgstore.format.fields import all_digests, all_u64, unpack_u64
from zgstore.format.manifest import Column, Constant, Record, Snapshot
from zgstore.format.pages import Dropped, LeafPage, RootPage, RowsPage, RowsRoot
from zgstore.storage import partials
from zgstore.storage.naming import refuse_text
from zgstore.storage.objects import Stat
from zgstore.storage.refs import KINDS, Break, Ref
from zgstore.storage.store import Store
from zgstore.upkeep.digestsets import DigestSet
from zgstore.upkeep.reachability import Retention, history_of, lost_entries

Page = TypeVar("Page", Snapshot, RootPage, LeafPage, Dropped, RowsRoot, RowsPage, Record)


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a store.

    Args:
        kind: ``corrupt``, ``missing``, ``foreign`` (no object, and not ours), or ``unreadable`` (the system refused).
        object: Its text digest; the file's name where it has none.
        path: Where.
        snapshots: Text digests of the snapshots that it hurts.
        refs: The refs, tags and holds that it hurts; ``NAME@{N}`` for what only a reflog still names.
        hint: What mends it.
        message: What was found.
    """

    kind: str
    object: str
    path: str
    snapshots: tuple[str, ...]
    refs: tuple[str, ...]
    hint: str
    message: str

    def as_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind, "object": self.object, "path": self.path, "snapshots": list(self.snapshots),
            "refs": list(self.refs), "hint": self.hint, "message": self.message,
        }  # fmt: skip


class Fault(NamedTuple):
    """A problem before it is known what it hurts."""

    kind: str
    digest: Digest | None
    path: Path
    message: str
    hint: str = ""


class Wanted(NamedTuple):
    """A blob as a page describes it.

    Args:
        digest: Its name.
        size: Bytes of its file.
        rows: Rows that it has; 0 for a constant.
        like: The column that it is of, or the constant that it is.
        required: False for a column outside the part that the store means to have.
    """

    digest: Digest
    size: int
    rows: int
    like: Column | Constant
    required: bool


@dataclass(slots=True)
class _Table:
    """A snapshot that could be read: its columns, and the leaves that could be."""

    digest: Digest
    snapshot: Snapshot
    parts: frozenset[str] | None
    leaves: list[Digest]
    blobs: DigestSet | None = None


#: What was read and found right: digest, family, and the file's stamp from before it was read.
Verified = tuple[Digest, str, Stat]


class Survey:
    """Walks from names to leaf pages, reads and hashes each once, and keeps going.

    Args:
        store: What is examined.
        revs: Which snapshots; None for all that refs, tags, holds and reflogs within retention name.

    Raises:
        NotFound, Invalid: if a REV names nothing.
    """

    def __init__(self, store: Store, revs: Sequence[str | Digest] | None) -> None:
        refuse_text(revs, "revs")
        self.store = store
        self.faults: list[Fault] = []
        self.verified: list[Verified] = []
        self._names: dict[Digest, list[str]] = {}
        self._records: dict[Digest, list[str]] = {}
        self._users: dict[Digest, set[Digest]] = {}
        self._read: dict[Digest, Any] = {}
        self._tables: list[_Table] = []
        self._all = revs is None
        for rev in revs or ():
            self._name_one(rev)

    # -- names -----------------------------------------------------------------------------------------------------

    def snapshots(self) -> list[Digest]:
        """What will be walked: looked up now, where all names were asked for."""
        if self._all:
            self._all = False
            self._name_all()
        return list(self._names)

    def named(self) -> Iterator[Digest]:
        """The same and the records that tell of it; looked up no sooner than the first is asked for."""
        yield from self.snapshots()
        yield from self._records

    def _name_one(self, rev: str | Digest) -> None:
        try:
            digest = rev if isinstance(rev, Digest) else self.store.resolve(rev)
        except Corrupt as error:
            self._torn(error)
            return
        self._names.setdefault(digest, []).append(digest.short if isinstance(rev, Digest) else rev)

    def _name_all(self) -> None:
        torn: list[ZgError] = []
        now, retention = self.store.now(), Retention()
        for ref in self.store.refs.list(damaged=torn):
            self._names.setdefault(ref.snapshot, []).append(ref.name)
            log, breaks, _ = history_of(self.store, ref, damaged=torn)
            self.faults += [_broken(self.store, ref, each) for each in breaks]
            for at, entry in enumerate(log[: retention.kept(log, now)]):
                name = f"{ref.name}@{{{at}}}"
                if at:  # the newest is what the ref names
                    self._names.setdefault(entry.new, []).append(name)
                if entry.record is not None:
                    self._records.setdefault(entry.record, []).append(name)
        self._name_lost(retention, now)
        for hold in self.store.refs.holds(damaged=torn):
            self._names.setdefault(hold.snapshot, []).append(f"hold {hold.name}")
        for error in torn:
            self._torn(error)

    def _name_lost(self, retention: Retention, now: float) -> None:
        """Names whose log tells that they moved, and that are not there."""
        for name, kind, log in self.store.refs.lost():
            if any(entry.old is not None for entry in log):
                path = self.store.path.joinpath("refs", KINDS[kind], *name.split("/"))
                why = f"{path} is gone, and its reflog tells that it named {log[0].new.short}"
                self.faults.append(Fault("missing", None, path, why, _set_again(name, kind, log[0].new)))
        for name, at, entry in lost_entries(self.store, retention=retention, now=now):
            self._names.setdefault(entry.new, []).append(f"{name}@{{{at}}}")

    def _torn(self, error: ZgError) -> None:
        """A file that should hold a digest: a ref is set again from its reflog, others hurt nothing by going."""
        if not isinstance(error, Corrupt):
            self.faults.append(Fault("unreadable", None, self.store.path, error.message, error.hint))
            return
        path = self.store.path / error.path
        top, *rest = path.relative_to(self.store.path).parts
        hint = f"remove {path}: what it named is named elsewhere, or not at all"
        if top == "refs" and len(rest) > 1:
            kind, name = "head" if rest[0] == "heads" else "tag", "/".join(rest[1:])
            hint = _set_again(name, kind, self.store.refs.last_logged(name, kind))
        elif top == "holds":
            hint = f"remove {path}, then `zgstore hold {'/'.join(rest)} REV` again"
        self.faults.append(Fault("corrupt", None, path, error.message, hint))

    # -- walking ---------------------------------------------------------------------------------------------------

    def walk(self) -> None:
        """Read every snapshot, record and page; what is wrong with them is in ``faults``."""
        for digest in self.snapshots():
            self._walk_snapshot(digest)
        for digest in self._records:
            self._page(digest, Record, None)

    def _walk_snapshot(self, digest: Digest) -> None:
        snapshot = self._page(digest, Snapshot, digest)
        if snapshot is None:
            return
        parts = None
        try:
            parts = partials.expected(self.store.path, digest)
        except Corrupt as error:
            self.faults.append(Fault("corrupt", None, Path(error.path), error.message, error.hint))
        table = _Table(digest, snapshot, parts, [])
        self._tables.append(table)
        rows = self._walk_table(table)
        self._walk_rows(snapshot, digest)
        dropped = Dropped() if snapshot.dropped is None else self._page(snapshot.dropped, Dropped, digest)
        if rows is None or dropped is None:
            return
        masked = dropped.masked
        if any(a >= b for a, b in pairwise(masked)) or (masked and masked[-1] >= rows):
            self._wrong(snapshot.dropped, f"it masks rows that the {rows} stored ones do not have, or not in order")
        if snapshot.samples != rows - len(masked):
            self._wrong(digest, f"it says {snapshot.samples} samples, and has {rows} rows less {len(masked)} masked")

    def _walk_table(self, table: _Table) -> int | None:
        """The root and its leaves, and that their sums agree; the rows, if all could be read."""
        columns = len(table.snapshot.columns)
        root = self._page(table.snapshot.root, RootPage, table.digest)
        if root is None:
            return None
        if len(root.column_bytes) != columns:
            self._wrong(table.snapshot.root, f"it has {len(root.column_bytes)} columns, and its snapshot {columns}")
            return None
        whole = True
        for at, digest in enumerate(all_digests(root.leaves)):
            leaf = self._page(digest, LeafPage, table.digest)
            if leaf is None:
                whole = False
            elif len(leaf.blobs) != columns:
                self._wrong(digest, f"it has {len(leaf.blobs)} columns, and its snapshot {columns}")
                whole = False
            else:
                table.leaves.append(digest)
                says = tuple(unpack_u64(packed, at) for packed in (root.shards, root.rows, *root.column_bytes))
                has = (len(leaf), sum(all_u64(leaf.rows)), *(sum(all_u64(sizes)) for sizes in leaf.sizes))
                if says != has:
                    self._wrong(
                        table.snapshot.root,
                        f"of leaf {digest.short} it says {says} (shards, rows, bytes), which has {has}",
                    )
        return sum(all_u64(root.rows)) if whole else None

    def _walk_rows(self, snapshot: Snapshot, user: Digest) -> None:
        digest = self.store.rows_root_of(snapshot)
        root = None if digest is None else self._page(digest, RowsRoot, user)
        if root is None:
            return
        pages = [self._page(each, RowsPage, user) for each in all_digests(root.pages)]
        count = sum(len(page.digests) // 32 for page in pages if page is not None)
        if None not in pages and count != root.count:
            self._wrong(digest, f"it says {root.count} rows, and its pages have {count}")

    def _page(self, digest: Digest, kind: type[Page], user: Digest | None) -> Page | None:
        """One metadata object, read and hashed once; None if it cannot be used."""
        if user is not None:
            self._users.setdefault(digest, set()).add(user)
        if digest not in self._read:
            self._read[digest] = self._read_page(digest, kind)
        page = self._read[digest]
        if page is not None and not isinstance(page, kind):
            self._wrong(digest, f"it is a {type(page).__name__}, and a {kind.__name__} was referred to")
            return None
        return page

    def _read_page(self, digest: Digest, kind: type[Page]) -> Page | None:
        path = self.store.objects.path(digest, "meta")
        try:
            before = self.store.objects.stat(digest, "meta")
            page = kind.decode(self.store.objects.read_meta(digest, kind.KIND))
        except Missing as error:
            self.faults.append(Fault("missing", digest, path, error.message, self._out_of_the_trash(digest, "meta")))
        except Corrupt as error:
            self.faults.append(Fault("corrupt", digest, path, error.message))
        except ZgError as error:  # a feature that this version does not know, or what the system refuses
            self.faults.append(Fault("unreadable", digest, path, error.message, error.hint))
        else:
            if before is not None:
                self.verified.append((digest, "meta", before))
            return page
        return None

    def _out_of_the_trash(self, digest: Digest, family: str) -> str:
        return self.store.objects.missing(digest, family).hint if self.store.objects.in_trash(digest, family) else ""

    def _wrong(self, digest: Digest | None, why: str) -> None:
        """Metadata whose bytes are what its name says, and that contradicts itself."""
        assert digest is not None
        path = self.store.objects.path(digest, "meta")
        self.faults.append(Fault("corrupt", digest, path, f"{path} contradicts what it refers to: {why}"))

    # -- blobs -----------------------------------------------------------------------------------------------------

    def blobs(self) -> Iterator[Wanted]:
        """Every blob that the pages describe, once for each different description; required ones first."""
        seen: dict[bytes, tuple[int, ...]] = {}
        likes: dict[tuple[Any, ...], int] = {}
        for table in sorted(self._tables, key=lambda table: table.parts is not None):
            for wanted in self._blobs_of(table):
                column = wanted.like
                like = (column.dtype, column.shape, getattr(column, "codec", ""), wanted.size, wanted.rows)
                number = likes.setdefault(like, len(likes))
                before = seen.get(wanted.digest.raw, ())
                if number not in before:
                    seen[wanted.digest.raw] = (*before, number)
                    yield wanted

    def _blobs_of(self, table: _Table) -> Iterator[Wanted]:
        for constant in table.snapshot.constants:
            yield Wanted(constant.blob, constant.size, 0, constant, required=True)
        for digest in table.leaves:
            leaf: LeafPage = self._read[digest]
            rows = all_u64(leaf.rows)
            for column, blobs, sizes in zip(table.snapshot.columns, leaf.blobs, leaf.sizes, strict=True):
                required = table.parts is None or column.name in table.parts
                for blob, size, count in zip(all_digests(blobs), all_u64(sizes), rows, strict=True):
                    yield Wanted(blob, size, count, column, required)

    # -- what is hurt ----------------------------------------------------------------------------------------------

    def problem(self, fault: Fault) -> Problem:
        """A fault with the snapshots and names that it hurts, and what mends it."""
        snapshots = sorted(self._hurt(fault.digest)) if fault.digest is not None else []
        refs = [name for digest in snapshots for name in self._names.get(digest, ())]
        if fault.digest is not None:
            refs += self._records.get(fault.digest, ())
        return Problem(
            kind=fault.kind,
            object=str(fault.digest) if fault.digest is not None else fault.path.name,
            path=str(fault.path),
            snapshots=tuple(str(digest) for digest in snapshots),
            refs=tuple(dict.fromkeys(refs)) or self._refs_of_file(fault.path),
            hint=fault.hint or _repair(refs),
            message=fault.message,
        )

    def _hurt(self, digest: Digest) -> set[Digest]:
        users = set(self._users.get(digest, ()))
        for table in self._tables:
            if table.blobs is None:  # needed only where something is wrong; then perhaps for every blob
                leaves = (self._read[leaf] for leaf in table.leaves)
                constants = [constant.blob.raw for constant in table.snapshot.constants]
                table.blobs = DigestSet(b"".join([*constants, *(blobs for leaf in leaves for blobs in leaf.blobs)]))
            if digest.raw in table.blobs:
                users.add(table.digest)
        return users

    def _refs_of_file(self, path: Path) -> tuple[str, ...]:
        parts = path.relative_to(self.store.path).parts if path.is_relative_to(self.store.path) else ()
        return ("/".join(parts[2:]),) if parts[:1] == ("refs",) and len(parts) > 2 else ()

    @property
    def pages(self) -> Iterable[Digest]:
        """Every metadata object that was looked for."""
        return self._read.keys()


def _set_again(name: str, kind: str, digest: Digest | None) -> str:
    was = digest.short if digest else "REV"
    return f"`zgstore ref set {name} {was}`" if kind == "head" else f"`zgstore tag {name} {was} --force`"


def _broken(store: Store, ref: Ref, lost: Break) -> Fault:
    """A ref that is not what its log says, or a log that lacks an entry."""
    was = lost.digest.short
    if lost.path.is_relative_to(store.path / "refs"):
        why = f"{lost.path} names {was}, which its reflog does not tell of"
        last = store.refs.last_logged(ref.name, ref.kind)
        hint = f"{_set_again(ref.name, ref.kind, last)} is what its reflog says; or set it to {was}, if that is meant"
    else:
        why = f"{lost.path} says that {ref.name} named {was} before, and no entry before it tells of that"
        hint = f"name it, if it is wanted: `zgstore tag NAME {was}`; then remove {lost.path} and the entries before it"
    return Fault("corrupt", None, lost.path, why, hint)


_REPAIR: Final = "make it anew: `zgstore verify{revs} --repair --recipe RECIPE`, or `--from STORE`"


def _repair(refs: Sequence[str]) -> str:
    named = [name for name in refs if "@" not in name and " " not in name]
    return _REPAIR.format(revs=f" {named[0]}" if named else "")
