"""The files of a job's output: put in place whole, and opened as if anybody could have put them there."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import IO, Any, Final, get_origin

import zgstore

_MOST_BYTES: Final = 64 << 20  # of a file that is read whole: a report has some KiB, an evaluation some hundreds
_OPEN: Final = os.O_CLOEXEC | os.O_NONBLOCK  # a fifo must not block the open
_DISK: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}
_NO_FILE: Final = {errno.EISDIR, errno.ELOOP, errno.ENXIO}


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


def read_json(path: Path, kinds: Mapping[str, Any], *, remedy: str) -> dict[str, Any] | None:
    """The JSON object in a file; None if there is no file.

    Args:
        path: Where.
        kinds: The type of each field that must be there; others may be there too.
        remedy: What to do about one that holds anything else.

    Raises:
        zgstore.Corrupt: if it does.
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
    for name, kind in kinds.items():
        if name not in value or not is_of(value[name], kind):
            said = f"is {value[name]!r:.80}" if name in value else "is missing"
            raise damaged(path, f"{name} {said}", remedy)
    return value


def is_of(value: Any, kind: Any) -> bool:
    """Whether JSON's value is of a type, as annotations write it; JSON writes some numbers without a point."""
    if isinstance(kind, UnionType):
        return any(is_of(value, each) for each in kind.__args__)
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else get_origin(kind) or kind)


def damaged(path: Path, why: str, remedy: str) -> zgstore.Corrupt:
    """The error of a small file that is not what its name says."""
    return zgstore.Corrupt(f"{path} cannot be read: {why}", hint=remedy, object=path.name, path=str(path))
