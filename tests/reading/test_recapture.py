"""The teacher run again for chosen rows: what a reader gives, also where rows were left out or masked."""

from __future__ import annotations

import sys

import pytest
import torch

import zgstore

CODE = """
import torch
from torch import nn
import zgstore


class Teacher(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 6)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


def teacher():
    torch.manual_seed(0)
    return Teacher()


def batches():
    for at in range(0, 12, 4):
        x = torch.arange(at * 4, at * 4 + 16, dtype=torch.float32).reshape(4, 4) / 50
        if at == 4:
            x[1, 0] = float("nan")
        yield {"x": x}


def extract(teacher, batch):
    y = teacher.first(batch["x"])
    keep = [row for row in range(4) if row != 3]
    return zgstore.capture.Trajectory(boundaries={"a": y[keep], "b": teacher.last(y)[keep]}, left_out={3: "not wanted"})
"""
RECIPE = """
[teacher]
factory = "{module}:teacher"
id = "t"
revision = "1"
[data]
factory = "{module}:batches"
id = "d"
revision = "1"
[capture]
{capture}
context = ["x"]
[storage]
dtype = "bfloat16"
batches_per_shard = 2
"""
HOOKS = 'boundaries = ["first:out", "last:out"]'


@pytest.fixture
def make(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))

    def build(module, capture, more=""):
        (tmp_path / f"{module}.py").write_text(CODE)
        (tmp_path / "cache.toml").write_text(RECIPE.format(module=module, capture=capture) + more)
        store = zgstore.Store.init(tmp_path / "store")
        zgstore.build(store, tmp_path / "cache.toml", ref="main", on_nonfinite="drop")
        return store, tmp_path / "cache.toml"

    return build


@pytest.mark.parametrize(
    ("module", "capture", "more", "rows"),
    [
        ("again_hooks", HOOKS, "", 11),
        ("again_int8", HOOKS, '[storage.columns."last:out"]\ncodec = "int8"', 11),
        ("again_extractor", 'extractor = "again_extractor:extract"', "", 8),
    ],
)
def test_rows_are_what_a_reader_gives_and_count_as_it_counts(make, module, capture, more, rows):
    store, recipe = make(module, capture, more)
    columns = [column.name for column in store.snapshot(store.resolve("main")).boundaries()]
    reader = zgstore.read(store, "main", columns)
    assert len(reader) == rows
    with zgstore.Recapture(store, "main", recipe, columns) as again:
        assert len(again) == rows
        for indices in ([*range(rows)], [rows - 1, 0, 5, 5]):
            found = again.rows(indices)
            whole = reader.batch(indices, given=found)
            for name, expected in reader.batch(indices).items():
                assert torch.equal(whole[name], expected)
            for name in columns:
                assert torch.equal(torch.stack(found[name]), reader.batch(indices)[name])


def test_only_what_a_teacher_makes_is_made_again(make):
    store, recipe = make("again_context", HOOKS)
    with pytest.raises(zgstore.Invalid, match="not of the teacher"):
        zgstore.Recapture(store, "main", recipe, ["x"])
    with pytest.raises(zgstore.Invalid, match="no column"):
        zgstore.Recapture(store, "main", recipe, ["first:in"])


def test_rows_that_are_given_must_be_the_columns_own(make):
    reader = zgstore.read(make("again_given", HOOKS)[0], "main", ["first:out"])
    with pytest.raises(zgstore.Invalid, match="a row given"):
        reader.batch([0], given={"first:out": [torch.zeros(6)]})
    with pytest.raises(zgstore.Invalid, match="a row given"):
        reader.batch([0], given={"first:out": [torch.zeros(5, dtype=torch.bfloat16)]})
    with pytest.raises(zgstore.Partial):
        reader.batch([0], given={"other": [torch.zeros(6)]})
