"""The examples run as they stand, and stay short."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import zgstore
import zgtrain

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"


def test_the_minimal_example_builds_reads_and_trains(tmp_path):
    ran = subprocess.run(
        [sys.executable, EXAMPLES / "minimal" / "train.py", tmp_path / "store"],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    said = ran.stdout.splitlines()
    assert said[0].endswith("64 samples")
    assert float(said[1].rpartition(" ")[2]) < 0.2


def test_the_minimal_example_is_under_sixty_lines_of_its_own_code():
    lines = [
        line
        for path in (EXAMPLES / "minimal").glob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.strip()
    ]
    assert len(lines) < 60


def test_every_recipe_of_the_examples_can_be_read():
    recipes = [path for path in sorted(EXAMPLES.rglob("*.toml")) if "\n[capture]" in path.read_text(encoding="utf-8")]
    assert len(recipes) >= 2
    for path in recipes:
        recipe = zgstore.load_recipe(path)
        assert recipe.teacher.factory.resolve()
        assert recipe.data.factory.resolve()


def test_every_job_of_the_examples_can_be_read():
    jobs = [path for path in sorted(EXAMPLES.rglob("*.toml")) if "\n[student]" in path.read_text(encoding="utf-8")]
    assert jobs
    for path in jobs:
        assert zgtrain.load_job(path).identity()


def test_the_recipe_of_the_demo_cuts_the_teacher_into_four_blocks():
    boundaries = zgstore.load_recipe(EXAMPLES / "smollm2" / "smollm2.toml").capture.boundaries
    assert boundaries == (*(f"model.layers.{layer}:in" for layer in (0, 8, 15, 23)), "model.norm:in")


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """The demo's module of that name, whose commands run in an empty folder."""
    spec = importlib.util.spec_from_file_location("commands_of_the_demo", EXAMPLES / "smollm2" / "commands.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    monkeypatch.setattr(found, "SCRATCH", tmp_path)
    return found


def test_a_command_of_the_demo_is_looked_at_while_it_runs(commands, monkeypatch):
    monkeypatch.setattr(commands, "LOOK_SECONDS", 0.01)
    looks = []
    assert commands.run("zgstore", "init", meanwhile=lambda: looks.append(1))["ok"]
    assert len(looks) > 1


def test_a_command_that_fails_ends_the_demo_with_what_it_said(commands, tmp_path):
    assert commands.zgstore("init")["store"] == str(tmp_path / ".zgstore")
    with pytest.raises(SystemExit, match=r"(?s)nobody.*hint: .*exit code 10"):
        commands.zgstore("show", "nobody")
