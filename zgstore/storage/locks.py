"""File locks held for milliseconds: who holds one, how long to wait, and what a fork must not inherit."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from zgstore.errors import Busy
from zgstore.storage.config import POLICIES
from zgstore.storage.files import create, directory, fault, faults

_UNSUPPORTED: Final = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
_STEP_SECONDS: Final = 0.005
_LONGEST_STEP_SECONDS: Final = 0.1

# A child that kept a descriptor would keep the lock after its parent died.
_guard = threading.Lock()
_owned: set[int] = set()


def _before_fork() -> None:
    _guard.acquire()


def _after_in_parent() -> None:
    _guard.release()


def _after_in_child() -> None:
    for handle in _owned:
        with contextlib.suppress(OSError):
            os.close(handle)
    _owned.clear()
    _guard.release()


os.register_at_fork(before=_before_fork, after_in_parent=_after_in_parent, after_in_child=_after_in_child)


def open_owned(name: str, flags: int, *, mode: int, dir_fd: int) -> int:
    """Open a file whose descriptor no forked child keeps."""
    with _guard:
        handle = os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600, dir_fd=dir_fd)
        _owned.add(handle)
    with contextlib.suppress(PermissionError):  # another user of the group made it, with the right mode
        if os.fstat(handle).st_mode & 0o777 != mode & 0o777 and flags & os.O_CREAT and _is_ours_alone(handle):
            os.fchmod(handle, mode)
    return handle


def _is_ours_alone(handle: int) -> bool:
    """Whether it may be changed where it lies: another link to it may be somebody's file outside the store."""
    entry = os.fstat(handle)
    return stat.S_ISREG(entry.st_mode) and entry.st_nlink == 1


def close_owned(handle: int) -> None:
    """Close it, unless a fork has: a child's number may belong to something else by now."""
    with _guard:
        if handle in _owned:
            _owned.discard(handle)
            os.close(handle)


def try_lock(handle: int, *, exclusive: bool) -> bool:
    """Take the lock if it is free. Where the file system has no locks it is always taken."""
    try:
        fcntl.flock(handle, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in {errno.EWOULDBLOCK, errno.EACCES}:
            return False
        if error.errno not in _UNSUPPORTED:
            raise fault(error, "taking a lock") from error
    return True


@contextlib.contextmanager
def hold(root: Path, name: str, *, exclusive: bool, wait_seconds: float, mode: int, what: str) -> Iterator[None]:
    """Hold ``locks/NAME`` for the block.

    Args:
        root: The store.
        name: The lock's file.
        exclusive: Alone, or beside other shared holders.
        wait_seconds: How long to wait for it.
        mode: Permissions of a lock file made.
        what: What is locked, for the message.

    Raises:
        Busy: if it is still held after that time; names the holder.
    """
    # A copy may have lost the folder, for the files in it may be empty.
    folder_mode = next(folders for folders, files in POLICIES.values() if files == mode)
    with faults(f"opening the lock of {what}"), directory(root, "locks", make=folder_mode) as locks:
        handle = open_owned(name, os.O_RDWR | os.O_CREAT, mode=mode, dir_fd=locks)
    try:
        give_up, step = time.monotonic() + wait_seconds, _STEP_SECONDS
        while not try_lock(handle, exclusive=exclusive):
            if time.monotonic() >= give_up:
                raise _busy(handle, what)
            time.sleep(min(step, max(0.0, give_up - time.monotonic())))
            step = min(2 * step, _LONGEST_STEP_SECONDS)
        if exclusive:
            _sign(handle)
        try:
            yield
        finally:
            if exclusive:
                _unsign(handle)
    finally:
        close_owned(handle)


def _sign(handle: int) -> None:
    # A full disk must not keep gc from locking: the name is a courtesy.
    with contextlib.suppress(OSError):
        if not _is_ours_alone(handle):
            return
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{socket.gethostname()} {os.getpid()} {time.time():.3f}\n".encode(), 0)


def _unsign(handle: int) -> None:
    with contextlib.suppress(OSError):
        if _is_ours_alone(handle):
            os.ftruncate(handle, 0)


def _busy(handle: int, what: str) -> Busy:
    host, pid, age = socket.gethostname(), _pid_of_holder(handle), 0.0
    with contextlib.suppress(OSError, ValueError):
        signed = os.pread(handle, 512, 0).decode("utf-8", "replace").split()
        if len(signed) == 3:
            host, pid, age = signed[0], int(signed[1]), max(0.0, time.time() - float(signed[2]))
    who = f"process {pid} on {host}" if pid else f"another process (asked from {host})"
    return Busy(
        f"{what} is held by {who}, for {age:.0f} s",
        hint="wait for it with `--wait 60s`, or see who it is with `zgstore lease ls`",
        host=host,
        pid=pid,
        age_seconds=age,
    )


def _pid_of_holder(handle: int) -> int:
    """The process that this host's kernel lists for the lock; 0 if it lists none."""
    entry = os.fstat(handle)
    inode = f"{os.major(entry.st_dev):02x}:{os.minor(entry.st_dev):02x}:{entry.st_ino}"
    with contextlib.suppress(OSError, ValueError), Path("/proc/locks").open(encoding="ascii") as lines:
        for line in lines:
            fields = line.split()
            if inode in fields and "->" not in fields:
                return max(0, int(fields[4]))
    return 0


_PROBE: Final = """
import fcntl, sys
with open(sys.argv[1], "r+b") as file:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(7)
"""


def locks_work(root: Path, *, dir_mode: int) -> bool:
    """Whether a lock that this process holds keeps another process out: asked of a real second process."""
    while (answer := _asked(root, dir_mode=dir_mode)) is None:
        pass
    return answer


def _asked(root: Path, *, dir_mode: int) -> bool | None:
    """The same; None if a collection took the file for a leftover meanwhile, as it does when this takes an hour."""
    name = f"probe-{uuid.uuid4()}"
    with faults("testing the store's locks"), directory(root, "tmp", make=dir_mode) as tmp:
        handle = create(tmp, name, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            probe = subprocess.run(  # noqa: S603  (our own interpreter and our own text)
                [sys.executable, "-I", "-S", "-c", _PROBE, str(root / "tmp" / name)], capture_output=True, check=False
            )
            if os.fstat(handle).st_nlink == 0:
                return None
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                return False
            raise
        finally:
            os.close(handle)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=tmp)
    return probe.returncode == 7
