"""The protocol of section 8 loses nothing in any interleaving, and what each of its promises is needed for."""

import re
from importlib import import_module
from pathlib import Path

import pytest

from tests.properties.gc_model import PROMISES, Protocol, all_scenarios, search
from tests.properties.gc_model.logs import LAST, MONTH
from tests.properties.gc_model.mutations import BOTH_NETS, KINDS, MUTATIONS, tried, tried_for_names

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "gc.md"
ROW = re.compile(r"\| [^|]+ \| `(?P<promise>\w+)` \| (?P<code>`[^|]+`) \| (?P<where>[^|]+) \| (?P<what>[^|]+) \|")
SCENARIOS = all_scenarios()
# Fewer states would say less: those that had the most have still so many.
THOUSANDS = {"moves": 35, "asleep": 15, "readers": 30, "follower": 25, "copy": 15, "builders": 10}


@pytest.mark.parametrize("name", SCENARIOS)
def test_no_interleaving_of_the_protocol_violates_anything_in(name):
    found = search(SCENARIOS[name], Protocol())
    print(f"{name}: {found.states} states")
    assert found.violation is None, "\n".join(found.way)
    assert found.states > 1000 * THOUSANDS.get(name, 0)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.promise)
def test_what_comes_of_a_protocol_without(mutation):
    found = tried(SCENARIOS[mutation.scenario], mutation.promise)
    kind = found.violation.partition(":")[0] if found.violation else None
    assert kind == mutation.kind, "\n".join(found.way)
    assert len(found.way) == (mutation.steps + 2 if kind else 0), "\n".join(found.way)


def test_each_promise_has_its_mutation():
    assert sorted(mutation.promise for mutation in MUTATIONS) == sorted(PROMISES)
    assert {mutation.kind for mutation in MUTATIONS} == {*KINDS, None}


@pytest.mark.parametrize("promise", BOTH_NETS)
def test_looking_at_publication_saves_the_names_where_a_builder_s_work_is_lost_without(promise):
    assert tried_for_names(SCENARIOS["sleeper"], promise).violation is None
    assert tried_for_names(SCENARIOS["sleeper"], promise, "publish_looks").violation is not None


@pytest.mark.parametrize("keeps", [LAST, MONTH], ids=["of many entries", "by a clock that was set back"])
def test_a_second_look_within_retention_loses_what_a_ref_named_for_a_moment(keeps):
    moves = SCENARIOS["moves"]
    starts = [start for start in moves.starts if start.keeps == keeps]
    found = tried_for_names(moves._replace(starts=starts), "rereads_all_that_is_logged")
    assert found.violation is not None
    read, named, left = (found.way.index(step) for step in ("collector: roots", "setter: moved", "ref moved on"))
    assert read < named < left
    assert ("the clock is set back by a month" in found.way) == (keeps == MONTH)


# --- Model and code side by side ------------------------------------------------------------------------------------


def rows():
    return [match.groupdict() for match in ROW.finditer(PAGE.read_text(encoding="utf-8"))]


def test_the_page_has_a_row_for_each_promise():
    assert sorted(row["promise"] for row in rows()) == sorted(PROMISES)


@pytest.mark.parametrize("row", rows(), ids=lambda row: row["promise"])
def test_the_code_that_keeps_a_promise_exists(row):
    named = re.findall(r"`([\w.]+)`", row["code"])
    assert named
    for path in named:
        parts = path.split(".")
        found = import_module(".".join(("zgstore", *parts[:2])))
        for part in parts[2:]:
            found = getattr(found, part)


@pytest.mark.parametrize("row", rows(), ids=lambda row: row["promise"])
def test_the_page_says_what_the_search_finds(row):
    (mutation,) = [each for each in MUTATIONS if each.promise == row["promise"]]
    assert row["where"] == mutation.scenario
    assert row["what"] == (mutation.kind or "nothing")
