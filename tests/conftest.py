"""Where tests put their stores."""

from __future__ import annotations

import os
import shutil
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
