"""Verified, picklable reading along a plan: samples, batches, columns and tokens."""

from __future__ import annotations

import operator
import os
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final, Literal, Self, overload

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from zgstore.errors import Invalid, Partial, ZgError
from zgstore.format.manifest import Column
from zgstore.format.readplan import BlobPlan, ReadPlan
from zgstore.reading.blobs import Blobs, Stamp
from zgstore.reading.layouts import (
    ID,
    MASK,
    Buffers,
    Layout,
    Lengths,
    assemble,
    check_layout_name,
    content_of,
    dense_length,
)
from zgstore.reading.table import Form, Indices, Table
from zgstore.reading.views import ColumnView, TokenView, is_list

VERIFY: Final = ("first-use", "open", "never")
_MASK_ROWS: Final = 4096

Verify = Literal["first-use", "open", "never"]
Closing = Callable[[list[tuple[BlobPlan, Stamp]]], None]


class Reader(Dataset[dict[str, Tensor]]):
    """The samples of a snapshot, or of a build that is still growing.

    A map-style dataset. It holds no store and no index; forked and spawned workers open files for themselves and
    share what was verified. ``zgstore.read`` makes one.

    Args:
        plan: Where the bytes are.
        columns: Names to return, of the plan's; default all. The others serve for lengths, mask and positions.
        absent: Columns of the snapshot that would serve for these, and that the store has not.
        verify: ``first-use`` hashes a blob when it is first needed, ``open`` all of them now, ``never`` none.
        on_close: Called once, in this process, with the blobs verified by this reader and its workers.

    Raises:
        Invalid: for a column whose codec or dtype this version does not know.
    """

    def __init__(
        self,
        plan: ReadPlan,
        *,
        columns: Sequence[str] | None = None,
        absent: Collection[str] = (),
        verify: Verify = "first-use",
        on_close: Closing | None = None,
    ) -> None:
        if verify not in VERIFY:
            raise Invalid(f"{verify!r} is no way to verify", hint=f"one of {', '.join(VERIFY)}")
        self._table = Table(plan, hint=_mending(plan), verify=verify != "never")
        self.columns: tuple[str, ...] = tuple(self._table.forms) if columns is None else tuple(columns)
        self._absent = tuple(absent)
        self._lengths: Lengths | None = None
        self._finalizer = weakref.finalize(self, _finish, self._table.blobs, on_close, os.getpid())
        if verify == "open":
            self.verify_all()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in {"_finalizer", "_lengths"}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lengths=None)
        self._finalizer = weakref.finalize(self, _finish, self._table.blobs, None, os.getpid())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close its files and, in the process that opened it, its lease."""
        self._finalizer()

    # -- what it is ------------------------------------------------------------------------------------------------

    @property
    def snapshot(self) -> str:
        """The snapshot's digest; empty while the build grows."""
        return self._table.plan.snapshot

    @property
    def pins(self) -> str:
        """The digest of the snapshot's pins; empty for a growing build."""
        return self._table.plan.pins

    @property
    def build(self) -> str:
        """The growing build's UUID; empty for a snapshot."""
        return self._table.plan.build

    @property
    def shards(self) -> int:
        """Shards there are; more, as a build grows."""
        return len(self._table.plan.shard_rows)

    @property
    def data_digest(self) -> str:
        """The digest of the data stream, of which a sampler's order is a function."""
        return self._table.plan.data

    @property
    def schema(self) -> dict[str, Column]:
        """The returned columns by name, in order."""
        return {name: self._table.forms[name].column for name in self.columns}

    @property
    def constants(self) -> dict[str, Tensor]:
        """The blobs without a row axis."""
        return {each[0]: self._table.constant(number) for number, each in enumerate(self._table.plan.constants)}

    @property
    def bytes_read(self) -> int:
        """Bytes of rows read by this process; what verification read is ``bytes_verified``."""
        return self._table.blobs.here().bytes_read

    @property
    def bytes_verified(self) -> int:
        """Bytes hashed by this process."""
        return self._table.blobs.here().bytes_verified

    def __len__(self) -> int:
        return len(self._table)

    def __repr__(self) -> str:
        what = self.snapshot[:19] or f"build {self.build}"
        return f"Reader({what}, {len(self)} rows, columns {', '.join(self.columns)})"

    # -- samples and batches ---------------------------------------------------------------------------------------

    @overload
    def __getitem__(self, index: int) -> dict[str, Tensor]: ...
    @overload
    def __getitem__(self, index: Sequence[int]) -> dict[str, Any]: ...
    def __getitem__(self, index: Any) -> dict[str, Any]:
        """One sample, a column each; or, for a list of indices, the padded batch (`DataLoader(batch_size=None)`).

        Raises:
            IndexError: if there is no such row.
        """
        if is_list(index):
            return self.batch(index)
        return self.__getitems__([operator.index(index)])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Tensor]]:
        """The samples at ``indices``, read together: what a DataLoader's worker asks for."""
        batch = self.batch(indices, layout="list")
        return [{name: batch[name][row] for name in self.columns} for row in range(len(indices))]

    def batch(
        self,
        indices: Indices,
        layout: Layout = "padded",
        *,
        out: Buffers | None = None,
        given: Mapping[str, Sequence[Tensor]] | None = None,
    ) -> dict[str, Any]:
        """The rows at ``indices``, in that order, as tensors.

        With ``padded`` ragged columns are ``[N, T, …]``, zeros on the right; with ``packed`` ``[S, …]``, and
        ``offsets`` int64 ``[N + 1]`` say where each row begins; with ``list`` each column is a list of tensors.
        ``lengths`` int64 ``[N]``, ``mask`` bool ``[N, T]`` (true where a token is real) and ``positions`` int64, those
        that the teacher used, come along where there is a sequence axis; a column of such a name takes its place.

        Args:
            indices: Rows; negative ones count from the end.
            layout: ``padded``, ``packed`` or ``list``.
            out: Memory to read into; the next batch read into it overwrites this one.
            given: Columns that are not read because their rows come from elsewhere, in the order of ``indices``: each
                as a sample has it, without padding if the column is ragged.

        Raises:
            IndexError: if there is no such row.
            TypeError: if the indices are no list of whole numbers.
            Invalid: for an unknown layout, or a reader that was closed.
            Partial: if ``packed`` needs an attention mask that is not in this part of the snapshot.
            Transient: if the system would not read it.
            Corrupt: if a blob is met whose bytes are not what its name says.
            Missing: if a blob is gone.
        """
        check_layout_name(layout)
        forms = list(self._table.forms.values())
        given = given or {}
        for name, rows in given.items():
            self._form(name)
            if len(rows) != len(indices):
                raise Invalid(
                    f"{len(rows)} rows are given for column {name!r}, and {len(indices)} are asked for",
                    hint="give one for each index, in their order",
                )
        read = [form for form in forms if form.column.name not in given]
        contents = self._table.read(read, self._table.runs(indices), layout, out)
        for form in forms:
            if form.column.name in given:
                contents[form.column.name] = content_of(given[form.column.name], form.column, layout)
        columns = {form.column.name: form.column for form in forms}
        return assemble(layout, contents, self.columns, columns, absent=self._absent)

    def prefetch(
        self, batches: Iterable[Sequence[int]], depth: int = 2, *, layout: Layout = "padded"
    ) -> Iterator[dict[str, Any]]:
        """The batches of these indices, verified and read in a thread while the one before is used.

        Args:
            batches: Lists of indices, as a sampler yields them; taken ``depth`` ahead.
            depth: Batches in flight.
            layout: As in ``batch``.
        """
        coming = deque[Future[dict[str, Any]]]()
        pool = ThreadPoolExecutor(1, thread_name_prefix="zgstore-prefetch")
        try:
            for indices in batches:
                coming.append(pool.submit(self.batch, indices, layout))
                if len(coming) > depth:
                    yield coming.popleft().result()
            while coming:
                yield coming.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def verify_all(self) -> None:
        """Verify every blob of the plan that carries no valid stamp.

        Raises:
            Corrupt: naming the first that is not what its name says.
        """
        blobs = self._table.blobs
        blobs.require(range(len(blobs.plans)))

    # -- columns, tokens, lengths ----------------------------------------------------------------------------------

    def column(self, name: str) -> ColumnView:
        """One column by row; a slice inside a shard is a map of the file and no copy."""
        return ColumnView(self._table, self._form(name))

    def tokens(self, name: str) -> TokenView:
        """A sequence column by token: real tokens only, in stored order, each ``[…]`` without the sequence axis."""
        return TokenView(self._table, self._form(name))

    def lengths(self) -> Tensor:
        """Real tokens of every row: int64 ``[len(self)]``; 1 where there is no sequence axis.

        Read from the smallest ragged column, or summed from the attention mask of dense ones.
        """
        if self._lengths is None or len(self._lengths) != len(self):
            self._lengths = self._all_lengths()
        return torch.from_numpy(self._lengths.copy())

    def _all_lengths(self) -> Lengths:
        table = self._table
        ragged = [form for form in table.forms.values() if form.column.ragged and form.column.name != ID]
        if ragged:
            form = min(ragged, key=lambda form: sum(blob.size for blob in table.plan.columns[form.place].blobs))
            parts = table.stored_lengths(form, range(len(table.plan.shard_rows)))
            lengths = np.concatenate([np.zeros(0, np.int64), *parts])
            return np.delete(lengths, table.skips)
        columns = {name: form.column for name, form in table.forms.items()}
        length = dense_length(columns)
        mask = columns.get(MASK)
        if mask is None or mask.shape != (length,):
            return np.full(len(self), 1 if length is None else length, np.int64)
        view = self.column(MASK)
        sums = [(view[at : at + _MASK_ROWS] != 0).sum(1).numpy() for at in range(0, len(self), _MASK_ROWS)]
        return np.concatenate([np.zeros(0, np.int64), *sums])

    def _form(self, name: str) -> Form:
        if name not in self._table.forms:
            raise Partial(
                f"this reader has no column {name!r}",
                hint=f"it reads {', '.join(self.columns)}; name {name!r} in `zgstore.read(…, columns=…)` too",
                column=name,
            )
        return self._table.forms[name]


def _mending(plan: ReadPlan) -> str:
    what = plan.snapshot.removeprefix("blake3:")[:12]
    if not what:
        return "`zgstore verify --repair --recipe RECIPE` makes it anew; then build again"
    return f"`zgstore verify {what} --repair --recipe RECIPE` makes it anew (or `--from STORE`)"


def _finish(blobs: Blobs, on_close: Closing | None, owner: int) -> None:
    """Close files; in the process that opened the reader, hand over what was verified. A fork closes nothing twice."""
    if os.getpid() != owner:
        return
    blobs.close()
    if on_close is not None:
        with suppress(ZgError):  # stamps are a saving; what could not be noted is looked at again
            on_close(blobs.verified_here())


def plain_reader(state: dict[str, Any]) -> Reader:
    """A reader from a pickled state: what a reader with more to it becomes in a worker."""
    reader = Reader.__new__(Reader)
    reader.__setstate__(state)
    return reader
