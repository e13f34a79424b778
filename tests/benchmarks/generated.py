"""Stores of many small objects, written without a build: what remains of each command is what its objects cost.

A blob is one row of 8 bytes, and its header: 4104 bytes. Beside each lies its action, as a build leaves it. Nothing is
synced; names, pages, snapshots and refs go through the store's own calls.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator
from pathlib import Path

from tests.benchmarks import synthetic
from zgstore.building.builder import build
from zgstore.building.preparation import Options, prepare
from zgstore.building.recall import Found, remember
from zgstore.building.recipe import Recipe
from zgstore.format.action import Action
from zgstore.format.blobheader import layout_of_column
from zgstore.format.digest import Digest, digest_of
from zgstore.format.manifest import Column, Pins, Snapshot
from zgstore.format.pages import SHARDS_PER_LEAF, Blob, LeafPage, RootPage, Shard
from zgstore.storage.memos import platform_tag
from zgstore.storage.names import FAMILIES, PREFIXES
from zgstore.storage.session import Session
from zgstore.storage.store import Store

COLUMNS = tuple(Column(f"h.{at}", "boundary", "F64", "raw", (1,), at) for at in range(10))
PLATFORM = {"torch": "none"}
_HEADER = layout_of_column(COLUMNS[0], rows=1, tokens=0).encode()
_TAG = platform_tag(PLATFORM)


class Folders:
    """The folders of one kind, open, so that a file takes three system calls."""

    def __init__(self, top: Path) -> None:
        self._handles = []
        for prefix in PREFIXES:
            (top / prefix).mkdir(exist_ok=True)
            self._handles.append(os.open(top / prefix, os.O_RDONLY | os.O_DIRECTORY))

    def write(self, prefix: int, name: str, body: bytes) -> None:
        """One file; one that is there stays."""
        with contextlib.suppress(FileExistsError):
            handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o444, dir_fd=self._handles[prefix])
            os.write(handle, body)
            os.close(handle)

    def close(self) -> None:
        for handle in self._handles:
            os.close(handle)


@contextlib.contextmanager
def folders(top: Path) -> Iterator[Folders]:
    """``Folders``, closed in the end."""
    opened = Folders(top)
    try:
        yield opened
    finally:
        opened.close()


def shard_of(number: int) -> tuple[Shard, list[tuple[Blob, bytes]]]:
    """A shard by its number, and its blobs with their bytes."""
    blobs = []
    for at in range(len(COLUMNS)):
        body = _HEADER + struct.pack("<Q", number * len(COLUMNS) + at)
        blobs.append((Blob(digest_of(None, body), len(body)), body))
    inputs = digest_of("batch", number.to_bytes(8, "little"))
    return Shard(1, inputs, tuple(blob for blob, _ in blobs)), blobs


def write_shards(store: Store, numbers: range, *, actions: bool = True) -> list[Shard]:
    """The shards' blobs, and their actions, where they are not there."""
    shards = []
    with folders(store.path / "objects") as objects, folders(store.path / "actions") as memos:
        for number in numbers:
            shard, blobs = shard_of(number)
            shards.append(shard)
            for column, (blob, body) in zip(COLUMNS, blobs, strict=True):
                objects.write(blob.digest.raw[0], blob.digest.hex + FAMILIES["objects"], body)
                if actions:
                    action = _action(column, blob)
                    memos.write(action.key.raw[0], f"{action.key.hex}.{_TAG}.msgpack", action.encode())
    return shards


def _action(column: Column, blob: Blob) -> Action:
    statistics = {"rms": 1.0, "min": -1.0, "max": 1.0}
    return Action(
        digest_of("action", blob.digest.raw), blob, 1, column.dtype, column.shape, PLATFORM, statistics=statistics
    )


def publish(store: Store, ref: str, shards: list[Shard]) -> Digest:
    """A snapshot of these shards, under a ref."""
    with store.writing("bench") as session:
        leaves = [_put(session, shards[at : at + SHARDS_PER_LEAF]) for at in range(0, len(shards), SHARDS_PER_LEAF)]
        root = session.put_meta("page", RootPage.of(leaves, columns=len(COLUMNS)).encode())
        pins = Pins({"id": "bench", "revision": "1"}, {"id": "bench", "revision": "1", "pins": {}}, {})
        return session.publish(Snapshot(pins, COLUMNS, (), 1, len(shards), None, root), ref=ref)


def _put(session: Session, shards: list[Shard]) -> tuple[Digest, LeafPage]:
    leaf = LeafPage.of(shards, columns=len(COLUMNS))
    return session.put_meta("page", leaf.encode()), leaf


def generate(folder: Path, objects: int) -> Store:
    """A store of so many blobs: ``main`` has all, ``grown`` one shard more, ``half`` the first half."""
    store = Store.init(folder)
    count = max(2, objects // len(COLUMNS))
    shards = write_shards(store, range(count + 1))
    publish(store, "half", shards[: count // 2])
    publish(store, "main", shards[:count])
    publish(store, "grown", shards)
    return store


def generate_built(folder: Path, cells: int) -> tuple[Store, Recipe]:
    """A recipe's store in which everything is found: about so many columns × shards, as if its builds had run.

    One shard is built, so that the teacher is known. The rest has blobs of the right form, and is remembered.
    """
    folder.mkdir(parents=True)
    layers = len(COLUMNS) - 2  # and one boundary more, and the ids
    recipe = synthetic.recipe(
        folder, count=max(1, cells // len(COLUMNS)), rows=1, length=2, width=4, layers=layers, cut=1
    )
    store = Store.init(folder / "store")
    build(store, recipe, ref=None, limit=1)
    plan = prepare(store, recipe, Options(), session=None).plan
    found = [list(known) for known in plan.found]
    with folders(store.path / "objects") as objects:
        for place, column in enumerate(plan.known_columns()):
            assert column is not None
            for shard in plan.shards:
                if found[place][shard.index] is None:
                    header = layout_of_column(column, rows=shard.rows, tokens=0)
                    data = plan.key(place, shard.index).raw[: header.tensor("data").size]
                    body = header.encode() + data.ljust(header.tensor("data").size, b"\0")
                    blob = Blob(digest_of(None, body), len(body))
                    objects.write(blob.digest.raw[0], blob.digest.hex + FAMILIES["objects"], body)
                    platform = plan.platforms()[place]
                    found[place][shard.index] = Found(blob, shard.rows, column.dtype, column.shape, platform, (), {})
    remember(store.memos, plan.stems(), plan.tags(), plan.names(), platforms=plan.platforms(), found=found)
    assert not build(store, recipe, ref="main").teacher_loaded
    return store, recipe
