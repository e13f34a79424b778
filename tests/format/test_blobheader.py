"""Exactly one file means some tensors."""

from __future__ import annotations

import json
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zgstore.errors import Corrupt, Invalid
from zgstore.format.blobheader import BlobHeader, header_size, lay_out, read_header
from zgstore.format.manifest import DTYPES

SHAPES = st.lists(st.integers(0, 9), max_size=8).map(tuple)


@st.composite
def contents(draw):
    tensors = {"data": (draw(st.sampled_from(sorted(DTYPES))), draw(SHAPES))}
    if draw(st.booleans()):
        tensors["offsets"] = ("I64", (draw(st.integers(1, 9)),))
    if draw(st.booleans()):
        tensors["scale"] = ("F16", draw(SHAPES))
    return tensors


def read(body, *, file_size):
    return read_header(body, file_size=file_size, what="a blob")


def written(text, *, padded=4096, size=None):
    """A file's first bytes with that JSON, and the file's size."""
    body = (padded - 8).to_bytes(8, "little") + text.encode().ljust(padded - 8, b" ")
    return body, padded if size is None else size


@given(contents())
def test_a_layout_is_read_back_and_has_no_holes(tensors):
    header = lay_out(tensors)
    body = header.encode()
    assert len(body) == header.data_start == 4096
    assert read(body, file_size=header.file_size) == header
    at = header.data_start
    for spec in header.tensors:
        assert spec.start == at
        assert spec.start % DTYPES[spec.dtype] == 0
        at += spec.size
    assert at == header.file_size


@given(contents())
def test_the_order_in_which_tensors_are_named_changes_nothing(tensors):
    assert lay_out(dict(reversed(tensors.items()))) == lay_out(tensors)


def test_wider_elements_come_first_then_names():
    header = lay_out({"scale": ("F16", (2, 1)), "data": ("I8", (2, 8)), "offsets": ("I64", (3,))})
    assert [spec.name for spec in header.tensors] == ["offsets", "scale", "data"]
    header = lay_out({"offsets": ("I64", (3,)), "data": ("F64", (2,))})
    assert [spec.name for spec in header.tensors] == ["data", "offsets"]
    assert header.tensor("offsets").start == 4096 + 16
    with pytest.raises(KeyError):
        header.tensor("scale")


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {"offsets": ("I64", (3,))},
        {"data": ("F32", (1,)), "../etc/passwd": ("F32", (1,))},
        {"data": ("C64", (1,))},
        {"data": ("F32", (1,) * 9)},
        {"data": ("F32", (-1,))},
        {"data": ("F32", (1 << 62,))},
        {"data": ("F32", (0, 1 << 40, 1 << 40))},
        {"data": ("F32", (2,)), "offsets": ("I32", (3,))},
        {"data": ("F32", (2,)), "offsets": ("I64", (3, 1))},
        {"data": ("F32", (2,)), "scale": ("F32", (2,))},
    ],
)
def test_what_no_blob_holds_is_invalid(tensors):
    with pytest.raises(Invalid):
        lay_out(tensors)


@given(contents(), st.data())
def test_one_changed_byte_of_a_header_is_seen(tensors, data):
    header = lay_out(tensors)
    body = bytearray(header.encode())
    body[data.draw(st.integers(0, 300) | st.integers(0, 4095))] ^= data.draw(st.integers(1, 255))
    try:
        other = read(bytes(body), file_size=header.file_size)
    except Corrupt:
        return
    assert other != header
    assert other.encode() == bytes(body)


@given(contents(), st.integers(-4096, 4096).filter(bool))
def test_a_file_that_is_cut_or_grown_is_corrupt(tensors, change):
    header = lay_out(tensors)
    with pytest.raises(Corrupt):
        read(header.encode()[: max(header.file_size + change, 0)], file_size=max(header.file_size + change, 0))


DATA = '"data":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'
HOSTILE = {
    "two data": "{" + DATA + "," + DATA + "}",
    "a key twice": '{"data":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
    "metadata": '{"__metadata__":{"a":"b"},' + DATA + "}",
    "another name": "{" + DATA + ',"more":{"dtype":"F32","shape":[0],"data_offsets":[8,8]}}',
    "an unknown field": '{"data":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"x":1}}',
    "another field order": '{"data":{"shape":[2],"dtype":"F32","data_offsets":[0,8]}}',
    "another tensor order": '{"data":{"dtype":"F32","shape":[0],"data_offsets":[8,8]},'
    '"offsets":{"dtype":"I64","shape":[1],"data_offsets":[0,8]}}',
    "a hole": '{"data":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
    "an overlap": '{"offsets":{"dtype":"I64","shape":[1],"data_offsets":[0,8]},'
    '"data":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
    "a size that lies": '{"data":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}',
    "2 ** 62": '{"data":{"dtype":"F32","shape":[4611686018427387904],"data_offsets":[0,8]}}',
    "an overflow that meets zero": '{"data":{"dtype":"F32","shape":[4611686018427387904,16,0],"data_offsets":[0,0]}}',
    "negative": '{"data":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}}',
    "minus zero": '{"data":{"dtype":"F32","shape":[-0],"data_offsets":[0,0]}}',
    "a float": '{"data":{"dtype":"F32","shape":[2.0],"data_offsets":[0,8]}}',
    "a bool": '{"data":{"dtype":"F32","shape":[true],"data_offsets":[0,4]}}',
    "text for a shape": '{"data":{"dtype":"F32","shape":"2","data_offsets":[0,8]}}',
    "a list for a dtype": '{"data":{"dtype":[],"shape":[2],"data_offsets":[0,8]}}',
    "spaces": "{ " + DATA + "}",
    "leading space": " {" + DATA + "}",
    "an escape": '{"d\\u0061ta":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
    "a list": "[" + DATA.replace('"data":', "") + "]",
    "more after it": "{" + DATA + "}{}",
    "a comment": "{" + DATA + "}//",
    "nothing": "",
    "no JSON": "{",
    "NaN": "NaN",
    "deep": "[" * 4000,
    "nine dimensions": json.dumps(
        {"data": {"dtype": "F32", "shape": [1] * 9, "data_offsets": [0, 4]}}, separators=(",", ":")
    ),
    "a digit storm": '{"data":{"dtype":"F32","shape":[' + "9" * 4050 + '],"data_offsets":[0,8]}}',
}


def test_the_form_that_the_hostile_ones_differ_from_is_read():
    body, _ = written("{" + DATA + "}")
    assert read(body, file_size=4104).tensor("data").shape == (2,)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_header_is_corrupt(name):
    body, _ = written(HOSTILE[name])
    for size in (4096, 4100, 4104, 4108, 4112):
        with pytest.raises(Corrupt):
            read(body, file_size=size)


def test_bytes_that_are_no_text_are_corrupt():
    body, _ = written("{" + DATA + "}")
    with pytest.raises(Corrupt):
        read(body[:-1] + b"\xff", file_size=4104)


@pytest.mark.parametrize("length", [0, 1, 4087, 4089, (1 << 24) + 4096 - 8, 1 << 62, (1 << 64) - 1])
def test_a_header_length_out_of_bounds_is_corrupt_before_anything_is_read(length):
    with pytest.raises(Corrupt):
        header_size(length.to_bytes(8, "little"), file_size=1 << 30, what="a blob")


def test_a_header_longer_than_its_file_is_corrupt():
    with pytest.raises(Corrupt, match="claims"):
        header_size((4088).to_bytes(8, "little"), file_size=4095, what="a blob")
    assert header_size((4088).to_bytes(8, "little"), file_size=4096, what="a blob") == 4096


def test_a_header_of_16_mebibytes_is_refused_before_it_is_parsed():
    length = (16 << 20) - 8
    body = length.to_bytes(8, "little") + b"[" * length
    tracemalloc.start()
    with pytest.raises(Corrupt, match="fills"):
        read(body, file_size=len(body) + 8)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_a_header_that_is_padded_by_a_page_more_is_corrupt():
    body, size = written("{" + DATA + "}", padded=8192)
    with pytest.raises(Corrupt):
        read(body, file_size=size + 8)


def test_a_prefix_too_short_says_so():
    header = lay_out({"data": ("F32", (2,))})
    with pytest.raises(Corrupt, match="only 100 bytes"):
        read(header.encode()[:100], file_size=header.file_size)


def test_a_header_is_a_value():
    header = lay_out({"data": ("F32", ())})
    assert header == BlobHeader(header.tensors, 4096, 4100)
    assert header.tensor("data").size == 4
