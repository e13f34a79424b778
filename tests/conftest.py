"""Where tests put their stores."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ENOUGH_BYTES = 2 << 30


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """In memory where that can be: a store has a thousand folders, and a disk takes its time to remove them."""
    memory = Path("/dev/shm")
    fits = os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > ENOUGH_BYTES
    with tempfile.TemporaryDirectory(prefix="zgstore-", dir=memory if fits else None) as folder:
        yield Path(folder)


@pytest.fixture
def interrupt() -> Iterator[signal.Signals]:
    """A signal that interrupts as SIGINT does, which a shell has ignored by what it runs in the background.

    Not SIGALRM: a test's own time limit comes by that.
    """
    before = signal.signal(signal.SIGPROF, signal.default_int_handler)
    yield signal.SIGPROF
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.signal(signal.SIGPROF, before)
