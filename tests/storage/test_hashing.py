"""Files are hashed where they lie in memory, and read where they do not; one that is cut off ends nobody."""

from __future__ import annotations

import fcntl
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from blake3 import blake3

from zgstore.format.digest import digest_of
from zgstore.storage import hashing
from zgstore.storage.hashing import hash_file

SIZES = [0, 1, hashing.READ_BYTES - 1, hashing.READ_BYTES, hashing._MAP_BYTES + 4097, 2 * hashing._MAP_BYTES]

# Hashes a file again and again for a while; with "unleased" as it would be if nobody held writers back.
LOOP = """
import os, sys, time
from zgstore.storage import hashing
path, seconds, how = sys.argv[1], float(sys.argv[2]), sys.argv[3]
if how == "unleased":
    hashing._leased = lambda handle: True
end, mapped, populated = time.monotonic() + seconds, 0, hashing._populated
def counted(*given):
    global mapped
    mapped += populated(*given)
    return True
hashing._populated = counted
while time.monotonic() < end:
    handle = os.open(path, os.O_RDONLY)
    hashing.hash_file(handle)
    os.close(handle)
sys.exit(0 if mapped else "nothing was mapped")
"""


@pytest.fixture
def written():
    """Write a file of random bytes, on a disk: its path, its bytes. What lies in memory alone is always read."""
    with tempfile.TemporaryDirectory(prefix="zgstore-") as folder:

        def write(size: int) -> tuple[Path, bytes]:
            path, body = Path(folder) / "file", random.Random(size).randbytes(size)
            path.write_bytes(body)
            return path, body

        yield write


@pytest.fixture
def mappable(written):
    """Skips where the disk of temporary files gives no lease or does not say what is in memory."""
    path, _ = written(hashing.READ_BYTES)
    handle = os.open(path, os.O_RDONLY)
    try:
        with hashing._mapped(handle, hashing.READ_BYTES) as region:
            if region is None or not hashing._in_memory(handle, 0):
                pytest.skip("files of this disk are read and not mapped")
    finally:
        os.close(handle)


def hashed(path: Path, *kinds: str | None):
    """As a reader would."""
    handle = os.open(path, os.O_RDONLY)
    try:
        return hash_file(handle, kinds or (None,))
    finally:
        os.close(handle)


@pytest.mark.parametrize("size", SIZES)
def test_mapped_read_and_cold_files_have_the_digest_of_their_bytes(written, size, monkeypatch):
    path, body = written(size)
    right = ([digest_of(None, body)], size)
    assert right[0][0].raw == blake3(body).digest()
    assert hashed(path) == right
    handle = os.open(path, os.O_RDWR)
    assert hashed(path) == right, "somebody may write: no lease, and it is read"
    os.fsync(handle)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(handle)
    assert hashed(path) == right, "cold"
    monkeypatch.setattr(hashing, "_populated", lambda *_: False)
    assert hashed(path) == right, "a disk that fails under a map is asked by a read"


def test_several_kinds_in_one_pass(written):
    path, body = written(100)
    assert hashed(path, "page", "record") == ([digest_of("page", body), digest_of("record", body)], 100)


@pytest.mark.usefixtures("mappable")
def test_a_warm_file_is_mapped_and_its_lease_given_up(written, monkeypatch):
    path, _ = written(2 * hashing._MAP_BYTES)
    pieces, populated = [], hashing._populated
    monkeypatch.setattr(hashing, "_populated", lambda *given: pieces.append(given[1]) or populated(*given))
    handle = os.open(path, os.O_RDONLY)
    hash_file(handle)
    assert pieces == [0, hashing._MAP_BYTES]
    assert fcntl.fcntl(handle, fcntl.F_GETLEASE) == fcntl.F_UNLCK
    os.close(handle)


@pytest.mark.usefixtures("mappable")
@pytest.mark.parametrize(("how", "ends"), [("leased", 0), ("unleased", -signal.SIGBUS)])
def test_a_file_that_is_cut_off_while_it_is_hashed_ends_nobody(written, how, ends):
    """Without the lease the same process dies of it, which shows that it would."""
    path, body = written(32 << 20)
    seconds = 2 if how == "leased" else 60
    with subprocess.Popen([sys.executable, "-c", LOOP, str(path), str(seconds), how]) as process:
        while process.poll() is None:
            time.sleep(random.random() * 0.03)
            os.truncate(path, random.choice([0, 4096, random.randrange(len(body))]))
            path.write_bytes(body)
    assert process.returncode == ends
