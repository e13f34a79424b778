"""Batches of samples: what they may be, their digests, and their rows without padding.

Shapes: B rows of a batch, T positions, S = the sum of the rows' lengths, D whatever follows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Final, NoReturn

import numpy as np
import torch
from torch import Tensor

from zgstore.building.statistics import Seen
from zgstore.errors import Invalid
from zgstore.format.digest import Digest, digest_of
from zgstore.format.tensorfile import as_bytes, dtype_name

ID: Final = "id"
LABELS: Final = "labels"
IGNORED_LABEL: Final = -100
_JOIN_BYTES: Final = 1 << 16

Batch = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """Some samples, as they go into columns.

    Args:
        columns: Boundaries in depth order: ``[B, …]``, or ``[S, …]`` where ``packed`` names them.
        context: What a block needs beside its source (``input_ids``, ``attention_mask``, …): likewise.
        outputs: Columns of role output: likewise.
        constants: Tensors without a row axis.
        lengths: int64 ``[B]``, positions of each row; None if nothing is ragged.
        starts: int64 ``[B]``, where each row began under its padding; None if nothing is ragged.
        ids: int64 ``[B]`` or uint8 ``[B, n]``; None lets the rows be numbered.
        rows: Which rows of the data batch these are, ascending; None stands for all.
        left_out: Rows of the data batch that an extractor left out, and why.
        digests: The B row digests joined, 32 bytes each; None if they were not taken.
        packed: Names in ``columns``, ``context`` and ``outputs`` that are ragged and without padding already.
        ready: Waits until the tensors hold their values (copies from a device may be under way); None if they do.
        seen: What was seen of columns and outputs as they were copied; others are looked at when they are stored.
    """

    columns: Mapping[str, Tensor]
    context: Mapping[str, Tensor] = field(default_factory=dict)
    outputs: Mapping[str, Tensor] = field(default_factory=dict)
    constants: Mapping[str, Tensor] = field(default_factory=dict)
    lengths: Tensor | None = None
    starts: Tensor | None = None
    ids: Tensor | None = None
    rows: tuple[int, ...] | None = None
    left_out: Mapping[int, str] = field(default_factory=dict)
    digests: bytes | None = None
    packed: frozenset[str] = frozenset()
    ready: Callable[[], None] | None = None
    seen: Mapping[str, Seen] = field(default_factory=dict)

    def __len__(self) -> int:
        """B, the number of samples."""
        if self.lengths is not None:
            return len(self.lengths)
        if self.rows is not None:
            return len(self.rows)
        for tensors in (self.columns, self.outputs, self.context):
            for tensor in tensors.values():
                return len(tensor)
        return 0

    def wait(self) -> SampleBatch:
        """The batch once its tensors hold their values."""
        if self.ready is None:
            return self
        self.ready()
        return replace(self, ready=None)


def check_batch(batch: Any, *, constants: Collection[str] = (), what: str = "the data factory") -> int:
    """See that a batch is a mapping of tensors that agree in their first axis; the number of its rows.

    The entry ``id`` may also be a list of bytes.

    Args:
        batch: What the data factory gave.
        constants: Entries without a row axis.
        what: Who gave it, for the message.

    Raises:
        Invalid: saying what was got.
    """
    if not isinstance(batch, Mapping):
        raise Invalid(
            f"{what} gave a {_typed(batch)} where a mapping of tensors was expected",
            hint='yield mappings such as {"input_ids": tensor, "attention_mask": tensor}, first axis = samples',
        )
    counts: dict[str, int] = {}
    for key, value in batch.items():
        if not isinstance(key, str):
            raise Invalid(f"{what} gave a batch with the key {key!r:.40}", hint="keys are text")
        if key == ID and isinstance(value, list | tuple):
            counts[key] = len(value)
            continue
        if not isinstance(value, Tensor):
            raise Invalid(
                f"{what} gave a batch whose {key!r} is a {_typed(value)}, not a tensor",
                hint="yield tensors only, first axis = samples; make lists tensors, leave text out",
            )
        dtype_name(value, what=f"the batch's {key!r}")
        if key in constants:
            continue
        if not value.dim():
            raise Invalid(
                f"{what} gave a batch whose {key!r} has no axis, and so no samples",
                hint=f"give it a first axis, or list {key!r} under constants",
            )
        counts[key] = len(value)
    if not counts:
        raise Invalid(f"{what} gave a batch without tensors", hint="yield at least one tensor, first axis = samples")
    if len(set(counts.values())) > 1:
        said = ", ".join(f"{key} {count}" for key, count in counts.items())
        raise Invalid(
            f"{what} gave a batch whose tensors disagree about the number of samples: {said}",
            hint="give all tensors the same first axis, or list those without one under constants",
        )
    rows = next(iter(counts.values()))
    if not rows:
        raise Invalid(f"{what} gave a batch of zero rows", hint="leave empty batches out")
    return rows


def _typed(value: Any) -> str:
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(value, Mapping | list | tuple | str | bytes):
        return f"{name} of {len(value)}"
    return name


def own(given: Mapping[str, Any]) -> dict[str, Any]:
    """The same entries with tensors of their own: what waits is read when who made it may have filled it again."""
    return {key: value.detach().clone() if isinstance(value, Tensor) else value for key, value in given.items()}


def labels_masked(batch: Batch, *, key: str = LABELS) -> bool:
    """Whether a batch has labels and every one of them is −100.

    One such row, or batch, is legal. A stream in which every batch says so trains nothing, and is the builder's to
    refuse.
    """
    labels = batch.get(key)
    return isinstance(labels, Tensor) and not labels.is_floating_point() and bool((labels == IGNORED_LABEL).all())


def lengths_of(batch: Batch, rule: str) -> tuple[Tensor, Tensor]:
    """How long each row is, and where it begins.

    Args:
        batch: A checked batch.
        rule: The entry that says so: a mask ``[B, T]`` of one run of ones a row, padded left or right; or integer
            lengths ``[B]`` of rows that are padded on the right.

    Returns:
        int64 ``[B]`` lengths, int64 ``[B]`` starts.

    Raises:
        Invalid: naming the row that breaks the rule.
    """
    if rule not in batch:
        raise Invalid(f"the batch has no {rule!r} to take lengths from", hint=f"it has {', '.join(sorted(batch))}")
    tensor = batch[rule].detach().cpu()
    if tensor.dim() == 1 and tensor.dtype != torch.bool and not tensor.is_floating_point():
        lengths = tensor.to(torch.int64)
        if bool((lengths < 1).any()):
            _refuse_row((lengths < 1).numpy(), rule, "has no position", "leave empty rows out")
        return lengths, torch.zeros_like(lengths)
    if tensor.dim() != 2:
        raise Invalid(
            f"{rule!r} has the shape {list(tensor.shape)}, from which no lengths can be taken",
            hint="give a mask [rows, positions] of zeros and ones, or integer lengths [rows]",
        )
    # In numpy: a batch is small, and this is done for every batch of every build.
    mask = (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()
    positions = mask.shape[1]
    ones = mask != 0
    if not (mask == ones).all():
        _refuse_row((mask != ones).any(1), rule, "holds other numbers than 0 and 1", "give 0 or 1")
    counts = np.count_nonzero(ones, axis=1)
    if not counts.all():
        _refuse_row(counts == 0, rule, "is all zeros", "leave empty rows out")
    starts = ones.argmax(1)
    ends = positions - ones[:, ::-1].argmax(1)
    if not (ends - starts == counts).all():
        _refuse_row(ends - starts != counts, rule, "is not one run of ones", "pad on the left or the right only")
    return torch.from_numpy(counts), torch.from_numpy(starts)


def _refuse_row(bad: np.ndarray[tuple[int, ...], np.dtype[Any]], rule: str, fault: str, hint: str) -> NoReturn:
    row = int(bad.argmax())
    raise Invalid(f"row {row} of {rule!r} {fault}", hint=hint, row=row)


def strip(tensor: Tensor, lengths: Tensor, starts: Tensor, *, what: str = "the tensor") -> Tensor:
    """The rows without their padding, joined.

    Args:
        tensor: ``[B, T, …]``.
        lengths: int64 ``[B]``.
        starts: int64 ``[B]``.
        what: What it is, for the message.

    Returns:
        ``[S, …]``; a view where nothing is padded.

    Raises:
        Invalid: if the tensor has too few rows or positions.
    """
    pieces = pieces_of(tensor, lengths, starts, what=what)
    if len(tensor) and bool((lengths == tensor.shape[1]).all()):
        return tensor.flatten(0, 1)
    return torch.cat(pieces)


def pieces_of(tensor: Tensor, lengths: Tensor, starts: Tensor, *, what: str = "the tensor") -> list[Tensor]:
    """Views of the rows without their padding: ``[length, …]`` each.

    Raises:
        Invalid: if the tensor has too few rows or positions.
    """
    longest = int((starts + lengths).max()) if len(lengths) else 0
    _check_positions(tensor, len(lengths), longest, what=what)
    return [tensor[row, s : s + n] for row, (s, n) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True))]


def _check_positions(tensor: Tensor, rows: int, longest: int, *, what: str) -> None:
    if tensor.dim() < 2 or len(tensor) != rows or tensor.shape[1] < longest:
        raise Invalid(
            f"{what} has the shape {list(tensor.shape)}, where {rows} rows of up to {longest} positions were "
            "expected: lengths must agree",
            hint="give every sequence column the axes [rows, positions], or leave it out of `sequence`",
        )


def ids_of(batch: Batch, *, first: int = 0) -> Tensor:
    """The rows' ids: the batch's ``id``, else their stream indices.

    Args:
        batch: A checked batch.
        first: Stream index of its first row.

    Returns:
        int64 ``[B]`` or uint8 ``[B, n]``.

    Raises:
        Invalid: if ``id`` is neither integers nor bytes of one width.
    """
    ids = batch.get(ID)
    if ids is None:
        rows = next(len(value) for value in batch.values())
        return torch.arange(first, first + rows, dtype=torch.int64, device="cpu")
    if isinstance(ids, Tensor):
        if ids.dim() == 1 and not ids.is_floating_point() and ids.dtype != torch.bool:
            return ids.detach().cpu().to(torch.int64)
        if ids.dim() == 2 and ids.dtype == torch.uint8:
            return ids.detach().cpu()
        said = f"{ids.dtype} {list(ids.shape)}"
    else:
        if all(isinstance(each, bytes) for each in ids) and len({len(each) for each in ids}) == 1:
            return torch.frombuffer(bytearray(b"".join(ids)), dtype=torch.uint8).view(len(ids), -1)
        said = "a list that is not of bytes of one width"
    raise Invalid(f"the batch's 'id' is {said}", hint="give int64 [rows], or bytes of one width for each row")


def row_digests(
    batch: Batch,
    *,
    lengths: str | None = None,
    sequence: Collection[str] = (),
    constants: Collection[str] = (),
) -> list[Digest]:
    """The digest of each sample: its sorted (key, dtype, shape, bytes), without padding and without ``id``.

    Args:
        batch: A mapping of tensors, first axis = samples.
        lengths: The entry that says how long each row is (see `lengths_of`); None: rows are taken as they are.
        sequence: The entries that have the sequence axis; a mask under ``lengths`` is one of them anyway.
        constants: Entries without a row axis, which belong to no sample.

    Raises:
        Invalid: if it is no batch, or has no such lengths.
    """
    rows = check_batch(batch, constants=constants)
    keys = sorted(key for key in batch if key != ID and key not in constants)
    runs: list[tuple[int, int]] = []
    ragged: set[str] = set()
    distinct: set[int] = set()
    if lengths is not None:
        counts, starts = lengths_of(batch, lengths)
        runs = list(zip(starts.tolist(), counts.tolist(), strict=True))
        longest = max(start + count for start, count in runs)
        distinct = {count for _, count in runs}
        ragged = {key for key in keys if key in sequence or (key == lengths and batch[key].dim() == 2)}
        for key in ragged:
            _check_positions(batch[key], rows, longest, what=f"the batch's {key!r}")
    chunks: list[list[bytes | memoryview]] = [[] for _ in range(rows)]
    for key in keys:
        tensor = batch[key]
        data = as_bytes(tensor, what=f"the batch's {key!r}")
        dtype, shape = dtype_name(tensor), tuple(tensor.shape[1:])
        width = len(data) // rows
        if key not in ragged:
            head = _head(key, dtype, shape)
            for row, chunk in enumerate(chunks):
                chunk.extend((head, data[row * width : (row + 1) * width]))
            continue
        heads = {count: _head(key, dtype, (count, *shape[1:])) for count in distinct}
        step = width // shape[0]
        for row, (chunk, (start, count)) in enumerate(zip(chunks, runs, strict=True)):
            at = row * width + start * step
            chunk.extend((heads[count], data[at : at + count * step]))
    # A small row is joined before it is hashed: fewer calls beat fewer copies.
    large = sum(map(len, chunks[0])) >= _JOIN_BYTES
    return [digest_of("row", *chunk) if large else digest_of("row", b"".join(chunk)) for chunk in chunks]


@lru_cache(maxsize=4096)
def _head(key: str, dtype: str, shape: tuple[int, ...]) -> bytes:
    """Key, dtype and shape so that no two can be written alike: the key's length first, then text without it."""
    name = key.encode()
    return len(name).to_bytes(8, "little") + name + f"{dtype}[{','.join(map(str, shape))}]".encode()


def batch_digest(batch: Batch, *, ids: bool = False) -> Digest:
    """The digest of a batch as the factory gave it: key, dtype, shape, bytes, padding included.

    Args:
        batch: A checked batch.
        ids: Whether ``id`` takes part too, as it does in the key of the column ``id`` alone.
    """
    chunks: list[bytes | memoryview] = []
    for key in sorted(batch):
        value = batch[key]
        if key == ID:
            if not ids:
                continue
            value = ids_of(batch)
        chunks += [_head(key, dtype_name(value), tuple(value.shape)), as_bytes(value)]
    return digest_of("batch", *chunks)


def join(digests: Sequence[Digest]) -> bytes:
    """Digests as `SampleBatch.digests` and the row pages hold them: 32 bytes each."""
    return b"".join(digest.raw for digest in digests)
