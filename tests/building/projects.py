"""Small real projects: a teacher, a data stream and a recipe beside each other in a folder of their own."""

import itertools
import json
import os
import textwrap
from pathlib import Path

_numbers = itertools.count()

CODE = """
import json
import pathlib

import torch
from torch import nn

LOADED = []


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        x += torch.tanh(self.linear(x))
        return x


class Teacher(nn.Module):
    def __init__(self, width, layers, vocabulary=32):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, input_ids, attention_mask=None):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def teacher(width=8, layers=4, seed=0, poison=None):
    LOADED.append(seed)
    torch.manual_seed(seed)
    model = Teacher(width, layers)
    if poison is not None:
        with torch.no_grad():
            model.embed.weight[poison] = float("nan")
    return model


class Stream:
    def __init__(self, batch_size, length, padding):
        self.batch_size, self.length, self.padding = batch_size, length, padding
        self.pins = {"length": length}

    def __iter__(self):
        rows = [json.loads(line) for line in pathlib.Path("rows.jsonl").read_text().splitlines()]
        for at in range(0, len(rows), self.batch_size):
            part = rows[at : at + self.batch_size]
            ids = torch.zeros(len(part), self.length, dtype=torch.int64)
            mask = torch.zeros(len(part), self.length, dtype=torch.int64)
            for number, row in enumerate(part):
                size = len(row["tokens"])
                where = slice(0, size) if self.padding == "right" else slice(self.length - size, self.length)
                ids[number, where] = torch.tensor(row["tokens"])
                mask[number, where] = 1
            labels = torch.where(mask == 1, ids, -100)
            batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
            if "id" in part[0]:
                batch["id"] = torch.tensor([row["id"] for row in part])
            yield batch


def batches(batch_size=2, length=6, padding="right"):
    return Stream(batch_size, length, padding)
"""


def write_rows(folder: Path, count: int, *, ragged: bool = False, ids: bool = False, first: int = 0) -> None:
    """``rows.jsonl``: row r holds tokens that are a function of r alone."""
    lines = []
    for row in range(first, first + count):
        size = 2 + row % 5 if ragged else 6
        tokens = [(7 * row + 3 * at) % 31 + 1 for at in range(size)]
        lines.append(json.dumps({"tokens": tokens} | ({"id": 1000 + row} if ids else {})))
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")


def write_recipe(
    folder: Path, module: str, *, name: str = "cache", teacher: str = "", data: str = "", capture: str = "",
    boundaries: tuple[str, ...] = ("layers.0:in", "layers.2:in", "norm:in"), storage: str = "batches_per_shard = 2",
    revision: str = "rev1", data_revision: str = "rev1", teacher_args: str = "", data_args: str = "",
    context: tuple[str, ...] = ("input_ids", "labels"),
) -> Path:  # fmt: skip
    """A recipe over the project in ``folder``."""
    points = "" if not boundaries else f"boundaries = {json.dumps(list(boundaries))}"
    text = f"""
[teacher]
factory = "{module}:teacher"
args = {{ {teacher_args} }}
id = "tiny/teacher"
revision = "{revision}"
{teacher}

[data]
factory = "{module}:batches"
args = {{ {data_args} }}
id = "tiny/data"
revision = "{data_revision}"
{data}

[capture]
{points}
context = {json.dumps(list(context))}
{capture}

[storage]
{storage}
"""
    path = folder / f"{name}.toml"
    path.write_text(text)
    return path


def make_project(folder: Path, *, rows: int = 12, code: str = CODE, more: str = "", **recipe) -> tuple[Path, str]:
    """A project with a module name of its own; its recipe's path and the module's name."""
    folder.mkdir(parents=True, exist_ok=True)
    module = f"tiny_project_{os.getpid()}_{next(_numbers)}"
    (folder / f"{module}.py").write_text(code + textwrap.dedent(more))
    write_rows(folder, rows)
    return write_recipe(folder, module, **recipe), module
