"""Locks and clocks that lie to a process, as a network file system or a host with a wrong time would."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("lies.c")


def cannot() -> str:
    """Why nothing can lie here; "" if it can."""
    return "" if shutil.which("cc") else "no C compiler is here"


def made(folder: Path) -> Path:
    """The library, to be named in ``LD_PRELOAD``."""
    library = folder / "lies.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, SOURCE, "-ldl"], check=True)
    return library


def lie(*, about_locks: bool = False, seconds_ahead: int = 0) -> None:
    """Lie to this process from now on, and to those that it begins."""
    library = ctypes.CDLL(None)
    ctypes.c_int.in_dll(library, "lies_about_locks").value = about_locks
    ctypes.c_long.in_dll(library, "lies_seconds_ahead").value = seconds_ahead
    os.environ["LIES_ABOUT_LOCKS"], os.environ["LIES_SECONDS_AHEAD"] = str(int(about_locks)), str(seconds_ahead)
