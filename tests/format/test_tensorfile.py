"""Tensors are bit for bit what they were, and int8 is what the format says it is."""

from __future__ import annotations

import warnings
from fractions import Fraction

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from zgstore.errors import Corrupt, Invalid
from zgstore.format.blobheader import lay_out, layout_of_column, read_header
from zgstore.format.manifest import DTYPES, Column
from zgstore.format.tensorfile import (
    NAME_OF,
    TORCH_OF,
    as_bytes,
    as_tensor,
    check_offsets,
    decode,
    dtype_name,
    encode,
    int8_decode,
    int8_encode,
    offsets_of,
)

torch.set_num_threads(1)
FLOATS = ("F8_E4M3", "F8_E5M2", "F16", "BF16", "F32", "F64")


def column(dtype, shape, codec="raw"):
    return Column("h", "boundary", dtype, codec, tuple(shape), 0)


def bits(dtype, shape, seed=0):
    """A tensor of arbitrary bits: NaN payloads, infinities and subnormal numbers among them."""
    size = int(np.prod(shape, dtype=np.int64)) * DTYPES[dtype]
    raw = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    if dtype == "BOOL":
        raw &= 1
    return (
        torch.frombuffer(raw, dtype=TORCH_OF[dtype]).view(shape) if size else torch.empty(shape, dtype=TORCH_OF[dtype])
    )


def same(one, other):
    return one.dtype == other.dtype and one.shape == other.shape and bytes(as_bytes(one)) == bytes(as_bytes(other))


def test_every_dtype_of_the_format_is_known_to_torch():
    assert set(TORCH_OF) == set(DTYPES)
    assert {name: dtype.itemsize for name, dtype in TORCH_OF.items()} == DTYPES


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("shape", [(5,), (3, 4), (0, 4), (2, 0, 3), (1, 2, 3, 4)])
def test_every_dtype_comes_back_bit_for_bit_and_the_reference_reader_agrees(dtype, shape):
    tensor = bits(dtype, shape)
    blob = encode(column(dtype, shape[1:]), tensor)
    assert same(decode(blob, column(dtype, shape[1:])).data, tensor)
    theirs = safetensors.torch.load(blob)
    assert list(theirs) == ["data"]
    assert same(theirs["data"], tensor)


@pytest.mark.parametrize("dtype", ["BF16", "I64", "F64"])
def test_ragged_columns_keep_their_rows(dtype):
    lengths = torch.tensor([3, 1, 0, 4])
    tensor = bits(dtype, (8, 5))
    blob = encode(column(dtype, (None, 5)), tensor, lengths)
    data, offsets = decode(blob, column(dtype, (None, 5)))
    assert same(data, tensor)
    assert offsets.tolist() == [0, 3, 4, 4, 8]
    assert same(safetensors.torch.load(blob)["data"], tensor)


def test_equal_tensors_give_equal_bytes_however_they_lie():
    tensor = torch.arange(24, dtype=torch.float32).view(4, 6)
    blob = encode(column("F32", (6,)), tensor)
    assert encode(column("F32", (6,)), tensor.t().contiguous().t()) == blob
    assert encode(column("F32", (6,)), torch.stack([tensor, tensor], 1)[:, 1]) == blob
    assert encode(column("F32", (6,)), torch.nn.Parameter(tensor)) == blob
    row = torch.arange(6, dtype=torch.float32)
    assert encode(column("F32", (6,)), row.expand(4, 6)) == encode(column("F32", (6,)), row.repeat(4, 1))
    assert encode(column("F32", (6,)), tensor[:1]) == encode(column("F32", (6,)), tensor.clone()[:1])


def test_a_view_that_is_lazily_negative_is_stored_as_its_values():
    lazily = torch.complex(torch.zeros(3), torch.arange(3.0)).conj().imag
    assert lazily.is_neg()
    assert as_bytes(lazily) == as_bytes(-torch.arange(3.0))


def test_bytes_are_not_copied_where_they_lie_in_order():
    tensor = torch.zeros(4, 4, dtype=torch.bfloat16)
    view = as_bytes(tensor)
    tensor[0, 0] = 1.0
    assert bytes(view[:2]) == b"\x80\x3f"
    assert as_bytes(tensor[1:3]).nbytes == 16


def test_tensors_of_one_element_or_none_have_any_stride():
    assert bytes(as_bytes(torch.arange(9.0)[8::9])) == np.float32(8).tobytes()
    assert bytes(as_bytes(torch.tensor(2.0))) == np.float32(2).tobytes()
    assert bytes(as_bytes(torch.from_numpy(np.zeros((0, 3), np.float32)))) == b""
    assert bytes(as_bytes(torch.zeros(1).expand(0))) == b""


def test_bytes_outlive_the_tensor_they_are_of():
    view = as_bytes(torch.full((1000,), 7, dtype=torch.uint8))
    assert bytes(view) == b"\7" * 1000


def test_rank_zero_samples_are_a_column():
    blob = encode(column("I64", ()), torch.arange(3))
    assert decode(blob, column("I64", ())).data.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("tensor", "name"),
    [
        (torch.eye(3).to_sparse(), "sparse"),
        (torch.zeros(3, dtype=torch.complex64), "complex"),
        (torch.zeros(3, device="meta"), "meta"),
    ],
)
def test_what_a_blob_cannot_hold_is_refused_by_name(tensor, name):
    with pytest.raises(Invalid, match=name):
        as_bytes(tensor)
    with pytest.raises(Invalid, match=name):
        encode(column("F32", (3,)), tensor)


def test_quantised_nested_and_compressed_tensors_are_refused_by_name():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantised = torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8)
        nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
        rows = torch.eye(3).to_sparse_csr()
    for tensor, name in ((quantised, "quantised"), (nested, "nested"), (rows, "sparse")):
        with pytest.raises(Invalid, match=name):
            dtype_name(tensor)


def test_tensors_of_a_fake_mode_are_refused():
    with FakeTensorMode():
        fake = torch.zeros(3)
    with pytest.raises(Invalid, match="meta"):
        as_bytes(fake)


def test_another_dtype_or_shape_than_the_columns_is_refused():
    with pytest.raises(Invalid, match="BF16"):
        encode(column("BF16", (3,)), torch.zeros(2, 3))
    with pytest.raises(Invalid, match=r"\[2, 4\]"):
        encode(column("F32", (4,)), torch.zeros(2, 3))
    with pytest.raises(Invalid, match=r"\[5, 3\]"):
        encode(column("F32", (None, 3)), torch.zeros(4, 3), torch.tensor([2, 3]))
    with pytest.raises(Invalid, match="ragged"):
        encode(column("F32", (None, 3)), torch.zeros(4, 3))


def test_another_columns_blob_is_corrupt():
    blob = encode(column("F32", (3,)), torch.zeros(2, 3))
    for other in (column("I32", (3,)), column("F32", (4,)), column("F32", (None, 3)), column("F32", (3,), "int8")):
        with pytest.raises(Corrupt):
            decode(blob, other)


@pytest.mark.parametrize("offsets", [[1, 2, 4], [0, 2, 3], [0, 3, 2, 4], [0, -1, 4], [0, 9, 4]])
def test_offsets_that_do_not_rise_to_the_end_are_corrupt(offsets):
    with pytest.raises(Corrupt):
        check_offsets(torch.tensor(offsets), 4, what="blob")


def test_the_layout_is_known_before_the_first_byte():
    ragged = column("BF16", (None, 100), "int8")
    header = layout_of_column(ragged, rows=3, tokens=7)
    assert {spec.name: spec.shape for spec in header.tensors} == {"offsets": (4,), "scale": (7, 2), "data": (7, 100)}
    blob = encode(ragged, torch.ones(7, 100, dtype=torch.bfloat16), torch.tensor([1, 2, 4]))
    assert blob.startswith(header.encode())
    assert len(blob) == header.file_size
    assert read_header(blob[:4096], file_size=len(blob), what="blob") == header


def test_a_buffer_that_may_be_written_is_not_copied():
    buffer = bytearray(8)
    tensor = as_tensor(buffer, "F32", (2,))
    buffer[4:] = np.float32(2).tobytes()
    assert tensor.tolist() == [0.0, 2.0]
    assert as_tensor(b"", "F32", (0, 3)).shape == (0, 3)


# int8


def reference(values, dtype):
    """The codec of one group in exact arithmetic: the smallest fp16 s with 127 s ≥ max|x|, x / s half to even."""
    largest = max(abs(Fraction(v)) for v in values)
    every = np.arange(0x7C00, dtype=np.uint16).view(np.float16)
    index = int(np.searchsorted(every.astype(np.float64) * 127, float(largest)))
    while Fraction(float(every[index])) * 127 < largest:
        index += 1
    scale = Fraction(float(every[index]))
    return float(scale), [0 if not scale else round(Fraction(v) / scale) for v in values]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["F16", "BF16", "F32"]), st.integers(0, 2**32), st.integers(-20, 12), st.integers(1, 64))
def test_int8_is_exact_for_any_values(dtype, seed, exponent, channels):
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(channels, generator=generator, dtype=torch.float64) * 2.0**exponent).to(TORCH_OF[dtype])
    encoded = int8_encode(x)
    scale, levels = reference([float(v) for v in x], dtype)
    assert float(encoded.scale[0]) == scale
    assert encoded.data.tolist() == levels


@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32", "F64"])
def test_ties_round_to_even_within_127(dtype):
    # max 127 makes s = 1, so that halves are ties.
    x = torch.tensor([127.0, -127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 0.0]).to(TORCH_OF[dtype])
    encoded = int8_encode(x)
    assert encoded.scale.tolist() == [1.0]
    assert encoded.data.tolist() == [127, -127, 0, 2, 2, 0, -2, 126, 0]


def test_the_scale_is_rounded_up_so_that_nothing_exceeds_127():
    x = torch.linspace(0.001, 60000, 997, dtype=torch.float64).view(-1, 1)
    encoded = int8_encode(x)
    assert bool((encoded.scale.double() * 127 >= x).all())
    assert int(encoded.data.max()) <= 127


def test_groups_are_of_64_channels_and_the_last_may_be_short():
    x = torch.zeros(3, 130)
    x[1, 63], x[1, 64], x[2, 129] = 127.0, 254.0, 1e-3
    encoded = int8_encode(x)
    assert encoded.data.shape == (3, 130)
    assert encoded.scale.shape == (3, 3)
    assert encoded.scale[0].tolist() == [0.0, 0.0, 0.0]
    assert encoded.scale[1].tolist() == [1.0, 2.0, 0.0]
    assert float(encoded.scale[2, 2]) * 127 >= 1e-3
    back = int8_decode(encoded.data, encoded.scale, torch.float32)
    assert torch.equal(back[0], x[0])
    assert torch.equal(back[1], x[1])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(5, 576), (2, 3, 100), (4, 1), (0, 64), (1, 64)])
def test_the_error_is_at_most_half_a_step_and_the_dtypes_own_rounding(dtype, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(TORCH_OF[dtype])
    encoded = int8_encode(x)
    back = int8_decode(encoded.data, encoded.scale, x.dtype)
    assert back.dtype == x.dtype
    assert back.shape == x.shape
    if x.numel():
        step = float(encoded.scale.max())
        rounding = torch.finfo(x.dtype).eps * float(x.double().abs().max())
        assert encoded.max_error <= step / 2 * 1.0001
        assert float((back.double() - x.double()).abs().max()) <= step / 2 + rounding


def test_chunks_change_nothing(monkeypatch):
    x = torch.randn(50, 200, generator=torch.Generator().manual_seed(2))
    whole = int8_encode(x)
    monkeypatch.setattr("zgstore.format.tensorfile._CHUNK", 500)
    cut = int8_encode(x)
    assert torch.equal(whole.data, cut.data)
    assert torch.equal(whole.scale, cut.scale)
    assert whole.max_error == cut.max_error
    assert torch.equal(int8_decode(whole.data, whole.scale, x.dtype), int8_decode(cut.data, cut.scale, x.dtype))


def test_the_largest_fp16_number_does_not_decode_to_infinity():
    for dtype in (torch.float16, torch.float8_e4m3fn, torch.float8_e5m2):
        x = torch.tensor([torch.finfo(dtype).max, -torch.finfo(dtype).max, 1.0]).to(dtype)
        encoded = int8_encode(x)
        back = int8_decode(encoded.data, encoded.scale, dtype)
        assert bool(torch.isfinite(back.float()).all())
        assert float(back[0]) == torch.finfo(dtype).max


def test_a_scale_beyond_fp16_is_refused_by_name():
    x = torch.zeros(2, 64)
    x[1, 3] = 65504 * 127.0
    assert float(int8_encode(x).scale[1, 0]) == 65504
    x[1, 3] = 65504 * 127.5
    with pytest.raises(Invalid, match=r"'h'.*fp16"):
        encode(column("F32", (64,), "int8"), x)


def test_a_group_with_nan_or_inf_decodes_to_nan_and_its_neighbours_to_themselves():
    x = torch.full((3, 128), 2.0)
    x[1, 5], x[2, 70] = torch.nan, torch.inf
    encoded = int8_encode(x)
    back = int8_decode(encoded.data, encoded.scale, torch.float32)
    assert bool(back[1, :64].isnan().all())
    assert bool(back[2, 64:].isnan().all())
    assert torch.allclose(back[1, 64:], x[1, 64:], atol=0.01)
    assert torch.allclose(back[0], x[0], atol=0.01)
    assert encoded.max_error < 0.01


@pytest.mark.parametrize(
    "each", [column("I64", (64,), "int8"), column("F32", (), "int8"), column("F32", (None,), "int8")]
)
def test_int8_needs_floats_and_a_channel_axis(each):
    with pytest.raises(Invalid, match="int8"):
        layout_of_column(each, rows=1, tokens=1)


def test_an_unknown_codec_is_refused_by_name():
    with pytest.raises(Invalid, match="zstd"):
        layout_of_column(column("F32", (4,), "zstd"), rows=1, tokens=0)


@pytest.mark.parametrize("lengths", [None, [2, 0, 3]])
def test_int8_blobs_come_back_as_the_columns_dtype(lengths):
    each = column("BF16", (None, 70) if lengths else (70,), "int8")
    x = torch.randn(5, 70, generator=torch.Generator().manual_seed(3)).bfloat16()
    blob = encode(each, x, None if lengths is None else torch.tensor(lengths))
    data, offsets = decode(blob, each)
    assert data.dtype == torch.bfloat16
    assert torch.allclose(data.float(), x.float(), atol=0.03)
    assert (offsets is None) == (lengths is None)
    theirs = safetensors.torch.load(blob)
    assert {name: NAME_OF[tensor.dtype] for name, tensor in theirs.items()}["data"] == "I8"


def test_offsets_of_no_rows_are_one_zero():
    assert offsets_of(torch.tensor([], dtype=torch.int64)).tolist() == [0]
    assert lay_out({"data": ("F32", (0,)), "offsets": ("I64", (1,))}).file_size == 4104
