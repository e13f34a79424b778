"""The bytes of format 1, frozen: a change here is a change of the format.

The files beside this one were written once. If a test fails, the code is wrong, not the file.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from zgstore.format.action import Action
from zgstore.format.digest import Digest, digest_of
from zgstore.format.manifest import Column, Constant, Pins, Snapshot
from zgstore.format.pages import Blob, Dropped, LeafPage, RootPage, Shard, rows_tree
from zgstore.format.tensorfile import decode, encode

HERE = Path(__file__).parent
RAGGED = Column("model.layers.1:in", "boundary", "BF16", "raw", (None, 3), 0)
CODED = Column("model.norm:in", "boundary", "F32", "int8", (66,), 1)


def blob_raw() -> bytes:
    return encode(RAGGED, (torch.arange(12, dtype=torch.float32) / 4 - 1).view(4, 3).bfloat16(), torch.tensor([1, 3]))


def blob_int8() -> bytes:
    return encode(CODED, torch.arange(132, dtype=torch.float32).view(2, 66) * 0.75 - 20)


def leaf() -> LeafPage:
    blobs = (
        Blob(digest_of(None, blob_raw()), len(blob_raw())),
        Blob(digest_of(None, blob_int8()), len(blob_int8())),
    )
    inputs = digest_of("batch", b"inputs")
    return LeafPage.of([Shard(2, inputs, blobs), Shard(1, inputs, blobs)], columns=2)


def root() -> RootPage:
    return RootPage.of([(digest_of("page", leaf().encode()), leaf())], columns=2)


def snapshot() -> Snapshot:
    rows, _ = rows_tree(b"".join(digest_of("row", bytes([row])).raw for row in range(3)))
    return Snapshot(
        pins=Pins(
            {"id": "org/model", "revision": "0" * 40, "measured": digest_of("teacher", b"t").raw},
            {
                "id": "org/data",
                "revision": "1" * 40,
                "pins": {"length": 256},
                "digest": digest_of("page", rows.encode()).raw,
            },
            {"points": ["model.layers.1:in", "model.norm:in"], "arithmetic": {"compute": ["bfloat16"], "tf32": False}},
        ),
        columns=(RAGGED, CODED),
        constants=(Constant("scale", "F32", (), digest_of(None, b"c"), 4100),),
        cut=16,
        samples=2,
        dropped=digest_of("page", Dropped((2,), ("NaN in model.norm:in",)).encode()),
        root=digest_of("page", root().encode()),
    )


def action() -> Action:
    return Action(
        key=Digest(bytes(range(32))),
        blob=Blob(digest_of(None, blob_raw()), len(blob_raw())),
        rows=2,
        dtype="BF16",
        shape=(None, 3),
        platform={"torch": "2.5.0", "device": "cpu", "cpu": "x86_64 AVX2"},
        nonfinite=(1,),
        statistics={"rms": 0.5, "min": -1.0, "max": 1.75},
        seconds=0.25,
    )


GOLDEN = {
    "blob.safetensors": (None, blob_raw),
    "blob-int8.safetensors": (None, blob_int8),
    "leaf.msgpack": ("page", lambda: leaf().encode()),
    "root.msgpack": ("page", lambda: root().encode()),
    "snapshot.msgpack": ("snapshot", lambda: snapshot().encode()),
    "action.msgpack": ("action", lambda: action().encode()),
}
NAMES = {
    "blob.safetensors": "84fe1d4accb74ecdf7532aeb661847317355d8276c712100a7c958fe1142d730",
    "blob-int8.safetensors": "28788ac4a2dae404d0de933ca98d2bf3ccc345baeefffdd5b36931c2261cfd12",
    "leaf.msgpack": "2d4f6ccb52c1cd31c602f8e1f4de33c3f53e49127983ab5f524dd53a47287fdd",
    "root.msgpack": "96cdc89df87cf73dea1fe258cf2c571580ef1832fc067fc7616894d7785d93b1",
    "snapshot.msgpack": "aad360cbc8ad328a3f2530b7e7fe8a79dd92339dd8fc46e6ac68c48337151a34",
    "action.msgpack": "21a004fbbe8a3d8f887e296be019e74086dba75058da7739c1558ce20de0934e",
}


@pytest.mark.parametrize("name", GOLDEN)
def test_bytes_and_their_digests_are_the_frozen_ones(name):
    kind, make = GOLDEN[name]
    frozen = (HERE / name).read_bytes()
    assert make() == frozen
    assert digest_of(kind, frozen).hex == NAMES[name]


def test_frozen_bytes_are_read_back():
    assert LeafPage.decode((HERE / "leaf.msgpack").read_bytes()) == leaf()
    assert RootPage.decode((HERE / "root.msgpack").read_bytes()) == root()
    assert Snapshot.decode((HERE / "snapshot.msgpack").read_bytes()) == snapshot()
    assert Action.decode((HERE / "action.msgpack").read_bytes()) == action()
    data, offsets = decode((HERE / "blob.safetensors").read_bytes(), RAGGED)
    assert data.float().flatten().tolist() == [at / 4 - 1 for at in range(12)]
    assert offsets.tolist() == [0, 1, 4]
    assert decode((HERE / "blob-int8.safetensors").read_bytes(), CODED).data.shape == (2, 66)
