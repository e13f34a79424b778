import os
import pickle
import shutil
import stat
import subprocess
import sys

import pytest
from tiny import blobs_of, keep, publish, write

from zgstore.errors import Conflict, Corrupt, Invalid, Missing, NoSpace, NotFound, Partial
from zgstore.format.digest import digest_of
from zgstore.format.manifest import Record
from zgstore.format.pages import Shard
from zgstore.storage import partials
from zgstore.storage import store as store_module
from zgstore.storage.store import Store


def test_a_new_store_is_what_the_format_says(store):
    assert {path.name for path in store.path.iterdir()} == {
        "zgstore.toml", "objects", "meta", "actions", "measurements", "builds", "refs", "reflog", "holds", "leases",
        "tmp", "trash", "quarantine", "locks", "index",
    }  # fmt: skip
    for family in ("objects", "meta", "actions"):
        assert len(list((store.path / family).iterdir())) == 256
    assert (store.path / "zgstore.toml").read_text().startswith("format = 1\nrequires = []\n")


def test_making_a_store_again_is_harmless(store):
    digest = publish(store, "one")
    again = Store.init(store.path, policy="group")
    assert (again.id, again.policy) == (store.id, "private")
    assert again.resolve("main") == digest


def test_a_store_made_half_is_completed(tmp_path):
    store = Store.init(tmp_path / "store")
    (store.path / "zgstore.toml").unlink()
    shutil.rmtree(store.path / "meta" / "ab")
    with pytest.raises(NotFound):
        Store.open(store.path)
    assert (Store.init(store.path).path / "meta" / "ab").is_dir()


def test_where_there_is_no_store_the_hint_makes_one(tmp_path):
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(NotFound) as caught:
            Store.open(path)
        assert "zgstore init" in caught.value.hint
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(NotFound):
        Store.open(tmp_path / "file")
    with pytest.raises(Invalid):
        Store.init(tmp_path / "file" / "store")


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [("format = 1", "format = 2", "format 2"), ("requires = []", 'requires = ["time-travel"]', "time-travel")],
)
def test_a_store_of_a_later_version_is_refused_by_name(store, old, new, named):
    config = store.path / "zgstore.toml"
    config.write_text(config.read_text().replace(old, new))
    with pytest.raises(Invalid, match=named):
        Store.open(store.path)


@pytest.mark.parametrize("text", ["", "format = 1", "\0", "format = 1\nid = 3\npolicy = 'private'", "policy = 'x'"])
def test_a_configuration_that_makes_no_sense_is_corrupt(store, text):
    (store.path / "zgstore.toml").write_text(text)
    with pytest.raises(Corrupt):
        Store.open(store.path)


def test_an_unknown_policy_is_refused(tmp_path):
    with pytest.raises(Invalid):
        Store.init(tmp_path / "store", policy="public")


@pytest.mark.parametrize(
    ("policy", "folder", "file"),
    [("private", 0o700, 0o600), ("group", 0o2770, 0o660), ("world-read", 0o755, 0o644)],
)
def test_the_policy_holds_under_any_umask(tmp_path, policy, folder, file):
    old = os.umask(0o077)
    try:
        store = Store.init(tmp_path / "store", policy=policy)
        digest = publish(store, "one", ref="team/main")
        store.hold("kept", digest)
        store.objects.to_trash("1", blobs_of(store, digest)[0].digest, "objects")
    finally:
        os.umask(old)
    for path in [store.path, *store.path.rglob("*")]:
        mode = stat.S_IMODE(path.stat().st_mode)
        if path.is_dir():
            assert mode == folder, path
        elif path.parts[-3] in {"objects", "meta"} or "trash" in path.parts:
            assert mode == 0o444, path
        else:
            assert mode == file, path


def test_a_store_is_small_when_pickled_and_the_same_when_back(store):
    digest = publish(store, "one")
    packed = pickle.dumps(store)
    assert len(packed) < 4096
    assert pickle.loads(packed).resolve("main") == digest


def test_rev_is_a_ref_then_a_tag_then_a_digest(store):
    first, second = publish(store, "one"), publish(store, "two")
    store.point("v1", "tag", first)
    assert store.resolve("main") == second
    assert store.resolve("v1") == first
    assert store.resolve("main@{1}") == first
    assert store.resolve(str(first)) == store.resolve(first.hex) == store.resolve(first.hex[:6]) == first
    store.point(first.hex[:8], "head", second)
    assert store.resolve(first.hex[:8]) == second


def test_an_unknown_rev_hints_at_the_nearest(store):
    publish(store, "one", ref="experiment")
    for rev in ("experimant", "0" * 64, "ffffff", "experiment@{7}", "nothing@{0}", "short", ""):
        with pytest.raises(NotFound) as caught:
            store.resolve(rev)
        assert caught.value.hint
    with pytest.raises(NotFound) as caught:
        store.resolve("experimant")
    assert "experiment" in caught.value.hint


def test_an_ambiguous_prefix_names_the_candidates(store, monkeypatch):
    first, second = publish(store, "one"), publish(store, "two")
    monkeypatch.setattr(Store, "_starting", lambda _self, family, _prefix: [first, second] if family == "meta" else [])
    with pytest.raises(Invalid) as caught:
        store.resolve("abcdef")
    assert first.hex[:16] in caught.value.message
    assert second.hex[:16] in caught.value.message


def test_a_digest_of_something_else_is_no_rev(store):
    digest = publish(store, "one")
    for other in (blobs_of(store, digest)[0].digest, store.snapshot(digest).root):
        with pytest.raises(Invalid, match="not a snapshot"):
            store.resolve(other.hex)
    assert store.find(digest.hex[:10]) == [("meta", digest)]
    assert store.find("xyz") == []


def test_a_corrupt_snapshot_is_still_the_one_that_was_meant(store):
    digest = publish(store, "one")
    path = store.objects.path(digest, "meta")
    path.chmod(0o644)
    path.write_bytes(b"rotten")
    assert store.resolve(digest.hex[:12]) == digest
    with pytest.raises(Corrupt):
        store.snapshot(digest)


def test_a_plan_says_where_the_blobs_are_and_whether_they_were_verified(store):
    digest = publish(store, "one")
    plan = store.read_plan("main", ["h.1", "h.0"])
    assert plan.snapshot == str(digest)
    assert plan.shard_rows == (3, 3)
    assert [column.column.name for column in plan.columns] == ["h.1", "h.0"]
    assert plan.objects == str(store.path / "objects")
    blobs = blobs_of(store, digest)
    assert [blob.name for blob in plan.columns[1].blobs] == [blobs[0].digest.hex, blobs[2].digest.hex]
    assert not plan.columns[1].blobs[0].verified
    assert type(plan.columns[1].blobs[0].stamp) is tuple
    with pytest.raises(Invalid):
        store.read_plan("main", ["h.7"])


def test_stamps_make_a_plan_s_blobs_verified(store, monkeypatch):
    digest = publish(store, "one")
    seen = [(blob.digest, "objects", store.objects.rehash(blob.digest, "objects")) for blob in blobs_of(store, digest)]
    store.stamp(seen)
    assert not store.read_plan(digest).columns[0].blobs[0].verified  # within 2 s of the ctime
    later = store.now() + 3
    monkeypatch.setattr(store_module, "clock", lambda _root: later)
    store.stamp(seen[:1])
    blobs = store.read_plan(digest).columns[0].blobs
    assert [blob.verified for blob in blobs] == [True, False]


def test_a_plan_names_every_blob_that_is_missing(store):
    digest = publish(store, "one")
    gone = [blob.digest for blob in blobs_of(store, digest)[1:3]]
    for each in gone:
        store.objects.path(each, "objects").unlink()
    with pytest.raises(Missing) as caught:
        store.read_plan("main")
    assert set(caught.value.fields["objects"]) == set(map(str, gone))
    assert "--repair" in caught.value.hint
    assert store.read_plan("main", []).columns == ()


def test_a_plan_refuses_a_blob_of_the_wrong_size(store):
    blob = blobs_of(store, publish(store, "one"))[0]
    path = store.objects.path(blob.digest, "objects")
    path.chmod(0o644)
    with path.open("ab") as file:
        file.write(b"!")
    with pytest.raises(Corrupt) as caught:
        store.read_plan("main")
    assert caught.value.object == str(blob.digest)
    assert (caught.value.expected, caught.value.actual) == (blob.size, blob.size + 1)


def test_of_a_part_only_what_is_there_is_planned(store):
    with store.writing("test") as session:
        snapshot = write(session, "one")
        shards = [shard.blobs for leaf in store.leaves(snapshot) for shard in map(leaf.shard, range(len(leaf)))]
        for blobs in shards:
            store.objects.path(blobs[1].digest, "objects").unlink()
        digest = session.publish(snapshot, ref="main", columns=["h.0"])
    assert partials.expected(store.path, digest) == {"h.0"}
    assert [column.column.name for column in store.read_plan("main").columns] == ["h.0"]
    with pytest.raises(Partial) as caught:
        store.read_plan("main", ["h.0", "h.1"])
    assert "zgstore copy" in caught.value.hint
    store.point("part", "tag", digest)
    with store.writing("test") as session:
        for number in range(2):
            keep(session, f"one {number} h.1".encode())
        session.publish(snapshot)
    assert partials.expected(store.path, digest) is None
    with store.writing("test") as session:  # whole, it stays whole
        session.publish(snapshot, columns=["h.0"])
    assert partials.expected(store.path, digest) is None


def test_a_growing_build_is_planned_as_far_as_it_is(store):
    with store.writing("test") as session:
        snapshot = write(session, "one")
        shards = list(store.shards(snapshot))
        head = {"columns": [column.as_value() for column in snapshot.columns], "data": None}
        with store.memos.start_build(session.uuid, head) as file:
            file.append(shards[0])
            plan, done = store.build_plan(session.uuid, ["h.1"])
            assert (plan.shard_rows, plan.build, plan.snapshot, done) == ((3,), session.uuid, "", False)
            file.append(shards[1])
            file.finish(session.publish(snapshot))
        plan, done = store.build_plan(session.uuid)
        assert done
        assert plan.snapshot == str(digest_of("snapshot", snapshot.encode()))
        assert plan.columns == store.read_plan(plan.snapshot).columns
    with pytest.raises(NotFound):
        store.build_plan("12345678-1234-1234-1234-123456789abc")
    with pytest.raises(Invalid):
        store.build_plan(session.uuid, ["h.9"])


def test_an_existing_snapshot_is_pointed_at_only_when_all_of_it_is_there(store):
    digest = publish(store, "one")
    blob = blobs_of(store, digest)[0]
    store.objects.to_trash("1", blob.digest, "objects")
    store.point("v1", "tag", digest)
    assert store.objects.stat(blob.digest, "objects") is not None
    store.objects.path(blob.digest, "objects").unlink()
    for name in ("tag", "head"):
        with pytest.raises(Missing):
            store.point("v2", name, digest)
    with pytest.raises(Missing):
        store.hold("kept", digest)
    with pytest.raises(Missing):
        store.point("v2", "tag", digest_of("snapshot", b"never was"))
    assert [ref.name for ref in store.refs.list()] == ["main", "v1"]
    assert store.refs.holds() == []


def test_tags_do_not_move_without_force(store):
    first, second = publish(store, "one"), publish(store, "two")
    store.point("v1", "tag", first)
    store.point("v1", "tag", first)
    with pytest.raises(Conflict, match="already"):
        store.point("v1", "tag", second)
    store.point("v1", "tag", second, force=True)
    assert store.resolve("v1") == second
    store.point("main", "head", first, expect=second, record=Record(first, 9.0))
    assert store.record_of(first) == Record(first, 9.0)
    with pytest.raises(Conflict):
        store.point("main", "head", second, expect=second)


def test_a_record_that_no_reflog_names_is_found_among_the_metadata(store):
    digest = publish(store, "one", ref=None, time_seconds=3.0)
    publish(store, "one", ref=None, time_seconds=4.0)
    assert store.record_of(digest) == Record(digest, 4.0)
    assert store.record_of(digest_of("snapshot", b"other")) is None


def test_a_torn_ref_hides_no_record_of_another(store):
    digest = publish(store, "one", time_seconds=3.0)
    publish(store, "two", ref="other", time_seconds=4.0)
    (store.path / "refs" / "heads" / "other").write_text("torn")
    assert store.record_of(digest) == Record(digest, 3.0)


def test_a_reader_s_lease_names_the_snapshot_while_it_is_used(store):
    digest = publish(store, "one")
    with store.using(digest, purpose="read") as lease:
        (seen,) = store.leases.all()
        assert (seen.uuid, seen.purpose, seen.digests) == (lease.uuid, "read", digest.raw)
    assert store.leases.all() == []
    with pytest.raises(Missing), store.using(digest_of("snapshot", b"never was")):
        pass
    assert store.leases.all() == []


def test_space_is_refused_before_it_is_used(store):
    store.check_space(1000)
    with pytest.raises(NoSpace) as caught:
        store.check_space(1 << 60)
    assert caught.value.fields["needed_bytes"] == 1 << 60
    assert 0 < caught.value.fields["free_bytes"] < 1 << 60


def test_a_copied_store_is_the_same_store(store, tmp_path):
    digest = publish(store, "one")
    shutil.copytree(store.path, tmp_path / "copy")
    copy = Store.open(tmp_path / "copy")
    assert copy.resolve("main") == digest
    assert len(copy.read_plan("main").columns) == 2
    assert publish(copy, "two") == copy.resolve("main")


READ_AS_SOMEBODY_ELSE = """
import os, sys
from zgstore.errors import Invalid
from zgstore.format.digest import Digest
from zgstore.storage.store import Store
if os.getuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
store = Store.open(sys.argv[1])
digest = store.resolve("main")
assert len(store.read_plan("main").columns) == 2
store.stamp([])
store.stamp([(Digest(bytes(32)), "objects", store.objects.stat(store.snapshot(digest).root, "meta"))])
with store.using(digest) as lease:
    assert lease is None
try:
    with store.writing("test"):
        raise SystemExit("a session began")
except Invalid as error:
    print(error.hint)
"""


def test_who_may_only_read_reads_without_a_lease_and_cannot_write(tmp_path):
    store = Store.init(tmp_path / "store", policy="world-read")
    publish(store, "one")
    if os.getuid() == 0:
        for parent in [*list(tmp_path.parents)[:-2], tmp_path]:
            parent.chmod(parent.stat().st_mode | 0o011)
    else:
        for path in [store.path, *(path for path in store.path.rglob("*") if path.is_dir())]:
            path.chmod(0o555)
    ran = subprocess.run(
        [sys.executable, "-c", READ_AS_SOMEBODY_ELSE, str(store.path)], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert "check who owns it" in ran.stdout


def test_a_leaf_of_other_columns_than_its_snapshot_is_corrupt(store):
    with store.writing("test") as session:
        snapshot = write(session, "one")
        other = type(snapshot)(
            snapshot.pins, snapshot.columns[:1], (), snapshot.cut, snapshot.samples, None, snapshot.root
        )
        with pytest.raises(Corrupt):
            session.publish(other)
    assert isinstance(next(store.shards(snapshot)), Shard)
