"""The long run of depth pruning, from its command to its table, on a toy in the teacher's place."""

from __future__ import annotations

import json

import pytest
from copied import copied, run

SMALL = {
    "rows = 768": "rows = 16", "skip      = 768": "skip = 16", "rows      = 48": "rows = 4",
    "sweep_rows = 16": "sweep_rows = 4",
}  # fmt: skip


@pytest.fixture(scope="module")
def prune(tmp_path_factory):
    """Called with words, it runs prune.py; gives what it said and the folder of its results."""
    root = tmp_path_factory.mktemp("pruning")
    place = copied(root, "depth_pruning", SMALL)
    return lambda *words: (
        run(place / "prune.py", "--set", "train.steps=4", *words), root / ".pruning" / "results"
    )  # fmt: skip


def found(results, name):
    return json.loads((results / f"{name}.json").read_text(encoding="utf-8"))


@pytest.mark.timeout(300)
def test_one_command_goes_from_the_teacher_to_the_table(prune):
    ways = ["tuned", "tuned-polish", "end-to-end"]
    said, results = prune(*(word for name in ways for word in ("--way", name)))
    rows = [line for line in (results / "results.md").read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[0] for row in rows[1:]] == [f"| {name}" for name in ways]
    for name in ways:
        each = found(results, name)
        assert each["steps"] == 4
        assert each["critical_seconds"] > 0
        assert len(each["evaluation"]["gates"]) == 6
    assert found(results, "build")["samples"] == 16
    curve = (results / "ce-against-seconds.csv").read_text(encoding="utf-8").splitlines()
    assert len(curve) == 4
    assert "<svg" in (results / "ce-against-seconds.svg").read_text(encoding="utf-8")

    said, _ = prune(*(word for name in ways for word in ("--way", name)))
    assert [line for line in said.splitlines() if line.endswith(": done")] == [
        f"{name}: done" for name in ("build", "fisher-information", "start", *ways)
    ]
