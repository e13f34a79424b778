"""A sample of ``make stress``: many processes on one store, each hazard for some operations; nobody loses anything."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OPERATIONS, HANDS, SEED = 24, 4, 5

pytestmark = pytest.mark.timeout(900)  # half a minute where nothing else runs; a slow machine takes what it takes


@pytest.fixture(scope="module")
def told():
    """What came of each hazard; torch is loaded once for all of them, and each process forked from there."""
    counts = ["--operations", str(OPERATIONS), "--hands", str(HANDS), "--seed", str(SEED)]
    command = [sys.executable, "-m", "tests.faults.stress", "--hazard", "all", "--json", *counts]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    results = {value["hazard"]: value for value in map(json.loads, done.stdout.splitlines())}
    assert len(results) == 7, done.stderr
    return results


def nothing_is_found(told, hazard):
    counts = told[hazard]
    if "skipped" in counts:
        pytest.skip(counts["skipped"])
    assert not counts["findings"]
    done, heard, befell = counts["done"], counts["heard"], counts["befell"]
    assert sum(done.values()) + sum(heard.values()) + befell.get("killed", 0) >= OPERATIONS
    return counts


def test_many_processes_on_one_store_lose_nothing_and_leave_nothing_unaccounted_for(told):
    counts = nothing_is_found(told, "none")
    assert counts["files"]["store: objects referenced"][0] > 0


def test_where_locks_lie_nobody_collects_but_who_says_that_he_alone_does(told):
    counts = nothing_is_found(told, "lying-flock")
    assert counts["heard"]["cannot_collect: refused"] > 0
    assert "collects" not in counts["done"]


def test_who_holds_a_lock_and_is_killed_keeps_nobody_from_going_on(told):
    assert nothing_is_found(told, "killed-holder")["befell"]["killed"] > 0


def test_who_was_stopped_until_the_lease_was_taken_notices_as_it_wakes(told):
    assert nothing_is_found(told, "stopped-holder")["befell"]["leases made old"] > 0


def test_clocks_that_are_a_day_off_in_either_direction_cost_nothing(told):
    assert nothing_is_found(told, "clock")["done"]


def test_a_mount_that_cannot_be_written_can_be_read_and_verified_beside_those_who_write(told):
    counts = nothing_is_found(told, "read-only")
    assert counts["done"]["reads_only"] > 0
    assert counts["heard"]["cannot_write: invalid"] > 0


def test_an_index_that_is_deleted_garbled_or_full_in_between_changes_no_answer(told):
    assert nothing_is_found(told, "index")["done"]["hurts_index"] > 0
