"""Why an object is kept, and what each snapshot takes."""

import pytest

from tests.upkeep.bare_stores import publish, put_action
from zgstore.errors import NotFound
from zgstore.format.digest import Digest
from zgstore.storage.store import Store
from zgstore.upkeep.accounts import usage, why


@pytest.fixture
def store(tmp_path):
    return Store.init(tmp_path / "store")


def test_why_tells_the_chain_of_every_root_down_to_a_blob(store):
    digest = publish(store, "main", [1, 2, 3])
    store.point("v1", "tag", digest)
    blob = list(store.shards(store.snapshot(digest)))[2].blobs[1]
    put_action(store, blob, b"k")
    found = why(store, blob.digest)
    assert found.place == "objects"
    kinds = [tuple(link.kind for link in chain) for chain in found.chains]
    below = ("snapshot", "root", "leaf", "blob")
    assert kinds == [("head", *below), ("tag", *below), ("reflog", *below), ("reflog", *below), ("action", "blob")]
    assert found.chains[0][-1].name == "column h.1:in of shard 2"
    assert found.chains[0][0].name == "main"
    assert found.as_json()["object"] == str(blob.digest)


def test_why_takes_a_prefix_of_anything_and_names_what_has_none(store):
    digest = publish(store, "main", [1], masked=[0])
    snapshot = store.snapshot(digest)
    for each in (
        digest, snapshot.root, snapshot.dropped, store.rows_root_of(snapshot), snapshot.constants[0].blob,
        store.refs.log("main")[0].record,
    ):  # fmt: skip
        assert why(store, each.hex[:12]).chains, each
    with pytest.raises(NotFound):
        why(store, "0123456789")
    with pytest.raises(NotFound):
        why(store, "main")
    with pytest.raises(NotFound):
        why(store, Digest(bytes(32)))


def test_why_names_the_lease_that_alone_keeps_an_object(store):
    digest = publish(store, "main", [1])
    store.refs.remove("main", "head")
    assert why(store, digest).chains == ()
    with store.using(digest) as lease:
        assert [chain[0].name for chain in why(store, digest).chains] == [lease.uuid]


def test_usage_tells_own_bytes_from_shared(store):
    a, b = publish(store, "a", [1, 2]), publish(store, "b", [2, 3])
    publish(store, "gone", [7])
    store.refs.remove("gone", "head")
    shard = sum(blob.size for blob in next(iter(store.shards(store.snapshot(a)))).blobs)
    found = usage(store)
    constant = store.snapshot(a).constants[0].size
    assert [(share.snapshot, share.refs) for share in found.snapshots] == [(a, ("a",)), (b, ("b",))]
    for share in found.snapshots:
        assert share.own_bytes == shard
        assert share.shared_bytes == shard + constant
        assert share.bytes == share.own_bytes + share.shared_bytes
    assert found.total_bytes == 3 * shard + constant
    assert found.other_bytes == shard
    assert found.trash_bytes == 0
    assert found.as_json()["snapshots"][0]["refs"] == ["a"]
