import contextlib
import os
import threading

import pytest
from tiny import blobs_of, keep, publish, write

from zgstore.errors import Conflict, Invalid, Missing, NoSpace, Transient
from zgstore.format.digest import Digest, digest_of
from zgstore.format.manifest import Record
from zgstore.format.pages import Blob
from zgstore.storage import leases
from zgstore.storage.leases import Lease, Leases
from zgstore.storage.objects import Objects
from zgstore.storage.refs import Refs
from zgstore.storage.session import Session, missing_parts
from zgstore.upkeep import collector


def take_away(session):
    """What a collector does that takes the session for dead, and sweeps up after it."""
    session.store.leases.remove(session.uuid)


def leased(store):
    (lease,) = store.leases.all()
    return lease.digests


def test_a_session_leaves_nothing_behind(store):
    with store.writing("test") as session:
        uuid = session.uuid
        assert [lease.uuid for lease in store.leases.all()] == [uuid]
        session.draft().write(b"never finished")
        assert (store.path / "tmp" / uuid).is_dir()
    assert store.leases.all() == []
    assert list((store.path / "tmp").iterdir()) == []


def test_a_session_that_fails_leaves_nothing_behind_either(store):
    with pytest.raises(NoSpace), store.writing("test") as session:  # noqa: PT012  (it has begun to write)
        session.draft().write(b"never finished")
        store.check_space(1 << 60)
    assert store.leases.all() == []
    assert list((store.path / "tmp").iterdir()) == []


def test_the_lease_is_closed_last(store, monkeypatch):
    real, seen = Lease.close, []

    def close(lease):
        seen.append(list((store.path / "tmp").iterdir()))
        real(lease)

    with store.writing("test") as session:
        session.draft().write(b"never finished")
        monkeypatch.setattr(Lease, "close", close)
    assert seen[0] == []


def test_reserving_names_first_and_looks_then(store, session, monkeypatch):
    digest = keep(session, b"bytes").digest
    wanted = digest_of(None, b"wanted")
    real, named = Objects.stats, []

    def stats(objects, digests, family, **options):
        named.append(wanted.raw in leased(store))
        return real(objects, digests, family, **options)

    monkeypatch.setattr(Objects, "stats", stats)
    assert session.reserve([digest, wanted]) == [True, False]
    assert named == [True]


def test_reserving_is_under_the_store_lock(store, session, monkeypatch):
    real, busy = Objects.stats, []

    def stats(objects, digests, family, **options):
        try:
            with store.leases.store_lock(exclusive=True, wait_seconds=0):
                busy.append(False)
        except Exception as error:  # noqa: BLE001
            busy.append(error.kind)
        return real(objects, digests, family, **options)

    monkeypatch.setattr(Objects, "stats", stats)
    session.reserve([digest_of(None, b"x")])
    assert busy == ["busy"]


def test_what_is_in_the_trash_is_moved_back_and_a_hit(store, session):
    digest = keep(session, b"bytes").digest
    store.objects.to_trash("1", digest, "objects")
    assert session.reserve([digest]) == [True]
    assert store.objects.stat(digest, "objects") is not None


def test_a_blob_of_another_size_is_a_miss_and_replaced_when_it_is_kept(store, session):
    blob = keep(session, b"bytes")
    path = store.objects.path(blob.digest, "objects")
    path.chmod(0o644)
    path.write_bytes(b"byt")
    assert session.reserve([blob]) == [False]
    assert session.reserve([blob.digest]) == [True]
    assert keep(session, b"bytes") == blob
    assert session.reserve([blob]) == [True]
    assert path.read_bytes() == b"bytes"


def test_a_holder_whose_lease_was_taken_takes_another_and_reserves_everything_again(store, session):
    first = keep(session, b"first").digest
    uuid = session.uuid
    take_away(session)
    store.objects.to_trash("1", first, "objects")
    second = digest_of(None, b"second")
    assert session.reserve([second]) == [False]
    assert session.uuid == uuid
    assert {leased(store)[at : at + 32] for at in range(0, 64, 32)} == {first.raw, second.raw}
    assert store.objects.stat(first, "objects") is not None


def test_a_session_whose_folder_was_swept_away_goes_on_with_new_drafts(store, session):
    lost = session.draft()
    lost.write(b"lost")
    take_away(session)
    store.objects.remove_aside(session.uuid)
    with pytest.raises(Transient):
        session.keep(lost)
    assert keep(session, b"found").size == 5


def test_publishing_notices_a_lease_that_was_taken(store, session):
    snapshot = write(session, "one")
    blob = store.leaf(Digest(store.root(snapshot).leaves)).shard(0).blobs[0]
    take_away(session)
    store.objects.to_trash("1", blob.digest, "objects")
    session.publish(snapshot, ref="main")
    assert store.objects.stat(blob.digest, "objects") is not None
    assert leased(store)


def test_nothing_is_published_that_refers_to_what_is_missing(store, session):
    snapshot = write(session, "one")
    blob = store.leaf(Digest(store.root(snapshot).leaves)).shard(1).blobs[0]
    store.objects.path(blob.digest, "objects").unlink()
    with pytest.raises(Missing) as caught:
        session.publish(snapshot, ref="main")
    assert caught.value.fields["objects"] == [str(blob.digest)]
    assert f"refers to 1 object that is missing: {blob.digest.short}" in caught.value.message
    assert "refers to 2 objects that are missing: " in missing_parts(blob.digest, [blob.digest] * 2).message
    assert store.refs.get("main") is None
    assert store.objects.stat(digest_of("snapshot", snapshot.encode()), "meta") is None


@pytest.mark.parametrize("page", ["root", "leaf", "rows"])
def test_pages_must_be_there_too(store, session, page):
    snapshot = write(session, "one")
    named = {
        "root": snapshot.root, "leaf": Digest(store.root(snapshot).leaves), "rows": store.rows_root_of(snapshot),
    }[page]  # fmt: skip
    store.objects.path(named, "meta").unlink()
    with pytest.raises(Missing):
        session.publish(snapshot, ref="main")
    assert store.refs.get("main") is None


def sleeps_before_it_logs(monkeypatch, meanwhile):
    """A host sleeps in the middle of a hold, and its file server gives the lock to others."""
    real = Refs._append

    def append(refs, *args):
        monkeypatch.setattr(Refs, "_append", real)
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(Leases, "store_lock", lambda *_, **__: contextlib.nullcontext())
            elsewhere.setattr(leases, "_alive", lambda *_, **__: False)
            meanwhile()
        real(refs, *args)

    monkeypatch.setattr(Refs, "_append", append)


def test_a_builder_that_slept_in_the_middle_of_a_hold_moves_no_ref_to_what_is_gone(store, session, monkeypatch):
    old = publish(store, "old")
    snapshot = write(session, "one")
    sleeps_before_it_logs(monkeypatch, lambda: collector.collect(store, now=True))
    with pytest.raises(Missing):
        session.publish(snapshot, ref="main")
    assert store.refs.get("main") == old
    assert [entry.new for entry in store.refs.log("main")] == [old]
    assert collector.collect(store, now=True).kept["head"].objects


def test_a_builder_that_slept_in_the_middle_of_a_hold_takes_back_what_is_in_the_trash(store, session, monkeypatch):
    snapshot = write(session, "one")
    blobs = list(store.objects.names("objects"))
    real, holds = Leases.store_lock, []

    def counted(leases, **how):
        holds.append(how)
        return real(leases, **how)

    monkeypatch.setattr(Leases, "store_lock", counted)

    def meanwhile():
        holds.clear()
        take_away(session)
        assert store.objects.all_to_trash("1", [("objects", Digest(raw)) for raw in blobs])

    sleeps_before_it_logs(monkeypatch, meanwhile)
    digest = session.publish(snapshot, ref="main")
    assert store.refs.get("main") == digest
    assert sorted(store.objects.names("objects")) == sorted(blobs)
    assert holds == [{"exclusive": False}]  # the lock that it had may be another's by now


@pytest.mark.parametrize("give", ["tag", "hold"])
def test_a_name_is_not_given_to_what_went_while_its_giver_slept(store, monkeypatch, give):
    digest = publish(store, "one")
    store.refs.remove("main", "head")
    real = Session._require

    def look_then_sleep(session, *args):
        real(session, *args)
        monkeypatch.setattr(Session, "_require", real)
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(Leases, "store_lock", lambda *_, **__: contextlib.nullcontext())
            elsewhere.setattr(leases, "_alive", lambda *_, **__: False)
            collector.collect(store, now=True)

    monkeypatch.setattr(Session, "_require", look_then_sleep)
    with pytest.raises(Missing):
        store.point("v1", "tag", digest) if give == "tag" else store.hold("v1", digest)
    assert store.refs.list() == store.refs.holds() == store.refs.lost() == []


def test_a_snapshot_is_in_before_its_ref_moves(store, session, monkeypatch):
    snapshot = write(session, "one")
    real, seen = Refs.move, []

    def move(refs, name, kind, new, **options):
        seen.append((store.snapshot(new), store.objects._dirty))
        real(refs, name, kind, new, **options)

    monkeypatch.setattr(Refs, "move", move)
    session.publish(snapshot, ref="main")
    assert seen == [(snapshot, set())]


def test_the_record_is_named_by_the_reflog_and_never_by_the_snapshot(store):
    digest = publish(store, "one", time_seconds=5.0)
    (entry,) = store.refs.log("main")
    assert store.record(entry.record) == Record(digest, 5.0)
    assert store.record_of(digest) == Record(digest, 5.0)


def test_the_same_made_twice_is_one_snapshot(store):
    first = publish(store, "one")
    count = len(list(store.objects.names("objects")))
    assert publish(store, "one") == first
    assert len(list(store.objects.names("objects"))) == count
    assert len(store.refs.log("main")) == 1


def test_a_ref_that_moved_meanwhile_is_a_conflict_and_the_work_stays(store):
    first = publish(store, "one")
    with pytest.raises(Conflict):
        publish(store, "two", expect=None)
    assert store.resolve("main") == first
    second = publish(store, "two", expect=first)
    assert store.resolve("main") == second


def test_of_builders_at_once_all_agree(store):
    made = []
    threads = [threading.Thread(target=lambda: made.append(publish(store, "one", shards=5))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(made)) == 1
    assert len(made) == 4
    assert len(list(store.objects.names("objects"))) == 10
    assert list((store.path / "quarantine").iterdir()) == []


def test_threads_of_one_session_keep_blobs_side_by_side(store, session):
    kept = []

    def work(number):
        kept.extend(keep(session, bytes([number, at])) for at in range(20))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(store.objects.names("objects")) == {blob.digest.raw for blob in kept}
    assert len(leased(store)) == 40 * 32


def test_an_existing_snapshot_is_confirmed_with_all_of_it(store):
    digest = publish(store, "one")
    for blob in blobs_of(store, digest):
        store.objects.to_trash("1", blob.digest, "objects")
    root = store.snapshot(digest).root
    store.objects.to_trash("1", root, "meta")
    store.objects.to_trash("1", digest, "meta")
    with store.writing("test") as session, session.confirmed(digest):
        assert digest.raw in leased(store)
        assert root.raw in leased(store)
    assert list(store.objects.trashed()) == []


def test_a_forked_child_cannot_use_its_parent_s_session(store, session):
    child = os.fork()
    if child == 0:
        try:
            session.reserve([digest_of(None, b"x")])
        except Invalid:
            session.close()
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (store.path / "tmp" / session.uuid).is_dir()
    assert keep(session, b"x") == Blob(digest_of(None, b"x"), 1)


def test_metadata_that_went_bad_is_replaced(store, session):
    digest = session.put_meta("page", b"\x80")
    path = store.objects.path(digest, "meta")
    path.chmod(0o644)
    path.write_bytes(b"\x81")
    assert session.put_meta("page", b"\x80") == digest
    assert store.objects.read_meta(digest, "page") == b"\x80"
    assert len(list((store.path / "quarantine").iterdir())) == 1
