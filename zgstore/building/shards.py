"""Shards on their way to the disk: columns streamed into blobs as states come, two side by side.

Who brings a batch looks at it and shares its writing with a second thread; or leaves both to the writing thread, whose
work is bounded by bytes, so that memory holds a few batches, and whose failure ends the build at the next one.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType, TracebackType
from typing import Any, Final, Self

import torch
from torch import Tensor

from zgstore.building.planner import Wanted
from zgstore.building.pool import Pool
from zgstore.building.statistics import Seen, look, nonfinite_rows
from zgstore.errors import Invalid
from zgstore.format.blobheader import BlobHeader, layout_of_column
from zgstore.format.digest import Digest
from zgstore.format.manifest import Column
from zgstore.format.pages import Blob
from zgstore.format.tensorfile import TORCH_OF, as_bytes, dtype_name, int8_encode, offsets_of
from zgstore.storage.drafts import Draft
from zgstore.storage.sharing import Job, SecondThread
from zgstore.storage.store import Session

QUEUE_BYTES: Final = 256 << 20
_SHOWN_VALUES: Final = 4


class Background:
    """The writing thread, which does what it is given, in order; and a second one, which shares what anybody does.

    Args:
        budget_bytes: How much may wait; one piece may always.
    """

    def __init__(self, budget_bytes: int = QUEUE_BYTES) -> None:
        self._budget = budget_bytes
        self._waiting = 0
        self._queue: deque[tuple[Callable[[], None] | None, int]] = deque()
        self._changed = threading.Condition()
        self._cause: BaseException | None = None
        self._dropping = False
        self._second = SecondThread("zgstore-writer-2")
        self._thread = threading.Thread(target=self._work, name="zgstore-writer", daemon=True)
        try:
            self._thread.start()
        except BaseException:  # an interrupt, while it starts
            self._end()
            raise

    def submit(self, work: Callable[[], None], *, weight_bytes: int = 0) -> None:
        """Queue ``work``; waits while too many bytes do.

        Raises:
            Whatever earlier work raised.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._cause or not self._waiting or self._waiting + weight_bytes <= self._budget
            )
            self._raise()
            self._waiting += weight_bytes
            self._queue.append((work, weight_bytes))
            self._changed.notify_all()

    def share(self, jobs: Sequence[Job]) -> None:
        """Do the jobs side by side, on the caller's thread and the second one.

        Raises:
            Whatever work that was queued earlier raised; what the first job that failed raised.
        """
        self._raise()
        self._second.share(jobs)

    def drain(self) -> None:
        """Wait until all that was queued is done.

        Raises:
            Whatever it raised.
        """
        done = threading.Event()
        self.submit(done.set)
        self.wait(done)

    def wait(self, done: threading.Event) -> None:
        """Wait until a queued work has set this.

        Raises:
            Whatever the thread raised meanwhile.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._cause or done.is_set())
            self._raise()

    def close(self) -> None:
        """Drop what has not begun, and end both threads."""
        # Both are told before either is waited for: another interrupt may end the wait, and they end all the same.
        self._end()
        self._thread.join()
        self._second.join()  # after an interrupt it may still be at a job

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _end(self) -> None:
        self._second.close()
        with self._changed:
            self._dropping = True
            self._queue.append((None, 0))
            self._changed.notify_all()

    def _raise(self) -> None:
        if self._cause is not None:
            raise self._cause

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue)
                work, weight = self._queue.popleft()
                dropping = self._dropping or self._cause is not None
            if work is None:
                return
            try:
                if not dropping:
                    work()
            except BaseException as error:  # noqa: BLE001 - it is raised again where the build waits
                self._cause = error
            finally:
                del work
                with self._changed:
                    self._waiting -= weight
                    self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class Stored:
    """A column of a shard, durable.

    Args:
        column: As it came out.
        blob: Its bytes.
        rows: Its rows.
        nonfinite: Rows (ascending) with NaN or Inf.
        statistics: ``rms``, ``min``, ``max`` and, under int8, ``error``.
    """

    column: Column
    blob: Blob
    rows: int
    nonfinite: tuple[int, ...]
    statistics: Mapping[str, float]


class ShardDraft:
    """One shard being written: its missing columns.

    Args:
        session: Whose drafts.
        columns: What is written.
        lengths: int64, of all the shard's rows, so that offsets can be written first; None without a ragged rule.
        rows: Rows of the shard; None where an extractor may leave some out: then it is held in memory until its end.
        pool: Where captured tensors go back to.
    """

    def __init__(
        self, session: Session, columns: Sequence[Wanted], *, rows: int | None, lengths: Tensor | None,
        pool: Pool | None = None,
    ) -> None:  # fmt: skip
        self._streams = {wanted.name: _Stream(session, wanted, rows=rows, lengths=lengths) for wanted in columns}
        self._pool = pool

    def take(
        self, tensors: Mapping[str, Tensor], *, lengths: Tensor | None = None, packed: frozenset[str] = frozenset(),
        pooled: frozenset[str] = frozenset(), seen: Mapping[str, Seen] = MappingProxyType({}),
    ) -> list[Job]:  # fmt: skip
        """Look at the next batch; what is returned appends it, a job for each column.

        The jobs of one batch may be done side by side, on any threads; batch follows batch in the order of taking.

        Args:
            tensors: Column → ``[B, …]``, or ``[S, …]`` where ``packed`` names it.
            lengths: int64 ``[B]`` of this batch.
            packed: Columns without padding.
            pooled: Columns whose memory goes back to the pool.
            seen: Of columns that were looked at before.

        Raises:
            Invalid: if it lacks a column, or has one of another dtype or shape than before.
        """
        jobs: list[Job] = []
        for name, stream in self._streams.items():
            if name not in tensors:
                raise Invalid(
                    f"a batch has no {name!r}, which others of its shard have",
                    hint=f"it has {', '.join(sorted(tensors))}; give every batch the same columns",
                )
            given, pool = tensors[name], self._pool if name in pooled else None
            tensor = stream.take(given, lengths if name in packed else None, seen.get(name))
            if pool is not None and tensor is not given:
                pool.give(given)
                pool = None
            jobs.append(partial(stream.append, tensor, pool))
        return jobs

    def check(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Column → rows that are not finite, and the first one's first values; empty: all are."""
        return {
            name: (tuple(stream.nonfinite), stream.shown) for name, stream in self._streams.items() if stream.nonfinite
        }

    def keep(self) -> list[Stored]:
        """Make the blobs durable and give them their names (FORMAT 1, 7.2 and 7.3), column by column."""
        return [stream.keep() for stream in self._streams.values()]

    def keep_expected(self, expected: Mapping[str, Digest]) -> dict[str, Blob]:
        """Keep the blobs that come out as expected and discard the others; column → what came out."""
        return {name: stream.keep_if(expected.get(name)) for name, stream in self._streams.items()}

    def discard(self) -> None:
        """Remove what has been written."""
        for stream in self._streams.values():
            stream.discard()


class _Stream:
    """One column of one shard on its way into its blob."""

    def __init__(self, session: Session, wanted: Wanted, *, rows: int | None, lengths: Tensor | None) -> None:
        self._session = session
        self._wanted = wanted
        self._rows = rows
        self._lengths = lengths
        self._seen_rows = 0
        self._seen_lengths: list[Tensor] = []
        self._held: dict[str, list[Tensor]] = {}
        self._draft: Draft | None = None
        self._offsets_last = False
        self._worst = 0.0
        self.column: Column | None = None
        self.header: BlobHeader | None = None
        self.seen = Seen()
        self.nonfinite: list[int] = []
        self.shown = ""

    def take(self, given: Tensor, lengths: Tensor | None, seen: Seen | None) -> Tensor:
        """Look at the next batch as it is stored, unless it was seen; the tensor itself, or a copy in another dtype."""
        wanted, tensor = self._wanted, given
        if wanted.dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(TORCH_OF[wanted.dtype])
        shape = tuple(tensor.shape[1:]) if lengths is None else (None, *tensor.shape[1:])
        column = wanted.column(dtype_name(tensor, what=f"column {wanted.name!r}"), shape)
        if self.column is None:
            self._begin(column)
        elif column != self.column:
            raise Invalid(
                f"column {wanted.name!r} is {column.dtype} {list(column.shape)} in one batch and {self.column.dtype} "
                f"{list(self.column.shape)} in another",
                hint="give every batch the same shape, or store sequences without padding: lengths and sequence",
            )
        rows = len(tensor) if lengths is None else len(lengths)
        if wanted.role != "context":
            seen = look(tensor) if seen is None or tensor is not given else seen
            self.seen += seen
            if tensor.is_floating_point() and seen.count < tensor.numel():
                self._note_nonfinite(tensor, rows, lengths)
        self._seen_rows += rows
        if lengths is not None:
            self._seen_lengths.append(lengths)
        return tensor

    def _note_nonfinite(self, tensor: Tensor, rows: int, lengths: Tensor | None) -> None:
        # int8 has no −inf: what is masked would come back as NaN, and its neighbours with it.
        masks = self._wanted.role == "output" and self._wanted.codec == "raw"
        bad = nonfinite_rows(tensor, lengths, masks=masks)
        if bad and not self.shown:
            self.shown = _first_values(tensor, rows, bad[0], lengths)
        self.nonfinite += [self._seen_rows + row for row in bad]

    def append(self, tensor: Tensor, pool: Pool | None) -> None:
        """Append what was taken, and give its memory back once it is not needed."""
        if self._wanted.codec == "int8":
            encoded = int8_encode(tensor, what=f"column {self._wanted.name!r}")
            self._worst = max(self._worst, encoded.max_error)
            self._held.setdefault("data", []).append(encoded.data)
            self._held.setdefault("scale", []).append(encoded.scale)
        elif self._draft is not None:
            self._draft.write(as_bytes(tensor))
        else:
            self._held.setdefault("data", []).append(tensor)
            return
        if pool is not None:
            pool.give(tensor)

    def _begin(self, column: Column) -> None:
        self.column = column
        if self._rows is None:
            return
        tokens = int(self._lengths.sum()) if column.ragged and self._lengths is not None else 0
        self.header = layout_of_column(column, rows=self._rows, tokens=tokens)
        if column.codec == "raw":
            self._open(self._lengths)

    def _open(self, lengths: Tensor | None) -> None:
        """Begin the file: the header, and the offsets where they come before the data."""
        assert self.header is not None
        assert self.column is not None
        self._draft = self._session.draft(size_hint=self.header.file_size)
        self._draft.write(self.header.encode())
        self._offsets_last = self.column.ragged and self.header.tensors[-1].name == "offsets"
        if self.column.ragged and not self._offsets_last:
            assert lengths is not None
            self._draft.write(as_bytes(offsets_of(lengths)))

    def _complete(self) -> Draft:
        """Write what is left, and see that all rows came."""
        if self.column is None:
            raise Invalid(f"column {self._wanted.name!r} of a shard got no batch", hint="add one before it is kept")
        if self._rows is not None and self._seen_rows != self._rows:
            raise Invalid(
                f"column {self.column.name!r} got {self._seen_rows} rows of a shard of {self._rows}",
                hint="the capture must give each row once",
            )
        lengths = torch.cat(self._seen_lengths) if self._seen_lengths else None
        if self._draft is None:
            tokens = int(lengths.sum()) if lengths is not None else 0
            self.header = layout_of_column(self.column, rows=self._seen_rows, tokens=tokens)
            self._open(lengths)
        assert self._draft is not None
        for name in ("scale", "data"):  # the larger elements first, as the layout has them
            for piece in self._held.get(name, ()):
                self._draft.write(as_bytes(piece))
        self._held.clear()
        if self._offsets_last:
            assert lengths is not None
            self._draft.write(as_bytes(offsets_of(lengths)))
        return self._draft

    def keep(self) -> Stored:
        blob = self._session.keep(self._complete())
        assert self.column is not None
        statistics = self.seen.as_value()
        if self.column.codec == "int8":
            statistics["error"] = self._worst
        return Stored(self.column, blob, self._seen_rows, tuple(self.nonfinite), statistics)

    def keep_if(self, expected: Digest | None) -> Blob:
        draft = self._complete()
        blob = draft.finish()
        if blob.digest == expected:
            self._session.keep(draft)
        else:
            draft.discard()
        return blob

    def discard(self) -> None:
        if self._draft is not None:
            self._draft.discard()
        self._held.clear()


def _first_values(tensor: Tensor, rows: int, row: int, lengths: Tensor | None) -> str:
    """The first values that are not finite in a row of a batch."""
    if lengths is None:
        values = tensor.reshape(rows, -1)[row]
    else:
        end = int(lengths[: row + 1].sum())
        values = tensor[end - int(lengths[row]) : end].flatten()
    values = values.to(torch.float32) if values.dtype.itemsize == 1 else values
    odd = values[~torch.isfinite(values)]
    # Masks, which may be legal, last. Not joined by torch, which refuses some dtypes under autocast.
    faults, masks = (odd[where][:_SHOWN_VALUES].tolist() for where in (odd != -math.inf, odd == -math.inf))
    return ", ".join(map(str, [*faults, *masks][:_SHOWN_VALUES]))


def weight_of(tensors: Mapping[str, Any]) -> int:
    """Bytes of the tensors, for the queue."""
    return sum(tensor.nbytes for tensor in tensors.values() if isinstance(tensor, Tensor))
