"""What keeps what: tables of digests, retention, everything a snapshot refers to."""

import pytest

from tests.upkeep.bare_stores import objects_in, publish
from zgstore.errors import Corrupt, Missing
from zgstore.format.digest import Digest
from zgstore.format.fields import all_u64
from zgstore.storage.refs import LogEntry
from zgstore.storage.store import Store
from zgstore.upkeep.digestsets import DigestSet
from zgstore.upkeep.reachability import Reach, Retention, place_in, reach, roots

DAY = 86400.0


@pytest.fixture
def store(tmp_path):
    return Store.init(tmp_path / "store")


def named(*numbers):
    """Digests that all begin with the same 8 bytes, joined."""
    return b"".join(bytes(8) + number.to_bytes(24, "big") for number in numbers)


def test_place_in_counts_by_whole_digests():
    joined = named(1, 2, 3)
    assert place_in(joined, Digest(named(3))) == 2
    assert place_in(bytes(8) + joined, Digest(named(1))) is None


def entries(*ages):
    return [LogEntry(None, Digest(bytes(32)), None, 1000 * DAY - age * DAY) for age in ages]


@pytest.mark.parametrize(
    ("retention", "ages", "kept"),
    [
        (Retention(), [400], 1),  # the newest never goes
        (Retention(), [1, 400], 2),  # replaced yesterday
        (Retention(), [1, 31, 32], 2),  # the last was replaced 31 days ago
        (Retention(), [], 0),
        (Retention(seconds=0.0), [0, 1, 2], 1),
        (Retention.chosen(seconds=None, keep_last=2), [0, 1, 2], 2),
        (Retention.chosen(seconds=None, keep_last=0), [0, 1, 2], 1),
        (Retention.chosen(seconds=None, keep_last=9), [0, 1, 2], 3),
        (Retention.chosen(seconds=10 * DAY, keep_last=1), [0, 1, 20, 30], 3),  # both keep what either keeps
        (Retention.chosen(seconds=None, keep_last=None), [0, 40, 50], 2),
    ],
)
def test_a_reflog_entry_ages_from_when_it_was_replaced(retention, ages, kept):
    assert retention.kept(entries(*ages), 1000 * DAY) == kept


def test_reach_has_everything_of_a_snapshot_but_its_record(store):
    digest = publish(store, "main", [1, 2, 3], masked=[4])
    found = reach(store, [digest])
    blobs, sizes = found.blobs()
    names = {blobs[at : at + 32].hex() for at in range(0, len(blobs), 32)}
    record = store.refs.log("main")[0].record
    assert names | {raw.hex() for raw in found.meta} | {record.hex} == objects_in(store)
    assert len(blobs) // 32 == len(sizes) // 8 == 10  # three columns of three shards, and a constant
    on_disk = sum(store.objects.stat(Digest(bytes.fromhex(name)), "objects").size for name in names)
    assert sum(all_u64(sizes)) == on_disk
    assert {met.kind for met in found.meta.values()} == {"snapshot", "root", "leaf", "dropped", "rows", "rows-root"}
    assert all(store.objects.stat(Digest(raw), "meta").size == met.size_bytes for raw, met in found.meta.items())


def test_an_object_is_credited_to_the_first_that_reached_it(store):
    first, second = publish(store, "a", [1, 2]), publish(store, "b", [2, 3])
    found = Reach(store)
    found.add(first, "tag")
    found.add(second, "head")
    credit = found.credit(DigestSet(b"".join(store.objects.names("objects"))))
    assert {reason: objects for reason, (objects, _) in credit.items()} == {"tag": 7, "head": 3}
    assert sum(size for _, size in credit.values()) == sum(all_u64(found.blobs()[1]))
    again = Reach(store, beyond=found)
    again.add(second, "hold")
    assert not again.meta
    assert not again.without(second.raw, "meta")


def test_reach_says_what_is_missing_or_corrupt(store):
    digest = publish(store, "main", [1, 2, 3])
    snapshot = store.snapshot(digest)
    leaf = store.objects.path(Digest(store.root(snapshot).leaves[:32]), "meta")
    leaf.chmod(0o644)
    leaf.write_bytes(leaf.read_bytes() + b"\0")
    with pytest.raises(Corrupt):
        reach(store, [digest])
    leaf.unlink()
    with pytest.raises(Missing):
        reach(store, [digest])


def test_roots_are_names_reflogs_holds_and_live_leases(store):
    old, new = publish(store, "main", [1]), publish(store, "main", [2])
    store.point("v1", "tag", old)
    store.hold("paper", old)
    with store.using(new):
        found = roots(store, retention=Retention(), now=store.now())
    assert {(root.kind, root.name, root.digest) for root in found.named if root.digest in {old, new}} == {
        ("head", "main", new), ("tag", "v1", old), ("hold", "paper", old),
        ("reflog", "main@{0}", new), ("reflog", "main@{1}", old), ("reflog", "v1@{0}", old),
    }  # fmt: skip
    assert [leased for _, leased in found.leased] == [new.raw]
    assert not roots(store, retention=Retention(), now=store.now()).leased
