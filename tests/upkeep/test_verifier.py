"""A verification reads what it should, reports everything, stamps what was read, and can be cut into parts."""

import os
import time

import pytest

from tests.upkeep.bare_stores import objects_in, publish
from zgstore.errors import Corrupt, Invalid, Missing, NotFound
from zgstore.format.digest import Digest
from zgstore.format.pages import RootPage
from zgstore.storage import partials
from zgstore.storage.leases import Leases
from zgstore.storage.store import Store
from zgstore.upkeep import collector
from zgstore.upkeep.survey import Problem, Survey
from zgstore.upkeep.verifier import failure, verify


@pytest.fixture
def store(tmp_path):
    return Store.init(tmp_path / "store")


def blob(store, ref, shard, column):
    return list(store.shards(store.snapshot(store.resolve(ref))))[shard].blobs[column]


def path_of(store, blob):
    return store.objects.path(blob.digest, "objects")


def rewrite(path, change):
    """Change a file's bytes where they lie; its size and times as ``change`` leaves them."""
    path.chmod(0o644)
    change(path)
    path.chmod(0o444)


def flip(path, at=-1):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_a_sound_store_has_no_problem_and_every_byte_was_read(store):
    publish(store, "main", [1, 2, 3], masked=[1])
    store.point("v1", "tag", store.resolve("main"))
    store.hold("paper", store.resolve("main"))
    told = []
    found = verify(store, progress=told.append)
    assert list(found) == []
    report = found.report
    assert report.ok
    assert report.objects == len(objects_in(store))
    sizes = [path.stat().st_size for family in ("objects", "meta") for path in (store.path / family).rglob("*.*")]
    assert report.bytes == sum(sizes) == sum(told)
    assert report.as_json()["problems"] == []
    assert report.seconds > 0


def test_quick_reads_headers_alone(store):
    publish(store, "main", [1, 2, 3])
    quick = verify(store, quick=True).report
    assert quick.ok
    assert quick.objects == verify(store).report.objects


def test_an_empty_store_is_sound(store):
    assert verify(store).report.objects == 0


def test_orphans_are_no_problem(store):
    publish(store, "main", [1])
    publish(store, "gone", [2])
    store.refs.remove("gone", "head")
    assert verify(store).report.ok


def test_named_revs_alone_are_examined(store):
    first = publish(store, "a", [1])
    publish(store, "b", [2])
    rewrite(path_of(store, blob(store, "b", 0, 0)), flip)
    assert list(verify(store, ["a"])) == []
    assert list(verify(store, [first])) == []
    assert [problem.refs for problem in verify(store, ["a", "b"])] == [("b",)]
    with pytest.raises(NotFound):
        verify(store, ["c"])
    with pytest.raises(Invalid, match="one text"):
        verify(store, "a")


def test_each_problem_names_what_it_hurts_and_what_mends_it(store):
    publish(store, "main", [1, 2])
    other = publish(store, "other", [2, 3])
    store.point("v1", "tag", other)
    bad = blob(store, "main", 1, 0)
    assert bad == blob(store, "other", 0, 0)
    rewrite(path_of(store, bad), flip)
    (problem,) = verify(store)
    assert problem.kind == "corrupt"
    assert problem.object == str(bad.digest)
    assert problem.path == str(path_of(store, bad))
    assert set(problem.snapshots) == {str(store.resolve("main")), str(other)}
    assert set(problem.refs) == {"main", "other", "v1"}
    assert "zgstore verify" in problem.hint
    assert "--repair" in problem.hint
    assert set(problem.as_json()) == {"kind", "object", "path", "snapshots", "refs", "hint", "message"}


def test_what_only_a_reflog_names_is_examined_too(store):
    publish(store, "main", [1])
    bad = blob(store, "main", 0, 0)
    publish(store, "main", [2])
    path_of(store, bad).unlink()
    (problem,) = verify(store)
    assert problem.kind == "missing"
    assert problem.refs == ("main@{1}",)


def test_a_missing_blob_in_the_trash_says_how_it_comes_back(store):
    publish(store, "main", [1])
    bad = blob(store, "main", 0, 0)
    store.objects.to_trash("1", bad.digest, "objects")
    (problem,) = verify(store)
    assert "trash" in problem.message
    assert "zgstore tag" in problem.hint


def test_five_corrupt_two_missing_and_one_foreign_are_all_reported(store):
    publish(store, "main", [1, 2, 3])
    blobs = [blob(store, "main", shard, column) for shard in range(3) for column in range(3)]
    for bad in blobs[:5]:
        rewrite(path_of(store, bad), flip)
    for gone in blobs[5:7]:
        path_of(store, gone).unlink()
    (store.path / "objects" / "ab" / "notes.txt").write_text("mine")
    for found in (verify(store), verify(store, ["main"])):
        kinds = sorted(problem.kind for problem in found)
        assert kinds == ["corrupt"] * 5 + ["foreign"] + ["missing"] * 2
        assert all(problem.hint and problem.message for problem in found)
        assert len(found.report.problems) == 8, "iterating again repeats what was found"


def test_parts_are_disjoint_and_together_the_whole(store):
    publish(store, "main", [1, 2, 3])
    for shard in range(3):
        rewrite(path_of(store, blob(store, "main", shard, 0)), flip)
    (store.path / "meta" / "zz").write_text("mine")
    whole = verify(store)
    parts = [verify(store, part=(at, 4)) for at in (1, 2, 3, 4)]
    assert sorted(p.object for part in parts for p in part) == sorted(p.object for p in whole)
    assert sum(part.report.objects for part in parts) == whole.report.objects
    assert sum(part.report.bytes for part in parts) == whole.report.bytes
    assert "zz" in {problem.object for problem in parts[0]}


@pytest.mark.parametrize("part", [(0, 3), (4, 3), (1, 0)])
def test_a_part_counts_from_one(store, part):
    with pytest.raises(Invalid, match="no part"):
        verify(store, part=part)


def let_settle(store):
    """Wait until files are old enough to be stamped."""
    newest = max(path.stat().st_ctime for path in (store.path / "objects").rglob("*.safetensors"))
    time.sleep(max(0.0, newest + 2.1 - time.time()))


def test_what_was_verified_is_stamped_and_new_skips_it(store):
    publish(store, "main", [1, 2])
    let_settle(store)
    verify(store, quick=True).report  # noqa: B018 - the quick level stamps nothing
    assert verify(store, new=True).report.objects == len(objects_in(store))
    plan = store.read_plan("main")
    assert all(each.verified for column in plan.columns for each in column.blobs)
    again = verify(store, new=True).report
    assert again.objects == len(list(store.objects.names("meta")))
    # A change that keeps size and mtime changes the ctime: the stamp does not fit any more.
    bad = path_of(store, blob(store, "main", 1, 1))
    before = bad.stat()
    rewrite(bad, flip)
    os.utime(bad, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert [problem.path for problem in verify(store, new=True)] == [str(bad)]
    bad.unlink()
    assert [problem.kind for problem in verify(store, new=True)] == ["missing"]


def test_a_blob_outside_the_part_that_the_store_means_to_have_may_be_absent(store):
    publish(store, "main", [1, 2])
    digest = store.resolve("main")
    partials.mark(store.path, digest, {"h.0:in"}, store.modes)
    outside, inside = blob(store, "main", 0, 1), blob(store, "main", 0, 0)
    path_of(store, outside).unlink()
    assert verify(store).report.ok
    rewrite(path_of(store, blob(store, "main", 1, 1)), flip)
    path_of(store, inside).unlink()
    assert sorted(problem.kind for problem in verify(store)) == ["corrupt", "missing"]


def test_a_root_whose_sums_disagree_with_its_leaves_is_found(store):
    def lying(leaves, *, columns):
        page = RootPage.of(leaves, columns=columns)
        return RootPage(page.leaves, page.shards, (7).to_bytes(8, "little") + page.rows[8:], page.column_bytes)

    digest = publish(store, "main", [1, 2, 3], root_of=lying)
    messages = [problem.message for problem in verify(store, quick=True)]
    assert len(messages) == 2  # the root, and the samples of the snapshot, which no longer add up
    assert str(store.snapshot(digest).root.hex) in messages[0]


def test_a_snapshot_whose_samples_do_not_add_up_is_found(store):
    publish(store, "main", [1, 2], samples=5)
    (problem,) = verify(store, quick=True)
    assert "5 samples" in problem.message
    assert problem.object == str(store.resolve("main"))


def test_the_exit_code_tells_missing_from_worse():
    def one(kind):
        return Problem(kind, "x", "x", (), (), "mend it", "")

    assert failure([]) is None
    assert isinstance(failure([one("missing"), one("missing")]), Missing)
    assert failure([one("missing")]).hint == "mend it"
    assert isinstance(failure([one("missing"), one("foreign")]), Corrupt)
    assert isinstance(failure([one("corrupt")]), Corrupt)


def test_a_torn_ref_is_named_with_what_sets_it_again(store):
    old = publish(store, "main", [1])
    publish(store, "fine", [2])
    (store.path / "refs" / "heads" / "main").write_text("blake3:12")
    (problem,) = verify(store)
    assert problem.kind == "corrupt"
    assert problem.refs == ("main",)
    assert f"zgstore ref set main {old.short}" in problem.hint
    store.point("main", "head", store.resolve(old.short))
    assert verify(store).report.ok
    assert store.refs.get("main") == old


def test_torn_reflogs_and_holds_are_all_named(store):
    publish(store, "main", [1])
    publish(store, "main", [2])
    store.hold("paper", store.resolve("main"))
    (store.path / "holds" / "paper").write_text("?")
    entry = max((store.path / "reflog" / "heads" / "main").iterdir())
    entry.write_text("torn")
    problems = list(verify(store))
    assert {problem.path for problem in problems} == {str(store.path / "holds" / "paper"), str(entry)}
    assert all(problem.kind == "corrupt" for problem in problems)


def test_a_ref_that_its_log_contradicts_is_found_and_setting_it_mends_it(store):
    first, second = publish(store, "main", [1]), publish(store, "main", [2])
    store.point("other", "head", first)
    path = store.path / "refs" / "heads" / "other"
    path.write_text(f"{second}\n")
    (problem,) = verify(store)
    assert (problem.kind, problem.path, problem.refs) == ("corrupt", str(path), ("other",))
    assert first.short in problem.hint
    store.point("other", "head", second)
    assert list(verify(store)) == []


def test_a_ref_that_is_gone_is_missed_where_its_log_tells_that_it_moved(store):
    publish(store, "main", [1])
    second = publish(store, "main", [2])
    (store.path / "refs" / "heads" / "main").unlink()
    (problem,) = verify(store)
    assert (problem.kind, problem.refs) == ("missing", ("main",))
    assert f"zgstore ref set main {second.short}" in problem.hint
    before = objects_in(store)
    collector.collect(store, now=True)
    assert objects_in(store) == before
    store.point("main", "head", second)
    assert list(verify(store)) == []


def test_a_lost_entry_of_a_reflog_is_found(store):
    for fill in (1, 2, 3):
        publish(store, "main", [fill])
    entries = sorted((store.path / "reflog" / "heads" / "main").iterdir())
    entries[1].unlink()
    (problem,) = verify(store)
    assert (problem.kind, problem.path) == ("corrupt", str(entries[2]))
    assert "zgstore tag" in problem.hint


def test_a_digest_that_is_no_object_s_is_missing_by_name(store):
    absent = Digest(b"\x05" * 32)
    (problem,) = verify(store, [absent])
    assert (problem.kind, problem.object) == ("missing", str(absent))


def test_what_is_examined_is_kept_while_it_is(store):
    publish(store, "main", [1, 2, 3])
    rewrite(path_of(store, blob(store, "main", 0, 0)), flip)
    found = iter(verify(store))
    assert next(found).kind == "corrupt"
    store.refs.remove("main", "head")
    collector.collect(store, now=True)
    assert list(found) == []
    assert [lease for lease in store.leases.all() if lease.alive] == []


@pytest.mark.parametrize(("where", "what"), [(Survey, "walk"), (Leases, "name")])
def test_what_is_named_and_taken_away_meanwhile_is_no_problem(store, monkeypatch, where, what):
    """Its record neither: the walk comes after the lease, and the names are looked up under the lock."""
    publish(store, "main", [1, 2, 3])
    go_on = getattr(where, what)

    def after_a_collection(*args):
        store.refs.remove("main", "head")
        assert collector.collect(store, now=True).kept.keys() <= {"lease"}
        go_on(*args)

    monkeypatch.setattr(where, what, after_a_collection)
    assert list(verify(store)) == []
