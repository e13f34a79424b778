"""Locks and clocks that lie to a process, as a network file system or a host with a wrong time would."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ENDS_WITH_ITS_PARENT = 1  # PR_SET_PDEATHSIG
SOURCE = Path(__file__).with_name("lies.c")


def cannot() -> str:
    """Why nothing can lie here; "" if it can."""
    return "" if shutil.which("cc") else "no C compiler is here"


def made(folder: Path) -> Path:
    """The library, to be named in ``LD_PRELOAD``."""
    library = folder / "lies.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, SOURCE, "-ldl"], check=True)
    return library


def begin_anew(module: str) -> None:
    """Run ``python -m MODULE`` again with the library, and end as it does: what lies is there from the first moment.

    Returns at once where this is that run, or where nothing can lie.
    """
    if "lies.so" in os.environ.get("LD_PRELOAD", ""):
        ctypes.CDLL(None).prctl(ENDS_WITH_ITS_PARENT, signal.SIGTERM)
    elif not cannot():
        with tempfile.TemporaryDirectory(prefix="zgstore-lies-") as folder:
            environment = os.environ | {"LD_PRELOAD": str(made(Path(folder)))}
            anew = subprocess.Popen([sys.executable, "-m", module, *sys.argv[1:]], env=environment)
            signal.signal(signal.SIGTERM, lambda *_: anew.terminate())
            sys.exit(anew.wait())


def lie(*, about_locks: bool = False, seconds_ahead: int = 0) -> None:
    """Lie to this process from now on, and to those that it begins."""
    library = ctypes.CDLL(None)
    ctypes.c_int.in_dll(library, "lies_about_locks").value = about_locks
    ctypes.c_long.in_dll(library, "lies_seconds_ahead").value = seconds_ahead
    os.environ["LIES_ABOUT_LOCKS"], os.environ["LIES_SECONDS_AHEAD"] = str(int(about_locks)), str(seconds_ahead)
