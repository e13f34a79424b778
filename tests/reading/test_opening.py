"""From a name to a reader: revisions, leases, read-only stores, and builds that still grow."""

import itertools
import os
import pickle
import threading

import pytest
import torch
from stored import blob_of, dense, make_store

from zgstore.building import lockfile
from zgstore.errors import Interrupted, Invalid, NotFound
from zgstore.format.digest import digest_of
from zgstore.format.manifest import Column, Pins, Snapshot
from zgstore.format.pages import LeafPage, RootPage, Shard, rows_tree
from zgstore.reading.opening import follow, read
from zgstore.reading.reader import Reader
from zgstore.reading.sampler import Sampler
from zgstore.storage.leases import Leases
from zgstore.storage.memos import Memos
from zgstore.storage.store import Store
from zgstore.upkeep import collector


def test_a_snapshot_is_found_by_ref_digest_prefix_and_lock(dense_store, tmp_path):
    digest = dense_store.digest
    lockfile.write(tmp_path / "zgstore.lock", "mine", lockfile.Locked(digest, None, digest))
    for rev in ("main", str(digest), digest.short, digest, "main@{0}"):
        with read(dense_store.store, rev, columns=["h.0"]) as reader:
            assert reader.snapshot == str(digest)
    with read(dense_store.store, "lock:mine", near=tmp_path) as reader:
        assert reader.snapshot == str(digest)
    with pytest.raises(NotFound):
        read(dense_store.store, "mian")
    assert dense_store.store.leases.all() == []


def test_what_a_reader_uses_is_named_in_its_lease_before_it_is_looked_for(dense_store, monkeypatch):
    seen = []
    real = Store.read_plan

    def look(store, *args):
        seen.extend(lease.digests for lease in store.leases.all())
        return real(store, *args)

    monkeypatch.setattr(Store, "read_plan", look)
    read(dense_store.store, "main").close()
    assert seen == [dense_store.digest.raw]


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write everywhere")
def test_a_store_that_cannot_be_written_is_read_without_a_lease(tmp_path):
    made = make_store(tmp_path / "store", dense(4))
    (made.store.path / "leases").chmod(0o500)
    with pytest.warns(RuntimeWarning, match="no lease keeps"), read(made.store, "main") as reader:
        assert len(reader) == 4
    (made.store.path / "leases").chmod(0o700)


def test_a_reader_without_a_lease_reads_and_closes(dense_store, monkeypatch):
    monkeypatch.setattr(Leases, "try_take", lambda *_, **__: None)  # what a read-only mount gives
    with (
        pytest.warns(RuntimeWarning, match="no lease keeps"),
        read(dense_store.store, "main", columns=["h.0"], verify="open") as reader,
    ):
        assert torch.equal(reader[7]["h.0"], dense_store.rows["h.0"][7])
    assert dense_store.store.leases.all() == []


class Growing:
    """A build that makes shards when it is told to."""

    def __init__(self, store, rows):
        self.store, self.rows = store, rows
        self.columns = (Column("h.0", "boundary", "BF16", "raw", tuple(rows["h.0"][0].shape), 0),
                        Column("attention_mask", "context", "I64", "raw", (6,)))  # fmt: skip
        self._writing = store.writing("build")
        self.session = self._writing.__enter__()
        tree, pages = rows_tree(b"".join(digest_of("row", str(row).encode()).raw for row in range(len(rows["h.0"]))))
        self.data = self.session.put_meta("page", tree.encode())
        for page in pages:
            self.session.put_meta("page", page.encode())
        self.file = store.memos.start_build(
            self.session.uuid, {"columns": [column.as_value() for column in self.columns], "data": self.data.raw}
        )
        self.shards = []

    @property
    def uuid(self):
        return self.session.uuid

    def shard(self, first, last):
        blobs = []
        for column in self.columns:
            draft = self.session.draft()
            draft.write(blob_of(column, self.rows[column.name][first:last]))
            blobs.append(self.session.keep(draft))
        self.session.sync()
        self.shards.append(Shard(last - first, digest_of("batch", b"%d" % first), tuple(blobs)))
        self.file.append(self.shards[-1])

    def publish(self):
        leaf = LeafPage.of(self.shards, columns=2)
        root = RootPage.of([(self.session.put_meta("page", leaf.encode()), leaf)], columns=2)
        pins = Pins({"id": "t", "revision": "1"}, {"id": "d", "revision": "1", "digest": self.data.raw}, {})
        snapshot = Snapshot(pins=pins, columns=self.columns, constants=(), cut=1, dropped=None,
                            samples=sum(shard.rows for shard in self.shards),
                            root=self.session.put_meta("page", root.encode()))  # fmt: skip
        self.file.finish(self.session.publish(snapshot, ref="main"))
        self.end()

    def end(self):
        self.file.close()
        self._writing.__exit__(None, None, None)


@pytest.fixture
def growing(tmp_path):
    return Growing(Store.init(tmp_path / "store"), dense())


def test_a_follower_s_rows_become_more_as_shards_become_durable(growing):
    rows = growing.rows["h.0"]
    growing.shard(0, 4)
    with follow(growing.store, growing.uuid, columns=["h.0"]) as reader:
        assert isinstance(reader, Reader)
        assert (len(reader), reader.done, reader.snapshot, reader.build) == (4, False, "", growing.uuid)
        growing.shard(4, 8)
        assert len(reader) == 4
        assert reader.refresh() == 8
        batch = reader.batch([7, 1])
        assert torch.equal(batch["h.0"], torch.stack([rows[7], rows[1]]))
        assert torch.equal(batch["mask"], torch.stack([growing.rows["attention_mask"][row] for row in (7, 1)]).bool())
        (lease,) = [lease for lease in growing.store.leases.all() if lease.purpose == "follow"]
        assert growing.shards[1].blobs[0].digest.raw in lease.digests
        plain = pickle.loads(pickle.dumps(reader))
        assert type(plain) is Reader
        assert torch.equal(plain[7]["h.0"], rows[7])
        assert reader.wait(9, timeout_seconds=0.1) is False
        growing.shard(8, 10)
        growing.publish()
        assert reader.wait(100) is False
        assert (len(reader), reader.done) == (10, True)
        with read(growing.store, "main") as snapshot:
            assert (reader.snapshot, reader.data_digest) == (snapshot.snapshot, snapshot.data_digest)


def test_a_follower_waits_for_rows_that_another_thread_makes(growing):
    growing.shard(0, 2)
    with follow(growing.store, growing.uuid) as reader:
        later = threading.Timer(0.2, growing.shard, (2, 6))
        later.start()
        assert reader.wait(5)
        assert torch.equal(reader[5]["h.0"], growing.rows["h.0"][5])
        later.join()
    growing.end()


def test_a_follower_takes_up_no_shard_that_its_lease_does_not_name(growing, monkeypatch):
    parse = Memos.build
    growing.shard(0, 2)
    with follow(growing.store, growing.uuid) as reader:
        growing.shard(2, 4)

        def grows_meanwhile(memos, uuid):
            found = parse(memos, uuid)
            growing.shard(4, 6)
            return found

        with monkeypatch.context() as meanwhile:
            meanwhile.setattr(Memos, "build", grows_meanwhile)
            assert reader.refresh() == 4
        assert reader.refresh() == 6
        (lease,) = [lease for lease in growing.store.leases.all() if lease.purpose == "follow"]
        assert all(blob.digest.raw in lease.digests for shard in growing.shards for blob in shard.blobs)
    growing.end()


def test_a_follower_that_slept_keeps_all_that_it_has_when_it_wakes(growing):
    rows = growing.rows["h.0"]
    growing.shard(0, 4)
    with follow(growing.store, growing.uuid, columns=["h.0"]) as reader:
        (lease,) = [lease for lease in growing.store.leases.all() if lease.purpose == "follow"]
        growing.store.leases.remove(lease.uuid)  # as a collector elsewhere does an hour after its last refresh
        growing.shard(4, 8)
        assert reader.refresh() == 8
        growing.end()
        collector.collect(growing.store, now=True)
        assert torch.equal(reader.batch([7, 1])["h.0"], torch.stack([rows[7], rows[1]]))
    assert growing.store.leases.all() == []


def test_a_follower_that_waits_parses_only_what_has_grown(growing, monkeypatch):
    growing.shard(0, 2)
    with follow(growing.store, growing.uuid) as reader:
        reader.refresh()
        monkeypatch.setattr(Memos, "build", lambda *_: pytest.fail("nothing was added"))
        assert reader.refresh() == 2
    growing.end()


def test_a_sampler_follows_in_stored_order_and_shuffles_once_it_is_published(growing):
    growing.shard(0, 4)
    reader = follow(growing.store, growing.uuid, columns=["h.0"])
    with pytest.raises(Invalid, match="grows"):
        next(iter(Sampler(reader, batch_size=3)))
    steps = iter(sampler := Sampler(reader, batch_size=3, order="sequential-first"))
    assert next(steps) == [0, 1, 2]
    threading.Timer(0.1, lambda: (growing.shard(4, 8), growing.publish())).start()
    assert list(steps) == [[3, 4, 5], [6, 7]]
    later = list(itertools.chain(*sampler))
    assert sorted(later) == list(range(8))
    with read(growing.store, "main") as snapshot:
        same = Sampler(snapshot, batch_size=3, order="sequential-first")
        same.set_epoch(1)
        assert list(itertools.chain(*same)) == later
    reader.close()


def impatient(reader, rows):
    """Wait, and look after other things all the time."""
    while not reader.wait(rows, timeout_seconds=0.01):
        pass


def test_a_build_that_ended_unpublished_is_said_and_not_waited_for(growing):
    growing.shard(0, 4)
    with follow(growing.store, growing.uuid) as reader:
        growing.end()
        with pytest.raises(Interrupted, match="4 rows") as caught:
            reader.wait(5)
        assert "`zgstore build RECIPE` resumes it" in caught.value.hint
    with follow(growing.store, growing.uuid) as reader, pytest.raises(Interrupted, match="4 rows"):
        impatient(reader, 5)
    with pytest.raises(NotFound):
        follow(growing.store, "00000000-0000-0000-0000-000000000000")
    with pytest.raises(NotFound, match="no build 'nonsense' is known") as caught:
        follow(growing.store, "nonsense")
    assert "zgstore lease ls --json" in caught.value.hint
