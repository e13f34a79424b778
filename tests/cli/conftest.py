"""The command run in this process or in one of its own, on a small store."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import Ran, runner
from made import publish

from zgstore.cli.main import main
from zgstore.storage.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """``main`` moved once, from what the tag ``v1`` names."""
    store = Store.init(tmp_path / ".zgstore")
    first = publish(store, "main", 1.0)
    store.point("v1", "tag", first)
    publish(store, "main", 2.0, message="more of it")
    return store


@pytest.fixture
def zg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Any:
    """Runs the command in this process, where the store is."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ZGSTORE_DIR", raising=False)

    return runner(main, capfd)


@pytest.fixture
def process(tmp_path: Path) -> Any:
    """Runs Python code or the command in a process of its own, where the store is."""

    def run(*words: str, code: str | None = None, **environment: str) -> Ran:
        what = ["-c", code] if code is not None else ["-c", "from zgstore.cli.main import run; run()"]
        found = subprocess.run(
            [sys.executable, *what, *words], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
            env={**{name: text for name, text in os.environ.items() if name != "ZGSTORE_DIR"}, **environment},
        )  # fmt: skip
        return Ran(found.returncode, found.stdout, found.stderr)

    return run
