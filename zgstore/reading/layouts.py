"""Rows of one batch as tensors: right-padded, packed end to end, or listed; with lengths, mask and positions.

Shapes: N rows, T the longest length, S the sum of the lengths.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from zgstore.errors import Corrupt, Invalid, Partial
from zgstore.format.manifest import Column
from zgstore.format.tensorfile import TORCH_OF

Layout = Literal["padded", "packed", "list"]
LAYOUTS: Final = ("padded", "packed", "list")
POSITIONS, START, MASK, ID = "position_ids", "start", "attention_mask", "id"

Lengths = NDArray[np.int64]


class Buffers:
    """Memory that one batch after another is read into.

    A batch that was read into it is overwritten by the next: copy what must last, or use two in turn.

    Args:
        pin_memory: Page-locked, for asynchronous copies to a GPU.
    """

    def __init__(self, *, pin_memory: bool = False) -> None:
        self.pin_memory = pin_memory
        self._held: dict[str, Tensor] = {}

    def take(self, key: str, size: int) -> Tensor:
        """uint8 ``[size]``, the same memory for the same key while it is large enough."""
        held = self._held.get(key)
        if held is None or len(held) < size:
            held = self._held[key] = torch.empty(size, dtype=torch.uint8, pin_memory=self.pin_memory, device="cpu")
        return held[:size]

    def forget(self) -> None:
        """Take other memory from now on: somebody may still be filling this."""
        self._held.clear()

    def __getstate__(self) -> dict[str, Any]:
        return {"pin_memory": self.pin_memory, "_held": {}}


@dataclass(frozen=True, slots=True)
class Content:
    """A column of a batch.

    Args:
        values: ``[N, …]`` of a dense column; of a ragged one ``[S, …]``, or ``[N, T, …]`` when it was read padded.
        lengths: int64 ``[N]`` of a ragged column; None of a dense one.
    """

    values: Tensor
    lengths: Lengths | None = None


def auxiliaries(chosen: Iterable[Column], available: Iterable[Column]) -> list[str]:
    """Context columns that lengths, mask and positions of the chosen columns are made of.

    Args:
        chosen: The columns that are wanted.
        available: The snapshot's columns.
    """
    chosen, wanted = list(chosen), set()
    if any(column.ragged and column.name != ID for column in chosen):
        wanted |= {POSITIONS, START}
    if any(not column.ragged and len(column.shape) >= 2 for column in chosen):
        wanted |= {MASK, POSITIONS}
    names = {column.name for column in chosen}
    return [column.name for column in available if column.name in wanted - names]


def check_layout_name(layout: str) -> None:
    if layout not in LAYOUTS:
        raise Invalid(f"{layout!r} is not a layout", hint=f"one of {', '.join(LAYOUTS)}")


def dense_length(columns: Mapping[str, Column]) -> int | None:
    """T of columns that are stored with their padding; None where there is no sequence axis."""
    mask = columns.get(MASK)
    if mask is not None and len(mask.shape) == 1:
        return mask.shape[0]
    for column in columns.values():
        if not column.ragged and column.role != "context" and len(column.shape) >= 2:
            return column.shape[0]
    for name in ("input_ids", POSITIONS, "labels"):
        if name in columns and len(columns[name].shape) == 1:
            return columns[name].shape[0]
    return None


def pad(packed: Tensor, lengths: Lengths) -> Tensor:
    """``[S, …]`` as ``[N, T, …]``, zeros on the right."""
    longest = int(lengths.max(initial=0))
    out = torch.zeros((len(lengths), longest, *packed.shape[1:]), dtype=packed.dtype, device="cpu")
    at = 0
    for row, length in enumerate(lengths.tolist()):
        out[row, :length] = packed[at : at + length]
        at += length
    return out


def content_of(rows: Sequence[Tensor], column: Column, layout: Layout) -> Content:
    """Rows that were not read, as a column of a batch.

    Args:
        rows: One tensor a row, as a sample has it.
        column: What they are of.
        layout: As the batch's other columns lie.

    Raises:
        Invalid: if a row is not one of that column.
    """
    shape, dtype = tuple(size for size in column.shape if size is not None), TORCH_OF[column.dtype]
    for row in rows:
        if tuple(row.shape[1:] if column.ragged else row.shape) != shape or row.dtype != dtype:
            raise Invalid(
                f"a row given for column {column.name!r} is {row.dtype} {list(row.shape)}",
                hint=f"give {column.dtype} {list(column.shape)}, as `reader[i]` does",
            )
    if not column.ragged:
        return Content(torch.stack(list(rows)) if len(rows) else torch.empty((0, *shape), dtype=dtype, device="cpu"))
    lengths = np.array([len(row) for row in rows], np.int64)
    packed = torch.cat([torch.empty((0, *shape), dtype=dtype, device="cpu"), *rows])
    return Content(pad(packed, lengths) if layout == "padded" else packed, lengths)


def assemble(
    layout: Layout,
    contents: Mapping[str, Content],
    names: Iterable[str],
    columns: Mapping[str, Column],
    *,
    absent: Collection[str] = (),
) -> dict[str, Any]:
    """The batch: the named columns, and what their layout needs to be understood.

    Args:
        layout: How ragged columns lie in ``contents``: padded for ``padded``, else packed.
        contents: Columns, and the auxiliary ones.
        names: Columns to return, in order.
        columns: What each is.
        absent: Auxiliary columns that the snapshot has and this store has not: what they would say is left out.

    Raises:
        Partial: if ``packed`` needs an absent attention mask.
    """
    names = list(names)
    ragged = {name: c.lengths for name, c in contents.items() if c.lengths is not None and name != ID}
    length = None if ragged else dense_length(columns)
    fields: dict[str, Any] = {}
    mask: Tensor | None = None
    if ragged:
        fields = _ragged_fields(layout, contents, _agreed(ragged))
    elif length is not None:
        fields, mask = _dense_fields(layout, contents, length)
        if MASK in absent:
            if layout == "packed":
                raise Partial(
                    f"column {MASK!r} is not in this part of the snapshot, and packing leaves out what it masks",
                    hint=f"fetch it with `zgstore copy REV --to STORE --columns {MASK}`, or read the layout padded",
                    column=MASK,
                )
            del fields["mask"], fields["lengths"]
    if {POSITIONS, START} & {*absent}:
        fields.pop("positions", None)
    for name in names:
        content = contents[name]
        if layout == "list":
            fields[name] = _rows_of(content)
            continue
        if name == ID and content.lengths is not None:
            fields["id_lengths"] = torch.from_numpy(content.lengths)
        whole = layout == "packed" and mask is not None and columns[name].shape[:1] == (length,)
        fields[name] = content.values[mask] if whole else content.values
    return fields


def _agreed(ragged: Mapping[str, Lengths]) -> Lengths:
    """The one length of each row, which all ragged columns must have."""
    (first, lengths), *others = ragged.items()
    for name, other in others:
        if not np.array_equal(lengths, other):
            at = int(np.flatnonzero(lengths != other)[0])
            raise Corrupt(
                f"columns {first!r} and {name!r} give one row {lengths[at]} and {other[at]} tokens",
                hint="run `zgstore verify`; if it finds nothing, read the two columns apart",
                object=name,
                expected=int(lengths[at]),
                actual=int(other[at]),
            )
    return lengths


def _ragged_fields(layout: Layout, contents: Mapping[str, Content], lengths: Lengths) -> dict[str, Any]:
    longest = int(lengths.max(initial=0))
    real = np.arange(longest) < lengths[:, None]
    positions = _ragged_positions(layout, contents, lengths, real)
    fields: dict[str, Any] = {"lengths": torch.from_numpy(lengths)}
    if layout == "padded":
        return {**fields, "mask": torch.from_numpy(real), "positions": positions}
    if layout == "packed":
        return {**fields, "offsets": offsets_of(lengths), "positions": positions}
    return {**fields, "positions": list(torch.split(positions, lengths.tolist()))}


def _ragged_positions(
    layout: Layout, contents: Mapping[str, Content], lengths: Lengths, real: NDArray[np.bool_]
) -> Tensor:
    """The positions that the teacher used: ``[N, T]`` (0 in the padding) for padded, else ``[S]``."""
    stored = contents.get(POSITIONS)
    if stored is not None and stored.lengths is not None and stored.values.dim() == (2 if layout == "padded" else 1):
        return stored.values.to(torch.int64)
    start = contents.get(START)
    begin = np.zeros(len(lengths), np.int64) if start is None else start.values.numpy().astype(np.int64)
    places = (begin[:, None] + np.arange(real.shape[1])) * real
    if stored is not None and stored.lengths is None and stored.values.dim() == 2:  # kept with its padding
        whole = stored.values.numpy().astype(np.int64)
        places = np.take_along_axis(whole, np.minimum(places, whole.shape[1] - 1), axis=1) * real
    return torch.from_numpy(places if layout == "padded" else places[real])


def _dense_fields(layout: Layout, contents: Mapping[str, Content], length: int) -> tuple[dict[str, Any], Tensor]:
    """Fields of columns stored with their padding, and the mask of their real tokens, by which packed leaves it out."""
    shape = (len(next(iter(contents.values())).values), length)
    kept, stored = contents.get(MASK), contents.get(POSITIONS)
    if kept is not None and kept.values.shape == shape:
        mask = kept.values != 0
        lengths = mask.sum(1)
    else:
        # By numpy: torch's small operations took most of the time that a warm step's fields do (`LOG.md`).
        mask = torch.from_numpy(np.ones(shape, np.bool_))
        lengths = torch.from_numpy(np.full(shape[:1], length))
    if stored is not None and stored.values.shape == shape:
        positions = stored.values.to(torch.int64)
    else:
        positions = torch.from_numpy(np.broadcast_to(np.arange(length), shape).copy())
    if layout == "padded":
        return {"lengths": lengths, "mask": mask, "positions": positions}, mask
    if layout == "list":
        return {"lengths": lengths, "mask": list(mask), "positions": list(positions)}, mask
    return {"lengths": lengths, "offsets": offsets_of(lengths.numpy()), "positions": positions[mask]}, mask


def offsets_of(lengths: Lengths) -> Tensor:
    """int64 ``[N + 1]``: where each row begins in the packed tensors, and the end."""
    return torch.from_numpy(np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)]))


def _rows_of(content: Content) -> list[Tensor]:
    if content.lengths is None:
        return list(content.values)
    return list(torch.split(content.values, content.lengths.tolist()))
