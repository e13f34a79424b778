"""A column by row, without copies where it can be, and by token, shuffled for those who train on single tokens.

Shapes: N rows or tokens asked for, V all tokens of the view.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from zgstore.errors import Invalid
from zgstore.reading.layouts import ID, MASK
from zgstore.reading.order import permutation
from zgstore.reading.table import Form, Indices, Table, places_of

# Shuffled tokens: chunks are read whole, windows of them are held and mixed.
CHUNK_BYTES: Final = 256 << 10
WINDOW_BYTES: Final = 64 << 20

Places = NDArray[np.int64]


def is_list(index: Any) -> bool:
    return isinstance(index, list | tuple | np.ndarray) or (isinstance(index, Tensor) and index.dim() > 0)


class ColumnView:
    """One column by row. ``view[10:14]`` of a dense raw column inside a shard maps the file and copies nothing.

    The map is private: writing to such a tensor changes this process's copy of the page and never the file.
    """

    def __init__(self, table: Table, form: Form) -> None:
        self._table = table
        self._form = form
        self.column = form.column

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int | slice | Indices) -> Any:
        """A row; for a slice or a list ``[N, …]`` of a dense column, a list of tensors of a ragged one.

        Raises:
            IndexError: if there is no such row.
        """
        if isinstance(index, slice):
            rows = np.arange(*index.indices(len(self)))
            mapped = self._mapped(rows)
            return self._read(rows) if mapped is None else mapped
        if is_list(index):
            return self._read(index)
        return self._read([operator.index(index)])[0]  # type: ignore[arg-type]

    def _read(self, rows: Any) -> Any:
        content = self._table.read([self._form], self._table.runs(rows), "packed")[self.column.name]
        if content.lengths is None:
            return content.values
        return list(torch.split(content.values, content.lengths.tolist()))

    def _mapped(self, rows: Places) -> Tensor | None:
        """The rows as a private map; None where they are not one stretch of one file as it is."""
        size = self._form.item_bytes["data"]
        if self.column.ragged or self.column.codec != "raw" or not size:
            return None
        runs = self._table.runs(rows)
        if len(runs) != 1:
            return None
        with self._table.blobs.open(self._table.number(runs[0].shard, self._form)) as file:
            start = file.data.start + runs[0].first * size
            # By the open descriptor, so that it is the verified file; the map keeps none, as Python's own would.
            held = torch.from_file(
                f"/proc/self/fd/{file.fd}", shared=False, size=start + len(rows) * size, dtype=torch.uint8
            )
        return self._form.tensor("data", held[start:], len(rows))


class TokenView(Dataset[Tensor]):
    """A sequence column by token: real tokens, in stored order; those of skipped rows and of the padding left out.

    A ragged column is one stretch of tokens in each shard, so nothing but sizes is looked at to open it. Of a column
    stored with its padding the reader's attention mask says what is real, if it has one.

    Raises:
        Invalid: if the column has no sequence axis.
    """

    def __init__(self, table: Table, form: Form) -> None:
        column = form.column
        if column.name == ID or not (column.ragged or len(column.shape) >= 2 or column.role == "context"):
            raise Invalid(f"column {column.name!r} has no sequence axis", hint="name one whose rows are sequences")
        if not column.ragged and (not column.shape or (column.codec != "raw" and len(column.shape) < 2)):
            raise Invalid(f"column {column.name!r} has no tokens", hint="name one whose rows are sequences")
        self._table = table
        self._form = form
        self.column = column
        # Stretches of real tokens: their shard, first token there, and first token here.
        self._shards, self._firsts, counts = _stretches(table, form)
        self._ends = np.cumsum(counts)
        self._starts = self._ends - counts

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int | Indices) -> Tensor:
        """A token; for a list ``[N, …]``.

        Raises:
            IndexError: if there is no such token.
        """
        if is_list(index):
            return self.batch(index)  # type: ignore[arg-type]
        return self.batch([operator.index(index)])[0]  # type: ignore[arg-type]

    def __getitems__(self, indices: Sequence[int]) -> list[Tensor]:
        return list(self.batch(indices))

    def batch(self, indices: Indices) -> Tensor:
        """The tokens at ``indices``, in that order: ``[N, …]`` of the column's dtype."""
        wanted = places_of(indices, len(self), what="token")
        order = np.argsort(wanted, kind="stable")  # tokens that follow each other are one read
        found = self._sorted(wanted[order])
        if (order[1:] > order[:-1]).all():
            return found
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        return found[torch.from_numpy(back)]

    def batches(
        self, size: int, *, seed: int = 0, epoch: int = 0, shuffle: bool = True, drop_last: bool = False, start: int = 0
    ) -> Iterator[Tensor]:
        """All tokens once, ``[size, …]`` at a time.

        Shuffled in two steps, so that a disk reads stretches and not single tokens: stretches of 256 KiB in a random
        order, and the tokens of 64 MiB of them mixed. Both are functions of (seed, epoch, data digest), and a batch
        can be begun at directly.

        Args:
            size: Tokens of a batch.
            seed: Of the order.
            epoch: Another order for each.
            shuffle: Else in stored order.
            drop_last: Leave out a last batch that is short.
            start: Number of the batch to begin with.
        """
        if size < 1:
            raise Invalid(f"a batch of {size} tokens", hint="give at least 1")
        last = len(self) // size if drop_last else -(-len(self) // size)
        order = _TokenOrder(self, seed, epoch) if shuffle else None
        for number in range(start, last):
            first, end = number * size, min((number + 1) * size, len(self))
            yield self.batch(np.arange(first, end)) if order is None else order.tokens(first, end)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token as stored."""
        stride = 1 if self.column.ragged else self.column.shape[0] or 1
        return max(1, sum(self._form.item_bytes.values()) // stride)

    @property
    def data_digest(self) -> str:
        return self._table.plan.data

    def _sorted(self, wanted: Places) -> Tensor:
        """Ascending tokens, read in runs."""
        stretch = np.searchsorted(self._ends, wanted, side="right")
        place = wanted - self._starts[stretch] + self._firsts[stretch]
        shard = self._shards[stretch]
        return self._table.tokens(self._form, shard, place)


class _TokenOrder:
    """Tokens of an epoch by their position in it."""

    def __init__(self, view: TokenView, seed: int, epoch: int) -> None:
        self._view = view
        size = len(view)
        self._chunk = max(1, CHUNK_BYTES // view.token_bytes)
        self._window = self._chunk * max(1, WINDOW_BYTES // CHUNK_BYTES)
        # The last chunk, if it is short, stays last, so that where a window begins is known.
        self._chunks = permutation(seed, epoch, f"{view.data_digest} chunks", size // self._chunk)
        self._key = (seed, epoch, f"{view.data_digest} tokens")
        self._held: tuple[int, Tensor] = (-1, torch.empty(0, device="cpu"))

    def tokens(self, first: int, end: int) -> Tensor:
        """The tokens at positions ``first`` to ``end``."""
        parts = []
        while first < end:
            window, offset = divmod(first, self._window)
            mixed = self._load(window)
            parts.append(mixed[offset : offset + end - first])
            first += len(parts[-1])
        return parts[0].clone() if len(parts) == 1 else torch.cat(parts)

    def _load(self, window: int) -> Tensor:
        if self._held[0] != window:
            self._held = (-1, torch.empty(0, device="cpu"))  # two windows need not be in memory
            first, end = window * self._window, min((window + 1) * self._window, len(self._view))
            chunks, rest = self._chunks.rows(first // self._chunk, end // self._chunk), len(self._chunks) * self._chunk
            places = (chunks[:, None] * self._chunk + np.arange(self._chunk)).reshape(-1)
            places = np.concatenate([places, np.arange(max(first, rest), end)])
            seed, epoch, data = self._key
            mixing = permutation(seed, epoch, f"{data} {window}", len(places)).rows(0, len(places))
            self._held = (window, self._view.batch(places[mixing]))
        return self._held[1]


def _stretches(table: Table, form: Form) -> tuple[Places, Places, Places]:
    """Where the real tokens lie: shard, first token in it, and how many, of each stretch."""
    shards = np.arange(len(table.shard_rows), dtype=np.int64)
    if form.column.ragged:
        counts = np.array([table.stored_items(form, int(shard)) for shard in shards], np.int64)
        firsts = np.zeros_like(counts)
    else:
        counts = table.shard_rows * (form.column.shape[0] or 0)
        firsts = np.zeros_like(counts)
    if not form.column.ragged and MASK in table.forms and table.forms[MASK].column.shape == form.column.shape[:1]:
        return _real_stretches(table, form)
    if len(table.skips):
        return _visible_stretches(table, form)
    return shards, firsts, counts


def _visible_stretches(table: Table, form: Form) -> tuple[Places, Places, Places]:
    """Stretches between the rows that are skipped; only shards that have such rows are looked into."""
    begins = table.shard_ends - table.shard_rows
    skipped = np.searchsorted(table.shard_ends, table.skips, side="right")
    found: list[tuple[int, int, int]] = []
    for shard, rows in enumerate(table.shard_rows.tolist()):
        gone = table.skips[skipped == shard] - begins[shard]
        if not len(gone):
            items = table.stored_items(form, shard) * (1 if form.column.ragged else form.column.shape[0] or 0)
            found.append((shard, 0, items))
            continue
        if form.column.ragged:
            lengths = table.stored_lengths(form, [shard])[0]
        else:
            lengths = np.full(rows, form.column.shape[0] or 0, np.int64)
        bounds = np.concatenate([[0], np.cumsum(lengths)])
        edges = np.concatenate([[-1], gone, [rows]])
        found += [
            (shard, int(bounds[a + 1]), int(bounds[b] - bounds[a + 1]))
            for a, b in pairwise(edges.tolist())
            if b > a + 1
        ]
    columns = np.array(found, np.int64).reshape(-1, 3).T
    return columns[0], columns[1], columns[2]


def _real_stretches(table: Table, form: Form) -> tuple[Places, Places, Places]:
    """Runs of ones in the attention mask of visible rows."""
    mask, length = table.forms[MASK], form.column.shape[0] or 0
    parts = []
    visible = np.delete(np.arange(int(table.shard_rows.sum())), table.skips)
    for at in range(0, len(table), 4096):
        rows = visible[at : at + 4096]
        runs = table.runs(np.arange(at, at + len(rows)))
        real = (table.read([mask], runs, "packed")[MASK].values != 0).numpy()
        edges = np.diff(np.pad(real.astype(np.int8), ((0, 0), (1, 1))), axis=1)
        row, first = np.nonzero(edges == 1)
        _, end = np.nonzero(edges == -1)
        shard = np.searchsorted(table.shard_ends, rows[row], side="right")
        local = rows[row] - table.shard_ends[shard] + table.shard_rows[shard]
        parts.append(np.stack([shard, local * length + first, end - first]))
    columns = np.concatenate([np.zeros((3, 0), np.int64), *parts], axis=1)
    return columns[0], columns[1], columns[2]
