"""The command run in this process, which has torch already."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from students import built, make_job

from zgstore.cli.console import Screen
from zgtrain.cli.main import main

FOUR = ["layers.0:in", "layers.1:in", "layers.2:in", "layers.3:in", "norm:in"]


@dataclass
class Ran:
    """One run of the command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        assert self.out.count("\n") == 1, f"not one line: {self.out!r}"
        value = json.loads(self.out)
        assert isinstance(value, dict)
        return value

    @property
    def error(self) -> str:
        """Both lines of the error, seen to be two."""
        lines = self.err.splitlines()
        assert len(lines) == 2, self.err
        assert lines[0].startswith("error: ")
        assert lines[1].startswith("hint: ")
        return self.err


@pytest.fixture
def zg(capfd, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(*words: object) -> Ran:
        capfd.readouterr()
        screen = Screen()
        try:
            code = main([str(word) for word in words], screen)
        finally:
            screen.restore()
        out, err = capfd.readouterr()
        return Ran(code, out, err)

    return run


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A job of four blocks on a snapshot, none of them trained: its file."""
    path = make_job(
        tmp_path_factory.mktemp("job"),
        boundaries=FOUR,
        rows=16,
        train="steps = 12\ncheckpoint_every = 4",
        more="[launch]\nparallel = 2",
    )
    built(path)
    return path
