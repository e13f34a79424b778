"""The command run in this process, which has torch already."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from commands import runner
from students import built, make_job

from zgtrain.cli.main import main

FOUR = ["layers.0:in", "layers.1:in", "layers.2:in", "layers.3:in", "norm:in"]


@pytest.fixture
def zg(capfd, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))

    return runner(main, capfd)


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
