"""The arms run, in small: what is trained on stored targets and on live ones ends in the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(900)  # on a busy machine; alone it takes a tenth of that

ARMS = Path(__file__).resolve().parent.parent.parent / "examples" / "arms" / "arms.py"


FOLDERS = {"B": "diffusion-", "D": "noised-", "E": "noised-", "F": "sharded-"}


def run(home):
    ran = subprocess.run(
        [sys.executable, ARMS, "--quick", "--output", home], env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False, timeout=800,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return ran.stdout, read(home / "arms.json")


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


def reports(home, blocks, targets, arm="C"):
    folder = FOLDERS.get(arm, "")
    return [read(path) for path in sorted(home.glob(f"runs/{folder}{blocks}-blocks/*/{targets}/*/report.json"))]


@pytest.fixture(scope="module")
def arms(tmp_path_factory):
    home = tmp_path_factory.mktemp("arms")
    return home, *run(home)


def test_every_arm_is_measured_on_both_kinds_of_targets(arms):
    home, said, found = arms
    rows = {(row["arm"], row["blocks"], row["targets"]): row for row in found["arms"]}
    assert list(rows) == [
        ("A", 1, "live"), ("A", 1, "cached"), ("C", 2, "live"), ("C", 2, "cached"), ("B", 2, "cached"),
        ("E", 2, "live"), ("D", 2, "cached"), ("F", 2, "cached"),
    ]  # fmt: skip
    for (arm, blocks, targets), row in rows.items():
        assert [each["targets"] for each in reports(home, blocks, targets, arm)] == [targets] * blocks
        assert all(each["inter_block_gradient_bytes"] == 0 for each in reports(home, blocks, targets, arm))
        assert row["peak_memory_bytes"][0] > found["idle_memory_bytes"]
        assert 0 < row["critical_path_seconds"][0] <= row["all_blocks_seconds"][0]
        assert len(row["gates"][0]) == 6
    assert rows["C", 2, "cached"]["bytes_stored"] > 10 * rows["C", 2, "live"]["bytes_stored"]
    assert said.endswith((home / "arms.md").read_text(encoding="utf-8"))


def test_stored_and_live_targets_end_in_the_same_bits(arms):
    home, _, _ = arms
    for blocks, arm in ((1, "A"), (2, "C"), (2, "D")):
        live, cached = (reports(home, blocks, targets, arm) for targets in ("live", "cached"))
        assert [each["state_digest"] for each in live] == [each["state_digest"] for each in cached]
        assert all(each["state_digest"] != each["initial_digest"] for each in live)


def test_a_block_that_two_processes_shard_learns_what_one_learns(arms):
    home, _, _ = arms
    for one, two in zip(reports(home, 2, "cached", "C"), reports(home, 2, "cached", "F"), strict=True):
        assert two["initial_digest"] == one["initial_digest"]
        assert two["last_window_mean_loss"] == pytest.approx(one["last_window_mean_loss"], rel=1e-3)


def test_every_arm_is_asked_what_its_source_is_worth_under_the_same_noise(arms):
    _, _, found = arms
    for row in found["arms"]:
        (leaked,) = row["leakage"]
        assert len(leaked["loss"]) == row["blocks"]
        assert all(each["own"] > 0 and each["other"] > 0 for each in [*leaked["loss"], leaked["kl"]])
    clean = next(row for row in found["arms"] if row["arm"] == "C")
    assert clean["leakage"][0]["kl"]["other"] > clean["leakage"][0]["kl"]["own"]


def test_what_is_finished_is_not_done_again(arms):
    home, _, found = arms
    lost = home / "runs" / "2-blocks" / "seed-0" / "live" / "block-001" / "report.json"
    lost.unlink()
    before = {path: path.stat().st_mtime_ns for path in home.rglob("*.json")}
    assert run(home)[1]["snapshot"] == found["snapshot"]
    changed = {path for path in home.rglob("*.json") if path.stat().st_mtime_ns != before.get(path)}
    assert lost in changed
    assert {path for path in changed if path.parent != lost.parent} == {home / "arms.json"}
