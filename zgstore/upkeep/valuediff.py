"""The values of two snapshots' columns compared, row by row, streaming.

Shapes: N rows or tokens of one piece, E elements of each.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from zgstore.format.blobheader import TensorSpec
from zgstore.format.digest import DIGEST_BYTES, Digest
from zgstore.format.fields import all_digests, raw_digests
from zgstore.format.manifest import Column, Snapshot
from zgstore.format.pages import Dropped, RowsPage
from zgstore.format.readplan import ColumnPlan, ReadPlan
from zgstore.format.tensorfile import TORCH_OF, int8_decode
from zgstore.reading.blobs import Blobs, OpenBlob
from zgstore.storage import partials
from zgstore.storage.store import Store
from zgstore.upkeep.distances import Piece, Sums, ValueDiff

# Elements worked on at once, or one row: their temporaries, in fp64, are what memory is bounded by, and fit a cache.
PIECE_ELEMENTS: Final = 1 << 18

Positions = np.ndarray[tuple[int], np.dtype[np.int64]]


def compare(
    store: Store,
    a: Digest,
    b: Digest,
    *,
    columns: Sequence[str],
    samples: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> tuple[dict[str, ValueDiff], dict[str, str]]:
    """Compare the values of ``columns`` over the rows that both snapshots have.

    Args:
        store: Where both are.
        a: The first.
        b: The second.
        columns: Names that both have.
        samples: Rows to compare, spread evenly; None for all.
        progress: Told the bytes of blobs read, as they are.

    Returns:
        The numbers by column, and for columns that cannot be compared the reason.

    Raises:
        Missing, Corrupt: if a blob is not there, or not what its name says.
    """
    sides = [_Side.of(store, digest, columns) for digest in (a, b)]
    rows_a, rows_b = _aligned(*sides)
    if samples is not None and samples < len(rows_a):
        chosen = np.linspace(0, len(rows_a) - 1, samples).round().astype(np.int64)
        rows_a, rows_b = rows_a[chosen], rows_b[chosen]
    found: dict[str, ValueDiff] = {}
    skipped: dict[str, str] = {}
    for name in columns:
        pair = [side.columns.get(name) for side in sides]
        reason = _incomparable(pair, len(rows_a))
        if reason:
            skipped[name] = reason
            continue
        left, right = (_Column(side, name, progress) for side in sides)
        with contextlib.closing(left), contextlib.closing(right):
            found[name] = _compare_column(left, right, rows_a, rows_b)
    return found, skipped


@dataclass(frozen=True, slots=True)
class _Side:
    snapshot: Snapshot
    dropped: Dropped
    plan: ReadPlan
    columns: Mapping[str, ColumnPlan]
    row_digests: bytes | None
    starts: Positions

    @classmethod
    def of(cls, store: Store, digest: Digest, columns: Sequence[str]) -> _Side:
        snapshot = store.snapshot(digest)
        expected = partials.expected(store.path, digest)
        plan = store.read_plan(digest, [name for name in columns if expected is None or name in expected])
        starts = np.concatenate([[0], np.cumsum(np.array(plan.shard_rows, dtype=np.int64))])
        by_name = {each.column.name: each for each in plan.columns}
        dropped = store.dropped(snapshot)
        digests = _row_digests(store, snapshot, dropped, int(starts[-1]))
        return cls(snapshot, dropped, plan, by_name, digests, starts)

    @property
    def rows(self) -> int:
        return int(self.starts[-1])

    def seen_as(self, position: int) -> int:
        """The number that a reader gives a stored row: masked ones are not counted."""
        return position - int(np.searchsorted(np.array(self.plan.masked, dtype=np.int64), position))


def _row_digests(store: Store, snapshot: Snapshot, dropped: Dropped, rows: int) -> bytes | None:
    """The digests of the stored rows joined; None where the pins do not tell them."""
    root = store.rows_root(snapshot)
    if root is None:
        return None
    pages = (RowsPage.decode(store.objects.read_meta(page, "page")) for page in all_digests(root.pages))
    stream = np.frombuffer(b"".join(page.digests for page in pages), dtype=np.uint8).reshape(-1, DIGEST_BYTES)
    kept = np.ones(len(stream), dtype=bool)
    kept[[row for row in dropped.left_out if row < len(stream)]] = False
    stored = stream[kept]
    return stored.tobytes() if len(stored) == rows else None


def _aligned(a: _Side, b: _Side) -> tuple[Positions, Positions]:
    """Stored positions of the rows that both have and neither skips, ascending in a."""
    if a.row_digests is None or b.row_digests is None:
        left = right = np.arange(min(a.rows, b.rows), dtype=np.int64)
    elif a.row_digests == b.row_digests:
        left = right = np.arange(a.rows, dtype=np.int64)
    else:
        left, right = _joined(a.row_digests, b.row_digests)
    keep = ~(np.isin(left, a.plan.masked) | np.isin(right, b.plan.masked))
    return left[keep], right[keep]


def _joined(a: bytes, b: bytes) -> tuple[Positions, Positions]:
    """Where equal row digests stand; the n-th of several equal ones meets the n-th."""
    waiting: defaultdict[bytes, deque[int]] = defaultdict(deque)
    for at, row in enumerate(raw_digests(b)):
        waiting[row].append(at)
    pairs = [(at, queue.popleft()) for at, row in enumerate(raw_digests(a)) if (queue := waiting.get(row))]
    joined = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return joined[:, 0], joined[:, 1]


def _incomparable(pair: Sequence[ColumnPlan | None], rows: int) -> str | None:
    left, right = pair
    if left is None or right is None:
        return "only a part of the snapshot is here, without this column"
    if left.column.shape != right.column.shape:
        return f"samples of shape {list(left.column.shape)} and {list(right.column.shape)}"
    return None if rows else "no row is in both"


class _Run(NamedTuple):
    """Rows that lie side by side in one blob of each: shard and first row there, for a and b; how many."""

    shard_a: int
    row_a: int
    shard_b: int
    row_b: int
    rows: int


def _runs(starts_a: Positions, starts_b: Positions, rows_a: Positions, rows_b: Positions) -> Iterator[_Run]:
    shards_a = np.searchsorted(starts_a, rows_a, side="right") - 1
    shards_b = np.searchsorted(starts_b, rows_b, side="right") - 1
    broken = (np.diff(rows_a) != 1) | (np.diff(rows_b) != 1) | (np.diff(shards_a) != 0) | (np.diff(shards_b) != 0)
    begins = np.concatenate([[0], np.flatnonzero(broken) + 1])
    ends = np.concatenate([begins[1:], [len(rows_a)]])
    for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
        at_a, at_b = int(shards_a[begin]), int(shards_b[begin])
        yield _Run(at_a, int(rows_a[begin] - starts_a[at_a]), at_b, int(rows_b[begin] - starts_b[at_b]), end - begin)


def _compare_column(left: _Column, right: _Column, rows_a: Positions, rows_b: Positions) -> ValueDiff:
    runs = list(_runs(left.side.starts, right.side.starts, rows_a, rows_b))
    same = [left.plans[run.shard_a].name == right.plans[run.shard_b].name and run.row_a == run.row_b for run in runs]
    sums = Sums()
    if all(same):
        # One blob cannot differ from itself: nothing is read.
        sums.add_equal_rows(len(rows_a))
        return sums.result(None)
    first: int | None = None
    for run, equal in zip(runs, same, strict=True):
        if equal:
            # Only its magnitude is wanted, for the relative number.
            blob = left.open(run.shard_a)
            for at, count in blob.steps(run.row_a, run.rows):
                sums.add_equal(blob.rows(run.row_a + at, count))
            continue
        blob_a, blob_b = left.open(run.shard_a), right.open(run.shard_b)
        for at, count in blob_a.steps(run.row_a, run.rows):
            x, y = blob_a.rows(run.row_a + at, count), blob_b.rows(run.row_b + at, count)
            differs = sums.add(x, y)
            if differs is not None and first is None:
                position = int(left.side.starts[run.shard_a]) + run.row_a + at + differs
                first = left.side.seen_as(position)
    return sums.result(first)


class _Column:
    """One column of one side; one blob of it is open at a time."""

    def __init__(self, side: _Side, name: str, progress: Callable[[int], None] | None) -> None:
        self.side, self.progress = side, progress
        self.column = side.columns[name].column
        self.plans = side.columns[name].blobs
        self._files = Blobs(side.plan.objects, hint="zgstore verify --repair --recipe RECIPE", verify=True)
        self._files.extend(zip(self.plans, repeat(self.column), side.plan.shard_rows, strict=False))
        self._open: tuple[int, _Opened] | None = None
        self._used = contextlib.ExitStack()

    def open(self, shard: int) -> _Opened:
        """The shard's blob, verified at its first use."""
        if self._open is None or self._open[0] != shard:
            self._open = None
            self._used.close()
            file = self._used.enter_context(self._files.open(shard))
            self._open = (shard, _Opened(self._files, file, self.column))
            if self.progress is not None:
                self.progress(self.plans[shard].size)
        return self._open[1]

    def close(self) -> None:
        self._open = None
        self._used.close()
        self._files.close()


class _Opened:
    """One blob, of which a piece at a time is read: a map would be killed by what befalls its file."""

    def __init__(self, files: Blobs, file: OpenBlob, column: Column) -> None:
        self._files, self._file = files, file
        self._dtype = TORCH_OF[column.dtype]
        self._data = file.header.tensor("data")
        self._scale = file.header.tensor("scale") if column.codec == "int8" else None
        self._offsets = file.offsets

    def _read(self, spec: TensorSpec, begin: int, end: int) -> Tensor:
        size = spec.size // max(spec.shape[0], 1)
        flat = torch.empty((end - begin) * size, dtype=torch.uint8, device="cpu")
        self._files.read(self._file, spec.start + begin * size, [flat.numpy().data], len(flat))
        return flat.view(TORCH_OF[spec.dtype]).view(end - begin, *spec.shape[1:])

    def _token(self, row: int) -> int:
        return row if self._offsets is None else int(self._offsets[row])

    def steps(self, row: int, rows: int) -> Iterator[tuple[int, int]]:
        """(first, count) of pieces of the rows from ``row``, each of about PIECE_ELEMENTS and at least one row."""
        tokens = self._token(row + rows) - self._token(row)
        of_a_row = math.prod(self._data.shape[1:]) * -(-tokens // max(rows, 1))
        step = max(1, PIECE_ELEMENTS // max(of_a_row, 1))
        for at in range(0, rows, step):
            yield at, min(step, rows - at)

    def rows(self, row: int, count: int) -> Piece:
        """``count`` rows from ``row``."""
        begin, end = self._token(row), self._token(row + count)
        values = self._read(self._data, begin, end)
        if self._scale is not None:
            values = int8_decode(values, self._read(self._scale, begin, end), self._dtype)
        if self._offsets is None:
            lengths = torch.ones(count, dtype=torch.int64, device="cpu")
        else:
            lengths = torch.from_numpy(np.diff(self._offsets[row : row + count + 1]))
        return Piece(values.reshape(end - begin, math.prod(values.shape[1:])), lengths)
