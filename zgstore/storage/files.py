"""The file system as the store needs it: no links followed, writes that last, renames that replace nothing.

Everything inside a store is opened relative to a directory handle. The store's own path may be a link; nothing below
it may.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import pwd
import stat
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from zgstore.errors import Corrupt, Invalid, NoSpace, Transient, ZgError

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a fifo must not block the open
_CREATE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

_FULL: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DENIED: Final = {errno.EROFS, errno.EACCES, errno.EPERM}
_SENSELESS: Final = {errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EEXIST}
READ_ONLY: Final = frozenset(_DENIED)

_RENAME_NOREPLACE: Final = 1
_SYNC_FILE_RANGE_WRITE: Final = 2
# Where two hosts see one file: LMDB must not run there. NFS, CIFS, SMB2, 9P, Ceph, Lustre, GPFS, BeeGFS, AFS, FUSE.
_NETWORK: Final = {
    0x6969, 0xFF534D42, 0xFE534D42, 0x01021997, 0x00C36400, 0x0BD00BD0, 0x47504653, 0x19830326, 0x5346414F, 0x65735546,
}  # fmt: skip

# Two changes within so long may leave the same times, whatever the file system's clock: nothing is concluded before.
SETTLE_SECONDS: Final = 2.0


class Modes(NamedTuple):
    """Permissions under a store's policy, whatever the umask: of folders, and of files that change."""

    folder: int
    file: int


class Stat(NamedTuple):
    """What tells a file from every other, and from itself after a change: what its stamp is made of."""

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


def fault(error: OSError, doing: str) -> ZgError:
    """The typed error for what the system said while ``doing`` something; empty if nobody knows what."""
    why = ": ".join(filter(None, (doing, error.strerror or str(error))))
    number = errno.errorcode.get(error.errno or 0, str(error.errno))
    if error.errno in _FULL:
        return NoSpace(why, hint="free some space, with `zgstore gc` or otherwise; rerun to resume", errno=number)
    if error.errno in _DENIED:
        return Invalid(why, hint="check who owns it, its permissions, its mount and the store's policy", errno=number)
    if error.errno in {errno.EMFILE, errno.ENFILE}:
        return Transient(why, hint="raise `ulimit -n`, or use fewer workers", errno=number)
    if error.errno in _SENSELESS:
        return Invalid(why, hint="check the path: a part of it is no folder, or too long", errno=number)
    return Transient(why, hint="check the disk or the network, then rerun to resume", errno=number)


@contextlib.contextmanager
def faults(doing: str, *, but_absence: bool = False) -> Iterator[None]:
    """Turn what the system says inside the block into typed errors.

    Args:
        doing: What, for the message.
        but_absence: Leave ``FileNotFoundError`` as it is: the caller says what it means.
    """
    try:
        yield
    except OSError as error:
        if but_absence and isinstance(error, FileNotFoundError):
            raise
        raise fault(error, doing) from error


def make_directory(name: str | Path, mode: int, *, dir_fd: int | None = None) -> bool:
    """Make a directory with exactly ``mode``, whatever the umask; False if it was there."""
    try:
        os.mkdir(name, 0o700, dir_fd=dir_fd)
    except FileExistsError:
        return False
    # A new directory that is not ours to change inherits what it needs.
    with contextlib.suppress(PermissionError):
        os.chmod(name, mode, dir_fd=dir_fd)
    return True


@contextlib.contextmanager
def directory(root: str | Path, *parts: str, make: int | None = None) -> Iterator[int]:
    """A handle of ``root/parts…``; no link below ``root`` is followed.

    Args:
        root: Where to begin; may be a link.
        *parts: Single components below it.
        make: Mode of directories to make where they are missing; None makes none.

    Raises:
        FileNotFoundError: if one is missing and none is to be made.
        Corrupt: if one is no directory.
    """
    handle = os.open(root, _DIRECTORY)
    try:
        for part in parts:
            if make is not None and make_directory(part, make, dir_fd=handle):
                os.fsync(handle)  # what is made durable below it must be found again
            try:
                below = os.open(part, _DIRECTORY | os.O_NOFOLLOW, dir_fd=handle)
            except OSError as error:
                if error.errno in {errno.ELOOP, errno.ENOTDIR}:
                    raise not_regular(Path(root, *parts), "a directory") from error
                raise
            handle, above = below, handle  # first, lest an interrupt have it closed twice, and another's file with it
            os.close(above)
        yield handle
    finally:
        os.close(handle)


def not_regular(path: Path, wanted: str = "a regular file") -> Corrupt:
    return Corrupt(
        f"{path} is not {wanted}",
        hint="something else put it there; move it away, then run `zgstore verify`",
        object=path.name,
        expected=wanted,
        actual="a link, a device or another kind of file",
        path=str(path),
    )


def open_regular(dir_fd: int, name: str, path: Path) -> int:
    """Open a regular file for reading.

    Raises:
        FileNotFoundError: if it is not there.
        Corrupt: if it is a link, a directory, a device or a fifo.
    """
    try:
        handle = os.open(name, _READ, dir_fd=dir_fd)
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.ENXIO, errno.ENODEV}:
            raise not_regular(path) from error
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise not_regular(path)
    return handle


def read_all(dir_fd: int, name: str, path: Path, *, limit_bytes: int) -> bytes:
    """A whole small file.

    Raises:
        FileNotFoundError: if it is not there.
        Corrupt: if it is not regular, or larger than ``limit_bytes``.
    """
    handle = open_regular(dir_fd, name, path)
    try:
        size = os.fstat(handle).st_size
        if size > limit_bytes:
            raise Corrupt(
                f"{path} has {size} bytes, which is over the bound of {limit_bytes}",
                hint="run `zgstore verify` to see what it hurts and what mends it",
                object=name,
                expected=f"at most {limit_bytes} bytes",
                actual=size,
                path=str(path),
            )
        chunks = []
        while chunk := os.read(handle, min(limit_bytes, 1 << 20)):  # it may still grow: builds and leases do
            chunks.append(chunk)
            if sum(map(len, chunks)) > limit_bytes:
                break
        return b"".join(chunks)
    finally:
        os.close(handle)


def write_all(handle: int, data: bytes | memoryview) -> None:
    """Write all of ``data``, however short the writes are."""
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]


def create(dir_fd: int, name: str, mode: int) -> int:
    """A new file for writing, with exactly ``mode``, whatever the umask."""
    handle = os.open(name, _CREATE, 0o600, dir_fd=dir_fd)
    os.fchmod(handle, mode)
    return handle


def write_file(
    root: Path, folder: tuple[str, ...], name: str, data: bytes, *, mode: int, dir_mode: int,
    durable: bool = True, replace: bool = True,
) -> bool:  # fmt: skip
    """Put a small file in place whole: a temporary one, ``fdatasync``, rename, ``fsync`` of the directory.

    Args:
        root: The store.
        folder: Components below it; made where missing.
        name: Last component.
        data: Its content.
        mode: Its permissions.
        dir_mode: Permissions of folders made.
        durable: Whether it must survive power loss; the rename is whole in any case.
        replace: Whether an existing file gives way.

    Returns:
        False if a file was there and must not be replaced.
    """
    temporary = str(uuid.uuid4())
    with faults(f"writing {Path(*folder, name)}"), directory(root, "tmp", make=dir_mode) as tmp:
        handle = create(tmp, temporary, mode)
        try:
            try:
                write_all(handle, data)
                if durable:
                    os.fdatasync(handle)
            finally:
                os.close(handle)
            with directory(root, *folder, make=dir_mode) as target:
                if replace:
                    os.rename(temporary, name, src_dir_fd=tmp, dst_dir_fd=target)
                else:
                    rename_new(tmp, temporary, target, name)
                if durable:
                    os.fsync(target)
        except FileExistsError:
            os.unlink(temporary, dir_fd=tmp)
            return False
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=tmp)
            raise
    return True


def clock(root: Path) -> float:
    """The file system's time: what it stamps a folder with that is touched now; where none can be, this host's."""
    with contextlib.suppress(OSError, ZgError), directory(root, "locks") as folder:
        os.utime(folder)
        return os.fstat(folder).st_mtime
    return time.time()


@functools.cache
def libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def rename_new(from_fd: int, name: str, to_fd: int, new: str) -> None:
    """Rename without replacing: ``renameat2``, or where that is refused ``link`` and ``unlink``.

    Where links are refused too (none on this file system, or none to another user's file) a look comes before the
    rename. Between the two another process may put a file there; under a digest's name it has the same bytes.

    Raises:
        FileExistsError: if ``new`` is there.
        OSError: what the system said.
    """
    renameat2 = getattr(libc(), "renameat2", None)
    if renameat2 is not None:
        if renameat2(from_fd, os.fsencode(name), to_fd, os.fsencode(new), _RENAME_NOREPLACE) == 0:
            return
        number = ctypes.get_errno()
        if number not in {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}:
            raise OSError(number, os.strerror(number), new)
    try:
        os.link(name, new, src_dir_fd=from_fd, dst_dir_fd=to_fd, follow_symlinks=False)
    except OSError as error:
        if error.errno not in {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP}:
            raise
        with contextlib.suppress(FileNotFoundError):
            os.stat(new, dir_fd=to_fd, follow_symlinks=False)
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), new) from error
        os.rename(name, new, src_dir_fd=from_fd, dst_dir_fd=to_fd)
    else:
        os.unlink(name, dir_fd=from_fd)


def start_writeback(handle: int, offset: int, size: int) -> None:
    """Ask the kernel to begin writing these bytes; where it cannot, the sync at the end does all of it."""
    sync_file_range = getattr(libc(), "sync_file_range", None)
    if sync_file_range is not None:
        sync_file_range(handle, ctypes.c_int64(offset), ctypes.c_int64(size), ctypes.c_uint(_SYNC_FILE_RANGE_WRITE))


def on_network(path: Path) -> bool:
    """Whether other hosts may see this file system too."""
    statfs = getattr(libc(), "statfs", None)
    buffer = ctypes.create_string_buffer(256)
    if statfs is None or statfs(os.fsencode(path), buffer) != 0:
        return False
    return int.from_bytes(buffer.raw[:4], "little") in _NETWORK


def user_name(uid: int) -> str:
    """A user's name; the number where this host knows none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def listing(handle: int) -> list[str]:
    """The names in an open directory."""
    return os.listdir(handle)


def remove_tree(dir_fd: int, name: str) -> None:
    """Remove a file or a folder with all in it, following no link; what is gone already is no fault.

    Folders may lie in folders without end: each is moved up into ``name`` and emptied there, so that neither
    descriptors nor calls pile up.
    """
    with contextlib.suppress(FileNotFoundError):
        top = _unlinked_or_opened(dir_fd, name)
        if top is None:
            return
        try:
            while names := listing(top):
                for each in names:
                    _remove_level(top, each)
        finally:
            os.close(top)
        os.rmdir(name, dir_fd=dir_fd)


def _remove_level(top: int, name: str) -> None:
    """Remove what is in ``top/name``, its own folders moved up into ``top``."""
    with contextlib.suppress(FileNotFoundError):
        below = _unlinked_or_opened(top, name)
        if below is None:
            return
        try:
            for each in listing(below):
                inner = _unlinked_or_opened(below, each)
                if inner is not None:
                    os.close(inner)
                    os.rename(each, str(uuid.uuid4()), src_dir_fd=below, dst_dir_fd=top)
        finally:
            os.close(below)
        os.rmdir(name, dir_fd=top)


def _unlinked_or_opened(dir_fd: int, name: str) -> int | None:
    """Remove a file; a folder is opened instead, and returned."""
    try:
        os.unlink(name, dir_fd=dir_fd)
    except (IsADirectoryError, PermissionError) as error:
        try:
            return os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=dir_fd)
        except NotADirectoryError:
            raise error from None
    return None


def remove_empty(dir_fd: int, name: str, *, deep: int) -> None:
    """Remove a folder that holds nothing but empty folders, at most ``deep`` of them in each other."""
    with contextlib.suppress(OSError):
        below = os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=dir_fd)
        try:
            for each in listing(below) if deep else ():
                remove_empty(below, each, deep=deep - 1)
        finally:
            os.close(below)
        os.rmdir(name, dir_fd=dir_fd)
