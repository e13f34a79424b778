"""What a cache costs and saves: published numbers come out again, and jobs that do not compare are refused."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import zgstore
from zgtrain.blockreport import BlockReport
from zgtrain.economics import CacheCost, Spent, amortised, break_even, economics, weigh
from zgtrain.jobfile import parse_job

# Published: cache 618.3 s on one of four devices; cached runs of 99.13 s and live runs of 116.39 s on four.
CACHE, CACHED, LIVE = 618.3, 99.13, 116.39
PUBLISHED = {1: 723.98, 2: 412.89, 4: 256.59, 8: 176.47, 16: 137.77}
RUNS = [
    105.68, 101.80, *[(4 * 256.59 - 2 * 412.89) / 2] * 2, *[(8 * 176.47 - 4 * 256.59) / 4] * 4,
    *[(16 * 137.77 - 8 * 176.47) / 8] * 8,
]  # fmt: skip


def test_published_amortised_seconds_come_out_again():
    for trainings, seconds in PUBLISHED.items():
        assert amortised(CACHE, RUNS, trainings) == pytest.approx(seconds, abs=0.005)
    assert sum(RUNS) / len(RUNS) == pytest.approx(CACHED, abs=0.01)


def test_published_break_even_is_36_in_wall_time_and_9_in_device_time():
    assert break_even(CACHE, cached=CACHED, live=LIVE) == 36
    assert break_even(CACHE, cached=4 * CACHED, live=4 * LIVE) == 9
    assert all(amortised(CACHE, RUNS, k) > LIVE for k in range(1, 17))


def test_break_even_is_the_first_training_at_which_the_cache_has_paid():
    for cache, cached, live in [(10.0, 1.0, 3.0), (10.0, 1.0, 2.0), (0.5, 1.0, 2.0)]:
        k = break_even(cache, cached=cached, live=live)
        assert amortised(cache, [cached], k) <= live
        assert k == 1 or amortised(cache, [cached], k - 1) > live


def test_a_cache_that_saves_nothing_never_pays():
    assert break_even(10.0, cached=2.0, live=2.0) is None
    assert break_even(10.0, cached=3.0, live=2.0) is None
    assert break_even(0.0, cached=2.0, live=2.0) == 1


def test_runs_that_are_not_measured_yet_are_taken_as_the_mean():
    assert amortised(10.0, [4.0, 2.0], 4) == (10 + 4 + 2 + 3 + 3) / 4
    assert amortised(10.0, [4.0, 2.0], 1) == 14.0


def test_all_blocks_take_as_long_as_the_slowest_and_as_many_device_seconds_as_all():
    cached, live = Spent((2.0, 3.0, 4.0), (1, 1, 2)), Spent((4.0, 6.0, 8.0), (1, 1, 2))
    found = weigh(CacheCost(6.0, 2), [cached], [live], snapshot="s", steps=8).as_value()
    wall, device = found["all"]["wall"], found["all"]["device"]
    assert (wall["cache"], wall["cached_mean"], wall["live_mean"]) == (6.0, 4.0, 8.0)
    assert (device["cache"], device["cached_mean"], device["live_mean"]) == (12.0, 13.0, 26.0)
    assert (wall["break_even"], device["break_even"]) == (2, 1)
    assert [each["k"] for each in wall["t"]] == [1, 2, 4, 8, 16]
    assert wall["t"][1] == {"k": 2, "seconds": 7.0, "ratio": 7 / 8}


def test_each_block_stands_against_the_live_run_of_its_own_depth():
    cached, live = Spent((2.0, 2.0), (1, 1)), Spent((2.5, 4.0), (1, 1))
    found = weigh(CacheCost(4.0), [cached], [live], snapshot="s", steps=8).as_value()
    assert [each["wall"]["break_even"] for each in found["blocks"]] == [8, 2]
    assert [each["wall"]["live"] for each in found["blocks"]] == [[2.5], [4.0]]


def test_a_cache_that_is_followed_costs_what_it_added():
    beside, cached, live = Spent((5.0, 6.0), (1, 1)), Spent((2.0, 4.0), (1, 1)), Spent((7.0, 9.0), (1, 1))
    found = weigh(CacheCost(8.0), [cached], [live], following=[beside], snapshot="s", steps=8).as_value()
    assert found["all"]["wall"]["cache"] == 2.0
    assert found["all"]["device"]["cache"] == 8.0 + 11.0 - 6.0
    assert found["all"]["wall"]["t"][0]["seconds"] == 6.0
    alone = weigh(CacheCost(8.0), [], [live], following=[beside], snapshot="s", steps=8).as_value()
    assert (alone["all"]["wall"]["cache"], alone["all"]["wall"]["t"][0]["seconds"]) == (0.0, 6.0)


def test_without_a_live_run_nothing_is_claimed():
    found = weigh(CacheCost(4.0), [Spent((2.0,), (1,))], [], snapshot="s", steps=8).as_value()
    assert found["all"]["wall"]["break_even"] is None
    assert found["all"]["wall"]["t"][0]["ratio"] is None
    assert any("no live run" in note for note in found["notes"])


# ---- from the reports of jobs ----


def job(tmp_path, name, seconds, *, targets="cached", snapshot="s", steps=8, launch=None):
    output = tmp_path / name
    names = [f"h.{b}" for b in range(max(2, len(seconds) + 1))]
    made = parse_job(
        {"output": name, "snapshot": {"store": "store", "rev": "main"},
         "student": {"block": "m:block", "boundaries": names},
         "train": {"steps": steps}, **({"launch": launch} if launch else {})},
        path=tmp_path / "job.toml",
    )  # fmt: skip
    for block, total in enumerate(seconds):
        folder = output / f"block-{block:03d}"
        folder.mkdir(parents=True)
        seconds = {"data": 0.0, "compute": total, "validation": 0.5, "total": total + 0.5}
        whole = dict.fromkeys(BlockReport.__slots__, 0) | {
            "pins": "p", "job": made.identity(), "source": "a", "target": "b", "initial_digest": "i",
            "state_digest": "d", "deterministic": True, "environment": {},
        }  # fmt: skip
        report = {**whole, "block": block, "snapshot": snapshot, "steps": steps, "targets": targets, "seconds": seconds}
        (folder / "report.json").write_text(json.dumps(report), encoding="utf-8")
    return made


def built_store(tmp_path):
    """A snapshot with a record that says what it took."""
    (tmp_path / "toy_economics.py").write_text(
        "import torch\n"
        "def teacher(): return torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))\n"
        "def batches():\n    yield {'input': torch.ones(2, 3)}\n",
        encoding="utf-8",
    )
    (tmp_path / "cache.toml").write_text(
        '[teacher]\nfactory = "toy_economics:teacher"\nid = "t"\nrevision = "1"\n'
        '[data]\nfactory = "toy_economics:batches"\nid = "d"\nrevision = "1"\n'
        '[capture]\nboundaries = ["0:in", "1:in"]\ncontext = []\n',
        encoding="utf-8",
    )
    store = zgstore.Store.init(tmp_path / "store")
    report = zgstore.build(store, tmp_path / "cache.toml", ref="main")
    return str(report.snapshot), report.seconds["total"]


def test_reports_and_the_builds_record_are_all_it_takes(tmp_path):
    snapshot, took = built_store(tmp_path)
    cached = job(tmp_path, "cached", [2.0, 3.0], snapshot=snapshot, launch={"blocks": {"1": {"processes": 2}}})
    live = job(tmp_path, "live", [4.0, 5.0], snapshot=snapshot, targets="live")
    found = economics([live, cached]).as_value()
    assert found["snapshot"] == snapshot
    assert found["all"]["wall"]["cache"] == pytest.approx(took, abs=0.2)
    assert (found["all"]["wall"]["runs"], found["all"]["wall"]["live"]) == ([3.0], [5.0])
    assert found["all"]["device"]["runs"] == [8.0]
    json.dumps(found, allow_nan=False)


def test_jobs_that_do_not_compare_are_refused(tmp_path):
    one = job(tmp_path, "one", [2.0, 3.0])
    with pytest.raises(zgstore.Refused, match="has 1 trained blocks"):
        economics([one, job(tmp_path, "fewer", [2.0])])
    with pytest.raises(zgstore.Refused, match="is of steps 9"):
        economics([one, job(tmp_path, "longer", [2.0, 3.0], steps=9)])
    with pytest.raises(zgstore.Refused, match="is of snapshot other"):
        economics([one, job(tmp_path, "other", [2.0, 3.0], snapshot="other")])
    with pytest.raises(zgstore.Invalid, match="named twice"):
        economics([one, one])
    (tmp_path / "one" / "block-000" / "report.json").unlink()
    with pytest.raises(zgstore.NotFound, match=r"block 0 of 2 in .* is not trained"):
        economics(one)
    with pytest.raises(zgstore.Invalid, match="no job here"):
        economics(job(tmp_path, "live", [2.0, 3.0], targets="live"))
    with pytest.raises(zgstore.NotFound, match="no trained block"):
        economics(job(tmp_path, "nothing", []))


def test_economics_and_report_load_no_torch():
    code = "import sys, zgtrain.economics, zgtrain.report; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
