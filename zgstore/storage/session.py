"""One writer: its lease, its folder in ``tmp/``, and the steps of FORMAT 7 and 8 in their order."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from zgstore.errors import Invalid, Missing, ZgError
from zgstore.format.digest import Digest, digest_of
from zgstore.format.manifest import Blob, Record, RowsRoot, Snapshot, all_digests
from zgstore.storage import partials
from zgstore.storage.drafts import Draft
from zgstore.storage.files import directory, faults, remove_tree
from zgstore.storage.leases import Lease
from zgstore.storage.refs import ANY, Expectation

if TYPE_CHECKING:
    from zgstore.storage.store import Store

_LISTED: Final = 5  # digests named in a message


class Session:
    """What a writer holds: a lease, taken first and closed last, and a folder for what has no name yet.

    Safe to use from several threads. Made by ``Store.writing``.
    """

    def __init__(self, store: Store, purpose: str) -> None:
        self.store = store
        self.purpose = purpose
        self._mutex = threading.RLock()
        self._reserved: dict[tuple[str, Digest], None] = {}
        self._pid = os.getpid()
        self._lease: Lease = store.leases.take(purpose)
        try:
            with (
                faults("making a session's folder"),
                directory(store.path, "tmp", self._lease.uuid, make=store.dir_mode) as folder,
            ):
                self._folder = os.dup(folder)
        except BaseException:
            self._lease.close()
            raise

    @property
    def uuid(self) -> str:
        """Of its lease, its folder in ``tmp/``, and its build."""
        return self._lease.uuid

    # -- writing (FORMAT 7) ----------------------------------------------------------------------------------------

    def draft(self, size_hint: int = 0) -> Draft:
        """A new blob, to be written, then kept."""
        return self.store.objects.draft(self._folder, size_hint=size_hint)

    def keep(self, draft: Draft) -> Blob:
        """Give a draft its name: finish it, reserve it, place it; durable after the next ``sync``.

        Raises:
            NoSpace, Transient: as the disk says; nothing of it is kept.
        """
        blob = draft.finish()  # fdatasync
        self.reserve([blob.digest])
        self.store.objects.place(draft, blob.digest, "objects")
        return blob

    def put_meta(self, kind: str, body: bytes) -> Digest:
        """The same for a page, snapshot or record.

        Args:
            kind: ``page``, ``snapshot`` or ``record``.
            body: Its canonical bytes.
        """
        digest = digest_of(kind, body)
        if self.reserve([digest], "meta") == [True] and self.store.objects.is_sound(digest, "meta"):
            return digest
        draft = self._written(kind, body)
        self.store.objects.place(draft, digest, "meta")
        return digest

    def _written(self, kind: str, body: bytes) -> Draft:
        draft = self.store.objects.draft(self._folder, size_hint=len(body), kind=kind)
        draft.write(body)
        draft.finish()
        return draft

    def sync(self) -> None:
        """``fsync`` the dirty folders: per shard, before its actions."""
        self.store.objects.sync()

    # -- reserving (FORMAT 8) --------------------------------------------------------------------------------------

    def reserve(self, digests: Sequence[Digest | Blob], family: str = "objects") -> list[bool]:
        """Append to the lease first, then look: present → hit; in trash → move back → hit; else miss.

        Args:
            digests: What is needed; given as ``Blob``, a file of another size is a miss too.
            family: ``objects`` or ``meta``.

        Returns:
            Whether each is there, and stays while this session lasts.
        """
        wanted = [each.digest if isinstance(each, Blob) else each for each in digests]
        sizes = [each.size if isinstance(each, Blob) else None for each in digests]
        with self._step():
            self._name(wanted, family)
            return self._look(wanted, sizes, family)

    @contextlib.contextmanager
    def _step(self) -> Iterator[None]:
        """Hold the store lock shared, and see that the lease is still linked; if not, take one and reserve again."""
        if self._pid != os.getpid():
            raise Invalid("this session belongs to the process that this one was forked from", hint="open another")
        with self._mutex, self.store.leases.store_lock(exclusive=False):
            if not self._lease.linked():
                self._take_again()
            yield

    def _name(self, digests: Iterable[Digest], family: str) -> None:
        fresh = [digest for digest in dict.fromkeys(digests) if (family, digest) not in self._reserved]
        self._lease.add(fresh)
        self._reserved.update(((family, digest), None) for digest in fresh)

    def _look(self, digests: Sequence[Digest], sizes: Sequence[int | None], family: str) -> list[bool]:
        objects = self.store.objects
        hits = []
        for digest, size, found in zip(digests, sizes, objects.stats(digests, family), strict=True):
            there = found is not None or objects.restore(digest, family)
            if there and size is not None:
                found = found or objects.stat(digest, family)  # noqa: PLW2901
                there = found is not None and found.size == size
            hits.append(there)
        # Whoever renamed them may not have synced the folder yet.
        objects.touch((digest for digest, hit in zip(digests, hits, strict=True) if hit), family)
        return hits

    def _take_again(self) -> None:
        """A collector took us for dead: everything that was reserved is reserved again, under the same name."""
        self._lease.close()
        self._lease = self.store.leases.take(self.purpose, uuid=self._lease.uuid)
        self._lease.add(digest for _, digest in self._reserved)
        for family in ("objects", "meta"):
            mine = [digest for each, digest in self._reserved if each == family]
            self._look(mine, [None] * len(mine), family)

    # -- publishing (FORMAT 7.4, 8) --------------------------------------------------------------------------------

    def publish(
        self, snapshot: Snapshot, *, record: Record | None = None, ref: str | None = None, kind: str = "head",
        expect: Digest | Expectation | None = ANY, columns: Sequence[str] | None = None,
    ) -> Digest:  # fmt: skip
        """Make a snapshot visible: every blob present, snapshot in, record in, ref moved, under one hold of the lock.

        Args:
            snapshot: Its pages are in already.
            record: Who, when and how.
            ref: The name to move; None moves none.
            kind: ``head`` or ``tag``.
            expect: What the ref must name now; None if it must not exist.
            columns: Where only a part is here: the columns whose blobs must be; None for all.

        Returns:
            The snapshot's digest.

        Raises:
            Missing: naming what it refers to and is not there; nothing is published.
            Conflict: if the ref moved; the snapshot is in.
        """
        body = snapshot.encode()
        digest = digest_of("snapshot", body)
        blobs, pages = self.refers_to(snapshot, columns)
        drafts = [("snapshot", body)] + ([("record", record.encode())] if record else [])
        written = [(digest_of(name, each), self._written(name, each)) for name, each in drafts]
        with self._step():
            self._name((blob.digest for blob in blobs), "objects")
            self._name([*pages, *(each for each, _ in written)], "meta")
            self._require(blobs, pages, digest)
            was_here = self.store.objects.stat(digest, "meta") is not None
            for name, draft in written:
                self.store.objects.place(draft, name, "meta")
            self._mark_part(digest, columns, was_here=was_here)
            self.sync()
            if ref is not None:
                self.store.refs.move(ref, kind, digest, expect=expect, record=written[1][0] if record else None)
        return digest

    def adopt(self, digest: Digest) -> Snapshot:
        """Reserve an existing snapshot with all that it refers to, out of the trash where it is there.

        Raises:
            Missing: naming what is not there.
        """
        if self.reserve([digest], "meta") != [True]:
            raise self.store.objects.missing(digest, "meta")
        snapshot = self.store.snapshot(digest)
        expected = partials.expected(self.store.path, digest)
        columns = None if expected is None else sorted(expected)
        blobs, pages = self.refers_to(snapshot, columns)
        with self._step():
            self._name((blob.digest for blob in blobs), "objects")
            self._name(pages, "meta")
            self._require(blobs, pages, digest)
        self.sync()
        return snapshot

    @contextlib.contextmanager
    def confirmed(self, digest: Digest) -> Iterator[None]:
        """Hold the store lock with an existing snapshot seen to be whole under it: to name it, or to hold it."""
        snapshot = self.adopt(digest)
        expected = partials.expected(self.store.path, digest)
        blobs, pages = self.refers_to(snapshot, None if expected is None else sorted(expected))
        with self._step():
            self._require(blobs, [digest, *pages], digest)
            yield

    def refers_to(self, snapshot: Snapshot, columns: Sequence[str] | None) -> tuple[list[Blob], list[Digest]]:
        """The blobs (of the named columns, and constants) and pages of a snapshot, each once.

        Pages are reserved before they are read, and come out of the trash where they are there.
        """
        places = [at for at, each in enumerate(snapshot.columns) if columns is None or each.name in columns]
        blobs = {constant.blob: constant.size for constant in snapshot.constants}
        rows = self.store.rows_root_of(snapshot)
        pages = [page for page in (snapshot.root, snapshot.dropped, rows) if page is not None]
        self._require_pages(pages)
        leaves = list(all_digests(self.store.root(snapshot).leaves))
        if rows is not None:
            row_pages = RowsRoot.decode(self.store.objects.read_meta(rows, "page")).pages
            pages += list(all_digests(row_pages))
        pages += leaves
        self._require_pages(pages)
        for leaf_digest in leaves:
            leaf = self.store.leaf(leaf_digest)
            for at in range(len(leaf)):
                shard = leaf.shard(at)
                blobs.update((shard.blobs[place].digest, shard.blobs[place].size) for place in places)
        return [Blob(digest, size) for digest, size in blobs.items()], list(dict.fromkeys(pages))

    def _require_pages(self, pages: Sequence[Digest]) -> None:
        for page, hit in zip(pages, self.reserve(pages, "meta"), strict=True):
            if not hit:
                raise self.store.objects.missing(page, "meta")

    def _require(self, blobs: Sequence[Blob], pages: Sequence[Digest], snapshot: Digest) -> None:
        """See that all is there, under the lock; what is in the trash comes back."""
        digests = [blob.digest for blob in blobs]
        found = self._look(digests, [blob.size for blob in blobs], "objects")
        absent = [digest for digest, hit in zip(digests, found, strict=True) if not hit]
        absent += [p for p, hit in zip(pages, self._look(pages, [None] * len(pages), "meta"), strict=True) if not hit]
        if absent:
            raise missing_parts(snapshot, absent)

    def _mark_part(self, snapshot: Digest, columns: Sequence[str] | None, *, was_here: bool) -> None:
        store = self.store
        expected = partials.expected(store.path, snapshot)
        if columns is None:
            if expected is not None:
                partials.clear(store.path, snapshot)
        elif not was_here or expected is not None:
            union = {*columns, *(expected or ())}
            partials.mark(store.path, snapshot, union, mode=store.file_mode, dir_mode=store.dir_mode)

    # -- the end ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Remove the session's folder, then close the lease, last."""
        if self._pid != os.getpid():
            return
        try:
            if self._folder >= 0:
                os.close(self._folder)
                self._folder = -1
                with contextlib.suppress(OSError, ZgError), directory(self.store.path, "tmp") as tmp:
                    remove_tree(tmp, self._lease.uuid)
        finally:
            self._lease.close()


def missing_parts(snapshot: Digest, absent: Sequence[Digest]) -> Missing:
    """The error that a snapshot is not all there."""
    named = ", ".join(digest.short for digest in absent[:_LISTED]) + (", …" if len(absent) > _LISTED else "")
    return Missing(
        f"{len(absent)} of the objects that {snapshot.short} refers to are not there as they should be: {named}",
        hint="make them anew: `zgstore verify --repair --recipe RECIPE`, or `--from STORE`; or rerun the build",
        object=str(absent[0]),
        objects=[str(digest) for digest in absent],
        snapshot=str(snapshot),
    )
