"""Snapshots made by hand: values in, no teacher."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from zgstore.format import tensorfile
from zgstore.format.digest import Digest, digest_of
from zgstore.format.manifest import Column, Constant, Pins, Record, Snapshot
from zgstore.format.pages import Blob, Dropped, LeafPage, RootPage, Shard, rows_tree
from zgstore.storage.store import Store

WIDTH = 8


def boundary(name: str, depth: int, *, codec: str = "raw", dtype: str = "BF16", shape=(WIDTH,)) -> Column:
    return Column(name, "boundary", dtype, codec, tuple(shape), depth)


def values(seed: int, rows: int, *, width: int = WIDTH, dtype=torch.bfloat16) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def pins(rows: bytes | None = None, *, teacher: str = "a", **capture) -> Pins:
    data: dict = {"id": "org/data", "revision": "r1", "pins": {"max_length": 8}}
    if rows is not None:
        data["digest"] = rows
    measured = digest_of("teacher", teacher.encode()).raw
    return Pins(
        {"id": "org/teacher", "revision": "r1", "measured": measured},
        data,
        {"boundaries": ["h.0", "h.1"], "arithmetic": {"dtype": "BF16"}, **capture},
    )


def row_names(count: int, *, of: str = "row") -> bytes:
    return b"".join(digest_of("row", f"{of} {number}".encode()).raw for number in range(count))


def publish(
    store: Store,
    columns: Mapping[Column, Sequence[torch.Tensor | tuple[torch.Tensor, torch.Tensor]]],
    *,
    ref: str | None = None,
    teacher: str = "a",
    inputs: Sequence[str] | None = None,
    rows: bytes | None = None,
    dropped: Dropped | None = None,
    platforms: Sequence[Mapping[str, str]] = (),
    per_leaf: int = 1024,
    constants: Mapping[str, torch.Tensor] | None = None,
    **capture,
) -> Digest:
    """Store tensors, shard by shard; a ragged one is (tensor, lengths). Rows get digests by their number."""
    listed = list(columns)
    with store.writing("test") as session:

        def keep(column: Column, part) -> Blob:
            tensor, lengths = part if isinstance(part, tuple) else (part, None)
            draft = session.draft()
            draft.write(tensorfile.encode(column, tensor, lengths))
            return session.keep(draft)

        count = len(columns[listed[0]])
        shards = []
        for at in range(count):
            part = columns[listed[0]][at]
            size = len(part[1]) if isinstance(part, tuple) else len(part)
            name = inputs[at] if inputs else f"shard {at}"
            blobs = tuple(keep(column, columns[column][at]) for column in listed)
            shards.append(Shard(size, digest_of("batch", name.encode()), blobs))
        total = sum(shard.rows for shard in shards)
        root_of_rows, pages = rows_tree(rows if rows is not None else row_names(total))
        for page in pages:
            session.put_meta("page", page.encode())
        data_digest = session.put_meta("page", root_of_rows.encode())
        leaves = [LeafPage.of(shards[at : at + per_leaf], columns=len(listed)) for at in range(0, count, per_leaf)]
        named = [(session.put_meta("page", leaf.encode()), leaf) for leaf in leaves]
        root = session.put_meta("page", RootPage.of(named, columns=len(listed)).encode())
        dropped_digest = session.put_meta("page", dropped.encode()) if dropped else None
        kept = []
        for name, tensor in (constants or {}).items():
            draft = session.draft()
            column = Column(name, "context", tensorfile.NAME_OF[tensor.dtype], "raw", tuple(tensor.shape[1:]))
            draft.write(tensorfile.encode(column, tensor))
            blob = session.keep(draft)
            kept.append(Constant(name, column.dtype, tuple(tensor.shape), blob.digest, blob.size))
        snapshot = Snapshot(
            pins=pins(data_digest.raw, teacher=teacher, **capture),
            columns=tuple(listed),
            constants=tuple(kept),
            cut=1,
            samples=total - (len(dropped.masked) if dropped else 0),
            dropped=dropped_digest,
            root=root,
        )
        session.sync()
        digest = digest_of("snapshot", snapshot.encode())
        record = Record(digest, 1.0, {"platforms": [dict(each) for each in platforms], "host": "here"})
        return session.publish(snapshot, record=record, ref=ref)
