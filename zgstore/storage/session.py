"""One writer: its lease, its folder in ``tmp/``, and the steps of FORMAT 7 and 8 in their order."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from zgstore.errors import Invalid, Missing, ZgError
from zgstore.format.digest import Digest, digest_of
from zgstore.format.fields import all_digests, raw_digests
from zgstore.format.manifest import Record, Snapshot
from zgstore.format.pages import Blob
from zgstore.storage import partials
from zgstore.storage.drafts import Draft
from zgstore.storage.files import directory, faults, remove_tree
from zgstore.storage.leases import Lease
from zgstore.storage.names import FAMILIES
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
        self.new_bytes = 0  # of blobs that the store did not have
        self._mutex = threading.RLock()
        self._reserved: dict[str, set[bytes]] = {family: set() for family in FAMILIES}
        self._pid = os.getpid()
        self._lease: Lease = store.leases.take(purpose)
        try:
            self._folder = self._open_folder()
        except BaseException:
            self._lease.close()
            raise

    @property
    def uuid(self) -> str:
        """Of its lease, its folder in ``tmp/``, and its build."""
        return self._lease.uuid

    def _open_folder(self) -> int:
        with (
            faults("making a session's folder"),
            directory(self.store.path, "tmp", self.uuid, make=self.store.modes.folder) as folder,
        ):
            return os.dup(folder)

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
        if self.store.objects.place(draft, blob.digest, "objects"):
            with self._mutex:
                self.new_bytes += blob.size
        return blob

    def put_meta(self, kind: str, body: bytes) -> Digest:
        """The same for a page, snapshot or record.

        Args:
            kind: ``page``, ``snapshot`` or ``record``.
            body: Its canonical bytes.
        """
        digest = digest_of(kind, body)
        (there,) = self.reserve([digest], "meta")
        if there and self.store.objects.is_sound(digest, "meta", kind=kind, size=len(body)):
            return digest
        self.store.objects.place(self._written(kind, body), digest, "meta", kind=kind)
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
        with self._step():
            self._name([digest.raw for digest in wanted], family)
            found = self.store.objects.stats(wanted, family, strict=False)
            for at, digest in enumerate(wanted):
                if found[at] is None and self.store.objects.restore(digest, family):
                    found[at] = self.store.objects.stats([digest], family, strict=False)[0]
        hits = [
            stat is not None and (not isinstance(each, Blob) or stat.size == each.size)
            for each, stat in zip(digests, found, strict=True)
        ]
        # Whoever renamed them may not have synced the folder yet.
        self.store.objects.touch((digest.raw for digest, hit in zip(wanted, hits, strict=True) if hit), family)
        return hits

    @contextlib.contextmanager
    def _step(self) -> Iterator[contextlib.ExitStack]:
        """Hold the store lock shared, and see that the lease is still linked; if not, take it and reserve again."""
        if self._pid != os.getpid():
            raise Invalid("this session belongs to the process that this one was forked from", hint="open another")
        with self._mutex, contextlib.ExitStack() as hold:
            hold.enter_context(self.store.leases.store_lock(exclusive=False))
            if not self.store.leases.see_linked(self._lease):
                self._look_again()
            yield hold

    def _name(self, raws: Iterable[bytes], family: str) -> None:
        reserved = self._reserved[family]
        fresh = [raw for raw in dict.fromkeys(raws) if raw not in reserved]
        self._lease.add_raw(b"".join(fresh))
        reserved.update(fresh)

    def _look_again(self) -> None:
        """A collector took us for dead: what the lease names again is looked for again."""
        for family, raws in self._reserved.items():
            self._bring_back(list(raws), family)
        if not self._has_folder():  # swept away as a leftover, and drafts with it
            fresh = self._open_folder()
            os.dup2(fresh, self._folder, inheritable=False)
            os.close(fresh)

    def _has_folder(self) -> bool:
        """Whether the folder that is held is the one in ``tmp/``: another may be on its way out of there."""
        with contextlib.suppress(FileNotFoundError), directory(self.store.path, "tmp", self.uuid) as folder:
            return os.path.sameopenfile(folder, self._folder)
        return False

    def _bring_back(self, raws: Sequence[bytes], family: str) -> list[bytes]:
        """Restore from the trash what is not there; what is not there either."""
        objects = self.store.objects
        absent = objects.absent(raws, family)
        return [raw for raw in absent if not objects.restore(Digest(raw), family)]

    def _is_here(self, digest: Digest) -> bool:
        """Whether metadata is there or comes out of the trash; what is no regular file is to be replaced."""
        objects = self.store.objects
        return objects.stats([digest], "meta", strict=False) != [None] or objects.restore(digest, "meta")

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
        parts = self._parts(snapshot, columns)
        drafts = [(digest, "snapshot", self._written("snapshot", body))]
        if record is not None:
            drafts.append((digest_of("record", record.encode()), "record", self._written("record", record.encode())))
        self.sync()  # of what is many before the lock, so that it is held for milliseconds
        with self._step() as hold:
            self._require(digest, parts)
            self._name([each.raw for each, _, _ in drafts], "meta")
            with partials.alone(self.store.path, mode=self.store.modes.file):
                was_here = self._is_here(digest)
                # Before the snapshot: one that is here without a marker counts as whole.
                self._mark_part(digest, columns, was_here=was_here)
                for name, hashed_as, draft in drafts:
                    self.store.objects.place(draft, name, "meta", kind=hashed_as)
            self.sync()
            if ref is not None:
                told = drafts[1][0] if record is not None else None
                self.store.refs.move(
                    ref, kind, digest, expect=expect, record=told,
                    last_look=lambda: self._see_it_stayed(hold, digest, parts, [each.raw for each, _, _ in drafts]),
                )  # fmt: skip
        return digest

    @contextlib.contextmanager
    def confirmed(self, digest: Digest) -> Iterator[Callable[[], None]]:
        """An existing snapshot, reserved with all that it refers to; in the block it is known whole, under the lock.

        What is in the trash comes back. There it may be given a name; yields the last look before that is seen.

        Raises:
            Missing: naming what is not there.
        """
        if self.reserve([digest], "meta") != [True]:
            raise self.store.objects.missing(digest, "meta")
        snapshot = self.store.snapshot(digest)
        expected = partials.expected(self.store.path, digest)
        parts = self._parts(snapshot, expected)
        self.sync()
        with self._step() as hold:
            self._require(digest, parts)
            if self._bring_back([digest.raw], "meta"):
                raise self.store.objects.missing(digest, "meta")
            self.sync()
            yield lambda: self._see_it_stayed(hold, digest, parts, [digest.raw])

    def _parts(self, snapshot: Snapshot, columns: Collection[str] | None) -> dict[str, list[bytes]]:
        """What a snapshot refers to: blobs (of the named columns, and constants) and pages, each once, by family.

        Pages are reserved before they are read, and come out of the trash where they are there.
        """
        named = (snapshot.root, snapshot.dropped, self.store.rows_root_of(snapshot))
        pages = [page for page in named if page is not None]
        self._require_pages(pages)
        below = list(all_digests(self.store.root(snapshot).leaves))
        rows = self.store.rows_root(snapshot)
        if rows is not None:
            below += all_digests(rows.pages)
        self._require_pages(below)
        places = [at for at, each in enumerate(snapshot.columns) if columns is None or each.name in columns]
        blobs = dict.fromkeys(constant.blob.raw for constant in snapshot.constants)
        for leaf in self.store.leaves(snapshot):
            for packed in (leaf.blobs[place] for place in places):
                blobs.update(dict.fromkeys(raw_digests(packed)))
        return {"objects": list(blobs), "meta": [page.raw for page in dict.fromkeys(pages + below)]}

    def _require_pages(self, pages: Sequence[Digest]) -> None:
        for page, hit in zip(pages, self.reserve(pages, "meta"), strict=True):
            if not hit:
                raise self.store.objects.missing(page, "meta")

    def _require(self, snapshot: Digest, parts: Mapping[str, Sequence[bytes]]) -> None:
        """See that all is there, named in the lease first; under the lock."""
        absent = []
        for family, raws in parts.items():
            self._name(raws, family)
            absent += self._bring_back(raws, family)
            self.store.objects.touch(raws, family)
        if absent:
            raise missing_parts(snapshot, [Digest(raw) for raw in absent])

    def _see_it_stayed(
        self, hold: contextlib.ExitStack, snapshot: Digest, parts: Mapping[str, Sequence[bytes]], own: Sequence[bytes]
    ) -> None:
        """Look once more, if a host that slept since the first look has lost its lease, and with it lock and objects.

        With the lease still there all of it is, until whatever keeps it from now on.
        """
        if not self._lease.linked():
            hold.enter_context(self.store.leases.store_lock(exclusive=False))  # a file server gave the first away
            self.store.leases.see_linked(self._lease)
            self._look_again()
            self._require(snapshot, {**parts, "meta": [*parts["meta"], *own]})
            self.sync()

    def _mark_part(self, snapshot: Digest, columns: Sequence[str] | None, *, was_here: bool) -> None:
        store = self.store
        expected = partials.expected(store.path, snapshot)
        if columns is None:
            if expected is not None:
                partials.clear(store.path, snapshot)
        elif not was_here or expected is not None:
            # A marker that outlived its snapshot says nothing of what is here now.
            union = {*columns, *(expected or () if was_here else ())}
            partials.mark(store.path, snapshot, union, modes=store.modes)

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
    are = "1 object that is" if len(absent) == 1 else f"{len(absent)} objects that are"
    return Missing(
        f"{snapshot.short} refers to {are} missing: {named}",
        hint="make them anew: `zgstore verify --repair --recipe RECIPE`, or `--from STORE`; or rerun the build",
        object=str(absent[0]),
        objects=[str(digest) for digest in absent],
        snapshot=str(snapshot),
    )
