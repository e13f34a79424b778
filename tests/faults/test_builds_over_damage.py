"""A build that finds everything meets damaged metadata: what it says is there can be read."""

import os
import sys
from pathlib import Path

import pytest

from zgstore.building.builder import build
from zgstore.errors import Invalid
from zgstore.storage.store import Store
from zgstore.upkeep.verifier import verify

sys.path.insert(0, str(Path(__file__).parents[1] / "building"))

from projects import make_project


@pytest.fixture(autouse=True)
def _own_import_path(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))


def garble(path):
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-1] + b"\xc1")


def make_a_pipe(path):
    path.unlink()
    os.mkfifo(path)


def make_a_link(path):
    path.unlink()
    path.symlink_to("/etc/hostname")


@pytest.mark.parametrize("damage", [garble, make_a_pipe, make_a_link])
def test_metadata_that_a_build_would_write_is_read_before_it_is_said_to_be_there(tmp_path, damage):
    store = Store.init(tmp_path / "store")
    path, _module = make_project(tmp_path / "p", rows=4)
    first = build(store, path).snapshot
    record = store.refs.log("cache")[0].record
    for file in sorted((store.path / "meta").glob("??/*")):
        if file.stem == record.hex:
            continue
        damage(file)
        again = build(store, path)
        assert (again.snapshot, again.teacher_loaded) == (first, False)
        assert list(verify(store)) == []
    assert len(store.refs.log("cache")) == 1


def test_a_name_that_cannot_be_given_is_refused_before_the_teacher_runs(tmp_path):
    store = Store.init(tmp_path / "store")
    build(store, make_project(tmp_path / "p", rows=4)[0], ref="main")
    before = sorted((store.path / "actions").glob("??/*"))
    path, _module = make_project(tmp_path / "q", rows=4, revision="rev2", teacher_args="seed = 1")
    for ref in ("../main", "main/x", "MAIN"):
        with pytest.raises(Invalid):
            build(store, path, ref=ref)
    assert sorted((store.path / "actions").glob("??/*")) == before


def test_a_device_that_is_none_is_refused_by_name(tmp_path):
    store = Store.init(tmp_path / "store")
    path, _module = make_project(tmp_path / "p", rows=4)
    for device, why in (("nope", "no device"), ("cuda:9999", "no cuda:9999")):
        with pytest.raises(Invalid, match=why):
            build(store, path, devices=[device])
