"""Where tests put their stores."""

from __future__ import annotations

import contextlib
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


class Interrupts:
    """A signal that interrupts as SIGINT does, which a shell has ignored by what it runs in the background.

    Only inside `within`, however late it is delivered. Not SIGALRM: a test's own time limit comes by that.
    """

    signal = signal.SIGPROF

    def __init__(self) -> None:
        self._armed = False

    def __call__(self, *_: object) -> None:
        armed, self._armed = self._armed, False
        if armed:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def within(self, cpu_seconds: float = 0.0) -> Iterator[None]:
        """One interrupt after so many seconds of this process's processors, or when the signal is sent."""
        self._armed = True
        try:
            signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
            yield
        finally:
            self._armed = False
            signal.setitimer(signal.ITIMER_PROF, 0)


@pytest.fixture
def interrupts() -> Iterator[Interrupts]:
    """What is still under way when it ends is ignored: what the system does by default ends the process."""
    given = Interrupts()
    signal.signal(given.signal, given)
    yield given
    signal.signal(given.signal, signal.SIG_IGN)
