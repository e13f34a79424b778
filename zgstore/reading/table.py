"""The rows of a plan as runs of bytes: the hot path from row numbers to a batch's memory.

Shapes: N rows of a batch, T the longest length, S the sum of the lengths.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from zgstore.format.blobheader import BlobHeader, lay_out, layout_of_column
from zgstore.format.manifest import Column
from zgstore.format.readplan import ReadPlan
from zgstore.format.tensorfile import TORCH_OF, as_tensor, int8_decode
from zgstore.reading.blobs import Blobs
from zgstore.reading.layouts import Buffers, Content, Layout, Lengths, pad
from zgstore.reading.order import Rows

# From here on the columns of a batch are read on two threads: one cold reader gets half of a disk.
PARALLEL_BYTES: Final = 2 << 20

_NO_LENGTHS: Final = np.zeros(0, np.int64)

Indices = Sequence[int] | Rows | Tensor


class Run(NamedTuple):
    """Rows that follow each other in a shard: one read for each column; or tokens, in `Table.tokens`.

    Args:
        shard: Which.
        first: The first one, counted in the shard.
        rows: How many.
        at: Where they go in the batch.
    """

    shard: int
    first: int
    rows: int
    at: int


class Form:
    """What the items (dense: rows; ragged: tokens) of a column are, without opening a file.

    Raises:
        Invalid: for a codec or dtype that this version does not know.
    """

    __slots__ = ("column", "dtypes", "item_bytes", "item_shape", "place")

    def __init__(self, column: Column, place: int) -> None:
        self.column = column
        self.place = place
        header = layout_of_column(column, rows=1, tokens=1)
        held = {spec.name: spec for spec in header.tensors}
        parts: list[str] = [name for name in ("data", "scale") if name in held]
        self.dtypes = {name: TORCH_OF[held[name].dtype] for name in parts}
        self.item_shape = {name: held[name].shape[1:] for name in parts}
        self.item_bytes = {name: held[name].size for name in parts}

    @property
    def dtype(self) -> torch.dtype:
        """What a reader gets."""
        return TORCH_OF[self.column.dtype]

    def tensor(self, part: str, flat: Tensor, *lead: int) -> Tensor:
        """uint8 memory as what it holds: ``[*lead, …]``."""
        return flat.view(self.dtypes[part]).view(*lead, *self.item_shape[part])

    def decoded(self, parts: Sequence[Tensor]) -> Tensor:
        """What a reader gets of the tensors that are stored, ``[…]`` each, in the order of ``item_bytes``."""
        return parts[0] if len(parts) == 1 else int8_decode(parts[0], parts[1], self.dtype)


class Piece(NamedTuple):
    """Bytes that follow each other in a blob, on their way into a batch's memory: one system call."""

    number: int
    start: int
    size: int
    into: list[memoryview]


class Span(NamedTuple):
    """A run of one column, found in its blob.

    Args:
        number: The blob's.
        header: Its.
        first: The first of the run's items there.
        items: How many.
        lengths: int64 ``[rows]`` of a ragged column; None of a dense one.
    """

    number: int
    header: BlobHeader
    first: int
    items: int
    lengths: Lengths | None

    def piece(self, part: str, item_bytes: int, into: list[memoryview]) -> Piece:
        """A part of its items, on their way to these places."""
        start = self.header.tensor(part).start + self.first * item_bytes
        return Piece(self.number, start, self.items * item_bytes, into)


class Load(NamedTuple):
    """A column of a batch: what is to be read for it, and then what it is."""

    pieces: list[Piece]
    content: Callable[[], Content]


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
        self._visible = sum(plan.shard_rows) - len(plan.masked)
        # A visible row comes after a skipped one exactly if its number is at least the skipped one's place less the
        # skipped ones before that.
        self._skips_visible = self.skips - np.arange(len(self.skips))

    def __len__(self) -> int:
        """Visible rows."""
        return self._visible

    def number(self, shard: int, form: Form) -> int:
        """The number of a column's blob; stable while a build grows."""
        return len(self.plan.constants) + shard * len(self.plan.columns) + form.place

    # -- which rows ------------------------------------------------------------------------------------------------

    def runs(self, indices: Indices) -> list[Run]:
        """Visible rows as runs of stored rows that follow each other in one shard.

        Raises:
            IndexError: if there is no such row.
            TypeError: if they are no list of whole numbers.
        """
        stored, runs, at = self._stored(indices), list[Run](), 0
        breaks = (stored[1:] - stored[:-1] != 1).nonzero()[0] + 1
        for end in (*breaks.tolist(), len(stored)):
            while at < end:  # cut where a shard ends
                row = int(stored[at])
                shard = bisect_right(self.shard_ends, row)
                shard_end = int(self.shard_ends[shard])
                count = min(end - at, shard_end - row)
                runs.append(Run(shard, row - shard_end + self.plan.shard_rows[shard], count, at))
                at += count
        return runs

    def _stored(self, indices: Indices) -> Rows:
        rows = places_of(indices, len(self), what="row")
        if len(self.skips):
            rows = rows + np.searchsorted(self._skips_visible, rows, side="right")
        return rows

    # -- their bytes -----------------------------------------------------------------------------------------------

    def read(
        self, forms: Sequence[Form], runs: list[Run], layout: Layout, out: Buffers | None = None
    ) -> dict[str, Content]:
        """The columns of these runs: verified, found, asked for at once if scattered, then read.

        One thread finds them and lays out the memory, and decodes in the end; two do nothing but the system calls. A
        step of some MiB leaves no cache warm, so that each line of Python costs several times what it does elsewhere,
        and on two threads it waits for Python's lock besides (`python -m tests.benchmarks read`).

        Returns:
            Content by column.

        Raises:
            Corrupt, Missing, Transient, Invalid: as `Blobs.open` and `Blobs.read` do.
        """
        self.blobs.require(self.number(run.shard, form) for run in runs for form in forms)
        loads = [self._load(form, runs, layout, out) for form in forms]
        jobs = [partial(self._fetch, load.pieces) for load in loads]
        if sum(piece.size for load in loads for piece in load.pieces) >= PARALLEL_BYTES:
            try:
                self.blobs.run(jobs)
            except BaseException:
                if out is not None:
                    out.forget()
                raise
        else:
            for job in jobs:
                job()
        return {form.column.name: load.content() for form, load in zip(forms, loads, strict=True)}

    def _fetch(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            with self.blobs.open(piece.number) as file:
                self.blobs.read(file, piece.start, piece.into, piece.size)

    def _load(self, form: Form, runs: list[Run], layout: Layout, out: Buffers | None) -> Load:
        """One column, found and laid out: for each run one system call to come, into memory that is the batch."""
        spans = self._find(form, runs)
        if not form.column.ragged:
            return self._packed(form, spans, None, out)
        lengths = np.concatenate([_NO_LENGTHS, *(span.lengths for span in spans if span.lengths is not None)])
        if layout == "padded" and form.column.codec == "raw":
            return self._padded(form, spans, lengths, out)
        load = self._packed(form, spans, lengths, out)
        if layout != "padded":
            return load
        return Load(load.pieces, lambda: Content(pad(load.content().values, lengths), lengths))

    def _find(self, form: Form, runs: list[Run]) -> list[Span]:
        """Where the runs lie. If they are several, all are asked for before the first is waited for.

        Cold and shuffled that takes a third less time; rows that follow each other the kernel reads ahead by itself.
        """
        spans, size = [], form.item_bytes["data"]
        for run in runs:
            number = self.number(run.shard, form)
            with self.blobs.open(number) as file:
                first, end, lengths = run.first, run.first + run.rows, None
                if file.offsets is not None:
                    bounds = file.offsets[first : end + 1]
                    first, end, lengths = int(bounds[0]), int(bounds[-1]), np.diff(bounds)
                spans.append(Span(number, file.header, first, end - first, lengths))
                if len(runs) > 1 and end > first:  # no bytes would mean all to the end of the file
                    start = file.data.start + first * size
                    os.posix_fadvise(file.fd, start, (end - first) * size, os.POSIX_FADV_WILLNEED)
        return spans

    def _packed(self, form: Form, spans: list[Span], lengths: Lengths | None, out: Buffers | None) -> Load:
        """Items of all spans end to end."""
        items = sum(span.items for span in spans)
        pieces, parts = [], []
        for part, size in form.item_bytes.items():
            flat = _memory(out, f"{part} {form.column.name}", items * size)
            view, at = flat.numpy().data, 0
            for span in spans:
                end = at + span.items * size
                pieces.append(span.piece(part, size, [view[at:end]]))
                at = end
            parts.append(form.tensor(part, flat, items))
        return Load(pieces, lambda: Content(form.decoded(parts), lengths))

    def _padded(self, form: Form, spans: list[Span], lengths: Lengths, out: Buffers | None) -> Load:
        """Rows ``[N, T, …]``: the kernel scatters a run to its padded places; only the padding is written here."""
        size, longest = form.item_bytes["data"], int(lengths.max(initial=0))
        stride = longest * size
        flat = _memory(out, f"padded {form.column.name}", len(lengths) * stride)
        array = flat.numpy()
        ends = (np.arange(len(lengths)) * stride + lengths * size).tolist()
        for row, end in enumerate(ends):
            array[end : (row + 1) * stride] = 0
        rows = [array.data[row * stride : end] for row, end in enumerate(ends)]
        pieces, at = [], 0
        for span in spans:
            assert span.lengths is not None
            after = at + len(span.lengths)
            pieces.append(span.piece("data", size, rows[at:after]))
            at = after
        values = form.tensor("data", flat, len(lengths), longest)
        return Load(pieces, lambda: Content(values, lengths))

    def tokens(self, form: Form, shards: Rows, places: Rows) -> Tensor:
        """Tokens by shard and by their place among the shard's tokens (rows of a dense column laid end to end).

        Returns:
            ``[N, …]`` without the sequence axis; tokens that follow each other are one read.
        """
        count = len(places)
        breaks = np.flatnonzero((np.diff(places) != 1) | (np.diff(shards) != 0)) + 1
        starts = np.concatenate([np.zeros(1, np.int64), breaks])[:count]
        counts = np.diff(np.concatenate([starts, [count]]))
        columns = (each.tolist() for each in (shards[starts], places[starts], counts, starts))
        runs = [Run(*each) for each in zip(*columns, strict=True)]
        stride = 1 if form.column.ragged else form.column.shape[0] or 1
        self.blobs.require(self.number(run.shard, form) for run in runs)
        parts = []
        for part, item_bytes in form.item_bytes.items():
            size = item_bytes // stride
            shape = form.item_shape[part] if form.column.ragged else form.item_shape[part][1:]
            flat = torch.empty(count * size, dtype=torch.uint8, device="cpu")
            view = flat.numpy().data
            for run in runs:
                with self.blobs.open(self.number(run.shard, form)) as file:
                    start = file.header.tensor(part).start + run.first * size
                    into = view[run.at * size : (run.at + run.rows) * size]
                    self.blobs.read(file, start, [into], run.rows * size)
            parts.append(flat.view(form.dtypes[part]).view(count, *shape))
        return form.decoded(parts)

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
                assert file.offsets is not None
                lengths.append(np.diff(file.offsets))
        return lengths

    def stored_items(self, form: Form, shard: int) -> int:
        """Items in a blob, without opening it: its size, which the snapshot's page pins, allows only one number."""
        rows = self.plan.shard_rows[shard]
        if not form.column.ragged:
            return rows
        empty = layout_of_column(form.column, rows=rows, tokens=0).file_size
        return (self.plan.columns[form.place].blobs[shard].size - empty) // sum(form.item_bytes.values())


def _memory(out: Buffers | None, key: str, size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cpu") if out is None else out.take(key, size)


def places_of(indices: Indices, size: int, *, what: str) -> Rows:
    """Indices, negative ones counted from the end, as places: int64 ``[N]``.

    Args:
        indices: A list of whole numbers, of any kind.
        size: How many there are.
        what: ``row`` or ``token``.

    Raises:
        IndexError: if there is no such one.
        TypeError: if they are no list of whole numbers.
    """
    given = np.asarray(indices)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise TypeError(
            f"indices are a list of whole numbers, not {indices!r:.80}; "
            "a DataLoader whose sampler gives whole batches takes batch_size=None"
        )
    if not len(given) or (given.min() >= 0 and given.max() < size):
        return given.astype(np.int64)
    outside = (given < -size) | (given >= size)
    if outside.any():
        raise IndexError(f"{what} {int(given[outside][0])} of {size} {what}s")
    places = given.astype(np.int64)
    return np.where(places < 0, places + size, places)
