"""Writes the frozen store: ``python tests/compat/make_store.py`` from the repository's root.

What a store of format 1 may hold is in it: all roles, dense and ragged columns, int8, constants, rows masked and left
out, two snapshots, a head with a reflog and a record, a tag, a hold, an action, a measurement. It was run once; the
archive it left is read by every later version and is never written again. Values are plain arithmetic, so that it can
be written anew to see that a version still gives the same digests.
"""

from __future__ import annotations

import io
import json
import lzma
import sys
import tarfile
import tempfile
from pathlib import Path

import torch

from zgstore.format import tensorfile
from zgstore.format.action import Action
from zgstore.format.digest import Digest, digest_of
from zgstore.format.manifest import Column, Constant, Pins, Record, Snapshot
from zgstore.format.pages import Blob, Dropped, LeafPage, RootPage, Shard, rows_tree
from zgstore.storage.memos import platform_tag
from zgstore.storage.store import Session, Store

HERE = Path(__file__).resolve().parent
ARCHIVE = HERE / "format1.tar.xz"
RECORDED = HERE / "format1.json"
PLATFORM = {"torch": "2.13.0", "device": "cpu", "capability": "AVX2"}

COLUMNS = (
    Column("model.layers.0:in", "boundary", "BF16", "raw", (None, 8), 0),
    Column("model.layers.1:in", "boundary", "F32", "int8", (None, 70), 1),
    Column("pooled", "boundary", "F16", "raw", (5,), 2),
    Column("lm_head:out", "output", "F32", "raw", (3,)),
    Column("input_ids", "context", "I64", "raw", (None,)),
    Column("flags", "context", "BOOL", "raw", (2,)),
    Column("id", "context", "I64", "raw", ()),
    Column("start", "context", "I64", "raw", ()),
)
LENGTHS = ((3, 1), (2, 4), (1, 1))
TOO_SHORT = "too short"


def ramp(count: int, *, seed: int, width: int | None = None) -> torch.Tensor:
    """Numbers between −1 and 1 that need no random generator: multiples of 1/128, exact in every dtype used."""
    size = count * (width or 1)
    numbers = ((torch.arange(size) * 37 + seed * 101) % 257 - 128).to(torch.float32) / 128
    return numbers if width is None else numbers.view(count, width)


def tensors(shard: int, *, teacher: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The values of one shard by column, and the rows' lengths."""
    lengths = torch.tensor(LENGTHS[shard])
    tokens, rows = int(lengths.sum()), len(lengths)
    seed = 10 * shard + teacher
    pooled = ramp(rows, seed=seed + 2, width=5).to(torch.float16)
    if shard == 1:
        pooled[1, 0] = torch.nan
    return {
        "model.layers.0:in": ramp(tokens, seed=seed, width=8).to(torch.bfloat16),
        "model.layers.1:in": ramp(tokens, seed=seed + 1, width=70),
        "pooled": pooled,
        "lm_head:out": ramp(rows, seed=seed + 3, width=3),
        "input_ids": torch.arange(tokens) + 100 * shard,
        "flags": torch.tensor([[True, False], [False, True]]),
        "id": torch.arange(rows) + 2 * shard + 1000,
        "start": torch.tensor([0, 4 - int(lengths[1])]),
    }, lengths


def keep(session: Session, content: bytes) -> Blob:
    draft = session.draft(size_hint=len(content))
    draft.write(content)
    return session.keep(draft)


def snapshot(store: Store, session: Session, *, shards: int, teacher: int, ref: str) -> Digest:
    """One snapshot of the first shards."""
    listed = []
    for at in range(shards):
        values, lengths = tensors(at, teacher=teacher)
        blobs = tuple(
            keep(session, tensorfile.encode(column, values[column.name], lengths if column.ragged else None))
            for column in COLUMNS
        )
        listed.append(Shard(len(lengths), digest_of("batch", f"batch {at}".encode()), blobs))
    names = b"".join(digest_of("row", f"row {row}".encode()).raw for row in range(2 * shards + 1))
    rows, pages = rows_tree(names)
    for page in pages:
        session.put_meta("page", page.encode())
    data = session.put_meta("page", rows.encode())
    dropped = Dropped(
        masked=(3,),
        masked_reasons=("pooled is not finite",),
        left_out=(2 * shards,),
        left_out_reasons=(TOO_SHORT,),
    )
    table = Column("inv_freq", "context", "F32", "raw", ())
    constant = keep(session, tensorfile.encode(table, ramp(4, seed=9)))
    leaf = LeafPage.of(listed, columns=len(COLUMNS))
    leaf_digest = session.put_meta("page", leaf.encode())
    made = Snapshot(
        pins=Pins(
            teacher={
                "id": "org/teacher",
                "revision": "1f" * 20,
                "measured": digest_of("teacher", bytes([teacher])).raw,
            },
            data={"id": "org/data", "revision": "2e" * 20, "pins": {"max_length": 4}, "digest": data.raw},
            capture={"boundaries": [c.name for c in COLUMNS if c.role == "boundary"], "arithmetic": {"dtype": "F32"}},
        ),
        columns=COLUMNS,
        constants=(Constant("inv_freq", "F32", (4,), constant.digest, constant.size),),
        cut=1,
        samples=2 * shards - 1,
        dropped=session.put_meta("page", dropped.encode()),
        root=session.put_meta("page", RootPage.of([(leaf_digest, leaf)], columns=len(COLUMNS)).encode()),
    )
    session.sync()
    digest = digest_of("snapshot", made.encode())
    action = Action(
        key=digest_of("action", f"{ref} {shards}".encode()),
        blob=listed[0].blobs[0],
        rows=2,
        dtype="BF16",
        shape=(None, 8),
        platform=PLATFORM,
        statistics={"rms": 0.5, "min": -1.0, "max": 1.0},
        seconds=0.25,
    )
    store.memos.put_action(action, platform_tag(PLATFORM))
    record = Record(digest, 1.7e9, {"host": "host", "message": f"{shards} shards", "platforms": [PLATFORM]})
    return session.publish(made, record=record, ref=ref)


def write(path: Path) -> dict[str, object]:
    """Write the store; what is recorded of it."""
    store = Store.init(path, policy="world-read")
    with store.writing("make the frozen store") as session:
        first = snapshot(store, session, shards=2, teacher=0, ref="main")
        second = snapshot(store, session, shards=3, teacher=0, ref="main")
        other = snapshot(store, session, shards=2, teacher=1, ref="quantised")
    store.point("v1", "tag", first)
    store.hold("paper", other, "the figures of the paper")
    rows = store.snapshot(second).pins.data["digest"]
    measured = {"kind": "data", "rows": rows, "count": 7}
    store.memos.put_measurement(digest_of("measurement", b"org/data"), measured)
    return {
        "heads": {"main": str(second), "quantised": str(other)},
        "tags": {"v1": str(first)},
        "holds": {"paper": str(other)},
        "objects": sorted(path.name for path in (store.path / "objects").glob("*/*")),
        "meta": sorted(path.name for path in (store.path / "meta").glob("*/*")),
    }


def pack(store: Path) -> bytes:
    """The store as an archive; without the index, which belongs to its machine."""
    body = io.BytesIO()
    with tarfile.open(fileobj=body, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for path in sorted(store.rglob("*")):
            name = path.relative_to(store)
            if name.parts[0] == "index" and len(name.parts) > 1:
                continue
            entry = tar.gettarinfo(path, arcname=f"store/{name.as_posix()}")
            entry.uid = entry.gid = 0
            entry.uname = entry.gname = ""
            entry.mtime = 1_700_000_000
            with path.open("rb") if path.is_file() else io.BytesIO() as content:
                tar.addfile(entry, content if path.is_file() else None)
    return lzma.compress(body.getvalue(), preset=9 | lzma.PRESET_EXTREME)


def main() -> None:
    if ARCHIVE.exists():
        sys.exit(f"{ARCHIVE} is frozen: a store of a later format gets an archive of its own")
    with tempfile.TemporaryDirectory() as folder:
        recorded = write(Path(folder) / "store")
        ARCHIVE.write_bytes(pack(Path(folder) / "store"))
    RECORDED.write_text(json.dumps(recorded, indent=2) + "\n")


if __name__ == "__main__":
    main()
