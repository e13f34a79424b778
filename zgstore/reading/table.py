"""The rows of a plan as runs of bytes: the hot path from row numbers to a batch's memory.

Shapes: N rows of a batch, T the longest length, S the sum of the lengths.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from zgstore.format.blobheader import lay_out, layout_of_column
from zgstore.format.manifest import Column
from zgstore.format.readplan import ReadPlan
from zgstore.format.tensorfile import TORCH_OF, as_tensor, int8_decode
from zgstore.reading.blobs import Blobs, OpenBlob
from zgstore.reading.layouts import Buffers, Content, Layout, Lengths, pad

# From here on the columns of a batch are read on two threads: one cold reader gets half of a disk.
PARALLEL_BYTES: Final = 2 << 20

Rows = NDArray[np.int64]
Indices = Sequence[int] | Rows | Tensor


class Run(NamedTuple):
    """Rows of a batch that follow each other in a shard: one read for each column."""

    shard: int
    first: int
    rows: int
    at: int


class Form:
    """What the items (dense: rows; ragged: tokens) of a column are, without opening a file.

    Raises:
        Invalid: for a codec or dtype that this version does not know.
    """

    __slots__ = ("column", "dtypes", "item_bytes", "item_shape", "parts", "place")

    def __init__(self, column: Column, place: int) -> None:
        self.column = column
        self.place = place
        header = layout_of_column(column, rows=1, tokens=1)
        held = {spec.name: spec for spec in header.tensors}
        self.parts: list[str] = [name for name in ("data", "scale") if name in held]
        self.dtypes = {name: TORCH_OF[held[name].dtype] for name in self.parts}
        self.item_shape = {name: held[name].shape[1:] for name in self.parts}
        self.item_bytes = {name: held[name].size for name in self.parts}

    @property
    def dtype(self) -> torch.dtype:
        """What a reader gets."""
        return TORCH_OF[self.column.dtype]

    def tensor(self, part: str, flat: Tensor, *lead: int) -> Tensor:
        """uint8 memory as what it holds: ``[*lead, …]``."""
        return flat.view(self.dtypes[part]).view(*lead, *self.item_shape[part])


class Table:
    """The rows and columns of a plan.

    Args:
        plan: Where the bytes are.
        hint: The command that mends a damaged blob.
        verify: Whether blobs are verified at their first use.
    """

    def __init__(self, plan: ReadPlan, *, hint: str, verify: bool) -> None:
        self.plan = plan
        self.forms = {each.column.name: Form(each.column, place) for place, each in enumerate(plan.columns)}
        self.blobs = Blobs(plan.objects, hint=hint, verify=verify)
        self.blobs.extend((blob, lay_out({"data": (dtype, shape)}), 0) for _, dtype, shape, blob in plan.constants)
        self._place_rows(plan, since=0)

    def grow(self, plan: ReadPlan) -> None:
        """Take over a plan of the same columns with more shards."""
        self._place_rows(plan, since=len(self.plan.shard_rows))

    def _place_rows(self, plan: ReadPlan, *, since: int) -> None:
        self.plan = plan
        self.blobs.extend(
            (each.blobs[shard], each.column, plan.shard_rows[shard])
            for shard in range(since, len(plan.shard_rows))
            for each in plan.columns
        )
        self.shard_rows = np.array(plan.shard_rows, np.int64)
        self.shard_ends = np.cumsum(self.shard_rows)
        self.skips = np.array(plan.masked, np.int64)
        # A visible row comes after a skipped one exactly if its number is at least the skipped one's place less the
        # skipped ones before that.
        self._skips_visible = self.skips - np.arange(len(self.skips))

    def __len__(self) -> int:
        """Visible rows."""
        return int(self.shard_rows.sum()) - len(self.skips)

    def number(self, shard: int, form: Form) -> int:
        """The number of a column's blob; stable while a build grows."""
        return len(self.plan.constants) + shard * len(self.plan.columns) + form.place

    # -- which rows ------------------------------------------------------------------------------------------------

    def runs(self, indices: Indices) -> list[Run]:
        """Visible rows as runs of stored rows that follow each other in one shard.

        Raises:
            IndexError: if there is no such row.
        """
        stored = self._stored(indices)
        if not len(stored):
            return []
        shards = np.searchsorted(self.shard_ends, stored, side="right")
        starts = np.concatenate([[0], np.flatnonzero((np.diff(stored) != 1) | (np.diff(shards) != 0)) + 1])
        counts = np.diff(np.concatenate([starts, [len(stored)]]))
        shards = shards[starts]
        firsts = stored[starts] - self.shard_ends[shards] + self.shard_rows[shards]
        columns = (each.tolist() for each in (shards, firsts, counts, starts))
        return [Run(*each) for each in zip(*columns, strict=True)]

    def _stored(self, indices: Indices) -> Rows:
        rows = np.asarray(indices)
        if rows.ndim != 1 or (rows.size and rows.dtype.kind not in "iu"):
            raise TypeError(
                f"indices are a list of whole numbers, not {indices!r:.80}; "
                "a DataLoader whose sampler gives whole batches takes batch_size=None"
            )
        rows, size = rows.astype(np.int64), len(self)
        rows = np.where(rows < 0, rows + size, rows)
        outside = (rows < 0) | (rows >= size)
        if outside.any():
            raise IndexError(f"row {int(np.asarray(indices)[outside][0])} of {size} rows")
        if len(self.skips):
            rows = rows + np.searchsorted(self._skips_visible, rows, side="right")
        return rows

    # -- their bytes -----------------------------------------------------------------------------------------------

    def read(
        self, forms: Sequence[Form], runs: list[Run], layout: Layout, out: Buffers | None = None
    ) -> dict[str, Content]:
        """The columns of these runs: verified, asked for at once if scattered, then read."""
        self.blobs.require(self.number(run.shard, form) for run in runs for form in forms)
        if len(runs) > 1:
            self._advise(forms, runs)
        contents: dict[str, Content] = {}

        def load(form: Form) -> None:
            contents[form.column.name] = self._column(form, runs, layout, out)

        if len(forms) > 1 and self._estimate(forms, runs) >= PARALLEL_BYTES:
            self.blobs.run([partial(load, form) for form in forms])
        else:
            for form in forms:
                load(form)
        return contents

    def _estimate(self, forms: Sequence[Form], runs: list[Run]) -> int:
        """About how many bytes the batch has, by the mean of each shard."""
        rows, columns = self.plan.shard_rows, self.plan.columns
        return sum(columns[form.place].blobs[r.shard].size * r.rows // rows[r.shard] for form in forms for r in runs)

    def _advise(self, forms: Sequence[Form], runs: list[Run]) -> None:
        """Ask for all of a step's rows before waiting for the first: cold and shuffled, a third less time."""
        for form in forms:
            for run in runs:
                with self.blobs.open(self.number(run.shard, form)) as file:
                    first, last = _items(form, file, run)
                    size = form.item_bytes["data"]
                    start = file.data.start + first * size
                    os.posix_fadvise(file.fd, start, (last - first) * size, os.POSIX_FADV_WILLNEED)

    def _column(self, form: Form, runs: list[Run], layout: Layout, out: Buffers | None) -> Content:
        """One column: for each run one system call, into memory that is already the batch."""
        count = sum(run.rows for run in runs)
        if not form.column.ragged:
            return Content(self._packed(form, runs, [run.at for run in runs], count, out))
        lengths = np.zeros(count, np.int64)
        for run in runs:
            with self.blobs.open(self.number(run.shard, form)) as file:
                lengths[run.at : run.at + run.rows] = np.diff(_bounds(file)[run.first : run.first + run.rows + 1])
        if layout == "padded" and form.column.codec == "raw":
            return Content(self._padded(form, runs, lengths, out), lengths)
        starts = np.concatenate([[0], np.cumsum(lengths)])
        values = self._packed(form, runs, [int(starts[run.at]) for run in runs], int(starts[-1]), out)
        return Content(pad(values, lengths) if layout == "padded" else values, lengths)

    def _packed(self, form: Form, runs: list[Run], places: list[int], items: int, out: Buffers | None) -> Tensor:
        """Items of all runs end to end, those of ``runs[i]`` from item ``places[i]``; decoded."""
        tensors = []
        for part in form.parts:
            size = form.item_bytes[part]
            flat = _memory(out, f"{part} {form.column.name}", items * size)
            view = flat.numpy().data
            for run, place in zip(runs, places, strict=True):
                with self.blobs.open(self.number(run.shard, form)) as file:
                    first, last = _items(form, file, run)
                    many = (last - first) * size
                    start = file.data.start if part == "data" else file.header.tensor(part).start
                    self.blobs.read(file, start + first * size, [view[place * size : place * size + many]], many)
            tensors.append(form.tensor(part, flat, items))
        return tensors[0] if len(tensors) == 1 else int8_decode(tensors[0], tensors[1], form.dtype)

    def _padded(self, form: Form, runs: list[Run], lengths: Lengths, out: Buffers | None) -> Tensor:
        """Rows ``[N, T, …]``: the kernel scatters a run to its padded places; only the padding is written here."""
        size, longest = form.item_bytes["data"], int(lengths.max(initial=0))
        stride = longest * size
        flat = _memory(out, f"padded {form.column.name}", len(lengths) * stride)
        array = flat.numpy()
        view, ends = array.data, (np.arange(len(lengths)) * stride + lengths * size).tolist()
        for row, end in enumerate(ends):
            array[end : (row + 1) * stride] = 0
        for run in runs:
            with self.blobs.open(self.number(run.shard, form)) as file:
                first, last = _items(form, file, run)
                into = [view[row * stride : ends[row]] for row in range(run.at, run.at + run.rows)]
                self.blobs.read(file, file.data.start + first * size, into, (last - first) * size)
        return form.tensor("data", flat, len(lengths), longest)

    def tokens(self, form: Form, shards: Rows, places: Rows) -> Tensor:
        """Tokens by shard and by their place among the shard's tokens (rows of a dense column laid end to end).

        Returns:
            ``[N, …]`` without the sequence axis; tokens that follow each other are one read.
        """
        count = len(places)
        breaks = np.flatnonzero((np.diff(places) != 1) | (np.diff(shards) != 0)) + 1
        starts = np.concatenate([np.zeros(1, np.int64), breaks])[: count or 0]
        counts = np.diff(np.concatenate([starts, [count]]))
        columns = (each.tolist() for each in (shards[starts], places[starts], counts, starts))
        runs = [Run(*each) for each in zip(*columns, strict=True)]
        stride = 1 if form.column.ragged else form.column.shape[0] or 1
        self.blobs.require(self.number(run.shard, form) for run in runs)
        tensors = []
        for part in form.parts:
            size = form.item_bytes[part] // stride
            shape = form.item_shape[part] if form.column.ragged else form.item_shape[part][1:]
            flat = torch.empty(count * size, dtype=torch.uint8)
            view = flat.numpy().data
            for run in runs:
                with self.blobs.open(self.number(run.shard, form)) as file:
                    start = file.header.tensor(part).start + run.first * size
                    into = view[run.at * size : (run.at + run.rows) * size]
                    self.blobs.read(file, start, [into], run.rows * size)
            tensors.append(flat.view(form.dtypes[part]).view(count, *shape))
        return tensors[0] if len(tensors) == 1 else int8_decode(tensors[0], tensors[1], form.dtype)

    def constant(self, number: int) -> Tensor:
        """A blob without a row axis."""
        _, dtype, shape, _ = self.plan.constants[number]
        with self.blobs.open(number) as file:
            raw = bytearray(file.data.size)
            self.blobs.read(file, file.data.start, [memoryview(raw)], len(raw))
        return as_tensor(raw, dtype, shape)

    # -- lengths ---------------------------------------------------------------------------------------------------

    def stored_lengths(self, form: Form, shards: Iterable[int]) -> list[Lengths]:
        """Lengths of all stored rows of a ragged column, shard by shard; int64."""
        numbers = [self.number(shard, form) for shard in shards]
        self.blobs.require(numbers)
        lengths = []
        for number in numbers:
            with self.blobs.open(number) as file:
                lengths.append(np.diff(_bounds(file)))
        return lengths

    def stored_items(self, form: Form, shard: int) -> int:
        """Items in a blob, without opening it: its size, which the snapshot's page pins, allows only one number."""
        rows = self.plan.shard_rows[shard]
        if not form.column.ragged:
            return rows
        empty = layout_of_column(form.column, rows=rows, tokens=0).file_size
        return (self.plan.columns[form.place].blobs[shard].size - empty) // sum(form.item_bytes.values())


def _items(form: Form, file: OpenBlob, run: Run) -> tuple[int, int]:
    """First and last item of a run in its blob."""
    if not form.column.ragged:
        return run.first, run.first + run.rows
    bounds = _bounds(file)
    return int(bounds[run.first]), int(bounds[run.first + run.rows])


def _bounds(file: OpenBlob) -> Lengths:
    assert file.offsets is not None
    return file.offsets


def _memory(out: Buffers | None, key: str, size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8) if out is None else out.take(key, size)
