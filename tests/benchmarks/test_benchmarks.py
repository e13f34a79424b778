"""Each benchmark runs, at sizes whose numbers say nothing; none is asserted."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.benchmarks import build, plot, results
from tests.benchmarks.__main__ import BENCHMARKS, TINY, measure
from tests.benchmarks.measuring import compare, machine, told, within
from tests.benchmarks.peers import __main__ as peers
from tests.benchmarks.peers.boundaries import made
from tests.benchmarks.peers.ours import Zgstore
from zgstore.building import sections
from zgstore.building.recipe import load_recipe


@pytest.fixture(autouse=True)
def _own_import_path(monkeypatch):
    """A recipe puts its folder first on the import path."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sections, "_directories", [])


@pytest.mark.parametrize("name", sorted(set(BENCHMARKS) - {"build", "training"}))
def test_a_benchmark_runs(name, tmp_path):
    entries, more = measure(name, tmp_path, TINY)
    assert entries
    assert all(entry.n == 1 for entry in entries)
    if name == "scale":
        assert plot.drawn(more["scale"]).startswith("<svg xmlns=")


def test_peers_are_measured_and_a_skipped_one_says_why(tmp_path):
    times, bits = peers.measure(tmp_path, made(0.02), [Zgstore], n=1)
    assert bits == {"zgstore": ("found", "found")}
    lines = peers.table(times, bits, {"other": "there is no program other"})
    assert lines[-1].startswith("| other | skipped: there is no program other |")
    assert {line.count("|") for line in lines} == {len(peers.MEASURES) + 4}
    assert [entry.holds for entry in peers.entries_of(times, bits)] == [True]


def test_the_recipe_of_the_real_build_names_what_is_there(tmp_path):
    (tmp_path / "cache.toml").write_text(build.RECIPE.format(rows=4))
    recipe = load_recipe(tmp_path / "cache.toml")
    assert recipe.teacher.factory.resolve().__code__ is build.teacher.__code__
    assert len(recipe.capture.boundaries) == 5


def test_a_bound_is_held_or_missed_by_its_median():
    times = {"ours": [1.0, 1.0, 9.0], "other": [2.0, 2.0, 2.0]}
    assert compare("a", times, ours="ours", other="other", at_least=2).holds
    assert not compare("a", times, ours="ours", other="other", at_most=0.4).holds
    assert within("a", [0.2, 0.1, 0.9], at_most=0.2).holds
    assert not within("a", [0.2, 0.3, 0.9], at_most=0.2).holds
    assert told("a", [5.0], [1.0]).holds


def test_results_of_other_benchmarks_on_this_machine_stay(tmp_path: Path):
    path, entry = tmp_path / "bench.json", within("a", [0.1], at_most=0.2)
    results.keep("one", [entry], path=path, scale=[1])
    results.keep("two", [entry], path=path)
    results.keep("one", [entry, entry], path=path)
    found = json.loads(path.read_text())
    assert [each["benchmark"] for each in found["entries"]] == ["two", "one", "one"]
    assert found["scale"] == [1]
    fields = {"name", "ours", "other", "ratio", "bound", "holds", "n", "spread", "machine"}
    assert all(fields <= set(each) for each in found["entries"])
    path.write_text(json.dumps({**found, "machine": machine() | {"cores": 999}}))
    results.keep("two", [entry], path=path)
    assert [each["benchmark"] for each in json.loads(path.read_text())["entries"]] == ["two"]
