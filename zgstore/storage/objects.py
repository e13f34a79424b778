"""Immutable files named by their digest: durable writes, verified opens, trash, quarantine."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from zgstore.errors import Corrupt, Missing, ZgError
from zgstore.format import canonical
from zgstore.format.digest import Digest, Hasher, digest_of
from zgstore.storage.drafts import PIECE_BYTES, Draft
from zgstore.storage.files import (
    directory,
    faults,
    listing,
    make_directory,
    not_regular,
    open_regular,
    read_all,
    remove_tree,
    rename_new,
)

FAMILIES: Final = {"objects": ".safetensors", "meta": ".msgpack"}
META_KINDS: Final = ("page", "snapshot", "record")
PREFIXES: Final = tuple(f"{byte:02x}" for byte in range(256))

_HEX = re.compile(r"[0-9a-f]{64}")


class Stat(NamedTuple):
    """What a file's stamp is made of."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, entry: os.stat_result) -> Stat:
        return cls(entry.st_dev, entry.st_ino, entry.st_size, entry.st_mtime_ns, entry.st_ctime_ns)

    @property
    def touched_seconds(self) -> float:
        """When it was last written, renamed or changed: what ages are counted from."""
        return max(self.mtime_ns, self.ctime_ns) / 1e9


class Trashed(NamedTuple):
    """One object in the trash."""

    epoch: str
    family: str
    digest: Digest
    size: int


Trusted = Callable[[Digest, str, Stat], bool]


def nobody_trusts(_digest: Digest, _family: str, _stat: Stat) -> bool:
    """No stamp vouches for a file: it is rehashed."""
    return False


class Objects:
    """The two families of immutable files: blobs under ``objects/``, pages, snapshots and records under ``meta/``.

    Args:
        root: The store.
        file_mode: Permissions of an object: readable, never writable.
        dir_mode: Permissions of folders.
        trusted: Whether a valid stamp vouches for a file that is already there.
    """

    def __init__(self, root: Path, *, file_mode: int, dir_mode: int, trusted: Trusted = nobody_trusts) -> None:
        self.root = root
        self._file_mode = file_mode
        self._dir_mode = dir_mode
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
        return self.root / family / digest.hex[:2] / (digest.hex + FAMILIES[family])

    def open(self, digest: Digest, family: str) -> int:
        """A close-on-exec descriptor to read the object by; the caller closes it.

        Raises:
            Missing: if it is not there.
            Corrupt: if it is not a regular file.
        """
        path = self.path(digest, family)
        try:
            with faults_but_absence(f"opening {path}"), directory(self.root, family, digest.hex[:2]) as folder:
                return open_regular(folder, path.name, path)
        except FileNotFoundError as error:
            raise self.missing(digest, family) from error

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
        """The object's stamp as it is now; None if it is not there.

        Raises:
            Corrupt: if what has its name is not a regular file.
        """
        return self.stats([digest], family)[0]

    def stats(self, digests: Sequence[Digest], family: str) -> list[Stat | None]:
        """``stat`` of many, in their order."""
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
                if not stat.S_ISREG(entry.st_mode):
                    raise not_regular(self.path(digest, family))
                found.append(Stat.of(entry))
        return found

    def read_meta(self, digest: Digest, kind: str) -> bytes:
        """A page, snapshot or record, whole and verified.

        Raises:
            Missing: if it is not there.
            Corrupt: if its bytes are not what its name says, or too many.
        """
        path = self.path(digest, "meta")
        try:
            with faults_but_absence(f"reading {path}"), directory(self.root, "meta", digest.hex[:2]) as folder:
                body = read_all(folder, path.name, path, limit_bytes=canonical.MAX_BYTES)
        except FileNotFoundError as error:
            raise self.missing(digest, "meta") from error
        actual = digest_of(kind, body)
        if actual != digest:
            raise self._corrupt(digest, "meta", actual, f"as a {kind}")
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
            Its stamp from before its bytes were read, so that a change meanwhile makes the stamp not fit.

        Raises:
            Missing: if it is not there.
            Corrupt: if its bytes are not what its name says.
        """
        kinds: tuple[str | None, ...] = (None,) if family == "objects" else (kind,) if kind else META_KINDS
        handle = self.open(digest, family)
        try:
            before = Stat.of(os.fstat(handle))
            with faults(f"reading {self.path(digest, family)}"):
                actual = _hash_file(handle, before.size, kinds, threads=threads)
        finally:
            os.close(handle)
        if digest not in actual:
            raise self._corrupt(digest, family, actual[0], f"({before.size} bytes)")
        return before

    def _corrupt(self, digest: Digest, family: str, actual: Digest, how: str) -> Corrupt:
        path = self.path(digest, family)
        return Corrupt(
            f"{path} is corrupt: its bytes hash to {actual.short} {how}",
            hint="make it anew: `zgstore verify --repair --recipe RECIPE`, or `--from STORE`",
            object=str(digest),
            expected=str(digest),
            actual=str(actual),
            path=str(path),
        )

    # -- listing ---------------------------------------------------------------------------------------------------

    def names(self, family: str) -> Iterator[bytes]:
        """Raw digests of what is there, by listing alone; names that are none are left to ``foreign``."""
        for packed in self.packed_names(family):
            for at in range(0, len(packed), 32):
                yield packed[at : at + 32]

    def packed_names(self, family: str) -> Iterator[bytes]:
        """The same folder by folder, raw digests joined: a million names take half a second."""
        extension = FAMILIES[family]
        wide = 64 + len(extension)
        with faults(f"listing {family}"), directory(self.root, family) as folder:
            for prefix in PREFIXES:
                entries = _listing(folder, prefix)
                stems = [name[:64] for name in entries if len(name) == wide and name.endswith(extension)]
                joined = "".join(stems)
                try:
                    packed = bytes.fromhex(joined)
                except ValueError:
                    packed = b""
                if packed.hex() != joined or any(not stem.startswith(prefix) for stem in stems):
                    packed = b"".join(bytes.fromhex(s) for s in stems if _HEX.fullmatch(s) and s.startswith(prefix))
                yield packed

    def foreign(self) -> Iterator[Path]:
        """What lies in ``objects/`` and ``meta/`` and is no object: other names, links, folders, devices."""
        for family, extension in FAMILIES.items():
            top = self.root / family
            with faults(f"listing {top}"), os.scandir(top) as entries:
                found = sorted(entries, key=lambda entry: entry.name)
            for entry in found:
                if entry.name not in PREFIXES or not entry.is_dir(follow_symlinks=False):
                    yield Path(entry.path)
                    continue
                with faults(f"listing {entry.path}"), os.scandir(entry.path) as inner:
                    for each in inner:
                        stem = each.name.removesuffix(extension)
                        fits = each.name == stem + extension and _HEX.fullmatch(stem) and stem[:2] == entry.name
                        if not fits or not each.is_file(follow_symlinks=False):
                            yield Path(each.path)

    # -- writing ---------------------------------------------------------------------------------------------------

    def draft(self, session_fd: int, *, size_hint: int = 0, kind: str | None = None) -> Draft:
        """A new file in a session's folder; see ``Draft``."""
        return Draft(session_fd, mode=self._file_mode, size_hint=size_hint, kind=kind)

    def place(self, draft: Draft, digest: Digest, family: str) -> None:
        """Give a finished draft its name.

        Rename without replacing. If the name is there: trusted by its stamp, else rehashed; if it is bad, it goes to
        quarantine and the new file takes its place.
        """
        path = self.path(digest, family)
        with faults(f"placing {path}"):
            while True:
                with directory(self.root, family, digest.hex[:2], make=self._dir_mode) as folder:
                    try:
                        rename_new(draft.dir_fd, draft.name, folder, path.name)
                    except FileExistsError:
                        pass
                    else:
                        draft.placed()
                        self.touch([digest], family)
                        return
                if self.is_sound(digest, family):
                    self.touch([digest], family)
                    draft.discard()
                    return
                self.quarantine(digest, family)

    def is_sound(self, digest: Digest, family: str) -> bool:
        """Whether the file of that name may be trusted: by its stamp, else by its bytes."""
        try:
            found = self.stat(digest, family)
            if found is not None and self._trusted(digest, family, found):
                return True
            self.rehash(digest, family)
        except Corrupt:
            return False
        except Missing:  # gone meanwhile: the rename is tried again
            return False
        return True

    def touch(self, digests: Iterable[Digest], family: str) -> None:
        """Count the folders of these objects as dirty: whoever renamed them may not have synced yet."""
        with self._syncing:
            self._dirty.update((family, digest.hex[:2]) for digest in digests)

    def sync(self) -> None:
        """``fsync`` the folders dirtied since the last sync; other threads' syncs wait, so none returns early."""
        with self._syncing:
            while self._dirty:
                family, prefix = next(iter(self._dirty))
                with faults(f"syncing {family}/{prefix}"), directory(self.root, family, prefix) as folder:
                    os.fsync(folder)
                self._dirty.discard((family, prefix))

    # -- trash and quarantine --------------------------------------------------------------------------------------

    def epochs(self) -> list[str]:
        """The names of the trash's folders, oldest name first."""
        with faults("listing the trash"), directory(self.root) as root:
            return sorted(_listing(root, "trash"))

    def in_trash(self, digest: Digest, family: str) -> bool:
        """Whether the trash has it."""
        return self._epoch_of(digest, family) is not None

    def _epoch_of(self, digest: Digest, family: str) -> str | None:
        name = digest.hex + FAMILIES[family]
        for epoch in reversed(self.epochs()):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                (self.root / "trash" / epoch / family / name).lstat()
                return epoch
        return None

    def restore(self, digest: Digest, family: str) -> bool:
        """Move it back out of the trash; False if it is not there either. The caller holds the store lock."""
        name = digest.hex + FAMILIES[family]
        while (epoch := self._epoch_of(digest, family)) is not None:
            with (
                faults(f"restoring {digest.short}"),
                contextlib.suppress(FileNotFoundError),
                directory(self.root, "trash", epoch, family) as trash,
                directory(self.root, family, name[:2], make=self._dir_mode) as folder,
            ):
                with contextlib.suppress(FileExistsError):
                    rename_new(trash, name, folder, name)
                self.touch([digest], family)
                return True
        return False

    def to_trash(self, epoch: str, digest: Digest, family: str) -> None:
        """Move it into ``trash/EPOCH/``. The caller holds the store lock exclusively."""
        name = digest.hex + FAMILIES[family]
        with (
            faults(f"moving {digest.short} to the trash"),
            directory(self.root, family, name[:2]) as folder,
            directory(self.root, "trash", epoch, family, make=self._dir_mode) as trash,
        ):
            os.rename(name, name, src_dir_fd=folder, dst_dir_fd=trash)

    def trashed(self) -> Iterator[Trashed]:
        """All that is in the trash, oldest epoch first."""
        for epoch in self.epochs():
            for family, extension in FAMILIES.items():
                with contextlib.suppress(FileNotFoundError, NotADirectoryError), directory(
                    self.root, "trash", epoch, family
                ) as folder:
                    for name in sorted(listing(folder)):
                        stem = name.removesuffix(extension)
                        if stem + extension == name and _HEX.fullmatch(stem):
                            with contextlib.suppress(FileNotFoundError):
                                size = os.stat(name, dir_fd=folder, follow_symlinks=False).st_size
                                yield Trashed(epoch, family, Digest(bytes.fromhex(stem)), size)

    def aside(self, trashed: Trashed, folder_name: str) -> bool:
        """Rename it out of the trash into ``tmp/FOLDER_NAME``, to be unlinked outside the lock; False if it is gone."""
        name = trashed.digest.hex + FAMILIES[trashed.family]
        with (
            faults(f"setting {trashed.digest.short} aside"),
            contextlib.suppress(FileNotFoundError),
            directory(self.root, "trash", trashed.epoch, trashed.family) as trash,
            directory(self.root, "tmp", folder_name, make=self._dir_mode) as tmp,
        ):
            os.rename(name, f"{trashed.family}-{name}", src_dir_fd=trash, dst_dir_fd=tmp)
            return True
        return False

    def remove_aside(self, folder_name: str) -> None:
        """Unlink what ``aside`` collected, or a leftover of ``tmp/``; can take milliseconds a file: hold no lock."""
        with faults(f"removing tmp/{folder_name}"), directory(self.root, "tmp") as tmp:
            remove_tree(tmp, folder_name)

    def remove_epoch(self, epoch: str) -> None:
        """Remove an epoch's folders if nothing is left in them."""
        with contextlib.suppress(OSError), directory(self.root, "trash", epoch) as folder:
            for family in FAMILIES:
                with contextlib.suppress(OSError):
                    os.rmdir(family, dir_fd=folder)
        with contextlib.suppress(OSError), directory(self.root, "trash") as trash:
            os.rmdir(epoch, dir_fd=trash)

    def leftovers(self) -> Iterator[tuple[str, Stat]]:
        """What lies in ``tmp/``, by name: sessions of the living, and leftovers of the dead."""
        with faults("listing tmp"), directory(self.root, "tmp") as tmp:
            for name in sorted(listing(tmp)):
                with contextlib.suppress(FileNotFoundError):
                    yield name, Stat.of(os.stat(name, dir_fd=tmp, follow_symlinks=False))

    def quarantine(self, digest: Digest, family: str) -> Path:
        """Move what has the object's name out of the way, for people to look at; returns where to."""
        return self.quarantine_path(self.path(digest, family))

    def quarantine_path(self, path: Path) -> Path:
        """Move a file that is no object, or a bad one, out of its folder of the store."""
        parts = path.relative_to(self.root).parts
        name = f"{parts[-1]}.{uuid.uuid4().hex[:8]}"
        with (
            faults(f"moving {path} to quarantine"),
            directory(self.root, *parts[:-1]) as folder,
            directory(self.root, "quarantine", make=self._dir_mode) as quarantine,
            contextlib.suppress(FileNotFoundError),
        ):
            os.rename(parts[-1], name, src_dir_fd=folder, dst_dir_fd=quarantine)
        return self.root / "quarantine" / name

    def make_folders(self) -> None:
        """All 512 folders, at init: they are never removed."""
        for family in FAMILIES:
            make_directory(self.root / family, self._dir_mode)
            with directory(self.root, family) as folder:
                for prefix in PREFIXES:
                    make_directory(prefix, self._dir_mode, dir_fd=folder)


@contextlib.contextmanager
def faults_but_absence(doing: str) -> Iterator[None]:
    """``faults``, with absence left as it is: what it means is for the caller to say."""
    try:
        with faults(doing):
            yield
    except ZgError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno in {errno.ENOENT, errno.ENOTDIR}:
            raise FileNotFoundError(doing) from error
        raise


def _listing(folder: int, name: str) -> list[str]:
    try:
        inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    except OSError as error:
        if error.errno in {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}:
            return []  # a link or a file there is foreign, and named as such
        raise
    try:
        return listing(inner)
    finally:
        os.close(inner)


_buffers = threading.local()


def _hash_file(handle: int, size: int, kinds: Sequence[str | None], *, threads: int) -> list[Digest]:
    """The digests of a file as each of ``kinds``, read in pieces into one buffer that stays in the core's cache."""
    buffer: bytearray | None = getattr(_buffers, "piece", None)
    if buffer is None:
        buffer = _buffers.piece = bytearray(PIECE_BYTES)
    if size > PIECE_BYTES:
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    hashers = [Hasher(kind, threads=threads) for kind in kinds]
    view = memoryview(buffer)
    offset = 0
    while got := os.preadv(handle, [buffer], offset):
        for hasher in hashers:
            hasher.update(view[:got])
        offset += got
    return [hasher.digest() for hasher in hashers]
