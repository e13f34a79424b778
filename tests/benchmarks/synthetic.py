"""A teacher that costs what it is told to, over rows made as they are asked for: no model, and no data on disk.

Shapes: B rows of a batch, T positions, C channels, H the width inside a layer.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

import zgstore

WIDTH = 1024
VOCABULARY = 256

RECIPE = """
[teacher]
factory  = "tests.benchmarks.synthetic:teacher"
args     = {{ width = {width}, hidden = {hidden}, layers = {layers} }}
id       = "synthetic/teacher"
revision = "1"

[data]
factory  = "tests.benchmarks.synthetic:batches"
args     = {{ count = {batches}, rows = {rows}, length = {length} }}
id       = "synthetic/rows"
revision = "1"

[capture]
boundaries = [{boundaries}]
context    = ["input_ids"]

[storage]
dtype = "bfloat16"
batches_per_shard = {cut}
"""


class Layer(nn.Module):
    """x += f(x) in place, as residual streams do, by two products of B × T × C × H multiplications each."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.down = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, T, C]`` to the same memory."""
        x.flatten(0, 1).addmm_(torch.tanh(self.down(x)).flatten(0, 1), self.up.weight.T)
        return x


class Teacher(nn.Module):
    """An embedding, layers, a norm."""

    def __init__(self, width: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Layer(width, hidden) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, input_ids: Tensor) -> Tensor:
        """``[B, T]`` to ``[B, T, C]``."""
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


@functools.lru_cache(maxsize=1)
def teacher(width: int, hidden: int, layers: int) -> Teacher:
    """The same module for the same arguments: making it is no part of a measurement."""
    torch.manual_seed(0)
    return Teacher(width, hidden, layers).eval()


class Batches:
    """``count`` batches of ids ``[B, T]``, each a function of its number."""

    def __init__(self, count: int, rows: int, length: int) -> None:
        self.count, self.rows, self.length = count, rows, length

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for number in range(self.count):
            made = torch.Generator().manual_seed(number)
            yield {"input_ids": torch.randint(VOCABULARY, (self.rows, self.length), generator=made)}


def batches(count: int, rows: int, length: int) -> Batches:
    """A recipe's data factory."""
    return Batches(count, rows, length)


def points(layers: int) -> tuple[str, ...]:
    """The boundaries around all layers, in depth order: one more than there are layers."""
    return (*(f"layers.{at}:in" for at in range(layers)), "norm:in")


def recipe(
    folder: Path, *, count: int, rows: int = 4, length: int = 1024, width: int = WIDTH, hidden: int = 1,
    layers: int = 4, boundaries: tuple[str, ...] | None = None, cut: int = 8,
) -> zgstore.Recipe:  # fmt: skip
    """A recipe over ``count`` batches: 8 MiB of bf16 a boundary and batch, blobs of 64 MiB, unless said otherwise.

    Args:
        folder: Where its file goes.
        count: Batches.
        rows: B.
        length: T.
        width: C.
        hidden: H: what the teacher costs.
        layers: Of the teacher.
        boundaries: Hook points; None: all around its layers.
        cut: Batches a shard.
    """
    path = folder / "cache.toml"
    named = ", ".join(f'"{point}"' for point in boundaries or points(layers))
    text = RECIPE.format(
        width=width, hidden=hidden, layers=layers, batches=count, rows=rows, length=length, cut=cut, boundaries=named
    )
    path.write_text(text)
    return zgstore.load_recipe(path)


def alone(made: zgstore.Recipe) -> float:
    """Seconds of the teacher over the same batches, nothing stored."""
    model = made.teacher.load()
    began = time.perf_counter()
    with torch.inference_mode():
        for batch in made.data.batches():
            model(batch["input_ids"])
    return time.perf_counter() - began


def hidden_for(seconds: float, *, rows: int, length: int, layers: int, width: int = WIDTH) -> int:
    """The H at which one batch takes about so many seconds; 1 where even that takes longer.

    The cost is a line in H, which two widths show.
    """
    ids = next(iter(Batches(1, rows, length)))["input_ids"]

    def cost(hidden: int) -> float:
        model, times = teacher(width, hidden, layers), []
        with torch.inference_mode():
            for _ in range(4):
                began = time.perf_counter()
                model(ids)
                times.append(time.perf_counter() - began)
        return statistics.median(times[1:])

    narrow, wide = 16, width
    low, high = cost(narrow), cost(wide)
    return max(1, round(narrow + (seconds - low) * (wide - narrow) / max(high - low, 1e-9)))
