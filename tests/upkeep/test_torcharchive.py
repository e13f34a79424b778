"""Plain tensors come back as they were saved, and no file asks for more than it has."""

from __future__ import annotations

import io
import os
import tracemalloc
import zipfile
from collections import OrderedDict

import pytest
import torch

from zgstore.format.tensorfile import TORCH_OF, as_bytes
from zgstore.upkeep import torcharchive


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file


def edited(file, change, *, method=zipfile.ZIP_STORED):
    """The archive with its records changed: name and bytes to bytes, or to None for one that is left out."""
    out = io.BytesIO()
    with zipfile.ZipFile(file) as before, zipfile.ZipFile(out, "w", method) as after:
        for name in before.namelist():
            body = change(name.partition("/")[2], before.read(name))
            if body is not None:
                after.writestr(name, body)
    return out


@pytest.mark.parametrize("name", sorted(TORCH_OF))
def test_tensors_of_every_dtype_and_their_views_come_back_bit_for_bit(name):
    whole = torch.randint(0, 2, (3, 4), generator=torch.Generator().manual_seed(1)).to(TORCH_OF[name])
    views = [whole, whole[1:], whole.t(), whole[:0], whole[0, 0], whole[:, ::2], whole[1:].clone()]
    found = torcharchive.load(saved({"boundaries": views, "context": OrderedDict(a=whole)}))
    for mine, theirs in zip([*found["boundaries"], found["context"]["a"]], [*views, whole], strict=True):
        assert (mine.dtype, mine.shape, mine.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
        assert bytes(as_bytes(mine)) == bytes(as_bytes(theirs))


def test_plain_values_come_back():
    value = {"a": [1, 2.5, None, True, False, -3, 1 << 40, -(1 << 70), 300], "b": (1, 2, 3, 4, (), ("t",)), 3: {}}
    assert torcharchive.load(saved(value)) == value


class Call:
    """Unpickled by the common way, it does what it says."""

    def __init__(self, function, *args):
        self.made = (function, args)

    def __reduce__(self):
        return self.made


NOT_PLAIN = {
    "a call": Call(print, "run"),
    "a gigabyte": Call(bytearray, 1 << 30),
    "a storage of its own": Call(torch.FloatStorage, 1 << 30),
    "a tensor of its own": Call(torch.Tensor, 1 << 30),
    "a parameter": torch.nn.Parameter(torch.ones(2)),
    "a sparse tensor": torch.eye(3).to_sparse(),
    "a set": {1, 2},
    "a key that is no text": {(1, 2): 3},
    "a dtype": torch.float32,
    "a dtype in a tuple": ((1, torch.float32),),
}


@pytest.mark.parametrize("what", NOT_PLAIN)
def test_what_is_not_plain_is_refused_and_costs_nothing(what, capsys):
    tracemalloc.start()
    with pytest.raises(torcharchive.Unlike):
        torcharchive.load(saved({"x": NOT_PLAIN[what]}))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("tensor", [torch.zeros(1 << 22), torch.randn(1 << 12)])
def test_records_are_not_unpacked(tensor):
    file = edited(saved({"x": tensor}), lambda _, body: body, method=zipfile.ZIP_DEFLATED)
    assert file.getbuffer().nbytes < 1 << 18
    with pytest.raises(torcharchive.Unlike, match=r"compressed|longer than it is"):
        torcharchive.load(file)


def test_records_that_lie_in_each_other_are_refused():
    body = bytearray(saved({"x": torch.zeros(1 << 12)}).getvalue())
    at = body.rindex(b"PK\x01\x02", 0, body.rindex(b"data/0"))  # its entry: the sizes are bytes 20 to 28
    for size in (1 << 20, 1 << 31):
        body[at + 20 : at + 28] = size.to_bytes(4, "little") * 2
        with pytest.raises(torcharchive.Unlike, match="longer than it is"):
            torcharchive.load(io.BytesIO(body))


@pytest.mark.parametrize(("field", "by"), [(48, 100), (42, 1 << 31)])
def test_records_that_begin_before_or_behind_it_are_refused(tmp_path, field, by):
    body = bytearray(saved({"x": torch.zeros(4)}).getvalue())
    end = body.rindex(b"PK\x06\x06")  # says where the list of entries begins: that moves them all
    at = (end if field == 48 else body.rindex(b"PK\x01\x02", 0, end)) + field
    body[at : at + 4] = (int.from_bytes(body[at : at + 4], "little") + by).to_bytes(4, "little")
    (tmp_path / "x").write_bytes(body)
    with (tmp_path / "x").open("rb") as file, pytest.raises(torcharchive.Unlike, match="not in it"):
        torcharchive.load(file)


CHANGES = {
    "no description": lambda name, body: None if name == "data.pkl" else body,
    "no storage": lambda name, body: None if name == "data/0" else body,
    "another byte order": lambda name, body: b"big" if name == "byteorder" else body,
    "a shorter storage": lambda name, body: body[:-4] if name == "data/0" else body,
    "a description without end": lambda name, body: body[:-1] if name == "data.pkl" else body,
    "nothing said": lambda name, body: b"." if name == "data.pkl" else body,
    "a description too long": lambda name, body: b"}" * (1 << 21) if name == "data.pkl" else body,
    "lists without end": lambda name, body: b"]" * (1 << 19) + b"." if name == "data.pkl" else body,
    "a larger shape": lambda name, body: body.replace(b"K\x08\x85", b"K\x09\x85") if name == "data.pkl" else body,
    "a stride beyond": lambda name, body: body.replace(b"K\x01\x85", b"K\x02\x85") if name == "data.pkl" else body,
}


@pytest.mark.parametrize("what", CHANGES)
def test_an_archive_that_contradicts_itself_is_refused(what):
    with pytest.raises(torcharchive.Unlike):
        torcharchive.load(edited(saved([torch.arange(8.0)]), CHANGES[what]))


def test_truth_values_are_true_or_false():
    file = edited(
        saved([torch.ones(4, dtype=torch.bool)]), lambda name, body: b"\1\0\2\1" if name == "data/0" else body
    )
    with pytest.raises(torcharchive.Unlike, match="neither true nor false"):
        torcharchive.load(file)


def test_any_bytes_are_refused():
    for body in (b"", b"PK\x03\x04", os.urandom(200), saved([1]).getvalue()[:-1]):
        with pytest.raises(torcharchive.Unlike):
            torcharchive.load(io.BytesIO(body))
