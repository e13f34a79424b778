import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from zgstore.building import sections
from zgstore.building.builder import build
from zgstore.errors import Invalid
from zgstore.storage.store import Store
from zgstore.upkeep.collector import collect
from zgstore.upkeep.copier import copy
from zgstore.upkeep.recomputer import recompute
from zgstore.upkeep.repairer import repair
from zgstore.upkeep.verifier import verify

sys.path.insert(0, str(Path(__file__).parents[1] / "building"))

from projects import make_project, write_recipe, write_rows


@pytest.fixture(autouse=True)
def _own_import_path(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sections, "_directories", [])
    torch.set_num_threads(1)


@pytest.fixture
def built(tmp_path):
    store = Store.init(tmp_path / "store")
    path, module = make_project(tmp_path / "p", capture="constants = []")
    return store, path, module, build(store, path)


def blobs(store):
    return sorted((store.path / "objects").glob("*/*.safetensors"))


def flip(path, at=-1):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.chmod(0o644)
    path.write_bytes(content)


def test_flipped_and_missing_blobs_are_made_anew_with_the_same_digest(built):
    store, path, _, report = built
    files = blobs(store)
    before = {file: file.read_bytes() for file in files}
    for file in files[:3]:
        flip(file)
    for file in files[3:5]:
        file.unlink()
    problems = list(verify(store))
    assert len(problems) == 5
    done = repair(store, problems, recipe=path)
    assert not done.left
    assert {each.source for each in done.mended} == {"recipe"}
    assert len(done.quarantined) == 3
    assert {file: file.read_bytes() for file in blobs(store)} == before
    assert not list(verify(store))
    again = build(store, path)
    assert (again.snapshot, again.shards_built) == (report.snapshot, 0)


def test_another_store_can_be_the_source(built, tmp_path):
    store, path, _, report = built
    other = Store.init(tmp_path / "other")
    build(other, path)
    flip(blobs(store)[0])
    flip(store.objects.path(store.snapshot(report.snapshot).root, "meta"))
    # What a corrupt page hid comes to light when the page is there again.
    for _ in range(2):
        done = repair(store, list(verify(store)), source=other)
        assert {each.source for each in done.mended} == {"store"}
    assert not list(verify(store))


def test_pages_and_snapshots_are_written_again_by_the_recipe(built):
    store, path, _, report = built
    snapshot = store.snapshot(report.snapshot)
    for digest in (snapshot.root, report.snapshot):
        flip(store.objects.path(digest, "meta"))
    done = repair(store, list(verify(store)), recipe=path)
    assert not done.left
    assert store.snapshot(report.snapshot) == snapshot
    assert not list(verify(store))


@pytest.mark.parametrize("damage", [flip, lambda file: file.unlink()])
def test_a_record_that_nothing_makes_again_is_forgotten_by_the_reflog(built, damage):
    store, path, _, report = built
    store.point("v1", "tag", report.snapshot)
    (entry,) = store.refs.log("cache")
    damage(store.objects.path(entry.record, "meta"))
    done = repair(store, list(verify(store)), recipe=path)
    assert ([each.source for each in done.mended], done.left) == (["forgotten"], ())
    assert not list(verify(store))
    assert store.refs.log("cache") == [replace(entry, record=None)]
    assert store.refs.get("cache") == report.snapshot
    collect(store, now=True)


def test_a_record_is_fetched_where_another_store_has_it(built, tmp_path):
    store, path, _, _ = built
    other = Store.init(tmp_path / "other")
    copy(store, "cache", to=other)
    (entry,) = store.refs.log("cache")
    flip(store.objects.path(entry.record, "meta"))
    done = repair(store, list(verify(store)), recipe=path, source=other)
    assert [each.source for each in done.mended] == ["store"]
    assert store.refs.log("cache") == [entry]


def test_a_snapshot_with_a_limit_is_repaired_as_it_was(tmp_path):
    store = Store.init(tmp_path / "store")
    path, _ = make_project(tmp_path / "p")
    build(store, path, limit=7, ref="short")
    for file in blobs(store):
        flip(file)
    done = repair(store, list(verify(store)), recipe=path)
    assert not done.left
    assert not list(verify(store))


def test_what_the_recipe_does_not_make_is_left_and_said_why(built):
    store, path, module, _ = built
    victim = blobs(store)[0]
    for file in blobs(store):
        flip(file)
    recipe = write_recipe(path.parent, module, boundaries=("layers.0:in",), teacher_args="seed = 3", revision="rev2")
    done = repair(store, list(verify(store)), recipe=recipe)
    assert done.left
    said = " ".join(problem.message for problem in done.left)
    assert "no column 'norm:in'" in said
    assert "teacher.measured" in said
    assert not victim.exists() or victim.read_bytes()


def test_other_data_is_no_repair(built):
    store, path, module, _ = built
    flip(blobs(store)[0])
    write_rows(path.parent, 12, first=5)
    other = write_recipe(path.parent, module, data_revision="rev2")
    done = repair(store, list(verify(store)), recipe=other)
    assert "no such shard" in done.left[0].message


def test_a_repair_needs_a_source(built):
    with pytest.raises(Invalid, match="repair from"):
        repair(built[0], [])


def test_a_recomputation_compares_bits_and_stores_nothing(built):
    store, path, _, report = built
    names = {file.name for file in blobs(store)}
    found = recompute(store, "cache", path, 2)
    assert (found.shards, found.problems) == (2, ())
    assert found.blobs == 2 * len(store.snapshot(report.snapshot).columns)
    assert {file.name for file in blobs(store)} == names


def test_a_recomputation_by_another_teacher_is_refused(built):
    store, path, module, _ = built
    other = write_recipe(path.parent, module, teacher_args="seed = 3", revision="rev2")
    with pytest.raises(Invalid, match=r"teacher\.measured"):
        recompute(store, "cache", other, 1)


def test_a_teacher_that_is_not_reproducible_is_found(tmp_path):
    more = """
    import itertools
    COUNT = itertools.count()

    class Drifting(Teacher):
        def forward(self, input_ids, attention_mask=None):
            x = self.embed(input_ids) + next(COUNT)
            for layer in self.layers:
                x = layer(x)
            return x

    def drifting():
        torch.manual_seed(0)
        return Drifting(8, 4)
    """
    store = Store.init(tmp_path / "store")
    path, module = make_project(tmp_path / "p", more=more, boundaries=("layers.0:in",))
    path.write_text(path.read_text().replace(f"{module}:teacher", f"{module}:drifting"))
    build(store, path)
    found = recompute(store, "cache", path, 1)
    assert [problem.kind for problem in found.problems] == ["differs"]
    assert "layers.0:in of shard 1" in found.problems[0].message
    flip(
        next(
            store.path.glob(
                f"objects/*/{next(iter(store.shards(store.snapshot(store.resolve('cache'))))).blobs[0].digest.hex}*"
            )
        )
    )
    done = repair(store, list(verify(store)), recipe=path)
    assert "not reproducible" in done.left[0].message
