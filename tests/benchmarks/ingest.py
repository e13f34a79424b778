"""Durable ingest of tensors that lie ready in memory, and verification, against the common way and the raw machine."""

from __future__ import annotations

import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from tests.benchmarks import common_way
from tests.benchmarks.measuring import Entry, compare, rounds, settle
from zgstore.format.blobheader import layout_of_column
from zgstore.format.digest import Hasher, digest_of
from zgstore.format.manifest import Column, Pins, Snapshot
from zgstore.format.pages import Blob, LeafPage, RootPage, Shard
from zgstore.format.tensorfile import as_bytes
from zgstore.storage.store import Store
from zgstore.upkeep.verifier import verify

COLUMNS = 5
LENGTH, WIDTH = 512, 1024  # 1 MiB of bf16 a row
STEP = 4  # rows a batch: 4 MiB a boundary, 20 MiB a record


def tensors(gib: float, *, blob_mib: int = 64) -> list[list[Tensor]]:
    """Shards of COLUMNS boundaries ``[blob_mib, LENGTH, WIDTH]``, about ``gib`` in all, of random numbers."""
    shards = max(1, round(gib * 1024 / (COLUMNS * blob_mib)))
    made = torch.Generator().manual_seed(0)
    return [
        [torch.randn(blob_mib, LENGTH, WIDTH, generator=made).to(torch.bfloat16) for _ in range(COLUMNS)]
        for _ in range(shards)
    ]


def into_store(folder: Path, shards: list[list[Tensor]]) -> Store:
    """Every column of every shard through drafts on two threads, durable, then pages, snapshot and ref."""
    store = Store.init(folder / "store")
    rows_each, *shape = shards[0][0].shape
    columns = tuple(Column(f"h.{at}", "boundary", "BF16", "raw", tuple(shape), at) for at in range(COLUMNS))
    header = layout_of_column(columns[0], rows=rows_each, tokens=0).encode()
    with store.writing("bench") as session, ThreadPoolExecutor(2) as pool:

        def keep(tensor: Tensor) -> Blob:
            draft = session.draft()
            draft.write(header)
            draft.write(as_bytes(tensor))
            return session.keep(draft)

        rows = []
        for tensors_ in shards:
            blobs = tuple(pool.map(keep, tensors_))
            session.sync()
            rows.append(Shard(rows_each, digest_of("batch"), blobs))
        leaf = LeafPage.of(rows, columns=COLUMNS)
        root = RootPage.of([(session.put_meta("page", leaf.encode()), leaf)], columns=COLUMNS)
        pins = Pins({"id": "bench", "revision": "1"}, {"id": "bench", "revision": "1", "pins": {}}, {})
        page = session.put_meta("page", root.encode())
        snapshot = Snapshot(pins, columns, (), 1, rows_each * len(rows), None, page)
        session.publish(snapshot, ref="main")
    return store


def raw_write(folder: Path, shards: list[list[Tensor]]) -> None:
    """The same bytes by one thread: write and fdatasync, no digest."""
    for at, columns in enumerate(shards):
        for number, tensor in enumerate(columns):
            handle = os.open(folder / f"{at}-{number}", os.O_WRONLY | os.O_CREAT, 0o600)
            view = as_bytes(tensor)
            while view:
                view = view[os.write(handle, view) :]
            os.fdatasync(handle)
            os.close(handle)


def in_common_way(folder: Path, shards: list[list[Tensor]]) -> None:
    """A record a batch of STEP rows, as is usual."""
    common_way.write(
        folder,
        (
            ([column[at : at + STEP].clone() for column in columns], {"mask": torch.ones(STEP, LENGTH)})
            for columns in shards
            for at in range(0, len(columns[0]), STEP)
        ),
    )


def hash_all(shards: list[list[Tensor]]) -> None:
    """BLAKE3 of the same bytes in memory on both cores: the ceiling of a warm verification."""
    with ThreadPoolExecutor(2) as pool:

        def one(tensor: Tensor) -> None:
            hasher, view = Hasher(), as_bytes(tensor)
            for at in range(0, len(view), 1 << 20):
                hasher.update(view[at : at + (1 << 20)])
            hasher.digest()

        list(pool.map(one, [tensor for columns in shards for tensor in columns]))


def drop_cache(folder: Path) -> None:
    """Let a folder's files leave memory."""
    settle()
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            handle = os.open(path, os.O_RDONLY)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def read_disk(folder: Path) -> float:
    """Seconds of reading every blob cold, on two threads, and doing nothing with it."""
    drop_cache(folder)
    files = sorted(folder.rglob("*.safetensors"))
    began = time.perf_counter()
    with ThreadPoolExecutor(2) as pool:

        def one(path: Path) -> None:
            handle = os.open(path, os.O_RDONLY)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            buffer = bytearray(1 << 20)
            offset = 0
            while got := os.preadv(handle, [buffer], offset):
                offset += got
            os.close(handle)

        list(pool.map(one, files))
    return time.perf_counter() - began


def run(scratch: Path, *, shards: list[list[Tensor]], n: int) -> list[Entry]:
    """Ingest and verification of these boundaries."""

    def fresh(work, /) -> float:
        folder = scratch / "ingest"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        settle()
        began = time.perf_counter()
        work(folder, shards)
        return time.perf_counter() - began

    times = rounds(
        {
            "store": lambda: fresh(into_store),
            "raw": lambda: fresh(raw_write),
            "common": lambda: fresh(in_common_way),
        },
        n=n,
    )
    entries = [
        compare(
            "durable ingest, against pickle, read back, SHA-256", times, ours="store", other="common", at_least=2.5
        ),
        compare("durable ingest, against raw write + fdatasync", times, ours="store", other="raw", at_least=0.8),
    ]
    shutil.rmtree(scratch / "ingest", ignore_errors=True)
    folder = scratch / "verify"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    store = into_store(folder, shards)

    def verified() -> float:
        began = time.perf_counter()
        report = verify(store).report
        assert not report.problems, report.problems
        return time.perf_counter() - began

    def cold() -> float:
        drop_cache(folder)
        return verified()

    verified()
    warm = rounds({"verify": verified, "blake3": lambda: hash_all(shards)}, n=n)
    entries.append(
        compare("full verify, warm, against BLAKE3 on all cores", warm, ours="verify", other="blake3", at_least=0.75)
    )
    colds = rounds({"verify": cold, "disk": lambda: read_disk(folder)}, n=n)
    entries.append(
        compare("full verify, cold, against the disk alone", colds, ours="verify", other="disk", at_least=0.9)
    )
    shutil.rmtree(folder, ignore_errors=True)
    return entries
