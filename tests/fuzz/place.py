"""Where targets put their files: one folder of this process, with something outside of what they are about."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
from pathlib import Path

from tests.faults.hostile import seen
from tests.fuzz.bounds import require
from zgstore.storage.store import Store

RENEWED = 200  # what is taken is kept: a store is made anew after so many uses


MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
_beside: list[str] = []  # where a process puts it that another will clean up after
_uses: dict[str, int] = {}


def begin(folder: str) -> None:
    """Begin again, in that folder: what was there belongs to the process that this one was forked from."""
    _beside[:] = [folder]
    _uses.clear()
    root.cache_clear()
    _untouched.cache_clear()


@functools.cache
def root() -> Path:
    """In memory where that can be; gone with the process."""
    folder = Path(tempfile.mkdtemp(prefix="zgfuzz-", dir=_beside[0] if _beside else MEMORY))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "outside").mkdir()
    (folder / "outside" / "mine").write_text("a letter")
    return folder


@functools.cache
def _untouched() -> dict[str, tuple[int, int, bytes]]:
    return seen(root() / "outside")


def see_outside() -> None:
    """That nothing outside of what a target is about was changed, or made."""
    require(seen(root() / "outside") == _untouched(), "something outside was changed")
    require({each.name for each in root().iterdir()} <= {"outside", "here", "stores"}, "something was made")


def here(*parts: str) -> Path:
    """A path in the folder that the target may use; the folders above it are made."""
    _untouched()
    path = root().joinpath("here", *parts)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def empty(*parts: str) -> Path:
    """An empty folder there."""
    path = here(*parts)
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    return path


def store(name: str = "store") -> Store:
    """A store that others may have written into; now and then a new one."""
    _untouched()
    path = root() / "stores" / name
    if _uses.get(name, 0) % RENEWED == 0:
        shutil.rmtree(path, ignore_errors=True)
    _uses[name] = _uses.get(name, 0) + 1
    return Store.init(path)
