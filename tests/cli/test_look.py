"""ls, show, log, diff, du, why: what a store says of itself."""

from __future__ import annotations

import os
import pwd
from dataclasses import replace

import pytest
from made import COLUMNS, RECIPE, blob_of, publish

from zgstore.cli.console import _lay_out
from zgstore.cli.diff import _unlike, _view_changes, _view_columns
from zgstore.cli.units import time_text
from zgstore.format.manifest import Column


def test_ls_lists_refs_and_tags_with_full_digests(store, zg):
    refs = zg("ls", "--json").json["refs"]
    assert [(ref["name"], ref["kind"]) for ref in refs] == [("main", "head"), ("v1", "tag")]
    assert refs[0]["snapshot"] == str(store.resolve("main"))
    assert refs[0]["samples"] == 8
    page = zg("ls").out.splitlines()
    assert page[0].split() == ["NAME", "KIND", "SNAPSHOT", "SAMPLES", "COLUMNS", "SIZE"]
    assert store.resolve("main").short in page[1]


def test_ls_of_an_empty_store_says_what_to_do(zg):
    assert zg("init", "--json").json["created"] is True
    assert zg("ls", "--json").json == {"ok": True, "refs": [], "holds": []}
    assert "zgstore build" in zg("ls").out


def test_who_holds_since_when_and_why_is_told_wherever_the_snapshot_is_shown(store, zg):
    assert zg("hold", "paper", "v1", "--reason", "for table 3").code == 0
    digest, user = store.resolve("v1"), pwd.getpwuid(os.getuid()).pw_name
    (hold,) = zg("ls", "--json").json["holds"]
    assert (hold["name"], hold["snapshot"], hold["user"], hold["reason"]) == ("paper", str(digest), user, "for table 3")
    text = f"by {user} since {time_text(store.refs.get_hold('paper').time_seconds)}: for table 3"
    assert zg("ls").out.endswith(f"\n\nholds\n  paper  {digest.short} {text}\n")
    assert zg("show", "v1", "--json").json["holds"] == [hold]
    page = zg("show", "v1").out.splitlines()
    assert [line.split(maxsplit=1) for line in page if line.startswith(("names", "held"))] == [
        ["names", "v1"], ["held", f"paper, {text}"]
    ]  # fmt: skip
    assert zg("show", "main", "--json").json["holds"] == []
    assert zg("why", digest.short, "--json").json["holds"] == [hold]
    assert f"hold paper {text}\n" in zg("why", digest.short).out


def test_ls_lists_a_name_whose_snapshot_cannot_be_read(store, zg):
    store.objects.path(store.resolve("main"), "meta").unlink()
    listed = zg("ls", "--json").json["refs"]
    assert [ref["samples"] for ref in listed] == [None, 8]
    assert "unreadable" in zg("ls").out


@pytest.mark.parametrize("rev", ["main", "v1", "main@{0}", "main@{1}"])
def test_show_takes_every_form_of_rev_and_its_digests_can_be_pasted_back(store, zg, rev):
    digest = str(store.resolve(rev))
    assert zg("show", rev, "--json").json["snapshot"] == digest
    pasted = zg("show", rev).out.split()[1]
    assert len(pasted) == 12
    for again in (pasted, pasted[:6], digest, digest.removeprefix("blake3:")):
        assert zg("show", again, "--json").json["snapshot"] == digest


def test_show_tells_pins_columns_and_statistics(store, zg):
    shown = zg("show", "main", "--json").json
    assert {"snapshot", "recipe", "pins", "teacher", "data", "capture", "columns", "samples", "shards", "bytes"} <= set(
        shown
    )
    assert shown["recipe"] == str(RECIPE)
    assert shown["columns"][0]["statistics"]["rms"] == 1.5
    assert shown["bytes"] == sum(column["bytes"] for column in shown["columns"])
    assert shown["names"] == ["main"]
    page = zg("show", "main").out
    for text in ("org/teacher", "max_length", "model.layers.1:in", "3×8", "ada@lab"):
        assert text in page


def test_show_of_what_is_not_there_is_not_found(store, zg):
    ran = zg("show", "mian")
    assert ran.code == 10
    assert "main" in ran.error
    assert zg("show", "main@{7}").code == 10
    assert zg("show", "lock:main").code == 10
    assert zg("show", "0" * 64).code == 10


def test_show_of_a_blob_says_that_it_is_none(store, zg):
    ran = zg("show", blob_of(store, "main").digest.hex)
    assert ran.code == 2
    assert "zgstore why" in ran.error


def test_show_of_a_lost_or_corrupt_snapshot_is_21_or_20(store, zg):
    store.objects.path(store.snapshot(store.resolve("main")).root, "meta").unlink()
    assert zg("show", "main", "--json").code == 21
    path = store.objects.path(store.snapshot(store.resolve("v1")).root, "meta")
    path.chmod(0o644)
    path.write_bytes(b"nothing of the kind")
    ran = zg("show", "v1", "--json")
    assert ran.code == 20
    assert ran.json["error"]["path"] == str(path)


def test_show_decode_needs_its_recipe_and_the_recipe_its_row(store, zg):
    assert "--recipe" in zg("show", "main", "--decode", "0").error
    assert "--decode" in zg("show", "main", "--recipe", "r.toml").error


def test_log_lists_moves_newest_first(store, zg):
    moves = zg("log", "main", "--json").json["entries"]
    assert [move["rev"] for move in moves] == ["main@{0}", "main@{1}"]
    assert moves[0]["old"] == moves[1]["new"] == str(store.resolve("v1"))
    assert moves[0]["record"]["user"] == "ada"
    page = zg("log").out
    assert "more of it" in page
    assert "main@{1}" in page
    assert zg("log", "nothing").code == 10


def test_diff_tells_what_differs_without_reading_a_blob(store, zg):
    for blobs in (store.path / "objects").glob("*/*"):
        blobs.unlink()
    found = zg("diff", "v1", "main", "--json").json
    assert found["same"] is False
    assert found["pins"] == []
    assert found["shards"] == {"added": 0, "removed": 0, "changed": 1, "same": 1}
    assert set(found["columns"]) == {"added", "removed", "changed", "same"}
    assert set(found["bytes"]) == {"shared", "only_a", "only_b"}
    assert "values" not in found
    assert "changed: model.layers.0:in" in zg("diff", "v1", "main").out


def test_diff_exits_by_1_only_if_asked_and_only_if_they_differ(store, zg):
    assert zg("diff", "v1", "main").code == 0
    ran = zg("diff", "v1", "main", "--exit-code", "--json")
    assert (ran.code, ran.json["ok"], ran.err) == (1, True, "")
    assert zg("diff", "main", "main", "--exit-code").code == 0
    assert "the same snapshot" in zg("diff", "main", "main").out


def test_diff_values_measures_each_column(store, zg):
    found = zg("diff", "v1", "main", "--values", "--json").json["values"]["model.layers.0:in"]
    assert {"max_abs", "mean_abs", "rel_l2", "cos_min", "cos_mean", "first_row"} <= set(found)
    assert found["max_abs"] == 1.0
    assert found["first_row"] == 4
    assert "MAX ABS" in zg("diff", "v1", "main", "--values", "--samples", "2").out


@pytest.mark.parametrize(
    ("words", "code"),
    [(["--samples", "3"], 2), (["--values", "--samples", "0"], 2), (["--values", "--samples", "many"], 2)],
)
def test_diff_refuses_what_makes_no_sense(store, zg, words, code):
    ran = zg("diff", "main", "v1", *words)
    assert ran.code == code
    assert ran.error


def test_diff_names_the_pins_that_differ(store, zg):
    column = (Column("model.layers.7:in", "boundary", "F32", "raw", (3, 8), 0),)
    publish(store, "other", 1.0, columns=column)
    found = zg("diff", "main", "other", "--json").json
    assert [pin["field"] for pin in found["pins"]] == ["capture.boundaries"]
    assert found["columns"]["added"] == ["model.layers.7:in"]
    page = zg("diff", "main", "other").out
    assert (
        "\ncapture.boundaries\n  only in A  model.layers.0:in, model.layers.1:in\n  only in B  model.layers.7:in\n"
    ) in page
    assert "added: model.layers.7:in" in page


def test_diff_says_how_a_column_is_defined_otherwise(store, zg):
    publish(store, "other", 3.0, columns=tuple(replace(column, codec="int8", dtype="BF16") for column in COLUMNS))
    names = [column.name for column in COLUMNS]
    changes = [{"field": "dtype", "a": "F32", "b": "BF16"}, {"field": "codec", "a": "raw", "b": "int8"}]
    assert zg("diff", "main", "other", "--json").json["definitions"] == dict.fromkeys(names, changes)
    assert f"changed: {', '.join(names)} (dtype F32 → BF16, codec raw → int8)\n" in zg("diff", "main", "other").out


def test_diff_writes_shapes_as_show_does():
    changes = {"x": [{"field": "shape", "a": [3, 8], "b": [None, 8]}]}
    value = {"columns": {"added": [], "removed": [], "changed": ["x", "y"]}, "definitions": changes}
    assert [line.text for line in _view_columns(value)] == ["changed: x (shape 3×8 → …×8)", "changed: y"]


def test_of_two_lists_a_diff_shows_what_only_one_has_or_that_the_order_differs():
    told = [list(_unlike(a, b)) for a, b in ((["x", "y"], ["y", "x"]), (["x"], ["x", "y"]), (["x", "x"], ["x", False]))]
    assert told == [
        [("  in both", "the same, in another order")],
        [("  only in B", "y")],
        [("  only in A", "x"), ("  only in B", "no")],
    ]


def test_a_narrow_page_cuts_no_name_out_of_a_list_that_differs():
    names = [f"model.layers.{at}:in" for at in range(12)]
    change = {"field": "capture.boundaries", "a": names[:1], "b": names}
    lines = [text for block in _view_changes("PINS", [change]) for text, _ in _lay_out(block, 80)]
    assert max(map(len, lines)) <= 80
    assert " ".join(" ".join(lines).split()).endswith(f"capture.boundaries only in B {', '.join(names[1:])}")


def test_a_pin_that_is_no_or_zero_or_no_list_at_all_is_written_in_its_cell():
    pairs = [(False, True), (0, 1), (None, []), ("x", ["x"])]
    changes = [{"field": f"capture.{at}", "a": a, "b": b} for at, (a, b) in enumerate(pairs)]
    _, rows = _view_changes("PINS", changes)
    assert [row[1:] for row in rows.rows] == [("no", "yes"), ("0", "1"), ("none", "[]"), ("x", "['x']")]


def test_du_counts_what_is_own_and_what_is_shared(store, zg):
    found = zg("du", "--json").json
    main, tag = found["snapshots"]
    assert main["refs"] == ["main"]
    assert main["own_bytes"] + main["shared_bytes"] == main["bytes"]
    assert found["total_bytes"] == main["bytes"] + tag["own_bytes"]
    assert "SHARED" in zg("du").out


def test_why_shows_the_chain_from_a_root(store, zg):
    blob = blob_of(store, "main").digest
    found = zg("why", blob.short, "--json").json
    assert found["object"] == str(blob)
    assert [link["kind"] for link in found["chains"][0]] == ["head", "snapshot", "root", "leaf", "blob"]
    page = zg("why", str(blob)).out
    assert "ref main" in page
    assert "column model.layers.0:in of shard 1" in page


def test_why_of_what_nothing_keeps_says_so(store, zg):
    lost = publish(store, None, 9.0)
    assert "nothing keeps" in zg("why", lost.short).out
    assert zg("why", "abcdef").code == 10
    assert zg("why", "xyz").code == 10
    assert zg("why", "0" * 64).code == 10
