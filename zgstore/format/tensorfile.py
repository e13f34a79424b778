"""Tensors to and from a blob's bytes; the codecs.

Shapes: R rows, S = the sum of the rows' lengths, C channels, G = ceil(C / 64) groups.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from zgstore.errors import Corrupt, Invalid
from zgstore.format.blobheader import GROUP, check_layout, groups_of, layout_of_column, read_header
from zgstore.format.manifest import Column

TORCH_OF: Final[dict[str, torch.dtype]] = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "U16": torch.uint16, "I16": torch.int16, "F16": torch.float16, "BF16": torch.bfloat16,
    "U32": torch.uint32, "I32": torch.int32, "F32": torch.float32,
    "U64": torch.uint64, "I64": torch.int64, "F64": torch.float64,
}  # fmt: skip
NAME_OF: Final[dict[torch.dtype, str]] = {dtype: name for name, dtype in TORCH_OF.items()}

LEVELS: Final = 127
# Where the largest decoded value, 127 · s, can lie beyond the largest number of the dtype, because s was rounded up.
_NARROW: Final = frozenset({torch.float16, torch.float8_e4m3fn, torch.float8_e5m2})
_EXACT_IN_FP32: Final = frozenset({torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2})
_CHUNK: Final = 1 << 18  # elements that the int8 codec works on at once: a few of its temporaries fit a core's cache


class Encoded(NamedTuple):
    """A tensor under int8.

    Args:
        data: int8, the tensor's shape ``[…, C]``.
        scale: fp16 ``[…, G]``.
        max_error: Largest |x − decoded| over finite groups.
    """

    data: Tensor
    scale: Tensor
    max_error: float


class Decoded(NamedTuple):
    """A blob's content.

    Args:
        data: ``[R, …]``, or ``[S, …]`` of a ragged column; the column's dtype.
        offsets: int64 ``[R + 1]`` of a ragged column: row r is ``data[offsets[r]:offsets[r + 1]]``; else None.
    """

    data: Tensor
    offsets: Tensor | None


def dtype_name(tensor: Tensor, *, what: str = "the tensor") -> str:
    """The safetensors name of a tensor's dtype.

    Raises:
        Invalid: for what a blob cannot hold: sparse, quantised, nested, complex and meta tensors, and other dtypes.
    """
    name = NAME_OF.get(tensor.dtype)
    strided = tensor.layout is torch.strided
    if name is not None and strided and tensor.is_cpu and type(tensor) is Tensor and not tensor.is_nested:
        return name
    fault = None
    if tensor.is_meta or type(tensor).__name__ == "FakeTensor":
        fault = "a meta tensor: it has no values"
    elif not strided:
        fault = f"a sparse tensor ({tensor.layout})"
    elif tensor.is_quantized:
        fault = f"a quantised tensor ({tensor.dtype})"
    elif tensor.is_nested:
        fault = "a nested tensor"
    elif tensor.is_complex():
        fault = f"a complex tensor ({tensor.dtype})"
    elif name is None:
        fault = f"a tensor of {tensor.dtype}"
    if fault or name is None:
        raise Invalid(
            f"{what} is {fault}, which a blob cannot hold",
            hint="give a dense tensor of a real dtype: `.to_dense()`, `.dequantize()` or `torch.view_as_real` make one",
        )
    return name


def as_bytes(tensor: Tensor, *, what: str = "the tensor") -> memoryview:
    """A tensor's elements in row-major order, bit for bit; without a copy if it lies so in CPU memory already.

    The view keeps the tensor's memory alive.

    Raises:
        Invalid: for what a blob cannot hold, see `dtype_name`.
    """
    dtype_name(tensor, what=what)
    tensor = tensor.detach()
    if tensor.is_neg() or not tensor.is_cpu or not tensor.is_contiguous():
        tensor = tensor.resolve_neg().cpu().contiguous()
    # A tensor of one element, or of none, may have any stride and yet lie in order.
    flat = tensor.view(-1) if tensor.numel() > 1 else tensor.as_strided((tensor.numel(),), (1,))
    array: np.ndarray[tuple[int, ...], np.dtype[np.uint8]] = flat.view(torch.uint8).numpy()
    return array.data


def as_tensor(buffer: bytes | bytearray | memoryview, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """A tensor over a buffer's bytes; without a copy if the buffer may be written, for torch knows no other tensors."""
    if not len(buffer):
        return torch.empty(shape, dtype=TORCH_OF[dtype], device="cpu")
    if memoryview(buffer).readonly:
        buffer = bytearray(buffer)
    return torch.frombuffer(buffer, dtype=TORCH_OF[dtype]).view(shape)


def offsets_of(lengths: Tensor) -> Tensor:
    """int64 ``[R + 1]``: where each row begins, and the end."""
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64, device="cpu")
    torch.cumsum(lengths.to(torch.int64), 0, out=offsets[1:])
    return offsets


def int8_encode(tensor: Tensor, *, what: str = "the tensor") -> Encoded:
    """Quantise by token and group of 64 channels.

    s is the smallest fp16 number with 127 · s ≥ max|x|; values are x / s rounded half to even. A group with NaN or
    Inf gets s = NaN and decodes to NaN, so that a row that is to be dropped stays recognisable.

    Args:
        tensor: Floating ``[…, C]``.
        what: What it is, for the message.

    Raises:
        Invalid: if a group needs an s beyond the largest fp16 number (65504).
    """
    if not tensor.is_floating_point() or not tensor.dim():
        raise Invalid(f"{what} ({tensor.dtype}, {list(tensor.shape)}) cannot have the codec int8",
                      hint="int8 is for floating tensors with a channel axis; use codec = \"raw\"")  # fmt: skip
    channels = tensor.shape[-1]
    flat = tensor.detach().reshape(-1, channels) if tensor.numel() else tensor.new_empty((0, channels))
    data = torch.empty(flat.shape, dtype=torch.int8, device="cpu")
    scale = torch.empty((len(flat), groups_of(channels)), dtype=torch.float16, device="cpu")
    step = max(1, _CHUNK // max(channels, 1))
    worst = 0.0
    for at in range(0, len(flat), step):
        error = _encode_chunk(flat[at : at + step], data[at : at + step], scale[at : at + step], what)
        worst = max(worst, error)
    return Encoded(data.view(tensor.shape), scale.view(*tensor.shape[:-1], scale.shape[1]), worst)


def _encode_chunk(x: Tensor, data: Tensor, scale: Tensor, what: str) -> float:
    """Fill ``data`` [N, C] and ``scale`` [N, G] from ``x`` [N, C]; the largest error."""
    # A quotient of a 16-bit float and an fp16 number is never so near a tie that fp32 would round it onto one.
    work = torch.float32 if x.dtype in _EXACT_IN_FP32 else torch.float64
    rows, channels = x.shape
    values = x.to(work)
    if channels % GROUP:
        values = torch.nn.functional.pad(values, (0, -channels % GROUP))
    values = values.view(rows, -1, GROUP)
    largest = values.abs().amax(-1).to(torch.float64)
    finite = torch.isfinite(largest)
    s = _scale_of(largest)
    if bool((torch.isinf(s) & finite).any()):
        raise Invalid(
            f"{what} holds a group of channels with a magnitude of {float(largest[finite].max()):.3g}, "
            "whose scale leaves the range of fp16",
            hint='use codec = "raw" for this column',
        )
    if not bool(finite.all()):
        values = torch.where(finite.unsqueeze(-1), values, torch.zeros_like(values))
        s = torch.where(finite, s, torch.full_like(s, torch.nan))
    divisor = torch.where(finite & (s > 0), s, torch.ones_like(s)).to(work).unsqueeze(-1)
    levels = (values / divisor).round_()  # within ±127 as they come, for 127 · s ≥ max|x|
    data.copy_(levels.view(rows, -1)[:, :channels])
    scale.copy_(s)
    low, high = torch.aminmax(levels.mul_(divisor).sub_(values))
    return max(-float(low), float(high))


def _scale_of(largest: Tensor) -> Tensor:
    """The smallest fp16 s with 127 · s ≥ largest, for fp64 ``largest``; inf where there is none."""
    s = (largest / LEVELS).to(torch.float16)
    # 127 · s needs 18 bits and is exact in fp64. Positive fp16 numbers are ordered as their bits are.
    short = s.to(torch.float64) * LEVELS < largest
    return (s.view(torch.int16) + short.to(torch.int16)).view(torch.float16)


def int8_decode(data: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The values that int8 codes stand for.

    Args:
        data: int8 ``[…, C]``.
        scale: fp16 ``[…, G]``.
        dtype: The column's.
    """
    if not data.numel():
        return torch.empty(data.shape, dtype=dtype, device="cpu")
    channels = data.shape[-1]
    out = torch.empty(data.shape, dtype=dtype, device="cpu")
    codes, scales, into = data.reshape(-1, channels), scale.reshape(-1, scale.shape[-1]), out.view(-1, channels)
    step = max(1, _CHUNK // channels)
    whole = channels - channels % GROUP
    for at in range(0, len(codes), step):
        # The product needs 19 bits: exact in fp32, rounded once, to the column's dtype.
        values = codes[at : at + step].to(torch.float32)
        s = scales[at : at + step].to(torch.float32)
        values[:, :whole].view(len(values), -1, GROUP).mul_(s[:, : whole // GROUP].unsqueeze(-1))
        values[:, whole:].mul_(s[:, whole // GROUP :])
        if dtype in _NARROW:
            values.clamp_(-torch.finfo(dtype).max, torch.finfo(dtype).max)
        into[at : at + step].copy_(values)
    return out


def encode(column: Column, tensor: Tensor, lengths: Tensor | None = None) -> bytes:
    """One whole blob.

    Args:
        column: What it is a blob of.
        tensor: ``[R, …]``, or ``[S, …]`` for a ragged column; of the column's dtype.
        lengths: Integer ``[R]`` for a ragged column.

    Raises:
        Invalid: if the tensor does not fit the column.
    """
    what = f"column {column.name!r}"
    name = dtype_name(tensor, what=what)
    if name != column.dtype:
        raise Invalid(f"{what} is {column.dtype}, and was given {name}", hint="cast it before it is stored")
    if column.ragged != (lengths is not None):
        raise Invalid(f"{what} is {'' if column.ragged else 'not '}ragged", hint="give lengths for ragged columns only")
    offsets = None if lengths is None else offsets_of(lengths)
    rows = len(tensor) if lengths is None else len(lengths)
    tokens = 0 if offsets is None else int(offsets[-1])
    header = layout_of_column(column, rows=rows, tokens=tokens)
    if tuple(tensor.shape) != header.tensor("data").shape:
        raise Invalid(
            f"{what} needs the shape {list(header.tensor('data').shape)}, and was given {list(tensor.shape)}",
            hint="give one row for each sample, without padding if it is ragged",
        )
    parts = {"data": tensor}
    if column.codec == "int8":
        encoded = int8_encode(tensor, what=what)
        parts = {"data": encoded.data, "scale": encoded.scale}
    if offsets is not None:
        parts["offsets"] = offsets
    return b"".join((header.encode(), *(as_bytes(parts[spec.name]) for spec in header.tensors)))


def decode(blob: bytes | bytearray | memoryview, column: Column, *, what: str = "blob") -> Decoded:
    """The tensors of a whole blob; over its own bytes where the codec is raw.

    Raises:
        Corrupt: if it is not a canonical blob of that column.
    """
    view = memoryview(blob)
    header = read_header(bytes(view[:4096]), file_size=len(view), what=what)
    check_layout(header, column, what=what)

    def load(name: str) -> Tensor:
        spec = header.tensor(name)
        return as_tensor(view[spec.start : spec.start + spec.size], spec.dtype, spec.shape)

    offsets = load("offsets") if column.ragged else None
    if offsets is not None:
        check_offsets(offsets, header.tensor("data").shape[0], what=what)
    data = load("data")
    if column.codec == "int8":
        data = int8_decode(data, load("scale"), TORCH_OF[column.dtype])
    return Decoded(data, offsets)


def check_offsets(offsets: Tensor, tokens: int, *, what: str) -> None:
    """See that offsets rise from 0 to the number of tokens.

    Raises:
        Corrupt: if they do not.
    """
    if int(offsets[0]) != 0 or int(offsets[-1]) != tokens or bool((offsets[1:] < offsets[:-1]).any()):
        raise Corrupt(
            f"the offsets of {what} do not rise from 0 to {tokens}",
            hint="run `zgstore verify` to see what it hurts and what mends it",
            object=what,
            expected=f"offsets from 0 to {tokens}",
            actual=f"offsets from {int(offsets[0])} to {int(offsets[-1])}",
        )
