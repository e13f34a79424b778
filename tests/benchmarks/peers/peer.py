"""What is asked of each peer."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from tests.benchmarks.peers.boundaries import Boundaries, Piece

Read = bytes | memoryview | Piece


class Unsound(Exception):
    """A check of the peer's own says that its data is not what it was."""


class Peer:
    """One tool in one folder of its own.

    Each method is timed as a whole; what ``prepare`` and ``prepare_more`` do is not. Whatever is written is synced by
    who calls, inside the time.

    Args:
        folder: Empty.
        data: What it is given.
    """

    name: ClassVar[str]
    verifies: ClassVar[bool] = True  # whether it has a check of all of its bytes

    def __init__(self, folder: Path, data: Boundaries) -> None:
        self.folder, self.data = folder, data

    @classmethod
    def absent(cls) -> str:
        """Why it cannot take part; empty if it can."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Whatever comes before the first byte."""

    def ingest(self) -> None:
        """Take in ``data.first``."""
        raise NotImplementedError

    def again(self) -> None:
        """Take in the same once more."""
        self.ingest()

    def prepare_more(self) -> None:
        """Whatever comes before the bytes that are new."""

    def grow(self) -> None:
        """Take in ``data.all``."""
        raise NotImplementedError

    def verify(self) -> None:
        """Check every byte by the peer's own means.

        Raises:
            Unsound: if something is not what it was.
        """
        raise NotImplementedError

    def read(self, piece: int) -> Read:
        """One piece, in this process."""
        raise NotImplementedError

    def forget(self) -> None:
        """Let go of what reading has opened."""

    def everything(self) -> Iterator[Read]:
        """The pieces of ``data.all``, in order, however that is done best."""
        return (self.read(number) for number in range(len(self.data.all)))

    def kept(self) -> Path:
        """The folder that holds what it keeps; a tool's own copy of what it was given is not counted."""
        raise NotImplementedError


class Tool(Peer):
    """A peer that is a program, and takes files."""

    program: ClassVar[str]
    environment: ClassVar[dict[str, str]] = {}

    @classmethod
    def absent(cls) -> str:
        """If the program is not installed."""
        for folder in os.get_exec_path():
            if (Path(folder) / cls.program).exists():
                return ""
        return f"there is no program {cls.program}"

    def run(self, *words: str, fails: type[Exception] = RuntimeError) -> bytes:
        """One run of a program in the peer's folder; what it printed."""
        done = subprocess.run(
            words, cwd=self.folder, capture_output=True, check=False,
            env={**os.environ, "HOME": str(self.folder), **_AUTHOR, **self.environment},
        )  # fmt: skip
        if done.returncode:
            raise fails(f"{' '.join(words)}: {done.stderr.decode(errors='replace')[-500:]}")
        return done.stdout


_AUTHOR = {
    "GIT_AUTHOR_NAME": "bench", "GIT_AUTHOR_EMAIL": "bench@localhost",
    "GIT_COMMITTER_NAME": "bench", "GIT_COMMITTER_EMAIL": "bench@localhost",
}  # fmt: skip
