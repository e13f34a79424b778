"""The data stream read ahead: digests, lengths and ids of every batch, and the batches again when they are needed.

Inputs are small beside what a teacher makes of them, so a build first reads them all; only then is known what is
missing. While they fit ``KEEP_BYTES`` they are kept; else the factory is asked again, and must say the same.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from zgstore.building.recipe import CaptureSpec, Recipe
from zgstore.building.rows import (
    ID,
    IGNORED_LABEL,
    LABELS,
    Batch,
    batch_digest,
    check_batch,
    ids_of,
    labels_masked,
    lengths_of,
    own,
    row_digests,
    strip,
)
from zgstore.errors import Invalid, Refused
from zgstore.format.digest import DIGEST_BYTES, digest_of
from zgstore.format.manifest import Column
from zgstore.format.tensorfile import as_bytes, dtype_name

KEEP_BYTES: Final = 256 << 20
START: Final = "start"
POSITIONS: Final = "position_ids"


@dataclass(frozen=True, slots=True)
class BatchInfo:
    """What is known of one batch without its teacher.

    Args:
        rows: Its rows, after the limit.
        first: Stream index of the first.
        tokens: Sum of their lengths; 0 without a ragged rule.
        digest: 32 bytes over its tensors, padding included and ``id`` left out.
        ids: 32 bytes over its rows' ids.
    """

    rows: int
    first: int
    tokens: int
    digest: bytes
    ids: bytes


@dataclass(frozen=True, slots=True)
class Inputs:
    """The whole stream.

    Args:
        batches: In stream order.
        row_digests: 32 bytes a row, joined.
        pins: What the factory reports beside its batches.
        context: Columns that are functions of the batches alone: the listed ones, ``id`` and perhaps ``start``; none
            with an extractor, which may replace them or leave rows out.
        constants: Batch entries without a row axis that are to be kept.
        lengths: int64 ``[rows]`` with a ragged rule; else None.
        kept: The batches themselves, if they are few enough to be kept.
        total_bytes: Of all batches.
        seconds: Spent reading and hashing.
    """

    batches: tuple[BatchInfo, ...]
    row_digests: bytes
    pins: Mapping[str, Any]
    context: tuple[Column, ...]
    constants: Mapping[str, Tensor] = field(default_factory=dict)
    lengths: Tensor | None = None
    kept: tuple[Batch, ...] | None = None
    total_bytes: int = 0
    seconds: float = 0.0

    @property
    def rows(self) -> int:
        """Rows of the stream."""
        return len(self.row_digests) // DIGEST_BYTES


def read_inputs(recipe: Recipe, *, limit: int | None = None, keep_bytes: int | None = None) -> Inputs:
    """Read the stream once.

    Args:
        recipe: Whose data.
        limit: At most so many rows; the last batch is cut.
        keep_bytes: How much of the batches may stay in memory; None: ``KEEP_BYTES``.

    Raises:
        Invalid: for no rows, a batch that is none, a column that a batch lacks, constants that change, or labels that
            are masked everywhere.
    """
    if limit is not None and limit < 1:
        raise Invalid(f"a limit of {limit} rows leaves nothing to build", hint="give at least 1")
    began = time.perf_counter()
    keep_bytes = KEEP_BYTES if keep_bytes is None else keep_bytes
    reading = _Reading(recipe.capture)
    source = recipe.data.batches()
    infos: list[BatchInfo] = []
    digests: list[bytes] = []
    kept: list[Batch] | None = []
    total_bytes = 0
    for batch in _limited(source, recipe, limit):
        info, rows = reading.read(batch)
        infos.append(info)
        digests.append(rows)
        total_bytes += sum(value.nbytes for value in batch.values() if isinstance(value, Tensor))
        if kept is not None:
            kept.append(own(batch))
            kept = kept if total_bytes <= keep_bytes else None
    reading.finish()
    return Inputs(
        batches=tuple(infos),
        row_digests=b"".join(digests),
        pins=source.pins,
        context=tuple(reading.columns.values()),
        constants=reading.constants,
        lengths=torch.cat(reading.lengths) if reading.lengths else None,
        kept=None if kept is None else tuple(kept),
        total_bytes=total_bytes,
        seconds=time.perf_counter() - began,
    )


class Replay:
    """The stream once more, moving forward: kept batches, or the factory asked a second time.

    Args:
        recipe: Whose data.
        inputs: What the first reading saw.
        limit: As in the first reading.
    """

    def __init__(self, recipe: Recipe, inputs: Inputs, *, limit: int | None) -> None:
        self._recipe = recipe
        self._inputs = inputs
        self._limit = limit
        self._steps: Iterator[Batch] | None = None
        self._at = 0

    def batch(self, index: int) -> Batch:
        """Batch ``index`` of the stream; indices must not decrease.

        Raises:
            Refused: if the second reading differs from the first.
        """
        if self._inputs.kept is not None:
            return self._inputs.kept[index]
        if self._steps is None or index < self._at:
            self._steps, self._at = _limited(self._recipe.data.batches(), self._recipe, self._limit), 0
        for batch in self._steps:
            self._at += 1
            if self._at - 1 < index:
                continue
            info = self._inputs.batches[index]
            if batch_digest(batch).raw != info.digest or _ids_digest(batch, info.first) != info.ids:
                break
            return own(batch)
        raise Refused(
            f"{self._recipe.data.factory.text!r} gave another batch {index} when it was read a second time",
            hint="make the data factory give the same batches each time it is called: fix its seeds and its order",
            batch=index,
        )


def context_tensor(batch: Batch, column: Column, runs: tuple[Tensor, Tensor] | None, *, first: int) -> Tensor:
    """A context column's part of a batch.

    Args:
        batch: A checked batch.
        column: One of ``Inputs.context``.
        runs: int64 ``[B]`` lengths and starts; None without a ragged rule.
        first: Stream index of its first row.

    Returns:
        ``[B, …]``, or ``[S, …]`` where the column is ragged.
    """
    if column.name == ID:
        return ids_of(batch, first=first)
    if runs is not None and column.name == START:
        return runs[1]
    tensor: Tensor = batch[column.name]
    if runs is None or not column.ragged:
        return tensor
    return strip(tensor, *runs, what=f"context column {column.name!r}")


def is_ragged(name: str, tensor: Tensor, capture: CaptureSpec) -> bool:
    """Whether a batch entry is stored without padding."""
    return capture.lengths is not None and (name in capture.sequence or (name == capture.lengths and tensor.dim() == 2))


class _Reading:
    """What must agree from batch to batch."""

    def __init__(self, capture: CaptureSpec) -> None:
        self.capture = capture
        self.columns: dict[str, Column] = {}
        self.constants: dict[str, Tensor] = {}
        self.lengths: list[Tensor] = []
        self.rows = 0
        self._masked = True
        self._labelled = False

    def read(self, batch: Batch) -> tuple[BatchInfo, bytes]:
        capture = self.capture
        rows = next(len(v) for k, v in batch.items() if k not in capture.constants)
        self._agree(batch)
        self._masked = self._masked and labels_masked(batch)
        self._labelled = self._labelled or LABELS in batch
        tokens = 0
        if capture.lengths:
            lengths = lengths_of(batch, capture.lengths)[0]
            self.lengths.append(lengths)
            tokens = int(lengths.sum())
        digests = row_digests(batch, lengths=capture.lengths, sequence=capture.sequence, constants=capture.constants)
        info = BatchInfo(rows, self.rows, tokens, batch_digest(batch).raw, _ids_digest(batch, self.rows))
        self.rows += rows
        return info, b"".join(digest.raw for digest in digests)

    def _agree(self, batch: Batch) -> None:
        for name in self.capture.constants:
            if name in batch:
                known = self.constants.setdefault(name, batch[name].detach().cpu().clone())
                if known.dtype != batch[name].dtype or not torch.equal(known, batch[name].detach().cpu()):
                    raise Invalid(
                        f"the constant {name!r} is another one in the batch at row {self.rows}",
                        hint="a constant is the same in every batch; list what changes under context",
                    )
            elif self.capture.extractor is None:
                raise self._lacks("constant", name, batch)
        if self.capture.extractor is not None:
            return  # it says itself what its context is
        for column in self._columns_of(batch):
            known_column = self.columns.setdefault(column.name, column)
            if known_column != column:
                raise Invalid(
                    f"context column {column.name!r} is {column.dtype} {list(column.shape)} in the batch at row "
                    f"{self.rows}, and {known_column.dtype} {list(known_column.shape)} before it",
                    hint="give every batch the same shape, or store it without padding: lengths and sequence",
                )

    def _columns_of(self, batch: Batch) -> Iterator[Column]:
        for name in self.capture.context:
            if name not in batch:
                raise self._lacks("context column", name, batch)
            tensor = batch[name]
            ragged = is_ragged(name, tensor, self.capture)
            shape = (None, *tensor.shape[2:]) if ragged else tuple(tensor.shape[1:])
            yield Column(name, "context", dtype_name(tensor), "raw", shape)
        ids = ids_of(batch, first=self.rows)
        yield Column(ID, "context", dtype_name(ids), "raw", tuple(ids.shape[1:]))
        if self.capture.lengths is not None and POSITIONS not in self.capture.context:
            yield Column(START, "context", "I64", "raw", ())

    def _lacks(self, what: str, name: str, batch: Batch) -> Invalid:
        return Invalid(
            f"the batch at row {self.rows} has no {what} {name!r}",
            hint=f"it has {', '.join(sorted(batch))}",
            column=name,
        )

    def finish(self) -> None:
        if not self.rows:
            raise Invalid("the data factory gave no rows", hint="see that its files are there and not empty")
        if self._labelled and self._masked:
            raise Invalid(
                f"every label is {IGNORED_LABEL}: nothing could be learned from this data",
                hint="see how the data factory masks labels (assistant_only, the template, the maximum length)",
            )


def _limited(source: Any, recipe: Recipe, limit: int | None) -> Iterator[Batch]:
    """Checked batches up to ``limit`` rows, the last one cut."""
    constants, left = recipe.capture.constants, limit
    for batch in source:
        rows = check_batch(batch, constants=constants, what=repr(recipe.data.factory.text))
        if left is None or rows < left:
            yield batch
        else:
            yield batch if rows == left else {k: v if k in constants else v[:left] for k, v in batch.items()}
            return
        left = None if left is None else left - rows


def _ids_digest(batch: Batch, first: int) -> bytes:
    ids = ids_of(batch, first=first)
    return digest_of("batch", repr((str(ids.dtype), tuple(ids.shape))).encode(), as_bytes(ids)).raw
