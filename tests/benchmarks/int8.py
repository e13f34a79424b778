"""The codec int8: what it saves, what it costs, and what it does to the values of a real model's states."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

import zgstore
from tests.benchmarks import build
from tests.benchmarks.measuring import Entry, compare, rounds, told
from zgstore.format.digest import digest_of
from zgstore.format.manifest import Column, Pins, Snapshot
from zgstore.format.pages import LeafPage, RootPage, Shard
from zgstore.reading.layouts import Buffers
from zgstore.storage.store import Store

STEP = 4
POINTS = ("model.layers.0:in", "model.layers.15:in", "model.norm:in")


def real_states(rows: int) -> dict[str, Tensor]:
    """SmolLM2's states at three depths, float32 ``[rows, T, C]``."""
    parts: dict[str, list[Tensor]] = {point: [] for point in POINTS}
    for batch in build.batches(rows):
        captured = zgstore.capture.run(build.teacher(), batch, POINTS)
        for point in POINTS:
            parts[point].append(captured.columns[point].clone())
    return {point: torch.cat(each) for point, each in parts.items()}


def columns_of(states: Tensor) -> dict[str, Column]:
    """The column of each codec for states ``[R, T, C]``."""
    raw = Column("raw", "boundary", "BF16", "raw", tuple(states.shape[1:]), 0)
    return {"int8": replace(raw, name="int8", codec="int8", depth=1), "raw": raw}


def encoded(column: Column, states: Tensor) -> bytes:
    """A whole blob of float32 states, cast to bf16 as a recipe that says so does."""
    return zgstore.encode(column, states.to(torch.bfloat16))


def errors(point: str, states: Tensor) -> Entry:
    """The relative L2 error of int8 of bf16 states, against that of bf16, which every cache has."""
    found = {}
    for name, column in columns_of(states).items():
        back = zgstore.decode(encoded(column, states), column).data.float()
        found[name] = float((back - states).norm() / states.norm())
    return told(f"int8, relative error of {point}, against bf16's", [found["int8"]], [found["raw"]], unit="")


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def stored(folder: Path, states: Tensor, *, shards: int) -> Store:
    """A store with the same states in both columns, as often as there are shards."""
    store = Store.init(folder)
    columns = columns_of(states)
    with store.writing("bench") as session:
        blobs = []
        for column in columns.values():
            body = encoded(column, states)
            draft = session.draft(len(body))
            draft.write(body)
            blobs.append(session.keep(draft))
        session.sync()
        leaf = LeafPage.of([Shard(len(states), digest_of("batch"), tuple(blobs))] * shards, columns=2)
        page = session.put_meta("page", leaf.encode())
        root = session.put_meta("page", RootPage.of([(page, leaf)], columns=2).encode())
        pins = Pins({"id": "bench", "revision": "1"}, {"id": "bench", "revision": "1", "pins": {}}, {})
        session.publish(Snapshot(pins, tuple(columns.values()), (), 1, len(states) * shards, None, root), ref="main")
    return store


def epoch(store: Store, column: str) -> float:
    """Seconds of an epoch of steps from one column, warm, nothing left to verify."""
    with zgstore.read(store, "main", columns=[column], verify="never") as reader:
        out, steps = Buffers(), [list(range(at, at + STEP)) for at in range(0, len(reader), STEP)]
        return timed(lambda: [reader.batch(rows, out=out) for rows in steps])


def run(scratch: Path, *, states: dict[str, Tensor], repeats: int, n: int) -> list[Entry]:
    """All entries.

    Args:
        scratch: Where the store goes.
        states: Float32 ``[R, T, C]`` by name.
        repeats: How often the first of them is repeated where time is measured.
        n: Rounds.
    """
    entries = [errors(point, each) for point, each in states.items()]
    large = next(iter(states.values())).repeat(repeats, 1, 1)
    columns = columns_of(large)
    size = {name: [len(encoded(column, large)) / 2**20] for name, column in columns.items()}
    entries.append(compare("int8, bytes, against bf16", size, ours="int8", other="raw", at_most=0.53, unit="MiB"))
    encoding = rounds(
        {
            "int8": lambda: timed(lambda: encoded(columns["int8"], large)),
            "raw": lambda: timed(lambda: encoded(columns["raw"], large)),
        },
        n=n,
    )
    entries.append(told("int8, encoding float32 states, against a cast to bf16", encoding["int8"], encoding["raw"]))
    store = stored(scratch / "int8", large, shards=4)
    epoch(store, "int8"), epoch(store, "raw")
    reading = rounds({"int8": lambda: epoch(store, "int8"), "raw": lambda: epoch(store, "raw")}, n=n)
    entries.append(told("int8, an epoch's reads, warm, against bf16", reading["int8"], reading["raw"]))
    shutil.rmtree(scratch / "int8")
    return entries
