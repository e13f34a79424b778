"""The small files of a job's output: put in place whole, opened as if anybody could have put them there, and locked.

Nothing here knows tensors.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final

import zgstore

_MOST_BYTES: Final = 64 << 20  # of a file that is read whole: a report has some KiB, an evaluation some hundreds
_OPEN: Final = os.O_CLOEXEC | os.O_NONBLOCK  # a fifo must not block the open
_DISK: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}
_NO_FILE: Final = {errno.EISDIR, errno.ELOOP, errno.ENXIO}
_HOLDER: Final = re.compile(r"pid \d+ on (\S+) since ")
_GLANCE_SECONDS: Final = 0.2  # who asks whether a lock is held has it for a moment
_QUIET_SECONDS: Final = 300  # another host's process that has said nothing for so long is taken to have ended


# ---- writing ----


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def placed(path: Path, *, by: str) -> Iterator[IO[bytes]]:
    """A file to write, put in place whole and durable at the end; until then, and if that fails, the old one stays.

    Args:
        path: Where; its folder is made.
        by: Ends the temporary file's name: who writes, or one word where there is only one who does, so that kills
            leave no more than one behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{by}")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def disk_heard() -> Iterator[None]:
    """Let what the disk says through.

    Where a write fails torch raises that its archive has the wrong length, and safetensors an error of its own, with
    the system's number in its text.
    """
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        before, told = error.__context__, re.search(r"\(os error (\d+)\)", str(error))
        number = before.errno if isinstance(before, OSError) else int(told[1]) if told else None
        if number in _DISK:
            raise OSError(number, os.strerror(number)) from error
        raise


def write_text(path: Path, text: str) -> None:
    """A text file put in place whole, its folder made."""
    with placed(path, by=str(os.getpid())) as file:
        file.write(text.encode())


def write_json(path: Path, value: Any) -> None:
    """The same of a value as JSON."""
    write_text(path, json.dumps(value, indent=2) + "\n")


# ---- reading ----


def opened(path: Path, *, remedy: str) -> IO[bytes] | None:
    """A regular file to read; None if there is none.

    Args:
        path: Where; may be a link to one.
        remedy: What to do about one that is no file: the error's hint.

    Raises:
        zgstore.Corrupt: if something else has its name.
        zgstore.Invalid: if it is not ours to open.
    """
    try:
        return _open(path, os.O_RDONLY, remedy)
    except FileNotFoundError:
        return None


def made(path: Path, *, remedy: str) -> IO[bytes]:
    """The same to append to, made with its folder where it is not there."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise _not_ours(path, error) from error
    file = _open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, remedy)
    file.seek(0, os.SEEK_END)
    return file


def _open(path: Path, flags: int, remedy: str) -> IO[bytes]:
    try:
        handle = os.open(path, flags | _OPEN, 0o666)
    except (PermissionError, NotADirectoryError) as error:
        raise _not_ours(path, error) from error
    except OSError as error:
        if error.errno in _NO_FILE:
            raise damaged(path, "it is no file", remedy) from error
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise damaged(path, "it is no file", remedy)
    return os.fdopen(handle, "r+b" if flags & os.O_RDWR else "rb", buffering=0)


def _not_ours(path: Path, error: OSError) -> zgstore.Invalid:
    hint = f"see what {path.parent} is and who owns it, or let whoever does run this"
    return zgstore.Invalid(f"{path} cannot be opened: {error.strerror}", hint=hint, path=str(path))


def read_json(path: Path, *, remedy: str) -> dict[str, Any] | None:
    """The JSON object in a file; None if there is no file.

    Raises:
        zgstore.Corrupt: if the file holds anything else.
    """
    file = opened(path, remedy=remedy)
    if file is None:
        return None
    with file:
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise damaged(path, f"it has more than {_MOST_BYTES >> 20} MiB", remedy)
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise damaged(path, str(error), remedy) from error
    if not isinstance(value, dict):
        raise damaged(path, "it holds no JSON object", remedy)
    return value


def damaged(path: Path, why: str, remedy: str) -> zgstore.Corrupt:
    """The error of a small file that is not what its name says."""
    return zgstore.Corrupt(f"{path} cannot be read: {why}", hint=remedy, object=path.name, path=str(path))


# ---- locking ----


@contextlib.contextmanager
def held(path: Path, doing: str, *, hint: str = "wait for it, or stop it") -> Iterator[None]:
    """One process at a time has a lock file, which says who it is; it is let go however that process ends.

    Args:
        path: The file; it and its folder are made.
        doing: What is done under it, for whoever comes second.
        hint: What that one can do.

    Raises:
        zgstore.Busy: if another process has it.
    """
    with made(path, remedy="remove it, and run the same again") as file:
        if not _locked(file, fcntl.LOCK_EX, patience_seconds=_GLANCE_SECONDS):
            raise zgstore.Busy(
                f"{doing} by another process ({_said(file).strip() or 'unknown'})",
                hint=hint,
                path=str(path),
            )
        file.truncate(0)
        file.write(f"pid {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S')}\n".encode())
        try:
            yield
        finally:
            file.truncate(0)


def holder(path: Path) -> str | None:
    """Who has a lock file: ``pid 17 on host``; None if nobody has.

    A file system may keep another host's locks from us: its process is taken to be alive while files beside the lock
    change.

    Raises:
        zgstore.Corrupt: if something else has the file's name.
    """
    file = opened(path, remedy="remove it")
    if file is None:
        return None
    with file:
        free, found = _locked(file, fcntl.LOCK_SH), _HOLDER.match(_said(file))
    if found is None:
        return None if free else "another process"
    if not free or (found[1] != socket.gethostname() and _lately(path.parent)):
        return found[0].removesuffix(" since ")
    return None


def _locked(file: IO[bytes], kind: int, *, patience_seconds: float = 0.0) -> bool:
    give_up = time.monotonic() + patience_seconds
    while True:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= give_up:
                return False
            time.sleep(_GLANCE_SECONDS / 20)
        else:
            return True


def _said(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(200).decode("utf-8", "replace")


def _lately(folder: Path) -> bool:
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # a temporary one, gone by now
            if path.is_file() and time.time() - path.stat().st_mtime < _QUIET_SECONDS:
                return True
    return False
