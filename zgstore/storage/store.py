"""One store: files, index, refs, leases and memos joined; names resolved, snapshots read, plans made. Bytes only."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from zgstore.errors import Corrupt, Invalid, Missing, NoSpace, NotFound, ZgError
from zgstore.format.digest import DIGEST_BYTES, Digest, digest_prefix
from zgstore.format.fields import all_digests
from zgstore.format.manifest import Record, Snapshot
from zgstore.format.pages import Dropped, LeafPage, RootPage, RowsPage, RowsRoot, Shard
from zgstore.format.readplan import ReadPlan
from zgstore.storage import plans
from zgstore.storage.builds import Build
from zgstore.storage.config import CONFIG, OBJECT_MODE, POLICIES, make_store, read_config
from zgstore.storage.files import Modes, Stat, clock, directory, faults, listing
from zgstore.storage.index import Index, Stamp
from zgstore.storage.leases import Lease, Leases
from zgstore.storage.memos import Memos
from zgstore.storage.names import FAMILIES, parse_name
from zgstore.storage.objects import Objects
from zgstore.storage.refs import ANY, Expectation, Refs
from zgstore.storage.session import Session

__all__ = ["ANY", "Session", "Store"]

FLOOR_BYTES: Final = (1 << 20, 256 << 20)  # of a hundredth of the file system: at least, at most
_AT = re.compile(r"(.+)@\{(\d{1,9})\}")


@dataclass(frozen=True, slots=True)
class Store:
    """A store by its path and configuration: cheap to open, picklable, holding nothing open.

    Args:
        path: Absolute.
        id: UUID given at init.
        policy: ``private``, ``group`` or ``world-read``.
        objects: Its immutable files.
        index: Its stamps.
        refs: Its names.
        leases: Who uses it.
        memos: What was computed.
    """

    path: Path
    id: str
    policy: str
    objects: Objects
    index: Index
    refs: Refs
    leases: Leases
    memos: Memos

    # -- opening ---------------------------------------------------------------------------------------------------

    @classmethod
    def open(cls, path: str | Path) -> Store:
        """Open the store at ``path``.

        Raises:
            NotFound: if there is none.
            Invalid: if it needs a format or a feature that this version does not know.
            Corrupt: if its configuration cannot be read.
        """
        root = Path(os.path.abspath(path))  # noqa: PTH100  (a link to a store stays the name people gave it)
        config = read_config(root)
        modes = POLICIES[config.policy]
        index = Index(root, modes, folder=config.index)
        return cls(
            path=root,
            id=config.id,
            policy=config.policy,
            objects=Objects(root, file_mode=OBJECT_MODE, dir_mode=modes.folder, trusted=_Trust(index, root)),
            index=index,
            refs=Refs(root, modes),
            leases=Leases(root, modes),
            memos=Memos(root, modes),
        )

    @classmethod
    def init(cls, path: str | Path, *, policy: str = "private") -> Store:
        """Make the store that ``path`` is; one that is there stays as it is, and is opened.

        Args:
            path: A folder, made where missing.
            policy: Who may use it: ``private``, ``group`` or ``world-read``; holds whatever the umask.

        Raises:
            Invalid: for an unknown policy, or a place that cannot be written.
        """
        root = Path(os.path.abspath(path))  # noqa: PTH100
        with contextlib.suppress(PermissionError):  # there is something, and opening it says what
            if not (root / CONFIG).exists():
                make_store(root, policy)
        return cls.open(root)

    @property
    def modes(self) -> Modes:
        """Permissions under the policy."""
        return POLICIES[self.policy]

    # -- the machine -----------------------------------------------------------------------------------------------

    def now(self) -> float:
        """The file system's time, in seconds: the one clock that decides ages."""
        return clock(self.path)

    def check_space(self, bytes_needed: int) -> None:
        """See that the disk holds so many more bytes, and keeps a floor free.

        Raises:
            NoSpace: if not; says what is needed and what is free.
        """
        with faults(f"asking for the free space of {self.path}"):
            disk = os.statvfs(self.path)
        free = disk.f_bavail * disk.f_frsize
        floor = min(max(FLOOR_BYTES[0], disk.f_blocks * disk.f_frsize // 100), FLOOR_BYTES[1])
        if bytes_needed + floor > free:
            raise NoSpace(
                f"{bytes_needed} bytes are needed, and {floor} stay free, but {self.path} has {free}",
                hint="free some space, with `zgstore gc` or otherwise, or use a store elsewhere",
                needed_bytes=bytes_needed,
                free_bytes=free,
                floor_bytes=floor,
            )
        if disk.f_files and disk.f_favail == 0:
            raise NoSpace(f"{self.path} has no inode left", hint="remove some files", needed_bytes=bytes_needed)

    # -- names -----------------------------------------------------------------------------------------------------

    def resolve(self, rev: str) -> Digest:
        """The snapshot that a REV names: ref, then tag, then digest or unambiguous prefix; ``NAME@{N}``.

        Raises:
            NotFound: if nothing is named so; the hint has the nearest names.
            Invalid: if a prefix fits several snapshots (named), or the digest is of something else.
        """
        named = self.refs.get(rev)
        if named is not None:
            return named
        if match := _AT.fullmatch(rev):
            return self.refs.at(match[1], int(match[2]))
        prefix = digest_prefix(rev)
        if prefix is None:
            raise NotFound(f"there is no ref, tag or digest {rev!r}", hint=self.refs.nearest(rev), rev=rev)
        found = [each for each in self._starting("meta", prefix) if self._may_be_snapshot(each)]
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(digest.hex[: max(16, len(prefix) + 4)] for digest in found[:10])
            raise Invalid(f"{rev!r} fits {len(found)} snapshots: {names}", hint="give more digits", rev=rev)
        others = [(family, each) for family in FAMILIES for each in self._starting(family, prefix)]
        if others:
            what = "blob" if others[0][0] == "objects" else "page or record"
            raise Invalid(f"{rev!r} is a {what}, not a snapshot", hint=f"see what keeps it: `zgstore why {rev}`")
        raise NotFound(f"there is no snapshot {rev!r}", hint=self.refs.nearest(rev), rev=rev)

    def find(self, prefix: str) -> list[tuple[str, Digest]]:
        """Every object, of either family, whose digest begins so (at least 6 digits), the trash included."""
        digits = digest_prefix(prefix)
        families = () if digits is None else FAMILIES
        return [(family, each) for family in families for each in self._starting(family, digits or "")]

    def _starting(self, family: str, prefix: str) -> list[Digest]:
        found: set[Digest | None] = set()
        folders = [(family, prefix[:2]), *(("trash", epoch, family) for epoch in self.objects.epochs())]
        for parts in folders:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError), directory(self.path, *parts) as folder:
                found.update(parse_name(name, family) for name in listing(folder) if name.startswith(prefix))
        return sorted(digest for digest in found if digest is not None)

    def _may_be_snapshot(self, digest: Digest) -> bool:
        """Whether it hashes as a snapshot, or as nothing (a corrupt one is still the one that was meant)."""
        try:
            return self.objects.kind_of(digest) in {"snapshot", None}
        except Missing:  # in the trash: that it is a snapshot shows when it is taken out
            return True

    def point(
        self, name: str, kind: str, digest: Digest, *, expect: Digest | Expectation | None = ANY, force: bool = False,
        record: Record | None = None,
    ) -> None:  # fmt: skip
        """Make a ref or tag name an existing snapshot: all of it is seen to be there, or taken out of the trash.

        Args:
            name: The ref's name.
            kind: ``head`` or ``tag``; a tag moves only by ``force``.
            digest: The snapshot.
            expect: What the ref must name now; None if it must not exist.
            force: Move a tag that names something else.
            record: Who, when and why.

        Raises:
            Missing: naming what is not there; the ref stays.
            Conflict: if it does not name what was expected.
        """
        with self.writing(f"set {name}"[:100]) as session:
            told = session.put_meta("record", record.encode()) if record else None
            with session.confirmed(digest) as last_look:
                session.sync()
                if kind == "tag" and not force and expect is ANY:
                    expect = digest if self.refs.get(name, kind) == digest else None
                self.refs.move(name, kind, digest, expect=expect, record=told, last_look=last_look)

    def hold(self, name: str, digest: Digest, reason: str = "") -> None:
        """Keep an existing snapshot from gc until ``refs.unhold(name)``; the same check as ``point``.

        Raises:
            Missing: naming what is not there.
            Conflict: if the name holds something else.
        """
        with self.writing(f"hold {name}"[:100]) as session, session.confirmed(digest) as last_look:
            session.sync()
            self.refs.hold(name, digest, reason)
            try:
                last_look()
            except Missing:
                self.refs.unhold(name)
                raise

    # -- reading ---------------------------------------------------------------------------------------------------

    def snapshot(self, digest: Digest) -> Snapshot:
        """A snapshot by its digest. Raises Missing, Corrupt."""
        return Snapshot.decode(self.objects.read_meta(digest, "snapshot"))

    def root(self, snapshot: Snapshot) -> RootPage:
        """Its root page. Raises Missing, Corrupt."""
        root = RootPage.decode(self.objects.read_meta(snapshot.root, "page"))
        if len(root.column_bytes) != len(snapshot.columns):
            raise _not_together(snapshot.root, "the root page has other columns than its snapshot")
        return root

    def leaf(self, digest: Digest) -> LeafPage:
        """A leaf page by its digest. Raises Missing, Corrupt."""
        return LeafPage.decode(self.objects.read_meta(digest, "page"))

    def leaves(self, snapshot: Snapshot) -> Iterator[LeafPage]:
        """Its leaf pages in order. Raises Missing, Corrupt."""
        for digest in all_digests(self.root(snapshot).leaves):
            leaf = self.leaf(digest)
            if len(leaf.blobs) != len(snapshot.columns):
                raise _not_together(digest, "a leaf page has other columns than its snapshot")
            yield leaf

    def shards(self, snapshot: Snapshot) -> Iterator[Shard]:
        """Its shards in order. Raises Missing, Corrupt."""
        for leaf in self.leaves(snapshot):
            for at in range(len(leaf)):
                yield leaf.shard(at)

    def dropped(self, snapshot: Snapshot) -> Dropped:
        """The rows that readers skip. Raises Missing, Corrupt."""
        if snapshot.dropped is None:
            return Dropped()
        return Dropped.decode(self.objects.read_meta(snapshot.dropped, "page"))

    def record(self, digest: Digest) -> Record:
        """A record by its digest. Raises Missing, Corrupt."""
        return Record.decode(self.objects.read_meta(digest, "record"))

    def rows_root_of(self, snapshot: Snapshot) -> Digest | None:
        """The root of its row pages; None where the pins name none."""
        raw = snapshot.pins.data.get("digest")
        return Digest(raw) if isinstance(raw, bytes) and len(raw) == DIGEST_BYTES else None

    def rows_root(self, snapshot: Snapshot) -> RowsRoot | None:
        """The row pages of the stream that it was made over; None where the pins name none. Raises Missing, Corrupt."""
        digest = self.rows_root_of(snapshot)
        return None if digest is None else RowsRoot.decode(self.objects.read_meta(digest, "page"))

    def row_digests(self, snapshot: Snapshot) -> bytes:
        """Its rows' digests joined, 32 bytes each, in the data's order; empty where the pins name none."""
        root = self.rows_root(snapshot)
        pages = () if root is None else all_digests(root.pages)
        return b"".join(RowsPage.decode(self.objects.read_meta(page, "page")).digests for page in pages)

    def record_of(self, snapshot: Digest) -> Record | None:
        """The newest record about a snapshot: named by a reflog entry, else found among the metadata; None if none.

        What is torn among the refs hides no record that is not, and is left to ``verify`` to name.
        """
        found, torn = [], list[ZgError]()
        for ref in self.refs.list(damaged=torn):
            with contextlib.suppress(NotFound):  # removed since it was listed
                for entry in self.refs.log(ref.name, ref.kind, damaged=torn):
                    if entry.new == snapshot and entry.record is not None:
                        with contextlib.suppress(Missing, Corrupt):
                            found.append(self.record(entry.record))
        if not found:
            for raw in self.objects.names("meta"):
                with contextlib.suppress(Missing, Corrupt):
                    record = self.record(Digest(raw))
                    if record.snapshot == snapshot:
                        found.append(record)
        return max(found, key=lambda record: record.time_seconds, default=None)

    def read_plan(self, rev: str | Digest, columns: Sequence[str] | None = None) -> ReadPlan:
        """All that a reader opens files by; presence and stamps are looked up here. See ``plans.read_plan``."""
        return plans.read_plan(self, rev if isinstance(rev, Digest) else self.resolve(rev), columns)

    def build_plan(
        self, build: str, columns: Sequence[str] | None = None, *, grown: Build | None = None
    ) -> tuple[ReadPlan, bool]:
        """The same of a build that is still growing, and whether it is done. See ``plans.build_plan``."""
        return plans.build_plan(self, build, columns, grown=grown)

    # -- writing and using -----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def writing(self, purpose: str) -> Iterator[Session]:
        """A writer's session: its lease is taken first and closed last."""
        session = Session(self, purpose)
        try:
            yield session
        finally:
            session.close()

    @contextlib.contextmanager
    def using(self, digest: Digest, *, purpose: str = "read") -> Iterator[Lease | None]:
        """A reader's lease on a snapshot: lease first, then resolve, then check presence.

        Yields:
            The lease; None where the store cannot be written, so that only the grace times protect the reader.
        """
        lease = self.leases.try_take(purpose)
        try:
            if lease is not None:
                self.leases.name(lease, [digest])
            if self.objects.stat(digest, "meta") is None:
                raise self.objects.missing(digest, "meta")
            yield lease
        finally:
            if lease is not None:
                lease.close()

    def unkept(self, digest: Digest) -> str:
        """What to say to somebody who reads a snapshot without a lease; "" where a hold keeps it."""
        if any(hold.snapshot == digest for hold in self.refs.holds(damaged=[])):
            return ""
        return (
            f"{self.path} cannot be written here, so no lease keeps {digest.short} while it is read: "
            f"if its name goes, only the grace times of gc are left; have somebody `zgstore hold NAME {digest.short}`"
        )

    def stamp(self, verified: Sequence[tuple[Digest, str, Stat]]) -> None:
        """Remember that these objects (digest, family, stamp from before they were read) were read and found right."""
        now = self.now()
        self.index.put_stamps([(digest.raw, Stamp(stat, now, family)) for digest, family, stat in verified])


@dataclass(frozen=True, slots=True)
class _Trust:
    """Whether a valid stamp vouches for a file that is already there."""

    index: Index
    root: Path

    def __call__(self, digest: Digest, stat: Stat) -> bool:
        (stamp,) = self.index.stamps([digest.raw])
        return stamp is not None and stamp.fits(stat, clock(self.root))


def _not_together(page: Digest, why: str) -> Corrupt:
    return Corrupt(
        why,
        hint="run `zgstore verify` to see what it hurts and what mends it",
        object=str(page),
        expected="a page of it",
    )
