"""verify, gc, reindex: a store examined, mended, collected."""

from __future__ import annotations

import shutil
import time

import pytest
from made import blob_of, flip, publish

from zgstore.format.action import Action
from zgstore.format.digest import digest_of
from zgstore.storage.memos import platform_tag
from zgstore.storage.store import Store

FIELDS = {"kind", "object", "path", "snapshots", "refs", "hint"}


def test_verify_of_a_sound_store_says_so(store, zg):
    found = zg("verify", "--json")
    assert found.code == 0
    assert found.json["ok"] is True
    assert found.json["problems"] == []
    assert {"objects", "bytes", "seconds"} <= set(found.json)
    assert zg("verify").out.startswith("sound: ")


def test_verify_tells_a_flipped_bit_with_what_it_hurts_and_what_mends_it(store, zg):
    blob = blob_of(store, "main").digest
    path = flip(store, blob)
    ran = zg("verify", "--json")
    assert ran.code == 20
    assert ran.json["ok"] is False
    assert ran.json["error"]["kind"] == "corrupt"
    (problem,) = ran.json["problems"]
    assert set(problem) >= FIELDS
    assert problem["object"] == str(blob)
    assert problem["path"] == str(path)
    assert problem["refs"] == ["main"]
    assert "zgstore" in problem["hint"]
    page = zg("verify")
    assert page.error
    assert blob.short in page.out
    assert str(path) in page.out


def test_verify_that_hashed_no_blob_says_how_far_its_word_goes(store, zg):
    flip(store, blob_of(store, "main").digest)
    ran = zg("verify", "--quick")
    assert ran.code == 0
    assert ran.out.startswith("sound as far as sizes and headers tell, no blob was hashed: ")
    assert zg("verify", "--quick", "--json").json["quick"] is True
    assert zg("verify", "--json").json["quick"] is False


def test_verify_tells_a_lost_blob_by_21_and_all_problems_at_once(store, zg):
    lost, bad = blob_of(store, "main").digest, blob_of(store, "v1").digest
    store.objects.path(lost, "objects").unlink()
    assert zg("verify", "--quick", "--json").code == 21
    flip(store, bad)
    (store.path / "objects" / "00" / "stray").write_text("hello")
    ran = zg("verify", "--json")
    assert ran.code == 20
    assert sorted(problem["kind"] for problem in ran.json["problems"]) == ["corrupt", "foreign", "missing"]
    assert "stray" in zg("verify").out


def test_verify_looks_at_what_is_named(store, zg):
    flip(store, blob_of(store, "main").digest)
    assert zg("verify", "v1").code == 0
    assert zg("verify", "v1", "main").code == 20
    assert zg("verify", "nothing").code == 10
    zg("lock", "v1")
    assert zg("verify", "--locked").code == 0
    zg("lock", "main")
    assert zg("verify", "--locked").code == 20


def test_the_parts_of_a_verify_make_the_whole(store, zg):
    flip(store, blob_of(store, "main").digest)
    codes = [zg("verify", "--part", f"{at}/3").code for at in (1, 2, 3)]
    assert sorted(codes) == [0, 0, 20]


@pytest.mark.parametrize(
    "words",
    [
        ["--part", "0/3"],
        ["--part", "x"],
        ["--quick", "--new"],
        ["--recompute", "1"],
        ["--recompute", "0", "--recipe", "r"],
        ["--repair"],
        ["--repair", "--recipe", "r", "--from", "s"],
        ["--from", "s"],
        ["--recipe", "r"],
        ["--locked"],
    ],
    ids=" ".join,
)
def test_verify_refuses_what_makes_no_sense(store, zg, words):
    ran = zg("verify", *words)
    assert ran.code == (10 if words == ["--locked"] else 2)
    assert ran.error
    assert zg("verify", *words, "--json").json["ok"] is False


def test_verify_repairs_from_another_store_and_accepts_the_same_digest_alone(store, zg, tmp_path):
    shutil.copytree(store.path, tmp_path / "other", symlinks=True)
    bad, lost = blob_of(store, "main").digest, blob_of(store, "main", column=1).digest
    flip(store, bad)
    store.objects.path(lost, "objects").unlink()
    ran = zg("verify", "--repair", "--from", str(tmp_path / "other"), "--json")
    assert ran.code == 0, ran.out
    assert ran.json["ok"] is True
    assert {each["object"] for each in ran.json["repair"]["mended"]} == {str(bad), str(lost)}
    assert zg("verify").code == 0
    flip(store, bad)
    flip(Store.open(tmp_path / "other"), bad)
    again = zg("verify", "--repair", "--from", str(tmp_path / "other"))
    assert again.code in {20, 21}
    assert "1 problem left" in again.out
    assert zg("verify", "--repair", "--from", str(tmp_path / "none")).code == 10


def test_gc_tells_what_it_keeps_and_a_dry_run_equals_what_is_then_done(store, zg):
    publish(store, None, 9.0)
    store.refs.remove("v1", "tag")
    dry = zg("gc", "--now", "--dry-run", "--json").json
    assert {"dry_run", "live", "trashed", "freed", "kept"} <= set(dry)
    assert {"objects", "bytes"} == set(dry["live"])
    assert dry["freed"]["objects"] > 0
    done = zg("gc", "--now", "--json").json
    assert {**done, "dry_run": True} == dry
    assert zg("gc", "--now", "--json").json["freed"]["objects"] == 0
    assert zg("verify").code == 0


def test_gc_says_what_now_would_free(store, zg):
    publish(store, None, 9.0)
    page = zg("gc", "--dry-run").out
    assert "nothing was touched" in page
    assert "zgstore gc --now" in page
    assert "refs" in page


def test_gc_says_of_now_what_it_costs_and_counts_nothing_twice(store, zg):
    store.refs.remove("v1", "tag")
    publish(store, "gone", 9.0)
    captured = blob_of(store, "gone")
    store.memos.put_action(Action(digest_of("action", b"k"), captured, 4, "F32", (3, 8), {}), platform_tag({}))
    store.refs.remove("gone", "head")
    dry = zg("gc", "--now", "--dry-run")
    cost = f"--now frees 1 blob, {captured.size / 1024:.2f} KiB, captured in the last 7 days"
    assert cost in dry.out
    ran = zg("gc", "--now")
    assert cost in ran.err
    assert "trashed" not in ran.out
    assert "leftovers  1 piece" in ran.out


def test_gc_says_of_trash_what_frees_it(store, zg):
    assert "trashed  0 objects, 0 B\n" in zg("gc").out
    publish(store, None, 9.0)
    time.sleep(0.05)
    assert ": a gc after the grace frees them" in zg("gc", "--grace", "0.01s").out


@pytest.mark.parametrize("words", [["--grace", "soon"], ["--keep-last", "-1"], ["--expire-reflog", "x"]], ids=" ".join)
def test_gc_refuses_what_makes_no_sense(store, zg, words):
    assert zg("gc", *words).code == 2


def test_gc_keeps_the_last_of_each_reflog(store, zg):
    store.refs.remove("v1", "tag")
    first = store.resolve("main@{1}")
    zg("gc", "--now", "--keep-last", "2")
    assert zg("show", first.hex).code == 0
    zg("gc", "--now", "--keep-last", "1")
    assert zg("show", first.hex).code == 10


def test_gc_stops_where_a_named_page_cannot_be_read(store, zg):
    flip(store, store.snapshot(store.resolve("main")).root, "meta")
    ran = zg("gc", "--now", "--json")
    assert ran.code == 20
    assert ran.json["error"]["kind"] == "corrupt"


def test_reindex_throws_the_stamps_away(store, zg):
    zg("verify")
    blob = blob_of(store, "main").digest
    assert "index" in zg("reindex").out
    assert store.index.stamps([blob.raw]) == [None]
    assert zg("verify", "--new").code == 0


def test_gc_takes_no_grace_without_a_unit(store, zg):
    publish(store, None, 9.0)
    for option in ("--grace", "--expire-reflog"):
        ran = zg("gc", option, "3")
        assert ran.code == 2
        assert "'3' has no unit" in ran.error
    assert list(store.objects.trashed()) == []
    assert zg("gc", "--wait", "3", "--dry-run").code == 0
