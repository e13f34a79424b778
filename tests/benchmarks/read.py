"""What a training waits for: opening and verifying its columns, and each step's read, against the common way."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

import zgstore
from tests.benchmarks import common_way
from tests.benchmarks.ingest import COLUMNS, STEP, drop_cache, in_common_way, into_store
from tests.benchmarks.measuring import Entry, compare, rounds, within
from zgstore.reading.layouts import Buffers
from zgstore.storage.files import SETTLE_SECONDS

BLOCK = ("h.0", "h.1")  # what one block of B = COLUMNS − 1 reads


@dataclass(frozen=True, slots=True)
class Case:
    """The same boundaries in both ways.

    Args:
        store: Ours.
        records: The folder of the common way.
        files: Its records, in order.
        rows: Of the snapshot.
        out: What all our epochs read into.
    """

    store: zgstore.Store
    records: Path
    files: list[Path]
    rows: int
    out: Buffers = field(default_factory=Buffers)

    def stamped(self) -> zgstore.Reader:
        """A reader of one block's columns whose blobs all carry a stamp, as after `zgstore verify`."""
        assert zgstore.verify(self.store, new=True).report.ok
        return zgstore.read(self.store, "main", columns=BLOCK)

    def unstamped(self) -> zgstore.Reader:
        """The same where nothing was verified yet."""
        self.store.index.clear()
        return zgstore.read(self.store, "main", columns=BLOCK)


def steps(case: Case, *, shuffled: bool) -> list[list[int]]:
    """The rows of each step of an epoch."""
    rows = list(range(case.rows))
    if shuffled:
        random.Random(0).shuffle(rows)
    return [rows[at : at + STEP] for at in range(0, len(rows), STEP)]


def our_epoch(case: Case, open_: Callable[[], zgstore.Reader], *, shuffled: bool, cold: bool) -> float:
    """Seconds a step of an epoch read into one reused buffer."""
    with open_() as reader:
        if cold:
            drop_cache(case.store.path)
        return _each(steps(case, shuffled=shuffled), lambda rows: reader.batch(rows, out=case.out))


def common_epoch(case: Case, *, shuffled: bool, cold: bool) -> float:
    """Seconds a step of an epoch in the common way: shuffled by whole records, since it cannot do finer."""
    if cold:
        drop_cache(case.records)
    order = list(case.files)
    if shuffled:
        random.Random(0).shuffle(order)
    return _each(order, common_way.step)


def _each(items: list, work: Callable[..., object]) -> float:
    began = time.perf_counter()
    for item in items:
        work(item)
    return (time.perf_counter() - began) / len(items)


def opening(case: Case, *, stamped: bool) -> float:
    """Seconds until one block's columns are open and known to be what their names say."""
    (case.stamped if stamped else case.unstamped)().close()
    if not stamped:
        case.store.index.clear()
    began = time.perf_counter()
    reader = zgstore.read(case.store, "main", columns=BLOCK, verify="open")
    seconds = time.perf_counter() - began
    reader.close()
    return seconds


def recut(shards: list[list[Tensor]], rows: int) -> list[list[Tensor]]:
    """The same boundaries in shards of so many rows."""
    return [list(cut) for each in shards for cut in zip(*(column.split(rows) for column in each), strict=True)]


def prepare(scratch: Path, shards: list[list[Tensor]]) -> Case:
    """Both ways written, and old enough that stamps are given."""
    records = scratch / "records"
    records.mkdir(parents=True)
    store = into_store(scratch, shards)
    in_common_way(records, shards)
    time.sleep(SETTLE_SECONDS)
    files = common_way.open_and_verify(records)
    return Case(store, records, files, sum(len(columns[0]) for columns in shards))


def openings(case: Case, *, n: int) -> list[Entry]:
    """Open and verify, warm."""
    times = rounds(
        {
            "verified": lambda: opening(case, stamped=False),
            "stamped": lambda: opening(case, stamped=True),
            "sha256": lambda: _once(lambda: common_way.open_and_verify(case.records)),
        },
        n=n,
    )
    name = f"open + verify of one block's columns, B = {COLUMNS - 1}, against SHA-256 of the whole cache"
    return [
        compare(f"{name}, warm, two threads", times, ours="verified", other="sha256", at_least=10),
        compare(f"{name}, with stamps", times, ours="stamped", other="sha256", at_least=100),
    ]


def _once(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


# What is read, and how many times faster it must be: stamped, and while first use verifies.
SITUATIONS: Iterable[tuple[str, bool, bool, float]] = (
    ("warm", False, False, 5),
    ("cold, sequential", False, True, 2.5),
    ("cold, shuffled", True, True, 1.5),
)


def reads(case: Case, *, blob_mib: int, n: int) -> list[Entry]:
    """Each step's read, in each situation."""
    entries = []
    for what, shuffled, cold, at_least in SITUATIONS:
        where = {"shuffled": shuffled, "cold": cold}
        times = rounds(
            {
                "stamped": lambda where=where: our_epoch(case, case.stamped, **where),
                "first use": lambda where=where: our_epoch(case, case.unstamped, **where),
                "records": lambda where=where: common_epoch(case, **where),
            },
            n=n,
        )
        name = f"a step's read, {what}, blobs of {blob_mib} MiB, against the pickled record"
        # The bounds of stamped reads are for blobs of 64 MiB; smaller ones only must not lose.
        bound = at_least if blob_mib >= 64 else 1
        entries += [
            compare(f"{name}, stamped", times, ours="stamped", other="records", at_least=bound),
            compare(f"{name}, verified at first use", times, ours="first use", other="records", at_least=1),
        ]
    return entries


def bytes_read(case: Case) -> Entry:
    """How many of the bytes a block reads."""
    with case.stamped() as reader:
        for rows in steps(case, shuffled=False):
            reader.batch(rows)
        ours = reader.bytes_read
    share = ours / sum(path.stat().st_size for path in case.files)
    return within("a block's share of the bytes that the records have", [share], at_most=2 / COLUMNS, unit="")


def run(scratch: Path, *, shards: list[list[Tensor]], n: int) -> list[Entry]:
    """All entries of this module, at the blob size of these boundaries and at a quarter of it."""
    entries = []
    whole = len(shards[0][0])
    for blob_mib in (whole, whole // 4):
        folder = scratch / "read"
        shutil.rmtree(folder, ignore_errors=True)
        case = prepare(folder, recut(shards, blob_mib))
        if blob_mib == whole:
            entries += [*openings(case, n=n), bytes_read(case)]
        entries += reads(case, blob_mib=blob_mib, n=n)
    shutil.rmtree(scratch / "read", ignore_errors=True)
    return entries
