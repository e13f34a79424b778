"""What a cache saves, measured through the command: cached, following and live runs of a tiny Llama."""

from __future__ import annotations

import re
import threading
import time

import pytest
from students import make_job

import zgstore
from zgtrain.jobfile import load_job

pytest.importorskip("transformers")


def test_cached_following_and_live_runs_are_weighed_and_the_page_says_from_where_it_pays(zg, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = make_job(tmp_path, kind="llama", ragged=True, rows=22, train='order = "sequential-first"\nsteps = 12')
    spent = {"following": [], "out": [], "runs/live": []}
    for output, report in trained_in_three_ways(zg, path):
        spent[output].append(report["seconds"]["total"])
    following, cached, live = spent.values()

    found = zg("economics", path, "runs/live", "following", "--json").json
    wall, device = found["all"]["wall"], found["all"]["device"]
    assert (wall["runs"], wall["live"]) == ([max(cached)], [max(live)])
    assert (device["runs"], device["live"]) == ([pytest.approx(sum(cached))], [pytest.approx(sum(live))])
    assert wall["cache"] == pytest.approx(max(0, max(following) - max(cached)))
    assert [each["wall"]["live"] for each in found["blocks"]] == [[each] for each in live]
    shown = zg("economics", path, "runs/live", "following").out
    assert re.search(r"CACHE +T\(1\) +T\(2\) +T\(4\) +T\(8\) +T\(16\) +LIVE +EVEN AT K\n", shown)
    assert "no live run" not in shown

    alone = zg("economics", path, "runs/live", "--json").json["all"]
    assert alone["wall"]["t"][0]["seconds"] == pytest.approx(alone["wall"]["cache"] + max(cached))
    assert alone["wall"]["t"][0]["ratio"] == pytest.approx(alone["wall"]["t"][0]["seconds"] / max(live))
    assert zg("report", path, "runs/live", "--json").json["path"] == str(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "No live run" not in page
    for kind in ("wall", "device"):
        k = alone[kind]["break_even"]
        assert f">{'never' if k is None else f'K = {k}'}<" in page
        assert k is None or k > 16 or f"pays from K = {k}" in page


def trained_in_three_ways(zg, path):
    """Both blocks beside the build, on what it left, and live: each run's output folder, and its report."""
    job, builds = load_job(path, ["output=following"]), []

    def progress(now):
        builds.extend([now.build] * bool(now.build))
        while now.stage == "publishing" and not (job.folder(0) / "log.jsonl").exists():  # it is followed
            time.sleep(0.01)

    store = zgstore.Store.init(job.snapshot.store)
    building = threading.Thread(target=zgstore.build, args=(store, job.snapshot.recipe), kwargs={"progress": progress})
    building.start()
    states = set()
    for block in (0, 1):
        which = ["--build", builds[-1]] if builds else ["--wait", "60s"]
        for output, targets, more in [
            ("following", "following", ["--follow", *which]), ("out", "cached", []),
            ("runs/live", "live", ["--source", "live"]),
        ]:  # fmt: skip
            report = zg("run", path, "--block", block, *more, "--set", f"output={output}", "--json").json
            assert report["targets"] == targets
            states.add((block, report["state_digest"]))
            building.join()
            yield output, report
    assert len(states) == 2  # the same bits in all three ways
