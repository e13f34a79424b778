"""Stores made by hand, so that what a reader gives can be held against what was put in."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from zgstore.format.digest import Digest, digest_of
from zgstore.format.manifest import Column, Constant, Pins, Snapshot
from zgstore.format.pages import Blob, Dropped, LeafPage, RootPage, Shard, rows_tree
from zgstore.format.tensorfile import NAME_OF, encode
from zgstore.storage.store import Store


@dataclass
class Stored:
    """A store, its snapshot, and the rows of each column as tensors."""

    store: Store
    digest: Digest
    rows: dict[str, list[Tensor]]
    blobs: dict[str, list[Blob]] = field(default_factory=dict)
    data: str = ""

    def path(self, column: str, shard: int) -> Path:
        return self.store.objects.path(self.blobs[column][shard].digest, "objects")

    def __len__(self) -> int:
        return len(next(iter(self.rows.values())))


def column(name, rows, *, role=None, codec="raw", ragged=False, depth=None):
    """The column that these rows make."""
    shape = (None, *rows[0].shape[1:]) if ragged else tuple(rows[0].shape)
    role = role or ("boundary" if name.startswith("h.") else "context")
    return Column(name, role, NAME_OF[rows[0].dtype], codec, shape, depth)


def blob_of(col: Column, rows: list[Tensor]) -> bytes:
    if not col.ragged:
        return encode(col, torch.stack(rows))
    return encode(col, torch.cat(rows), torch.tensor([len(row) for row in rows]))


def make_store(
    path: Path,
    rows: dict[str, list[Tensor]],
    *,
    per_shard: int = 4,
    ragged: tuple[str, ...] = (),
    int8: tuple[str, ...] = (),
    masked: tuple[int, ...] = (),
    constants: dict[str, Tensor] | None = None,
    ref: str = "main",
) -> Stored:
    """A store with one snapshot of these columns, each a list of one tensor a row."""
    store = Store.init(path)
    columns = tuple(
        column(
            name, each, ragged=name in ragged, codec="int8" if name in int8 else "raw",
            depth=int(name[2:]) if name.startswith("h.") else None,
        )
        for name, each in rows.items()
    )  # fmt: skip
    count = len(next(iter(rows.values())))
    with store.writing("test") as session:

        def keep(body: bytes) -> Blob:
            draft = session.draft()
            draft.write(body)
            return session.keep(draft)

        shards = []
        for at in range(0, count, per_shard):
            part = [blob_of(col, rows[col.name][at : at + per_shard]) for col in columns]
            size = min(per_shard, count - at)
            shards.append(Shard(size, digest_of("batch", str(at).encode()), tuple(map(keep, part))))
        made = []
        for name, tensor in (constants or {}).items():
            blob = keep(encode(Column(name, "context", NAME_OF[tensor.dtype], "raw", tuple(tensor.shape[1:])), tensor))
            made.append(Constant(name, NAME_OF[tensor.dtype], tuple(tensor.shape), blob.digest, blob.size))
        leaf = LeafPage.of(shards, columns=len(columns))
        root = RootPage.of([(session.put_meta("page", leaf.encode()), leaf)], columns=len(columns))
        data, pages = rows_tree(b"".join(digest_of("row", str(row).encode()).raw for row in range(count)))
        for page in pages:
            session.put_meta("page", page.encode())
        data_digest = session.put_meta("page", data.encode())
        dropped = None
        if masked:
            dropped = session.put_meta("page", Dropped(masked, ("non-finite",) * len(masked)).encode())
        snapshot = Snapshot(
            pins=Pins({"id": "t", "revision": "1"}, {"id": "d", "revision": "1", "digest": data_digest.raw}, {}),
            columns=columns, constants=tuple(made), cut=1, samples=count - len(masked), dropped=dropped,
            root=session.put_meta("page", root.encode()),
        )  # fmt: skip
        digest = session.publish(snapshot, ref=ref)
    visible = {name: [row for at, row in enumerate(each) if at not in masked] for name, each in rows.items()}
    blobs = {col.name: [shard.blobs[at] for shard in shards] for at, col in enumerate(columns)}
    return Stored(store, digest, visible, blobs, str(data_digest))


def dense(count: int = 18, length: int = 6, width: int = 8, *, seed: int = 0) -> dict[str, list[Tensor]]:
    """Two boundaries in bf16, token ids, and a mask and positions of left-padded rows."""
    random = torch.Generator().manual_seed(seed)
    rows: dict[str, list[Tensor]] = {"h.0": [], "h.1": [], "input_ids": [], "attention_mask": [], "position_ids": []}
    for row in range(count):
        padding = row % 3
        rows["h.0"].append(torch.randn(length, width, generator=random).bfloat16())
        rows["h.1"].append(torch.randn(length, width, generator=random).bfloat16())
        rows["input_ids"].append(torch.randint(0, 100, (length,), generator=random))
        rows["attention_mask"].append((torch.arange(length) >= padding).long())
        rows["position_ids"].append((torch.arange(length) - padding).clamp(min=0))
    return rows


def ragged(count: int = 18, width: int = 8, *, seed: int = 0, start: bool = True) -> dict[str, list[Tensor]]:
    """The same without padding: rows of 1 to 7 tokens, and where each began."""
    random = torch.Generator().manual_seed(seed)
    rows: dict[str, list[Tensor]] = {"h.0": [], "h.1": [], "input_ids": []}
    for row in range(count):
        length = 1 + row * 5 % 7
        rows["h.0"].append(torch.randn(length, width, generator=random).bfloat16())
        rows["h.1"].append(torch.randn(length, width, generator=random))
        rows["input_ids"].append(torch.randint(0, 100, (length,), generator=random))
    if start:
        rows["start"] = [torch.tensor(7 - len(row)) for row in rows["h.0"]]
    return rows


RAGGED = ("h.0", "h.1", "input_ids", "position_ids")
