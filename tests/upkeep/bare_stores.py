"""Stores of hand-made blobs, bytes only: a dense column, a ragged one, a context column, and a constant."""

import os
import struct
import time

from zgstore.format.action import Action
from zgstore.format.blobheader import lay_out
from zgstore.format.digest import digest_of
from zgstore.format.manifest import Column, Constant, Pins, Record, Snapshot
from zgstore.format.pages import Dropped, LeafPage, RootPage, Shard, rows_tree

ROWS = 3
COLUMNS = (
    Column("h.0:in", "boundary", "F32", "raw", (4,), 0),
    Column("h.1:in", "boundary", "F32", "raw", (None, 4), 1),
    Column("labels", "context", "I64", "raw", (2,)),
)
TAG = "0123456789ab"


def dense(dtype, shape, fill):
    """A whole blob: one tensor whose bytes are all ``fill``."""
    header = lay_out({"data": (dtype, shape)})
    return header.encode() + bytes([fill]) * (header.file_size - header.data_start)


def ragged(offsets, width, fill, *, tokens=None):
    """A whole blob: ``data`` of so many tokens, whose bytes are all ``fill``, and ``offsets``."""
    tokens = offsets[-1] if tokens is None else tokens
    header = lay_out({"data": ("F32", (tokens, width)), "offsets": ("I64", (len(offsets),))})
    packed = struct.pack(f"<{len(offsets)}q", *offsets)
    return header.encode() + packed + bytes([fill]) * (header.file_size - header.data_start - len(packed))


def blobs_of_shard(fill):
    """The three blobs of a shard of ``ROWS`` rows."""
    return [dense("F32", (ROWS, 4), fill), ragged([0, 1, 3, 6], 4, fill), dense("I64", (ROWS, 2), fill)]


def keep(session, content):
    draft = session.draft(len(content))
    draft.write(content)
    return session.keep(draft)


def write_shards(session, fills, blobs=blobs_of_shard):
    """Shards whose bytes are ``fills``, durable."""
    shards = []
    for fill in fills:
        kept = tuple(keep(session, content) for content in blobs(fill))
        shards.append(Shard(ROWS, digest_of("batch", bytes([fill])), kept))
    session.sync()
    return shards


def publish(store, ref, fills, *, constant=9, blobs=blobs_of_shard, **how):
    """A snapshot of one shard for each of ``fills``; returns its digest."""
    with store.writing("build") as session:
        shards = write_shards(session, fills, blobs)
        return publish_shards(session, ref, shards, keep(session, dense("F32", (4,), constant)), **how)


def publish_shards(
    session, ref, shards, fixed, *, leaf_shards=2, record=True, masked=(), columns=COLUMNS, samples=None,
    root_of=RootPage.of, **options,
):  # fmt: skip
    leaves = []
    for at in range(0, len(shards), leaf_shards):
        page = LeafPage.of(shards[at : at + leaf_shards], columns=len(columns))
        leaves.append((session.put_meta("page", page.encode()), page))
    root = session.put_meta("page", root_of(leaves, columns=len(columns)).encode())
    rows, pages = rows_tree(
        b"".join(
            digest_of("row", shard.inputs.raw, bytes([at])).raw for shard in shards for at in range(shard.rows)
        )
    )  # fmt: skip
    for page in pages:
        session.put_meta("page", page.encode())
    data = session.put_meta("page", rows.encode())
    dropped = None
    if masked:
        dropped = session.put_meta("page", Dropped(tuple(masked), ("nan",) * len(masked)).encode())
    snapshot = Snapshot(
        pins=Pins({"id": "t"}, {"id": "d", "digest": data.raw}, {}),
        columns=columns,
        constants=(Constant("mask", "F32", (4,), fixed.digest, fixed.size),),
        cut=1,
        samples=sum(shard.rows for shard in shards) - len(masked) if samples is None else samples,
        dropped=dropped,
        root=root,
    )
    digest = digest_of("snapshot", snapshot.encode())
    told = Record(digest, time.time(), {"message": "made by hand"}) if record else None
    return session.publish(snapshot, record=told, ref=ref, **options)


def put_action(store, blob, key, *, age_seconds=0.0):
    """An action that came out as ``blob``; returns its file."""
    action = Action(digest_of("action", key), blob, ROWS, "F32", (4,), {"torch": "2"})
    store.memos.put_action(action, TAG)
    path = store.path / "actions" / action.key.hex[:2] / f"{action.key.hex}.{TAG}.msgpack"
    moment = time.time() - age_seconds
    os.utime(path, (moment, moment))
    return path


def objects_in(store):
    """Names of all objects in their places."""
    return {raw.hex() for family in ("objects", "meta") for raw in store.objects.names(family)}


def files_in(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
