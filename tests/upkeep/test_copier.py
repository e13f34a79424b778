"""A snapshot carried to another store, whole or in part."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import small_stores as small
import torch

from zgstore.errors import Conflict, Corrupt, Invalid, Missing, NoSpace, NotFound, Partial
from zgstore.format.pages import Dropped
from zgstore.storage import partials
from zgstore.storage.store import Store
from zgstore.upkeep.accounts import usage
from zgstore.upkeep.copier import copy, plan_copy
from zgstore.upkeep.verifier import verify

H0, H1 = small.boundary("h.0", 0), small.boundary("h.1", 1)


@pytest.fixture
def source(tmp_path):
    return Store.init(tmp_path / "source")


@pytest.fixture
def target(tmp_path):
    return Store.init(tmp_path / "target")


def table(seed: int = 0, shards: int = 3) -> dict:
    return {
        H0: [small.values(seed + at, 2) for at in range(shards)],
        H1: [small.values(seed + 100 + at, 2) for at in range(shards)],
    }


def blobs(store: Store) -> set[str]:
    return {path.name for path in (store.path / "objects").glob("*/*")}


def damage(store: Store, digest) -> None:
    path = store.objects.path(digest, "objects")
    path.chmod(0o644)
    body = bytearray(path.read_bytes())
    body[-1] ^= 1
    path.write_bytes(body)


def test_a_copy_is_the_same_snapshot_with_its_record_and_ref(source, target):
    dropped = Dropped(masked=(1,), masked_reasons=("not finite",))
    digest = small.publish(
        source, table(), ref="main", dropped=dropped, constants={"rope": torch.ones(3)}, platforms=[{"torch": "x"}]
    )
    report = copy(source, "main", to=target)
    assert target.resolve("main") == digest
    assert blobs(target) == blobs(source)
    assert target.record_of(digest) == source.record_of(digest)
    assert target.read_plan("main").masked == (1,)
    assert partials.expected(target.path, digest) is None
    assert list((target.path / "tmp").iterdir()) == []
    found = report.as_json()
    assert found["objects"] == {"copied": 7, "present": 0}
    assert (found["partial"], found["ref"], found["snapshot"]) == (False, "main", str(digest))
    for path in (target.path / "objects").glob("*/*"):
        assert path.read_bytes() == (source.path / path.relative_to(target.path)).read_bytes()


def test_a_second_copy_carries_nothing(source, target):
    small.publish(source, table(), ref="main")
    copy(source, "main", to=target)
    found = copy(source, "main", to=target).as_json()
    assert found["objects"] == {"copied": 0, "present": 6}
    assert found["bytes"]["copied"] == 0


def test_only_what_is_missing_is_carried(source, target):
    small.publish(source, table(shards=3), ref="main")
    copy(source, "main", to=target)
    small.publish(source, table(shards=4), ref="main")
    assert copy(source, "main", to=target).as_json()["objects"] == {"copied": 2, "present": 6}
    assert target.resolve("main") == source.resolve("main")
    assert len(target.refs.log("main")) == 2


def test_the_plan_is_what_is_then_done(source, target):
    small.publish(source, table(), ref="main")
    plan = plan_copy(source, "main", to=target)
    done = copy(source, "main", to=target).as_json()
    assert {key: done[key] for key in plan.as_json()} == plan.as_json()


def test_a_digest_without_a_name_moves_no_ref(source, target):
    digest = small.publish(source, table())
    report = copy(source, digest.short, to=target)
    assert report.ref is None
    assert target.refs.list() == []
    assert target.snapshot(digest) == source.snapshot(digest)


def test_another_name_can_be_given(source, target):
    digest = small.publish(source, table(), ref="main")
    copy(source, "main", to=target, ref="theirs")
    assert [(each.name, each.snapshot) for each in target.refs.list()] == [("theirs", digest)]


def test_a_tag_arrives_as_a_tag_and_does_not_move(source, target):
    first = small.publish(source, table(0), ref="main")
    source.point("v1", "tag", first)
    copy(source, "v1", to=target)
    copy(source, "v1", to=target)
    assert [(each.name, each.kind) for each in target.refs.list()] == [("v1", "tag")]
    source.point("v1", "tag", small.publish(source, table(50)), force=True)
    with pytest.raises(Conflict):
        copy(source, "v1", to=target)
    assert target.resolve("v1") == first


def test_a_part_is_marked_partial(source, target):
    digest = small.publish(source, table(), ref="main", constants={"rope": torch.ones(3)})
    report = copy(source, "main", to=target, columns=["h.0"])
    assert report.as_json()["partial"]
    assert report.as_json()["columns"] == ["h.0"]
    assert partials.expected(target.path, digest) == {"h.0"}
    assert target.resolve("main") == digest
    assert len(blobs(target)) == 4
    assert [each.column.name for each in target.read_plan("main").columns] == ["h.0"]
    with pytest.raises(Partial) as caught:
        target.read_plan("main", ["h.1"])
    assert "zgstore copy" in caught.value.hint


def test_a_part_takes_the_bytes_that_are_there(source, target):
    small.publish(source, table(), ref="main")
    copy(source, "main", to=target, columns=["h.0"])
    here = sum(file.stat().st_size for file in (target.path / "objects").glob("??/*"))
    assert usage(target).total_bytes == here < usage(source).total_bytes
    assert [share.bytes for share in usage(target).snapshots] == [here]
    counted = verify(target)
    assert list(counted) == []
    assert counted.report.objects == len(
        [*(target.path / "objects").glob("??/*"), *(target.path / "meta").glob("??/*")]
    )


def test_parts_add_up_and_the_whole_is_no_part(source, target):
    digest = small.publish(source, table(), ref="main")
    copy(source, "main", to=target, columns=["h.0"])
    copy(source, "main", to=target, columns=["h.1"])
    assert partials.expected(target.path, digest) == {"h.0", "h.1"}
    assert copy(source, "main", to=target).as_json()["objects"]["copied"] == 0
    assert partials.expected(target.path, digest) is None


def test_a_part_of_what_is_there_whole_changes_nothing(source, target):
    digest = small.publish(source, table(), ref="main")
    copy(source, "main", to=target)
    copy(source, "main", to=target, columns=["h.0"])
    assert partials.expected(target.path, digest) is None


def test_a_part_can_be_copied_on_as_a_part(source, target, tmp_path):
    digest = small.publish(source, table(), ref="main")
    copy(source, "main", to=target, columns=["h.1"])
    third = Store.init(tmp_path / "third")
    copy(target, "main", to=third)
    assert partials.expected(third.path, digest) == {"h.1"}
    with pytest.raises(Partial):
        copy(target, "main", to=third, columns=["h.0"])


def test_every_column_by_name_is_the_whole(source, target):
    digest = small.publish(source, table(), ref="main")
    copy(source, "main", to=target, columns=["h.1", "h.0"])
    assert partials.expected(target.path, digest) is None


def test_a_corrupt_source_is_named_and_nothing_of_it_is_kept(source, target):
    digest = small.publish(source, table(), ref="main")
    bad = next(source.shards(source.snapshot(digest))).blobs[0].digest
    damage(source, bad)
    with pytest.raises(Corrupt) as caught:
        copy(source, "main", to=target)
    assert caught.value.object == str(bad)
    assert target.refs.list() == []
    assert not any(bad.hex in name for name in blobs(target))
    assert len(blobs(target) - blobs(source)) == 0
    assert list((target.path / "tmp").iterdir()) == []


def test_a_stopped_copy_goes_on_where_it_stopped(source, target):
    small.publish(source, table(shards=6), ref="main")

    class Stop(Exception):
        pass

    def stop(_count):
        if len(blobs(target)) >= 4:
            raise Stop

    with pytest.raises(Stop):
        copy(source, "main", to=target, progress=stop)
    there = len(blobs(target))
    assert 0 < there < 12
    assert target.refs.list() == []
    found = copy(source, "main", to=target).as_json()
    assert found["objects"] == {"copied": 12 - there, "present": there}


def test_a_file_of_another_size_is_replaced_and_set_aside(source, target):
    digest = small.publish(source, table(), ref="main")
    blob = next(source.shards(source.snapshot(digest))).blobs[0]
    path = target.objects.path(blob.digest, "objects")
    path.write_bytes(b"torn")
    copy(source, "main", to=target)
    assert path.stat().st_size == blob.size
    assert len(list((target.path / "quarantine").iterdir())) == 1


def test_what_the_target_has_in_its_trash_is_taken_out(source, target):
    digest = small.publish(source, table(), ref="main")
    copy(source, "main", to=target)
    target.refs.remove("main", "head")
    for shard in source.shards(source.snapshot(digest)):
        for blob in shard.blobs:
            target.objects.to_trash("1", blob.digest, "objects")
    target.objects.to_trash("1", digest, "meta")
    assert blobs(target) == set()
    assert copy(source, "main", to=target).as_json()["objects"]["present"] == 6
    assert target.read_plan("main").columns


def test_two_copies_at_once_agree(source, target):
    digest = small.publish(source, table(shards=8), ref="main")
    with ThreadPoolExecutor(2) as pool:
        copies = [pool.submit(copy, source, "main", to=Store.open(target.path)) for _ in range(2)]
    assert {each.result().plan.snapshot for each in copies} == {digest}
    assert target.resolve("main") == digest
    assert blobs(target) == blobs(source)


def test_too_little_space_is_said_before_anything_is_written(source, target, monkeypatch):
    small.publish(source, table(), ref="main")
    real = os.statvfs(target.path)
    full = os.statvfs_result([*real[:3], 0, 0, *real[5:]])
    monkeypatch.setattr(os, "statvfs", lambda _path: full)
    with pytest.raises(NoSpace):
        copy(source, "main", to=target)
    assert blobs(target) == set()


def test_a_missing_blob_is_said(source, target):
    digest = small.publish(source, table(), ref="main")
    source.objects.path(next(source.shards(source.snapshot(digest))).blobs[0].digest, "objects").unlink()
    with pytest.raises(Missing):
        copy(source, "main", to=target)
    assert target.refs.list() == []


def test_what_makes_no_sense_is_refused(source, target):
    small.publish(source, table(), ref="main")
    with pytest.raises(Invalid):
        copy(source, "main", to=Store.open(source.path))
    with pytest.raises(Invalid):
        copy(source, "main", to=target, columns=["h.9"])
    with pytest.raises(NotFound):
        copy(source, "nothing", to=target)


def test_two_parts_at_once_add_up(source, target):
    digest = small.publish(source, table(shards=6), ref="main")
    with ThreadPoolExecutor(2) as pool:
        copies = [
            pool.submit(copy, source, "main", to=Store.open(target.path), columns=[name]) for name in ("h.0", "h.1")
        ]
    assert {each.result().plan.columns for each in copies} == {("h.0",), ("h.1",)}
    assert partials.expected(target.path, digest) == {"h.0", "h.1"}


def test_a_marker_that_outlived_its_snapshot_is_forgotten(source, target):
    digest = small.publish(source, table(), ref="main")
    with partials.alone(target.path, mode=0o600):
        partials.mark(target.path, digest, {"h.1"}, target.modes)
    copy(source, "main", to=target, columns=["h.0"])
    assert partials.expected(target.path, digest) == {"h.0"}
    assert list(verify(target)) == []
