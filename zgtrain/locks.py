"""Lock files of a job's output: who has one, and that there is one who has."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

import zgstore
from zgtrain.files import made, opened

_HOLDER: Final = re.compile(r"pid \d+ on (\S+) since ")
_GLANCE_SECONDS: Final = 0.2  # who asks whether a lock is held has it for a moment
_QUIET_SECONDS: Final = 300  # another host's process that has said nothing for so long is taken to have ended


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
