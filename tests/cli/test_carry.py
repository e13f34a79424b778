"""init, copy, export, import: stores made, and snapshots carried."""

from __future__ import annotations

import json
import tomllib

import pytest
from made import COLUMNS, blob_of, flip

from zgstore.building.recipe import Recipe
from zgstore.cli import init as initial
from zgstore.cli.units import size_text
from zgstore.storage.store import Store


def test_init_makes_a_store_and_leaves_the_one_that_is_there(zg, tmp_path):
    made = zg("init", "--json").json
    assert made["created"] is True
    assert made["store"] == str(tmp_path / ".zgstore")
    again = zg("init", "--json").json
    assert again["created"] is False
    assert again["id"] == made["id"]
    assert "there already" in zg("init").out


def test_init_takes_a_path_and_a_policy(zg, tmp_path):
    assert zg("init", "cache", "--policy", "group", "--json").json["policy"] == "group"
    assert (tmp_path / "cache" / "objects").is_dir()
    assert zg("init", "--store", str(tmp_path / "third")).code == 0
    assert (tmp_path / "third" / "objects").is_dir()
    assert zg("init", "x", "--policy", "everybody").code == 2
    assert zg("init", "x", "--example", "nothing").code == 2
    assert not (tmp_path / "x").exists()


def test_the_folder_around_a_store_is_none_and_the_store_in_it_is_named(store, zg):
    around = store.path.parent
    ran = zg("ls", "--store", str(around))
    assert ran.code == 10
    assert str(store.path) in ran.error
    assert "init" not in ran.error


def test_init_says_where_it_cannot(zg, tmp_path):
    (tmp_path / "file").write_text("")
    ran = zg("init", "file/store")
    assert ran.code != 0
    assert ran.error


def test_the_example_is_a_recipe_and_is_not_written_over(zg, tmp_path):
    ran = zg("init", "--example", "chat")
    assert "zgstore build chat.toml" in ran.out
    path = tmp_path / "chat.toml"
    recipe = Recipe.parse(tomllib.loads(path.read_text()), path=path)
    assert recipe.name == "chat"
    assert recipe.data.factory.text == "zgtrain.causal_lm:chat_batches"
    for line in (tmp_path / "chat.jsonl").read_text().splitlines():
        assert [turn["role"] for turn in json.loads(line)["messages"]] == ["user", "assistant"]
    path.write_text("mine")
    assert zg("init", "--example", "chat", "--json").json["example"] == []
    assert path.read_text() == "mine"
    assert set(initial.EXAMPLES) == {"chat"}


def test_copy_carries_what_is_missing_and_the_ref(store, zg, tmp_path):
    other = Store.init(tmp_path / "other")
    ran = zg("copy", "main", "--to", str(other.path), "--json").json
    assert ran["objects"]["present"] == 0
    assert other.resolve("main") == store.resolve("main")
    assert zg("verify", "--store", str(other.path)).code == 0
    again = zg("copy", "main", "--to", str(other.path))
    assert again.code == 0
    assert "0 blobs" in again.out


def test_a_part_is_copied_and_said_to_be_one(store, zg, tmp_path):
    other = Store.init(tmp_path / "other")
    ran = zg("copy", "main", "--to", str(other.path), "--columns", COLUMNS[0].name, "--json").json
    assert ran["partial"] is True
    assert ran["columns"] == [COLUMNS[0].name]
    told = zg(
        "copy", "main", "--store", str(other.path), "--to", str(store.path), "--columns", COLUMNS[1].name, "--json"
    )
    assert told.code == 22
    assert told.json["error"]["kind"] == "partial"
    assert zg("show", "main", "--store", str(other.path), "--json").json["partial"] == [COLUMNS[0].name]
    assert f"only {COLUMNS[0].name}" in zg("show", "main", "--store", str(other.path)).out
    assert zg("show", "main", "--json").json["partial"] is None


def test_of_a_part_what_is_here_is_counted_and_the_rest_is_said_not_to_be(store, zg, tmp_path):
    other = Store.init(tmp_path / "other")
    there = ["--store", str(other.path)]
    assert zg("copy", "main", "--to", str(other.path), "--columns", COLUMNS[0].name).code == 0
    whole, part = zg("show", "main", "--json").json, zg("show", "main", *there, "--json").json
    size = whole["columns"][0]["bytes"]
    assert (whole["bytes_here"], part["bytes"], part["bytes_here"]) == (whole["bytes"], whole["bytes"], size)
    assert [[column["here"] for column in each["columns"]] for each in (whole, part)] == [[True, True], [True, False]]
    page = zg("show", "main", *there).out.splitlines()
    assert f"size      {size_text(size)} here of {size_text(whole['bytes'])} in 2 shards" in page
    assert [size_text(size) in line for line in page[-2:]] == [True, False]
    assert page[-1].endswith("not here")
    (ref,) = zg("ls", *there, "--json").json["refs"]
    assert (ref["partial"], ref["bytes"], ref["bytes_here"]) == ([COLUMNS[0].name], whole["bytes"], size)
    row = zg("ls", *there).out.splitlines()[1].split()
    assert row == ["main", "partial", "ref", store.resolve("main").short, "8", "1", "of", "2", *size_text(size).split()]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["copy", "nothing", "--to", "other"], 10),
        (["copy", "main", "--to", "none"], 10),
        (["copy", "main"], 2),
        (["copy", "main", "--to", ".zgstore"], 2),
        (["copy", "main", "--to", "other", "--columns", "h.9"], 2),
        (["export", "nothing", "out"], 10),
        (["export", "main"], 2),
        (["export", "main", "out", "--columns", "h.9"], 2),
        (["export", "main", "other"], 2),
        (["import", "safetensors", "none"], None),
        (["import", "zerograph", "none"], None),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else str(each),
)
def test_what_cannot_be_carried_is_said(store, zg, tmp_path, words, code):
    Store.init(tmp_path / "other")
    ran = zg(*words)
    assert ran.code == code if code else ran.code != 0
    assert ran.error
    told = zg("--json", *words)
    assert told.code == ran.code
    assert told.json["ok"] is False


def test_a_corrupt_blob_is_not_carried(store, zg, tmp_path):
    Store.init(tmp_path / "other")
    flip(store, blob_of(store, "main").digest)
    assert zg("copy", "main", "--to", "other").code == 20
    assert zg("export", "main", "out").code == 20
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_an_export_is_plain_files_that_come_back_in(store, zg, tmp_path):
    ran = zg("export", "main", "out", "--json").json
    assert set(ran["columns"]) == {column.name for column in COLUMNS}
    assert (tmp_path / "out" / "manifest.json").is_file()
    assert "manifest.json" in zg("export", "v1", "out2", "--columns", COLUMNS[0].name).out
    back = zg("import", "safetensors", "out", "--ref", "back", "--json")
    assert back.code == 0, back.out
    assert back.json["samples"] == 8
    assert back.json["snapshot"] == str(store.resolve("back"))
    assert "snapshot" in zg("import", "safetensors", "out").out
