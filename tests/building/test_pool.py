from pathlib import Path

import pytest

from zgstore.building import pool


def resident_mib():
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


@pytest.mark.skipif(pool._malloc_trim is None, reason="this C library has no malloc_trim")
def test_the_heap_gives_back_what_lies_free_below_what_is_used():
    blocks = [bytearray(b"x" * 100_000) for _ in range(2_000)]
    last = bytearray(b"x" * 100_000)
    del blocks
    full = resident_mib()
    pool.trim()
    assert resident_mib() < full - 100
    assert len(last) == 100_000
