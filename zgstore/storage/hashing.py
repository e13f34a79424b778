"""The digest of a file's bytes: hashed where the page cache has them if they can be kept whole, else read.

A read copies every byte once more than its hash needs, which is a third of a warm verification's time. A map does not,
but a file that is cut off while it is mapped, or a disk that fails under it, ends the process. A lease has the kernel
hold back whoever would open the file for writing until it is given up, and populating a piece first turns a failing
disk into an error. Where there is neither, or where a piece is not in memory, that piece is read as ever.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

from zgstore.format.digest import Digest, Hasher
from zgstore.storage.files import libc

READ_BYTES: Final = 512 << 10  # a buffer that stays in the core's cache: larger ones read slower
_MAP_BYTES: Final = 8 << 20
_POPULATE_READ: Final = 22  # MADV_POPULATE_READ, since Linux 5.14

_buffers = threading.local()


def hash_file(handle: int, kinds: Sequence[str | None] = (None,), *, threads: int = 1) -> tuple[list[Digest], int]:
    """The digests of a file as each of ``kinds``, and how many bytes were hashed: as many as it had at first, or fewer.

    Args:
        handle: A descriptor that was opened for reading alone; its position is left alone.
        kinds: What the bytes are hashed as; None for a blob.
        threads: Threads that hash one piece together.

    Raises:
        OSError: if the system would not read it.
    """
    hashers = [Hasher(kind, threads=threads) for kind in kinds]
    done, size = 0, os.fstat(handle).st_size
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    for piece in _pieces(handle, size):
        for hasher in hashers:
            hasher.update(piece)
        done += len(piece)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_NORMAL)
    return [hasher.digest() for hasher in hashers], done


def _pieces(handle: int, size: int) -> Iterator[memoryview]:
    """The file piece by piece, each gone when the next is asked for."""
    buffer: bytearray | None = getattr(_buffers, "piece", None)
    if buffer is None:
        buffer = _buffers.piece = bytearray(READ_BYTES)
    read, at = memoryview(buffer), 0
    with _mapped(handle, size) as region:
        while at < size:
            count = min(_MAP_BYTES, size - at)
            if region is not None and _in_memory(handle, at + count - 1) and _populated(region, at, count):
                with memoryview(region) as whole, whole[at : at + count] as piece:
                    yield piece
            elif count := os.preadv(handle, [read[: size - at]], at):
                yield read[:count]
            else:
                return
            at += count


@contextmanager
def _mapped(handle: int, size: int) -> Iterator[mmap.mmap | None]:
    """The file as a map that stays whole; None where the system does not promise it.

    The signal that a writer waits is one that nobody hears unless they ask for it: what we hold is given up within
    milliseconds anyway, and the kernel lets the writer on after /proc/sys/fs/lease-break-time.
    """
    if size < READ_BYTES or not _leased(handle):
        yield None
        return
    try:
        try:
            region = mmap.mmap(handle, size, access=mmap.ACCESS_COPY)
        except (OSError, ValueError):
            yield None
            return
        with region:
            yield region
    finally:
        with suppress(OSError):
            fcntl.fcntl(handle, fcntl.F_SETLEASE, fcntl.F_UNLCK)


def _leased(handle: int) -> bool:
    """Whether a lease was had: not where somebody writes, on another's file, or on most networks' disks."""
    try:
        fcntl.fcntl(handle, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(handle, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError:
        return False
    return True


def _in_memory(handle: int, at: int) -> bool:
    """Whether this byte is in the page cache: from the disk a read is twice as fast as a map."""
    try:
        return os.preadv(handle, [bytearray(1)], at, os.RWF_NOWAIT) == 1
    except OSError:
        return False


def _populated(region: mmap.mmap, at: int, size: int) -> bool:
    """Through ctypes, which lets other threads run should there be something to wait for; `mmap.madvise` does not."""
    first = ctypes.addressof(ctypes.c_char.from_buffer(region, at))
    return not libc().madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), _POPULATE_READ)
