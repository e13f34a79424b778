"""What nothing keeps goes, in two phases; what anything keeps stays; a dry run tells exactly what is then done."""

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.faults.disks import fill, free_bytes, small_disk
from tests.upkeep.bare_stores import (
    files_in,
    keep,
    objects_in,
    publish,
    put_action,
    write_shards,
)
from zgstore.errors import Busy, Corrupt, Missing, Refused
from zgstore.format.digest import Digest, digest_of
from zgstore.format.pages import RowsRoot
from zgstore.storage import leases, partials
from zgstore.storage.store import Store
from zgstore.upkeep import collector, gcplan
from zgstore.upkeep.verifier import verify

DAY = 86400.0


@pytest.fixture
def store(tmp_path):
    return Store.init(tmp_path / "store")


def everything_of(store, digest):
    """Names of all that a snapshot is made of."""
    snapshot = store.snapshot(digest)
    with store.writing("test") as session:
        parts = session._parts(snapshot, None)
    return {digest.hex, *(raw.hex() for raws in parts.values() for raw in raws)}


def as_json(report):
    value = report.as_json()
    del value["dry_run"]
    return value


def run_both(store, **options):
    """A dry run, then the run: both must say the same; returns what they say."""
    before = files_in(store.path)
    promised = collector.collect(store, dry_run=True, **options)
    assert {path for path in files_in(store.path) if not path.startswith("locks")} == {
        path for path in before if not path.startswith("locks")
    }
    done = collector.collect(store, **options)
    assert as_json(promised) == as_json(done)
    assert promised.dry_run
    assert not done.dry_run
    return done


@pytest.fixture
def later(monkeypatch):
    """Let the file system's clock run ahead by so many seconds."""
    ahead = [0.0]
    real = Store.now
    monkeypatch.setattr(Store, "now", lambda self: real(self) + ahead[0])

    def go(seconds):
        ahead[0] += seconds

    return go


def test_nothing_goes_that_a_ref_reaches(store, later):
    digest = publish(store, "main", [1, 2, 3], masked=[1])
    there = objects_in(store)
    later(365 * DAY)
    report = run_both(store, now=True)
    assert objects_in(store) == there
    assert report.trashed.objects == report.freed.objects == 0
    # The record is kept by the newest reflog entry, which never ages.
    assert report.kept["head"].objects + report.kept["reflog"].objects == len(there)
    assert report.live.bytes == sum(
        p.stat().st_size for f in ("objects", "meta") for p in (store.path / f).rglob("*.*")
    )
    assert everything_of(store, digest) <= there


def test_an_unreachable_object_goes_to_the_trash_and_a_grace_later_for_good(store, later):
    publish(store, "main", [1])
    kept = objects_in(store)
    publish(store, "other", [2])
    orphans = objects_in(store) - kept
    store.refs.remove("other", "head")
    later(2 * 3600)
    first = run_both(store)
    assert first.trashed.objects == len(orphans)
    assert first.freed.objects == 0
    assert objects_in(store) == kept
    assert {item.digest.hex for item in store.objects.trashed()} == orphans
    second = run_both(store)
    assert second.trashed.objects == second.freed.objects == 0
    assert second.freeable_now == first.trashed
    later(DAY)
    third = run_both(store)
    assert third.freed == first.trashed
    assert not list(store.objects.trashed())
    assert not files_in(store.path / "trash")


def test_what_is_younger_than_an_hour_stays(store):
    publish(store, "main", [1])
    store.refs.remove("main", "head")
    report = run_both(store)
    assert report.trashed.objects == 0
    assert report.kept["recent"].objects == len(objects_in(store))
    assert report.freeable_now == report.kept["recent"]


def test_grace_sets_both_graces(store, later):
    publish(store, "main", [1])
    count = len(objects_in(store))
    store.refs.remove("main", "head")
    later(60)
    assert run_both(store, grace_seconds=30.0).trashed.objects == count
    assert run_both(store, grace_seconds=30.0).freed.objects == 0
    later(60)
    assert run_both(store, grace_seconds=30.0).freed.objects == count


def test_now_frees_in_one_run_and_says_what_it_costs(store):
    with store.writing("build") as session:
        shards = write_shards(session, [1])
    put_action(store, shards[0].blobs[0], b"k")
    told = []
    ordinary = run_both(store)
    assert ordinary.kept["action"].bytes == ordinary.resumable.bytes == shards[0].blobs[0].size
    report = run_both(store, now=True, before=told.append)
    assert told[0].resumable == ordinary.resumable
    assert report.freed == report.trashed == ordinary.freeable_now
    assert report.resumable == ordinary.resumable
    assert not objects_in(store)
    assert not list(store.memos.actions()), "an action without its blob is dropped"


def test_a_young_action_keeps_its_blob_and_an_old_one_keeps_nothing(store, later):
    with store.writing("build") as session:
        shards = write_shards(session, [1])
    young, old, bare = shards[0].blobs
    put_action(store, young, b"young")
    put_action(store, old, b"old", age_seconds=8 * DAY)
    later(2 * 3600)
    report = run_both(store)
    assert report.kept == {"action": report.live}
    assert objects_in(store) == {young.digest.hex}
    # The old one's blob can still come back out of the trash, so its memo stays as long.
    assert len(list(store.memos.actions())) == 2
    later(DAY)
    run_both(store)
    assert [store.memos.read_action(file).blob for file in store.memos.actions()] == [young]
    assert bare.digest.hex not in objects_in(store)


def test_a_tag_a_hold_and_a_lease_keep_a_snapshot(store, later):
    kept = {}
    for kind, byte in (("tag", 1), ("hold", 2), ("lease", 3)):
        kept[kind] = publish(store, kind, [byte], constant=byte)
    store.point("v1", "tag", kept["tag"])
    store.hold("frozen", kept["hold"], "paper")
    lease = store.leases.take("read")
    lease.add([kept["lease"]])
    for kind in kept:
        store.refs.remove(kind, "head")
    later(2 * 3600)
    report = run_both(store, now=True)
    assert {"tag", "hold", "lease"} <= report.kept.keys()
    for digest in kept.values():
        assert everything_of(store, digest) <= objects_in(store)
    lease.close()
    store.refs.unhold("frozen")
    store.refs.remove("v1", "tag")
    later(2 * 3600)
    run_both(store, now=True)
    assert not objects_in(store)


def test_what_a_ref_was_is_kept_until_it_was_replaced_thirty_days_ago(store, later):
    first = publish(store, "main", [1])
    # Pointed to for 40 days, replaced yesterday: still kept.
    for path in (store.path / "reflog").rglob("0*"):
        os.utime(path, (time.time() - 40 * DAY,) * 2)
    second = publish(store, "main", [2])
    later(1 * DAY)
    assert run_both(store).kept["reflog"].objects
    assert everything_of(store, first) <= objects_in(store)
    assert store.refs.at("main", 1) == first
    later(31 * DAY)
    run_both(store)
    assert first.hex not in objects_in(store)
    assert everything_of(store, second) <= objects_in(store)
    assert [entry.new for entry in store.refs.log("main")] == [second]


def test_keep_last_keeps_so_many_reflog_entries_however_old(store, later):
    digests = [publish(store, "main", [fill]) for fill in (1, 2, 3, 4)]
    later(100 * DAY)
    run_both(store, keep_last=2)
    assert [entry.new for entry in store.refs.log("main")] == digests[:1:-1]
    assert {d.hex for d in digests} & objects_in(store) == {d.hex for d in digests[2:]}


def test_expire_reflog_sets_the_age(store, later):
    first, second = publish(store, "main", [1]), publish(store, "main", [2])
    later(2 * DAY)
    run_both(store, expire_reflog_seconds=3 * DAY)
    assert {first.hex, second.hex} <= objects_in(store)
    run_both(store, expire_reflog_seconds=DAY)
    assert first.hex not in objects_in(store)
    assert second.hex in objects_in(store)


def test_reachable_metadata_that_cannot_be_parsed_stops_everything(store, later):
    publish(store, "main", [1])
    publish(store, "gone", [2])
    store.refs.remove("gone", "head")
    page = store.objects.path(store.snapshot(store.refs.get("main")).root, "meta")
    page.chmod(0o644)
    page.write_bytes(page.read_bytes()[:-1])
    there = files_in(store.path)
    later(2 * 3600)
    with pytest.raises(Corrupt):
        collector.collect(store, now=True)
    page.unlink()
    with pytest.raises(Missing):
        collector.collect(store, now=True)
    assert there - files_in(store.path) == {str(page.relative_to(store.path))}


def test_unreachable_metadata_that_cannot_be_parsed_goes_to_quarantine(store, later):
    publish(store, "main", [1])
    bad = store.objects.path(Digest(b"\x07" * 32), "meta")
    bad.write_bytes(b"\xc1 no msgpack")
    later(2 * 3600)
    report = run_both(store)
    assert report.quarantined.objects == 1
    assert report.trashed.objects == 0
    assert len(files_in(store.path / "quarantine")) == 1


def test_what_has_an_object_s_name_and_is_no_file_is_left_alone(store, later, tmp_path):
    publish(store, "main", [1])
    link = store.objects.path(Digest(b"\x07" * 32), "objects")
    link.symlink_to(tmp_path / "elsewhere")
    later(2 * 3600)
    assert run_both(store, now=True).kept["foreign"].objects == 1
    assert link.is_symlink()


def test_a_snapshot_tagged_between_plan_and_deed_survives(store, later):
    digest = publish(store, "main", [1])
    store.refs.remove("main", "head")
    later(2 * 3600)
    report = collector.collect(store, now=True, before=lambda _: store.point("late", "tag", digest))
    assert everything_of(store, digest) <= objects_in(store)
    # The record is what the removed reflog alone had named.
    assert report.trashed.objects == 1
    assert report.kept["recheck"].objects == len(everything_of(store, digest))


def test_what_a_build_reserves_between_plan_and_deed_survives(store, later):
    publish(store, "main", [1])
    store.refs.remove("main", "head")
    blob = next(iter(store.objects.names("objects")))
    later(2 * 3600)
    with store.writing("build") as session:
        collector.collect(store, now=True, before=lambda _: session.reserve([Digest(blob)]))
        assert list(store.objects.names("objects")) == [blob]


def test_what_a_new_reader_s_lease_names_survives_with_all_below_it(store, later):
    digest = publish(store, "main", [1, 2, 3])
    whole = everything_of(store, digest)
    store.refs.remove("main", "head")
    later(2 * 3600)
    lease = store.leases.take("read")
    collector.collect(store, now=True, before=lambda _: lease.add([digest]))
    assert whole <= objects_in(store)
    lease.close()


def test_a_snapshot_born_without_a_ref_between_plan_and_deed_keeps_its_old_blobs(store, later):
    old = publish(store, "main", [1])
    blobs = {raw.hex() for raw in store.objects.names("objects")}
    store.refs.remove("main", "head")
    born = []
    later(2 * 3600)
    collector.collect(
        store,
        now=True,
        before=lambda _: born.append(publish(store, None, [1], leaf_shards=1, record=False, masked=[0])),
    )
    assert born[0] != old
    assert blobs | {born[0].hex} <= objects_in(store)


def test_what_a_lease_named_before_it_was_there_is_born_since_the_roots_were_read(store, later, monkeypatch):
    snapshot = publish(store, None, [1])
    later(2 * 3600)
    store.objects.to_trash("1", snapshot, "meta")
    mark = gcplan._mark

    def then_it_comes_back(*args):
        marks = mark(*args)
        assert store.objects.restore(snapshot, "meta")
        return marks

    monkeypatch.setattr(gcplan, "_mark", then_it_comes_back)
    with store.leases.take("read") as reader:
        store.leases.name(reader, [snapshot])
        collector.collect(store, now=True)
        assert everything_of(store, snapshot) <= objects_in(store)


def test_a_snapshot_born_within_the_tick_of_the_last_look_is_seen_all_the_same(store):
    publish(store, "main", [1])
    store.refs.remove("main", "head")
    planned = collector.plan(store, now=True)
    recheck = collector._Recheck(store, planned)
    items = [(item.family, item.digest) for item in planned.trash]
    assert recheck.loose(items) == set(items)
    stamps = {folder: folder.stat().st_mtime_ns for folder in (store.path / "meta").iterdir()}
    publish(store, None, [1], leaf_shards=1, record=False, masked=[0])
    for folder, stamp in stamps.items():
        os.utime(folder, ns=(stamp, stamp))
    assert not [item for item in recheck.loose(items) if item[0] == "objects"]


def test_a_young_snapshot_without_a_ref_keeps_its_old_blobs(store, later):
    publish(store, "main", [1])
    blobs = {raw.hex() for raw in store.objects.names("objects")}
    store.refs.remove("main", "head")
    for name in blobs:
        path = store.objects.path(Digest(bytes.fromhex(name)), "objects")
        os.utime(path, (time.time() - DAY,) * 2)
    later(2 * 3600)
    born = publish(store, None, [1], masked=[0], record=False)
    moment = time.time() + 2 * 3600
    for page in (store.path / "meta").rglob(f"{born.hex}*"):
        os.utime(page, (moment, moment))
    run_both(store)
    assert blobs | everything_of(store, born) <= objects_in(store)


KILLED_AS_IT_LOGGED = """
    import os, signal, sys
    sys.path.insert(0, {root!r})
    from tests.upkeep.bare_stores import publish
    from zgstore.storage.refs import Refs
    from zgstore.storage.store import Store
    append = Refs._append
    def killed(*args):
        append(*args)
        os.kill(os.getpid(), signal.SIGKILL)
    Refs._append = killed
    publish(Store.open({path!r}), {name!r}, [7])
"""


def killed_as_it_logged(store, name):
    code = textwrap.dedent(KILLED_AS_IT_LOGGED.format(root=str(Path.cwd()), path=str(store.path), name=name))
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9


def test_what_a_ref_is_about_to_name_stays_as_long_as_its_reflog_entry(store):
    old, before = publish(store, "main", [1]), objects_in(store)
    killed_as_it_logged(store, "main")
    everything = objects_in(store)
    collector.collect(store, now=True)
    assert objects_in(store) == everything
    assert store.refs.get("main") == old
    assert list(verify(store)) == []
    collector.collect(store, now=True, expire_reflog_seconds=0)
    assert objects_in(store) == before


@pytest.mark.parametrize("name", ["main", "first"])
def test_what_a_ref_is_about_to_name_stays_as_one_of_so_many_entries(store, later, name):
    publish(store, "main", [1])
    killed_as_it_logged(store, name)
    everything = objects_in(store)
    later(100 * DAY)
    collector.collect(store, now=True, keep_last=1)
    assert objects_in(store) == everything


def test_what_is_in_the_trash_and_reachable_again_comes_back(store, later):
    digest = publish(store, "main", [1])
    blob = Digest(next(iter(store.objects.names("objects"))))
    store.objects.to_trash("1", blob, "objects")
    report = run_both(store)
    assert report.restored.objects == 1
    assert store.objects.stat(blob, "objects") is not None
    assert report.freed.objects == 0
    assert store.refs.get("main") == digest


def test_a_second_copy_in_the_trash_is_freed_though_the_first_is_needed(store, later):
    publish(store, "main", [1])
    blob = Digest(next(iter(store.objects.names("objects"))))
    content = store.objects.path(blob, "objects").read_bytes()
    store.objects.to_trash("1", blob, "objects")
    with store.writing("build") as session:
        draft = session.draft()
        draft.write(content)
        draft.finish()
        store.objects.place(draft, blob, "objects")
    assert run_both(store).freed.objects == 1
    assert store.objects.stat(blob, "objects") is not None


def test_the_row_pages_of_a_measurement_are_kept(store, later):
    publish(store, "main", [1])
    store.refs.remove("main", "head")
    kinds = {Digest(raw): store.objects.kind_of(Digest(raw)) for raw in store.objects.names("meta")}
    rows = next(d for d, kind in kinds.items() if kind == "page" and b"rows-root" in store.objects.read_meta(d, "page"))
    store.memos.put_measurement(rows, {"kind": "data", "rows": rows.raw})
    later(2 * 3600)
    report = run_both(store, now=True)
    assert report.kept["measurement"].objects == 2
    pages = RowsRoot.decode(store.objects.read_meta(rows, "page")).pages
    assert objects_in(store) == {rows.hex, pages.hex()}


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / "disk", megabytes=8) as disk:
        yield disk


def test_a_disk_with_no_byte_left_is_collected(disk, later):
    store = Store.init(disk / "store")
    publish(store, "main", [1])
    kept = objects_in(store)
    publish(store, "other", [2], constant=3)
    store.refs.remove("other", "head")
    fill(disk)
    assert free_bytes(disk) == 0
    later(2 * 3600)
    report = run_both(store, now=True)
    assert report.freed.objects
    assert objects_in(store) == kept
    assert free_bytes(disk) > 0


def test_the_marker_of_a_part_goes_with_its_snapshot(store, later):
    digest = publish(store, "main", [1])
    partials.mark(store.path, digest, {"h.0:in"}, store.modes)
    later(2 * 3600)
    run_both(store, now=True)
    assert partials.expected(store.path, digest) == {"h.0:in"}
    store.refs.remove("main", "head")
    later(2 * 3600)
    run_both(store, now=True)
    assert not list(partials.listed(store.path))


KILLED = """
    import os, sys
    sys.path.insert(0, {root!r})
    from zgstore.storage.store import Session, Store
    from tests.upkeep.bare_stores import write_shards
    session = Session(Store.open({path!r}), "build")
    write_shards(session, [5])
    draft = session.draft()
    draft.write(b"half a blob")
    print(session.uuid, flush=True)
    os.kill(os.getpid(), 9)
"""


def killed_build(store):
    root = os.getcwd()  # noqa: PTH109
    code = textwrap.dedent(KILLED.format(root=root, path=str(store.path)))
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.returncode == -9, found.stderr
    return found.stdout.strip()


def test_what_a_killed_build_left_is_cleaned_and_its_objects_collected(store, later):
    uuid = killed_build(store)
    assert (store.path / "leases" / uuid).exists()
    assert (store.path / "tmp" / uuid).exists()
    with store.memos.start_build(uuid, {"columns": []}):
        pass
    later(2 * 3600)
    report = run_both(store)
    assert report.leftovers.objects == 3
    assert report.leftovers.bytes > len(b"half a blob")
    assert not (store.path / "leases" / uuid).exists()
    assert not (store.path / "tmp" / uuid).exists()
    assert not store.memos.builds()
    assert report.trashed.objects == 3


def test_a_copy_that_lost_its_empty_folders_is_collected(store):
    publish(store, "main", [1])
    publish(store, "gone", [9])
    store.refs.remove("gone", "head")
    for folder in sorted(store.path.rglob("*"), reverse=True):
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
    assert run_both(store, now=True).freed.objects
    assert list(verify(store)) == []


def test_what_a_living_build_has_in_tmp_stays(store, later):
    with store.writing("build") as session:
        draft = session.draft()
        draft.write(b"half a blob")
        with store.memos.start_build(session.uuid, {"columns": []}):
            pass
        write_shards(session, [1])
        later(2 * DAY)
        report = run_both(store, now=True)
        assert report.leftovers.objects == 0
        assert report.kept["lease"].objects == 3
        assert (store.path / "tmp" / session.uuid / draft.name).exists()


def test_a_holder_that_turns_out_to_live_keeps_what_it_has_in_tmp(store, monkeypatch):
    with store.writing("build") as session:
        draft = session.draft()
        with monkeypatch.context() as asleep:
            asleep.setattr(leases, "_alive", lambda *_, **__: False)
            report = collector.collect(store, before=lambda _: asleep.undo())
        assert report.leftovers.objects == 0
        assert (store.path / "leases" / session.uuid).exists()
        assert (store.path / "tmp" / session.uuid / draft.name).exists()


def test_a_holder_that_wakes_while_its_folder_is_swept_has_another(store, monkeypatch):
    with store.writing("build") as session:
        session.draft().write(b"lost")
        swept = store.objects.remove_aside

        def wakes_first(name):
            asleep.undo()
            assert session.reserve([digest_of(None, b"needed")]) == [False]
            assert (store.path / "tmp" / session.uuid).is_dir()
            swept(name)

        with monkeypatch.context() as asleep:
            asleep.setattr(leases, "_alive", lambda *_, **__: False)
            asleep.setattr(store.objects, "remove_aside", wakes_first)
            report = collector.collect(store)
        assert report.leftovers.objects == 2
        assert keep(session, b"found").size == 5
        assert os.listdir(store.path / "tmp") == [session.uuid]  # noqa: PTH208


def test_it_refuses_where_locks_do_not_work_unless_this_host_owns_the_store(store, monkeypatch):
    monkeypatch.setattr(type(store.leases), "locks_work", lambda self: False)
    with pytest.raises(Refused) as refusal:
        collector.collect(store)
    assert "--owner" in refusal.value.hint
    assert collector.collect(store, owner=True).freed.objects == 0
    assert collector.collect(store, dry_run=True).dry_run


def test_one_collector_at_a_time(store):
    with store.leases.gc_lock(), pytest.raises(Busy):
        collector.collect(store)


def test_with_nothing_loose_neither_actions_are_read_nor_objects_stat_ed(store, monkeypatch):
    publish(store, "main", [1, 2, 3])

    def never(*_):
        raise AssertionError("nothing depends on it")

    monkeypatch.setattr(type(store.memos), "actions", never)
    asked = []
    stats = type(store.objects).stats
    monkeypatch.setattr(type(store.objects), "stats", lambda self, *a: asked.extend(a[0]) or stats(self, *a))
    run_both(store)
    names = set(store.objects.names("objects"))
    assert not names & {digest.raw for digest in asked}
