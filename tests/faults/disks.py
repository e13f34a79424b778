"""Disks of a few MiB, in memory, that are filled to the last byte."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

BALLAST = "ballast"


@contextlib.contextmanager
def small_disk(at: Path, *, megabytes: int) -> Iterator[Path]:
    """A disk of that size, mounted for the block; skips the test where none can be."""
    at.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", at]
    if os.geteuid() or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("a file system of a few MiB cannot be mounted here")
    try:
        yield at
    finally:
        subprocess.run(["umount", "-l", at], check=True)


def free_bytes(disk: Path) -> int:
    found = os.statvfs(disk)
    return found.f_bavail * found.f_frsize


def fill(disk: Path, *, leave_bytes: int = 0) -> None:
    """Leave no more than so many bytes."""
    with (disk / BALLAST).open("ab", buffering=0) as ballast, contextlib.suppress(OSError):
        while free_bytes(disk) > leave_bytes:
            ballast.write(bytes(4096))


def lighten(disk: Path) -> None:
    """Take the ballast away."""
    (disk / BALLAST).unlink()
