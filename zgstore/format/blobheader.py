"""The canonical header of a blob, strictly read and written. Bytes only.

A blob is a safetensors file: eight bytes of length, compact JSON padded with spaces, then the tensors. Of the many
files that mean the same tensors to a safetensors reader, exactly one is a blob: reading a header means laying out
what it names again and comparing bytes. What a column's blob looks like is known before its first byte is.

Shapes: R rows, S = the sum of the rows' lengths, C channels, G = ceil(C / 64) groups.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from zgstore.errors import Corrupt, Invalid
from zgstore.format.manifest import DTYPES, FLOATING, Column

TENSOR_NAMES: Final = ("data", "offsets", "scale")
ALIGNMENT: Final = 4096
MAX_HEADER_BYTES: Final = 16 << 20
MAX_DIMENSIONS: Final = 8
MAX_TENSOR_BYTES: Final = 1 << 62
GROUP: Final = 64  # channels that share a scale under int8
_LENGTH_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a blob.

    Args:
        name: ``data``, ``offsets`` or ``scale``.
        dtype: safetensors name.
        shape: Sizes.
        start: First byte, counted from the beginning of the *file*.
        size: Bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class BlobHeader:
    """All tensors of a blob in the order of their bytes, and the file's size."""

    tensors: tuple[TensorSpec, ...]
    data_start: int
    file_size: int

    def tensor(self, name: str) -> TensorSpec:
        """The tensor of that name; KeyError if there is none."""
        for spec in self.tensors:
            if spec.name == name:
                return spec
        raise KeyError(name)

    def encode(self) -> bytes:
        """The header's bytes, length field and padding included: ``data_start`` bytes."""
        text = _text([(spec.name, spec.dtype, spec.shape, spec.start - self.data_start, spec.size)
                      for spec in self.tensors])  # fmt: skip
        length = self.data_start - _LENGTH_BYTES
        return length.to_bytes(_LENGTH_BYTES, "little") + text.ljust(length, b" ")


def lay_out(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> BlobHeader:
    """The one layout for tensors given as name → (dtype, shape).

    By descending element size, then name: so that every tensor is aligned to its element without a hole.

    Raises:
        Invalid: for a name outside TENSOR_NAMES, no ``data``, ``offsets`` that are not one axis of I64, ``scale`` that
            is not F16, an unknown dtype, more than 8 dimensions, a size that overflows.
    """
    fault = _fault(tensors)
    if fault:
        raise Invalid(f"no blob holds this: {fault}", hint="give `data`, and `offsets` (I64) or `scale` (F16) with it")
    order = sorted(tensors, key=lambda name: (-DTYPES[tensors[name][0]], name))
    at, places = 0, []
    for name in order:
        dtype, shape = tensors[name]
        size = DTYPES[dtype] * math.prod(shape)
        places.append((name, dtype, tuple(shape), at, size))
        at += size
    data_start = -(-(_LENGTH_BYTES + len(_text(places))) // ALIGNMENT) * ALIGNMENT
    specs = tuple(
        TensorSpec(name, dtype, shape, data_start + start, size) for name, dtype, shape, start, size in places
    )
    return BlobHeader(specs, data_start, data_start + at)


def header_size(first8: bytes, *, file_size: int, what: str) -> int:
    """Bytes up to the data section, from the file's first 8 bytes; bounded by the file's size and 16 MiB.

    Raises:
        Corrupt: if the length is out of bounds, or does not end on a 4096-byte boundary.
    """
    if len(first8) < _LENGTH_BYTES:
        raise _corrupt(what, f"it has {file_size} bytes, too few for a header", "a header")
    length = int.from_bytes(first8[:_LENGTH_BYTES], "little")
    bound = min(file_size - _LENGTH_BYTES, MAX_HEADER_BYTES)
    if length > bound:
        raise _corrupt(what, f"its header claims {length} bytes", f"at most {max(bound, 0)} bytes")
    if (_LENGTH_BYTES + length) % ALIGNMENT or not length:
        raise _corrupt(what, f"its data would start at byte {_LENGTH_BYTES + length}", f"a multiple of {ALIGNMENT}")
    return _LENGTH_BYTES + length


def read_header(prefix: bytes, *, file_size: int, what: str) -> BlobHeader:
    """Read a header strictly.

    Args:
        prefix: The file's first bytes: at least 8; as many as the header has, else ``header_size`` says how many.
        file_size: The file's size in bytes; bounds the header before anything is allocated.
        what: What it is, for the message.

    Raises:
        Corrupt: if it is not the canonical header of a file of that size.
    """
    data_start = header_size(prefix, file_size=file_size, what=what)
    # Three tensors of eight dimensions fill less than one page, so a longer header is refused before it is parsed.
    if data_start > ALIGNMENT:
        raise _corrupt(what, f"its header fills {data_start} bytes", f"{ALIGNMENT} bytes")
    if len(prefix) < data_start:
        raise _corrupt(what, f"only {len(prefix)} bytes of its header are there", f"{data_start} bytes")
    try:
        header = _parsed(bytes(prefix[:data_start]))
    except (ValueError, RecursionError, Invalid) as error:
        raise _corrupt(what, f"its header is not a blob's: {error}", "the canonical header") from error
    if header is None:
        raise _corrupt(what, "its header is not written the canonical way", "the canonical header")
    if header.file_size != file_size:
        raise _corrupt(what, f"it has {file_size} bytes", f"{header.file_size} bytes, as its header says")
    return header


@lru_cache(maxsize=256)
def _parsed(body: bytes) -> BlobHeader | None:
    """The header that these bytes are; None if they are not its canonical ones. Most blobs of a column share theirs."""
    header = lay_out(_named(json.loads(body[_LENGTH_BYTES:].decode("ascii"), object_pairs_hook=_unique)))
    return header if header.encode() == body else None


@lru_cache(maxsize=256)
def layout_of_column(column: Column, *, rows: int, tokens: int) -> BlobHeader:
    """The header of a column's blob, known before its first byte is.

    Args:
        column: Its dtype, codec and shape of one sample.
        rows: R.
        tokens: S; not looked at for a column that is not ragged.

    Raises:
        Invalid: if the codec cannot hold such a column.
    """
    if column.dtype not in DTYPES:
        raise Invalid(f"column {column.name!r} has the unknown dtype {column.dtype!r}", hint="use a newer zgstore")
    fixed = tuple(size for size in column.shape if size is not None)
    shape = (tokens if column.ragged else rows, *fixed)
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {"data": (column.dtype, shape)}
    if column.codec == "int8":
        if column.dtype not in FLOATING or not fixed:
            raise Invalid(
                f"column {column.name!r} ({column.dtype}, {list(column.shape)}) cannot have the codec int8",
                hint='int8 is for floating columns with a channel axis; use codec = "raw"',
            )
        tensors = {"data": ("I8", shape), "scale": ("F16", (*shape[:-1], groups_of(shape[-1])))}
    elif column.codec != "raw":
        raise Invalid(f"column {column.name!r} has the unknown codec {column.codec!r}", hint="use a newer zgstore")
    if column.ragged:
        tensors["offsets"] = ("I64", (rows + 1,))
    return lay_out(tensors)


def groups_of(channels: int) -> int:
    """G: groups of 64 channels, the last may be short."""
    return -(-channels // GROUP)


def check_layout(header: BlobHeader, column: Column, *, what: str) -> int:
    """See that a header is one of this column's; its rows.

    Raises:
        Corrupt: if dtypes, shapes or tensors are another column's.
    """
    first = header.tensor("data").shape[:1]
    tokens = first[0] if first else 0
    rows = header.tensor("offsets").shape[0] - 1 if column.ragged and _has(header, "offsets") else tokens
    wanted = layout_of_column(column, rows=max(rows, 0), tokens=tokens)
    if header != wanted:
        holds, should = _described(header.tensors), _described(wanted.tensors)
        raise Corrupt(
            f"{what} is not a blob of column {column.name!r}: it holds {holds}, and should hold {should}",
            hint="run `zgstore verify` to see what it hurts and what mends it",
            object=what,
            expected=should,
            actual=holds,
        )
    return rows


def _text(places: list[tuple[str, str, tuple[int, ...], int, int]]) -> bytes:
    fields = {
        name: {"dtype": dtype, "shape": list(shape), "data_offsets": [start, start + size]}
        for name, dtype, shape, start, size in places
    }
    return json.dumps(fields, separators=(",", ":")).encode("ascii")


def _fault(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> str | None:
    """Why these are not a blob's tensors; None if they are."""
    if "data" not in tensors:
        return "there is no tensor named data"
    for name, (dtype, shape) in tensors.items():
        fault = _fault_of_one(name, dtype, shape)
        if fault:
            return fault
    return None


def _fault_of_one(name: str, dtype: str, shape: tuple[int, ...]) -> str | None:
    fault = None
    if name not in TENSOR_NAMES:
        fault = f"a tensor is named {name!r:.40}"
    elif dtype not in DTYPES:
        fault = f"{name} has the dtype {dtype!r:.40}"
    elif len(shape) > MAX_DIMENSIONS:
        fault = f"{name} has {len(shape)} dimensions, more than {MAX_DIMENSIONS}"
    # Zeroes left out: a product that overflows before it meets one is refused too, as fixed-width readers would.
    elif any(size < 0 for size in shape) or DTYPES[dtype] * math.prod(s for s in shape if s) > MAX_TENSOR_BYTES:
        fault = f"{name} has the shape {list(shape)}"
    elif name == "offsets" and (dtype != "I64" or len(shape) != 1):
        fault = "offsets are one axis of I64"
    elif name == "scale" and dtype != "F16":
        fault = "scale is F16"
    return fault


def _named(value: Any) -> dict[str, tuple[str, tuple[int, ...]]]:
    if not isinstance(value, dict):
        raise ValueError("it is no map")  # noqa: TRY004 — it is the file's fault, caught above as such
    named = {}
    for name, entry in value.items():
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise ValueError(f"the fields of {name!r:.40}")
        dtype, shape = entry["dtype"], entry["shape"]
        if not isinstance(dtype, str) or not isinstance(shape, list) or any(type(size) is not int for size in shape):
            raise ValueError(f"the dtype or shape of {name!r:.40}")
        named[name] = (dtype, tuple(shape))
    return named


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key is there twice")
    return result


def _corrupt(what: str, actual: str, expected: str) -> Corrupt:
    return Corrupt(
        f"{what} is not a blob: {actual}",
        hint="run `zgstore verify` to see what it hurts and what mends it",
        object=what,
        expected=expected,
        actual=actual,
    )


def _has(header: BlobHeader, name: str) -> bool:
    return any(spec.name == name for spec in header.tensors)


def _described(specs: tuple[TensorSpec, ...]) -> str:
    return ", ".join(f"{spec.name} {spec.dtype} {list(spec.shape)}" for spec in specs)
