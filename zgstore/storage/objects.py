"""Immutable files named by their digest: durable writes, verified opens, trash, quarantine."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from zgstore.errors import Corrupt, Missing
from zgstore.format import canonical
from zgstore.format.digest import Digest, digest_of
from zgstore.format.fields import raw_digests
from zgstore.storage.drafts import Draft
from zgstore.storage.files import (
    Stat,
    directory,
    faults,
    not_regular,
    open_regular,
    read_all,
    rename_new,
)
from zgstore.storage.hashing import hash_file
from zgstore.storage.names import FAMILIES, PREFIXES, foreign, names_in, packed_names, packed_names_in
from zgstore.storage.trash import Trash, Trashed

__all__ = ["FAMILIES", "META_KINDS", "PREFIXES", "Objects", "Stat", "Trashed"]

META_KINDS: Final = ("page", "snapshot", "record")

Trusted = Callable[[Digest, Stat], bool]


def nobody_trusts(_digest: Digest, _stat: Stat) -> bool:
    """No stamp vouches for a file: it is rehashed."""
    return False


class Objects(Trash):
    """The two families of immutable files: blobs under ``objects/``, pages, snapshots and records under ``meta/``.

    Args:
        root: The store.
        file_mode: Permissions of an object: readable, never writable.
        dir_mode: Permissions of folders.
        trusted: Whether a valid stamp vouches for a blob that is already there.
    """

    def __init__(self, root: Path, *, file_mode: int, dir_mode: int, trusted: Trusted = nobody_trusts) -> None:
        super().__init__(root, dir_mode=dir_mode)
        self._file_mode = file_mode
        self._trusted = trusted
        self._dirty: set[tuple[str, str]] = set()
        self._syncing = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_dirty": set(), "_syncing": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _syncing=threading.Lock())

    # -- looking ---------------------------------------------------------------------------------------------------

    def path(self, digest: Digest, family: str) -> Path:
        """Where the object lies, or would."""
        name = digest.hex
        return Path(
            f"{self.root}/{family}/{name[:2]}/{name}{FAMILIES[family]}"
        )  # put together at once: a fifth of the time

    def open(self, digest: Digest, family: str, *, size: int | None = None) -> int:
        """A close-on-exec descriptor to read the object by; the caller closes it.

        Args:
            digest: Its name.
            family: Its family.
            size: What its page says that it has, where that is known: one of another size need not be read to its end.

        Raises:
            Missing: if it is not there.
            Corrupt: if it is not a regular file, or has another size.
        """
        path = self.path(digest, family)
        try:
            with faults(f"opening {path}", but_absence=True), directory(self.root, family, path.parent.name) as folder:
                handle = open_regular(folder, path.name, path)
        except FileNotFoundError as error:
            raise self.missing(digest, family) from error
        actual = os.fstat(handle).st_size
        if size is not None and actual != size:
            os.close(handle)
            raise self._corrupt(digest, family, f"it has {actual} bytes, and its page says {size}", actual)
        return handle

    def missing(self, digest: Digest, family: str) -> Missing:
        """The error that says so, and what brings it back."""
        what = "blob" if family == "objects" else "metadata object"
        trashed = self.in_trash(digest, family)
        return Missing(
            f"the {what} {digest.short} is {'in the trash' if trashed else 'missing'}",
            hint="tag its snapshot, which takes it out of the trash: `zgstore tag NAME DIGEST`"
            if trashed
            else "make it anew: `zgstore verify --repair --recipe RECIPE`, or `--from STORE`",
            object=str(digest),
            path=str(self.path(digest, family)),
        )

    def stat(self, digest: Digest, family: str) -> Stat | None:
        """What the object's file looks like now; None if it is not there.

        Raises:
            Corrupt: if what has its name is not a regular file.
        """
        return self.stats([digest], family)[0]

    def stats(self, digests: Iterable[Digest], family: str, *, strict: bool = True) -> list[Stat | None]:
        """``stat`` of many, in their order; if not ``strict``, what is not a regular file counts as not there."""
        found: list[Stat | None] = []
        extension = FAMILIES[family]
        with faults(f"looking into {family}"), directory(self.root, family) as folder:
            for digest in digests:
                name = digest.raw.hex()
                try:
                    entry = os.stat(f"{name[:2]}/{name}{extension}", dir_fd=folder, follow_symlinks=False)
                except (FileNotFoundError, NotADirectoryError):
                    found.append(None)
                    continue
                regular = stat.S_ISREG(entry.st_mode)
                if strict and not regular:
                    raise not_regular(self.path(digest, family))
                found.append(Stat.of(entry) if regular else None)
        return found

    def absent(self, raws: Sequence[bytes], family: str) -> list[bytes]:
        """Which of these raw digests are not there: by listing folders where many are asked for, else one by one."""
        with faults(f"looking into {family}"), directory(self.root, family) as folder:
            # A listed name takes a tenth of the time of a stat.
            if len(raws) >= 1024 and len(names_in(folder, "00")) * len(PREFIXES) < 8 * len(raws):
                there: set[bytes] = set()
                for prefix in PREFIXES:
                    there.update(raw_digests(packed_names_in(folder, prefix, family)))
                return [raw for raw in raws if raw not in there]
        found = self.stats(map(Digest, raws), family)
        return [raw for raw, each in zip(raws, found, strict=True) if each is None]

    def read_meta(self, digest: Digest, kind: str) -> bytes:
        """A page, snapshot or record, whole and verified.

        Raises:
            Missing: if it is not there.
            Corrupt: if its bytes are not what its name says, or too many.
        """
        path = self.path(digest, "meta")
        try:
            with faults(f"reading {path}", but_absence=True), directory(self.root, "meta", path.parent.name) as folder:
                body = read_all(folder, path.name, path, limit_bytes=canonical.MAX_BYTES)
        except FileNotFoundError as error:
            raise self.missing(digest, "meta") from error
        actual = digest_of(kind, body)
        if actual != digest:
            raise self._corrupt(digest, "meta", f"its bytes hash to {actual.short} as a {kind}", str(actual))
        return body

    def kind_of(self, digest: Digest) -> str | None:
        """Which kind of metadata hashes to this name; None if none does.

        Raises:
            Missing: if it is not there.
        """
        for kind in META_KINDS:
            with contextlib.suppress(Corrupt):
                self.read_meta(digest, kind)
                return kind
        return None

    def rehash(self, digest: Digest, family: str, *, kind: str | None = None, threads: int = 1) -> Stat:
        """Read every byte of the object and compare its digest.

        Args:
            digest: Its name.
            family: Its family.
            kind: For metadata, what it is hashed as; None tries each kind.
            threads: Threads that hash one piece together.

        Returns:
            What it looked like before its bytes were read, so that after a change meanwhile a stamp of it does not fit.

        Raises:
            Missing: if it is not there.
            Corrupt: if its bytes are not what its name says.
        """
        kinds: tuple[str | None, ...] = (None,) if family == "objects" else (kind,) if kind else META_KINDS
        handle = self.open(digest, family)
        try:
            before = Stat.of(os.fstat(handle))
            if family == "meta" and before.size > canonical.MAX_BYTES:
                raise self._corrupt(digest, family, f"no metadata has {before.size} bytes", before.size)
            with faults(f"reading {self.path(digest, family)}"):
                actual, _ = hash_file(handle, kinds, threads=threads)
        finally:
            os.close(handle)
        if digest not in actual:
            why = f"its bytes hash to {actual[0].short} ({before.size} bytes)"
            raise self._corrupt(digest, family, why, str(actual[0]))
        return before

    def _corrupt(self, digest: Digest, family: str, why: str, actual: object) -> Corrupt:
        path = self.path(digest, family)
        return Corrupt(
            f"{path} is corrupt: {why}",
            hint="make it anew: `zgstore verify --repair --recipe RECIPE`, or `--from STORE`",
            object=str(digest),
            expected=str(digest),
            actual=actual,
            path=str(path),
        )

    def names(self, family: str) -> Iterator[bytes]:
        """Raw digests of what is there, by listing alone; names that are none are left to ``foreign``."""
        for packed in packed_names(self.root, family):
            yield from raw_digests(packed)

    def packed_names(self, family: str) -> Iterator[bytes]:
        """The same joined, folder by folder: a million names take half a second."""
        return packed_names(self.root, family)

    def foreign(self) -> Iterator[Path]:
        """What lies in ``objects/`` and ``meta/`` and is no object: other names, links, folders, devices."""
        return foreign(self.root)

    # -- writing (FORMAT 7) ----------------------------------------------------------------------------------------

    def draft(self, session_fd: int, *, size_hint: int = 0, kind: str | None = None) -> Draft:
        """A new file in a session's folder; see ``Draft``."""
        return Draft(session_fd, mode=self._file_mode, size_hint=size_hint, kind=kind)

    def place(self, draft: Draft, digest: Digest, family: str, *, kind: str | None = None) -> bool:
        """Give a finished draft its name.

        Rename without replacing. If the name is there: trusted by its stamp, else rehashed; if it is bad, it goes to
        quarantine and the new file takes its place.

        Returns:
            False if a sound file of that name was there, and the draft was not needed.
        """
        path = self.path(digest, family)
        while True:
            with (
                faults(f"placing {path}"),
                contextlib.suppress(FileExistsError),
                directory(self.root, family, path.parent.name, make=self._dir_mode) as folder,
            ):
                rename_new(draft.dir_fd, draft.name, folder, path.name)
                draft.placed()
                self.touch([digest.raw], family)
                return True
            if self.is_sound(digest, family, kind=kind, size=draft.size):
                # Whoever renamed it may not have synced the folder yet.
                self.touch([digest.raw], family)
                draft.discard()
                return False
            self.quarantine(digest, family)

    def is_sound(self, digest: Digest, family: str, *, kind: str | None = None, size: int | None = None) -> bool:
        """Whether the file of that name may be trusted: by its stamp, else by its bytes.

        Args:
            digest: Its name.
            family: Its family.
            kind: For metadata, what it is hashed as.
            size: What it should have, where that is known: one of another size is not read, however long it is.
        """
        try:
            found = self.stat(digest, family)
            if found is not None and size not in {None, found.size}:
                return False
            # Metadata is small: hashing it takes less than looking for its stamp.
            if found is not None and family == "objects" and self._trusted(digest, found):
                return True
            self.rehash(digest, family, kind=kind)
        except (Corrupt, Missing):  # missing: gone meanwhile, so the rename is tried again
            return False
        return True

    def restore(self, digest: Digest, family: str) -> bool:
        """As ``Trash.restore``; its folder is dirty then."""
        found = super().restore(digest, family)
        if found:
            self.touch([digest.raw], family)
        return found

    def touch(self, raws: Iterable[bytes], family: str) -> None:
        """Count the folders of these objects as dirty."""
        folders = {(family, PREFIXES[raw[0]]) for raw in raws}
        with self._syncing:
            self._dirty |= folders

    def sync(self) -> None:
        """``fsync`` the folders dirtied since the last sync; other threads' syncs wait, so none returns early."""
        with self._syncing:
            while self._dirty:
                family, prefix = next(iter(self._dirty))
                with faults(f"syncing {family}/{prefix}"), directory(self.root, family, prefix) as folder:
                    os.fsync(folder)
                self._dirty.discard((family, prefix))
