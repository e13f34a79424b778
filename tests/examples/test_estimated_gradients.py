"""One block with its own gradient and with estimated ones, from command to table, on a toy in the model's place."""

from __future__ import annotations

import json

import pytest
from copied import copied, run

SMALL = {
    "rows = 108": "rows = 12", "length = 64": "length = 8",
    "rows  = 12": "rows = 4", "every = 4": "every = 1",
}  # fmt: skip


@pytest.mark.timeout(300)
def test_one_command_goes_from_the_teacher_to_the_table(tmp_path):
    place = copied(tmp_path, "zeroth_order", SMALL)
    run(place / "zeroth_order.py", "--set", "train.steps=4", "--set", "train.schedule.warmup=0")
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
