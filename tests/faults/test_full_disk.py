"""A disk that is full, or fills up at the worst moments: refused before, or stopped with all that was done so far."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

from tests.faults import steps
from tests.faults.disks import fill, free_bytes, lighten, small_disk
from tests.faults.operations import state_of
from tests.upkeep.bare_stores import objects_in, publish
from zgstore.building.builder import build
from zgstore.cli.console import Screen
from zgstore.cli.main import main
from zgstore.errors import NoSpace
from zgstore.storage.store import Store
from zgstore.upkeep.copier import copy
from zgstore.upkeep.verifier import verify

sys.path.insert(0, str(Path(__file__).parents[1] / "building"))

from projects import make_project

MIB = 1 << 20
BLOB_BYTES = 3 * 32 * 6 * 256 * 4  # boundaries, rows, positions, width, bytes of a value
NO_SPACE = 24


@pytest.fixture(autouse=True)
def _own_import_path(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    torch.set_num_threads(1)


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / "disk", megabytes=8) as disk:
        Store.init(disk / "store")
        yield disk


@pytest.fixture
def recipe(tmp_path):
    return make_project(tmp_path / "p", rows=32, teacher_args="width = 256", storage="batches_per_shard = 2")[0]


@pytest.fixture
def zg(disk, capfd):
    """Runs the command on the store of the small disk; its exit code and its JSON, of whatever kind."""

    def run(*words):
        capfd.readouterr()
        screen = Screen()
        try:
            code = main(["--store", str(disk / "store"), "--json", *map(str, words)], screen)
        finally:
            screen.restore()
        return code, json.loads(capfd.readouterr().out)

    return run


def test_the_estimate_refuses_a_build_before_anything_is_written(disk, recipe, zg):
    fill(disk, leave_bytes=5 * MIB // 4)
    code, said = zg("build", recipe)
    assert code == NO_SPACE
    assert said["error"]["kind"] == "no_space"
    assert BLOB_BYTES < said["error"]["needed_bytes"] < 2 * BLOB_BYTES
    assert said["error"]["free_bytes"] <= 5 * MIB // 4
    assert not objects_in(Store.open(disk / "store"))
    lighten(disk)
    assert zg("build", recipe)[0] == 0
    assert zg("verify")[0] == 0


def test_a_copy_is_refused_before_anything_is_written(disk, tmp_path):
    source = Store.init(tmp_path / "source")
    publish(source, "main", [1, 2])
    target = Store.open(disk / "store")
    fill(disk, leave_bytes=MIB)
    with pytest.raises(NoSpace) as caught:
        copy(source, "main", to=target)
    assert caught.value.fields["needed_bytes"] > 0
    assert not objects_in(target)


def moments(run):
    """Steps of each phase of a build: its first blob, one in the middle, an action, a page, the ref."""
    drafts = [step.number for step in run.steps if step.call == "write" and len(Path(step.path).parts) == 4]
    places = {
        name: [step.number for step in run.steps if step.call.startswith("rename") and f"store/{name}/" in step.path]
        for name in ("actions", "meta", "refs")
    }
    return [drafts[0], drafts[len(drafts) // 2], places["actions"][0] - 2, places["meta"][0] - 2, places["refs"][0] - 2]


def test_a_disk_that_fills_up_meanwhile_stops_a_build_with_what_it_needs(disk, recipe):
    if why := steps.cannot():
        pytest.skip(why)

    def work():
        return str(build(Store.open(disk / "store"), recipe).snapshot)

    whole = steps.run(work, disk, lambda _: steps.GO)
    assert not whole.failed, whole.message
    for number in moments(whole):
        anew(disk)

        def full_at(step, number=number):
            if step.number == number:
                fill(disk)
            return steps.GO

        run = steps.run(work, disk, full_at)
        assert run.kind == "no_space", run.message
        assert "bytes are needed" in run.message
        assert not state_of(disk).problems
        assert steps.alone(lambda: is_refused(disk, recipe))
        lighten(disk)
        assert steps.alone(work) == whole.value
        assert not state_of(disk).problems


def anew(disk):
    shutil.rmtree(disk / "store")
    Store.init(disk / "store")


def is_refused(disk, recipe):
    """Whether a build on a disk without a byte says so."""
    try:
        build(Store.open(disk / "store"), recipe)
    except NoSpace as error:
        return "needed_bytes" in error.fields
    return False


def test_on_a_full_disk_gc_frees_what_a_build_that_was_stopped_left(disk, recipe, zg):
    if why := steps.cannot():
        pytest.skip(why)
    store = Store.open(disk / "store")
    kept = publish(store, "other", [1])
    seen = []

    def full_in_the_fourth_shard(step):
        seen.extend([step] if "store/actions/" in step.path and step.call.startswith("rename") else [])
        if len(seen) == 4 * 5:
            fill(disk)
        return steps.GO

    assert steps.run(lambda: build(store, recipe) and "", disk, full_in_the_fourth_shard).kind == "no_space"
    fill(disk)
    assert free_bytes(disk) == 0
    code, said = zg("gc", "--now")
    assert code == 0, said
    assert said["freed"]["objects"] >= 4 * 5
    assert free_bytes(disk) > BLOB_BYTES // 4
    assert store.resolve("other") == kept
    assert list(verify(store)) == []
