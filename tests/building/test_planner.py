from dataclasses import replace
from types import SimpleNamespace

import pytest
from projects import make_project, write_recipe

from zgstore.building.explanation import pin_changes
from zgstore.building.inputs import read_inputs
from zgstore.building.planner import (
    TeacherIdentity,
    columns_of,
    key_of,
    look_up,
    recipe_digest,
    shards_of,
)
from zgstore.building.recipe import load_recipe
from zgstore.format.action import Action
from zgstore.format.digest import digest_of
from zgstore.format.manifest import Column, Pins
from zgstore.format.pages import Blob

TEACHER = TeacherIdentity(b"m" * 32, b"s" * 32, {"tf32": False, "compute": ["float32"]}, {"device": "cpu"}, "measured")


@pytest.fixture
def planned(tmp_path):
    _path, module = make_project(tmp_path / "p")

    def plan(teacher=TEACHER, **changes):
        recipe = load_recipe(write_recipe(tmp_path / "p", module, **changes))
        inputs = read_inputs(recipe)
        shards = shards_of(inputs, recipe.storage.batches_per_shard)
        return {
            wanted.name: [key_of(wanted, shard) for shard in shards] for wanted in columns_of(recipe, inputs, teacher)
        }

    return plan


def test_a_key_is_made_of_what_the_bits_depend_on(planned):
    first = planned()
    assert planned() == first
    changed = {
        "measured": planned(replace(TEACHER, measured=b"x" * 32)),
        "sources": planned(replace(TEACHER, sources=b"x" * 32)),
        "arithmetic": planned(replace(TEACHER, arithmetic={"tf32": True})),
        "dtype": planned(storage='dtype = "float16"\nbatches_per_shard = 2'),
        "codec": planned(storage='batches_per_shard = 2\n[storage.columns."norm:in"]\ncodec = "int8"'),
        "ragged": planned(capture='lengths = "attention_mask"'),
    }
    for what, keys in changed.items():
        assert keys["norm:in"] != first["norm:in"], what
        if what != "ragged":
            assert keys["input_ids"] == first["input_ids"], what


def test_a_key_does_not_depend_on_names_partitions_or_other_columns(planned):
    first = planned()
    others = planned(boundaries=("layers.1:in", "norm:in"), revision="other", context=("input_ids",))
    for name in ("norm:in", "input_ids", "id"):
        assert others[name] == first[name]
    assert planned(replace(TEACHER, platform={"device": "cuda"})) == first


def test_shards_are_whole_batches_and_the_last_may_be_short(tmp_path):
    recipe = load_recipe(make_project(tmp_path / "p", rows=11)[0])
    inputs = read_inputs(recipe)
    assert [(s.batches, s.rows, s.first_row) for s in shards_of(inputs, 4)] == [(4, 8, 0), (2, 3, 8)]
    assert shards_of(inputs, 4)[0].inputs == digest_of("batch", shards_of(inputs, 4)[0].joined)


class _Actions:
    def __init__(self, held):
        self.held = held

    def action(self, key, tag):
        return self.held.get((key, tag))

    def action_platforms(self, key):
        return sorted(tag for each, tag in self.held if each == key)


def _action(key, word):
    return Action(key, Blob(digest_of(None, word), 1), 1, "F32", (), {})


def test_another_platform_is_used_only_if_it_has_all_that_is_missing():
    keys = [digest_of("action", bytes([at])) for at in range(3)]
    mine = {(keys[0], "own"): _action(keys[0], b"mine")}
    some = mine | {(keys[1], "far"): _action(keys[1], b"far")}
    every = some | {(keys[2], "far"): _action(keys[2], b"far")}
    found = look_up(SimpleNamespace(memos=_Actions(some)), keys, "own")
    assert [action is not None for action in found] == [True, False, False]
    found = look_up(SimpleNamespace(memos=_Actions(every)), keys, "own")
    assert [action.blob.digest for action in found] == [
        digest_of(None, b"mine"), digest_of(None, b"far"), digest_of(None, b"far"),
    ]  # fmt: skip


def test_the_pins_that_changed_are_named_with_both_values():
    before = Pins({"id": "a", "measured": b"1"}, {"pins": {"length": 3}}, {"arithmetic": {"tf32": False}})
    after = Pins({"id": "a", "measured": b"2"}, {"pins": {"length": 4}}, {"arithmetic": {"tf32": False}})
    assert pin_changes(before, after) == {"teacher.measured": (b"1", b"2"), "data.pins.length": (3, 4)}


def test_the_recipe_digest_knows_cut_limit_policy_and_constants():
    pins = Pins({"id": "a"}, {"id": "b"}, {})
    columns = [Column("h", "boundary", "F32", "raw", (3,), 0)]
    base = {"cut": 2, "on_nonfinite": "error", "limit": None, "constants": ()}
    digests = {
        recipe_digest(pins, columns, **(base | change))
        for change in ({}, {"cut": 3}, {"on_nonfinite": "drop"}, {"limit": 5}, {"constants": ("k",)})
    }
    assert len(digests) == 5
    assert recipe_digest(pins, columns, **base) == recipe_digest(pins, columns, **base)


def test_ids_are_in_the_key_of_the_column_id_alone(planned, tmp_path):
    first = planned()
    rows = tmp_path / "p" / "rows.jsonl"
    rows.write_text(rows.read_text().replace('{"tokens"', '{"id": 7, "tokens"'))
    named = planned()
    assert named["id"] != first["id"]
    assert {name for name in first if named[name] != first[name]} == {"id"}
