"""A small store made without torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from zgstore.format.blobheader import lay_out
from zgstore.format.digest import Digest, digest_of
from zgstore.format.manifest import Column, Pins, Record, Snapshot
from zgstore.format.pages import Blob, LeafPage, RootPage, Shard, rows_tree
from zgstore.storage.store import Store

ROWS = 4
COLUMNS = (
    Column("model.layers.0:in", "boundary", "F32", "raw", (3, 8), 0),
    Column("model.layers.1:in", "boundary", "F32", "raw", (3, 8), 1),
)
RECIPE = digest_of("recipe", b"a recipe")


def publish(
    store: Store, ref: str | None, fill: float, *, shards: int = 2, columns: tuple[Column, ...] = COLUMNS, **fields: Any
) -> Digest:
    """A snapshot of constant values, ``fill`` apart from the first shard, and a record of it."""
    header = lay_out({"data": ("F32", (ROWS, 3, 8))})
    with store.writing("test") as session:
        rows = []
        for shard in range(shards):
            blobs = []
            for column in columns:
                values = np.full((ROWS, 3, 8), 10 * (column.depth or 0) + (fill if shard else 0.5), np.float32)
                draft = session.draft(header.file_size)
                draft.write(header.encode() + values.tobytes())
                blobs.append(session.keep(draft))
            rows.append(Shard(ROWS, digest_of("batch", bytes([shard])), tuple(blobs)))
        session.sync()
        leaf = LeafPage.of(rows, columns=len(columns))
        named = session.put_meta("page", leaf.encode())
        root = session.put_meta("page", RootPage.of([(named, leaf)], columns=len(columns)).encode())
        tree, pages = rows_tree(b"".join(digest_of("row", bytes([at])).raw for at in range(ROWS * shards)))
        for page in pages:
            session.put_meta("page", page.encode())
        data = session.put_meta("page", tree.encode())
        snapshot = Snapshot(
            pins=Pins(
                {"id": "org/teacher", "revision": "1" * 40, "measured": digest_of("teacher", b"t").raw},
                {"id": "org/data", "revision": "2" * 40, "pins": {"max_length": 3}, "digest": data.raw},
                {"boundaries": [column.name for column in columns], "arithmetic": {"compute": "float32"}},
            ),
            columns=columns,
            constants=(),
            cut=1,
            samples=ROWS * shards,
            dropped=None,
            root=root,
        )
        digest = digest_of("snapshot", snapshot.encode())
        told = {
            "recipe": RECIPE.raw,
            "user": "ada",
            "host": "lab",
            "statistics": {columns[0].name: {"rms": 1.5, "min": -2.0, "max": 3.0}},
            **fields,
        }
        return session.publish(snapshot, record=Record(digest, store.now(), told), ref=ref)


def flip(store: Store, digest: Digest, family: str = "objects") -> Path:
    """Flip one bit of an object's last byte, keeping size and time."""
    path = store.objects.path(digest, family)
    before = path.stat()
    path.chmod(0o644)
    body = bytearray(path.read_bytes())
    body[-1] ^= 1
    path.write_bytes(body)
    path.chmod(0o444)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    return path


def blob_of(store: Store, rev: str, *, shard: int = 1, column: int = 0) -> Blob:
    """One blob of a snapshot."""
    return list(store.shards(store.snapshot(store.resolve(rev))))[shard].blobs[column]
