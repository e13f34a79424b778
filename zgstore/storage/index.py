"""The disposable LMDB tables: which files were verified on this host, and when. The only importer of lmdb.

Everything here is a cache of what files say. A damaged, foreign, full or missing index is made anew, empty; on a
read-only store there is none. The environment is opened, used and closed inside one call, never twice in a process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import lmdb

from zgstore.errors import ZgError
from zgstore.format.digest import Digest, digest_of
from zgstore.storage.files import (
    SETTLE_SECONDS,
    Modes,
    Stat,
    directory,
    faults,
    listing,
    make_directory,
    on_network,
    read_all,
    remove_tree,
)
from zgstore.storage.names import FAMILIES

STAMP_SECONDS: Final = 30 * 86400

_LEVELS: Final = ("full",)
_KINDS: Final = tuple(FAMILIES)
_STAMP: Final = struct.Struct("<QQQqqBBd")
_FILE: Final = struct.Struct("<QQQqqd32s")
_BATCH: Final = 1000
_SMALLEST_MAP: Final = 16 << 20
_LARGEST_MAP: Final = 64 << 30
_BYTES_EACH: Final = 512  # of map for one entry, generously
_LOCK_BYTES: Final = 16 << 10  # LMDB's own for 126 readers takes half

# No fork happens while an environment is open, so that no child ever inherits one.
_one_at_a_time = threading.Lock()
os.register_at_fork(
    before=_one_at_a_time.acquire, after_in_parent=_one_at_a_time.release, after_in_child=_one_at_a_time.release
)


@dataclass(frozen=True, slots=True)
class Stamp:
    """That a file's every byte was read and found right.

    Args:
        stat: What the file looked like.
        time_seconds: When, by the file system's clock.
        kind: ``objects`` or ``meta``.
        level: How thoroughly.
    """

    stat: Stat
    time_seconds: float
    kind: str = "objects"
    level: str = "full"

    def fits(self, stat: Stat, now: float) -> bool:
        """Whether it vouches for a file that looks like ``stat`` at the time ``now``."""
        return self.stat == stat and -SETTLE_SECONDS <= now - self.time_seconds < STAMP_SECONDS

    @property
    def settled(self) -> bool:
        """Whether it may be given: not within 2 s of the file's last change."""
        return self.time_seconds - self.stat.ctime_ns / 1e9 >= SETTLE_SECONDS


class FileDigest(NamedTuple):
    """The digest of a file outside the store, as of a stat."""

    path: Path
    stat: Stat
    digest: Digest
    time_seconds: float


class Index:
    """The index of one store.

    Args:
        store: The store's path.
        modes: Permissions.
        folder: Where the index is; None for the store's own ``index/``, which is used on local file systems only.
            One that is elsewhere is used where it is there: a store that came from anywhere makes no folder outside.
    """

    def __init__(self, store: Path, modes: Modes, *, folder: Path | None) -> None:
        self._store = store
        self._elsewhere = folder
        self._parts = ("lmdb-1",) if folder else ("index", "lmdb-1")
        self._modes = modes

    @property
    def path(self) -> Path:
        """Where the tables are."""
        return self._root.joinpath(*self._parts)

    @property
    def _root(self) -> Path:
        """What may be a link; nothing below it may."""
        return self._elsewhere or self._store

    # -- stamps of objects -----------------------------------------------------------------------------------------

    def stamps(self, digests: Sequence[bytes]) -> list[Stamp | None]:
        """The stamp of each raw digest, or None."""

        def read(tables: _Tables) -> list[Stamp | None]:
            with tables.environment.begin(db=tables.object, buffers=False) as transaction:
                return [_stamp(transaction.get(digest)) for digest in digests]

        return self._reading(read) or [None] * len(digests)

    def put_stamps(self, items: Sequence[tuple[bytes, Stamp]]) -> None:
        """Keep stamps; those given within 2 s of their file's last change are left out."""
        rows = [
            (digest, _STAMP.pack(*stamp.stat, _LEVELS.index(stamp.level), _KINDS.index(stamp.kind), stamp.time_seconds))
            for digest, stamp in items
            if stamp.settled
        ]
        self._writing("object", rows)

    def drop(self, digests: Sequence[bytes]) -> None:
        """Forget stamps: of what was quarantined or collected."""
        self._writing("object", [(digest, None) for digest in digests])

    def clear(self) -> None:
        """Begin again, empty. Whoever asks for that means this index: its folder is made, where it is elsewhere.

        Raises:
            Invalid: where it cannot be written.
        """
        with _one_at_a_time, faults("removing the index"), contextlib.suppress(FileNotFoundError):
            if self._elsewhere is not None:
                self._elsewhere.parent.mkdir(parents=True, exist_ok=True)
                make_directory(self._elsewhere, self._modes.folder)
            self._remove()

    # -- digests of files outside the store ------------------------------------------------------------------------

    def file_digests(self, paths: Sequence[Path], *, now: float) -> list[Digest | None]:
        """The digest of each file, where one is known and the file still looks the same; None else."""

        def read(tables: _Tables) -> list[Digest | None]:
            with tables.environment.begin(db=tables.file) as transaction:
                return [_file_digest(transaction.get(_path_key(path)), path, now) for path in paths]

        return self._reading(read) or [None] * len(paths)

    def put_file_digests(self, items: Sequence[FileDigest]) -> None:
        """Keep the digests of files; those of files changed within the last 2 s are left out."""
        rows = [
            (_path_key(each.path), _FILE.pack(*each.stat, each.time_seconds, each.digest.raw))
            for each in items
            if each.time_seconds - each.stat.ctime_ns / 1e9 >= SETTLE_SECONDS
        ]
        self._writing("file", rows)

    # -- the environment -------------------------------------------------------------------------------------------

    def _reading(self, work: Callable[[_Tables], list[Any]]) -> list[Any] | None:
        """What ``work`` reads; None where there is no index, or a bad one, which is removed."""
        with _one_at_a_time, contextlib.suppress(OSError, ZgError):
            if not (self.path / "data.mdb").exists():
                return None
            damaged = False
            with self._alone(exclusive=False):
                if self._is_ours():
                    try:
                        with _open(self.path, 0, readonly=True) as tables:
                            return work(tables)
                    except lmdb.Error:
                        damaged = True
            with self._alone(exclusive=True):
                if damaged or not self._is_ours():
                    self._remove()
        return None

    def _writing(self, table: str, rows: Sequence[tuple[bytes, bytes | None]]) -> None:
        """Put rows, or delete where the value is None; on any failure the index begins again, empty."""
        if not rows or (self._elsewhere is None and on_network(self._store)):
            return
        with _one_at_a_time, contextlib.suppress(OSError, ZgError):
            with directory(self._root, *self._parts, make=self._modes.folder):
                pass
            with self._alone(exclusive=True):
                for _attempt in range(2):
                    if not self._is_ours():
                        self._remove()
                    try:
                        self._put(table, rows)
                    except lmdb.Error:
                        self._remove()
                        continue
                    return

    def _put(self, table: str, rows: Sequence[tuple[bytes, bytes | None]]) -> None:
        data = self.path / "data.mdb"
        size = (data.stat().st_size if data.exists() else 0) + _BYTES_EACH * len(rows)
        size = max(_SMALLEST_MAP, 2 * size)
        self._reserve_lock()
        while True:
            try:
                with _open(self.path, size, readonly=False) as tables:
                    for at in range(0, len(rows), _BATCH):
                        with tables.environment.begin(db=getattr(tables, table), write=True) as transaction:
                            for key, value in rows[at : at + _BATCH]:
                                if value is None:
                                    transaction.delete(key)
                                else:
                                    transaction.put(key, value)
                break
            except lmdb.MapFullError:
                size *= 2
                if size > _LARGEST_MAP:
                    raise
        self._seal()

    def _reserve_lock(self) -> None:
        """Give LMDB's lock file its blocks: it is mapped and written to, and on a full disk that ends the process."""
        with directory(self._root, *self._parts) as folder:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            handle = os.open("lock.mdb", flags, 0o600, dir_fd=folder)
            try:
                os.posix_fallocate(handle, 0, _LOCK_BYTES)
            finally:
                os.close(handle)

    @contextlib.contextmanager
    def _alone(self, *, exclusive: bool) -> Iterator[None]:
        """Keep other processes out, so that the seal belongs to the data."""
        with directory(self._root, *self._parts) as folder:
            fcntl.flock(folder, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
            yield

    # The seal says what the data file looked like when we closed it, and whose it is. LMDB maps its file and trusts
    # it: bytes that somebody else changed could crash the process, and a copied index would vouch for other files.

    def _expected_seal(self) -> str:
        data = Stat.of((self.path / "data.mdb").stat())
        objects = (self._store / "objects").stat()
        bound = (_machine(), objects.st_dev, objects.st_ino, lmdb.version(), struct.calcsize("P"))
        return f"{bound!r} {tuple(data)!r}\n"

    def _is_ours(self) -> bool:
        try:
            expected = self._expected_seal().encode()
            with directory(self._root, *self._parts) as folder:
                return read_all(folder, "seal", self.path / "seal", limit_bytes=len(expected)) == expected
        except (OSError, ZgError):
            return False

    def _seal(self) -> None:
        for name in ("data.mdb", "lock.mdb"):
            with contextlib.suppress(OSError):  # made by another user of the group
                (self.path / name).chmod(self._modes.file)
        fresh = self.path / "seal.new"
        with contextlib.suppress(FileNotFoundError):
            fresh.unlink()
        fresh.write_text(self._expected_seal(), encoding="utf-8")
        fresh.chmod(self._modes.file)
        fresh.replace(self.path / "seal")

    def _remove(self) -> None:
        with directory(self._root, *self._parts) as folder:
            for name in listing(folder):
                remove_tree(folder, name)


class _Tables(NamedTuple):
    environment: lmdb.Environment
    object: Any
    meta: Any
    file: Any


@contextlib.contextmanager
def _open(path: Path, map_size: int, *, readonly: bool) -> Iterator[_Tables]:
    # Our own lock keeps others out, so a reader needs no slot in LMDB's table and can read where it may not write.
    environment = lmdb.open(
        str(path), map_size=max(map_size, _SMALLEST_MAP), max_dbs=3, sync=True, writemap=False, readonly=readonly,
        lock=not readonly, create=not readonly, readahead=False,
    )  # fmt: skip
    try:
        names = (b"object", b"meta", b"file")
        yield _Tables(environment, *(environment.open_db(name, create=not readonly) for name in names))
    finally:
        environment.close()


def _machine() -> str:
    for path in ("/etc/machine-id", "/var/lib/dbus/machine-id"):
        with contextlib.suppress(OSError):
            if text := Path(path).read_text(encoding="ascii").strip():
                return text
    return socket.gethostname()


def _stamp(value: bytes | None) -> Stamp | None:
    if value is None or len(value) != _STAMP.size:
        return None
    *stat, level, kind, seconds = _STAMP.unpack(value)
    if level >= len(_LEVELS) or kind >= len(_KINDS):
        return None
    return Stamp(Stat(*stat), seconds, _KINDS[kind], _LEVELS[level])


def _path_key(path: Path) -> bytes:
    return digest_of("files", os.fsencode(path.absolute())).raw


def _file_digest(value: bytes | None, path: Path, now: float) -> Digest | None:
    if value is None or len(value) != _FILE.size:
        return None
    *stat, seconds, raw = _FILE.unpack(value)
    try:
        looks = Stat.of(path.stat())
    except OSError:
        return None
    return Digest(raw) if looks == Stat(*stat) and now - seconds < STAMP_SECONDS else None
