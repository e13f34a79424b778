"""Tensors of a file that torch.save wrote, read without doing what it says: no pickle is run, nothing is unpacked.

torch's own reader, even as it takes weights alone, lets some hundred bytes ask for any amount of memory: records may be
compressed, and a pickle may call for a ``bytearray``, or a storage, of any size. Here an archive may hold what plain
values with plain tensors need, records lie in it as they are, and a tensor is a view of its record.
"""

from __future__ import annotations

import os
import struct
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from typing import Any, BinaryIO, Final, NamedTuple

from torch import Tensor

from zgstore.format.manifest import DTYPES
from zgstore.format.tensorfile import TORCH_OF, as_tensor

MAX_DESCRIPTION_BYTES: Final = 1 << 20  # some thousand tensors
MAX_DIMENSIONS: Final = 64
MAX_RECORDS: Final = 1 << 16
_LOCAL: Final = struct.Struct("<4s22xHH")
_STORAGES: Final = {
    "FloatStorage": "F32", "DoubleStorage": "F64", "HalfStorage": "F16", "BFloat16Storage": "BF16",
    "LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8", "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}  # fmt: skip
_TYPES: Final = {str(dtype): name for name, dtype in TORCH_OF.items()}


class Unlike(ValueError):
    """The file is no such archive."""


def load(file: BinaryIO) -> Any:
    """What was saved: dicts, lists, tuples, text, numbers and dense tensors.

    Args:
        file: The archive; read in place.

    Raises:
        Unlike: if it is anything else.
    """
    try:
        records = _records(file)
        return _Machine(records).run(records.read("data.pkl", MAX_DESCRIPTION_BYTES))
    except Unlike:
        raise
    # What the library says of a damaged archive, and the steps of one that lacks what they are about.
    except (
        zipfile.BadZipFile, NotImplementedError, RuntimeError, ValueError, KeyError, IndexError, TypeError, EOFError,
        OverflowError, struct.error,
    ) as error:  # fmt: skip
        raise Unlike(f"it is no whole archive of torch.save ({type(error).__name__}: {error!s:.80})") from error


# ---- the archive ----


class _Record(NamedTuple):
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class _Records:
    """Where each record lies, and bytes of them."""

    file: BinaryIO
    places: dict[str, _Record]

    def read(self, name: str, limit_bytes: int | None = None) -> bytearray:
        """A record's bytes.

        Raises:
            Unlike: if there is none, or it is longer than it may be.
        """
        if name not in self.places:
            raise Unlike(f"it has no record {name!r:.80}")
        start, size = self.places[name]
        if limit_bytes is not None and size > limit_bytes:
            raise Unlike(f"its record {name!r} has {size} bytes, more than {limit_bytes}")
        self.file.seek(start)
        body = bytearray(size)
        if self.file.readinto(body) != size:  # type: ignore[attr-defined]
            raise Unlike(f"its record {name!r:.80} is cut off")
        return body


def _records(file: BinaryIO) -> _Records:
    """The records by name, without their folder's; all of them as they are, and none in another."""
    whole = file.seek(0, os.SEEK_END)
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
    if len(entries) > MAX_RECORDS or sum(entry.file_size for entry in entries) > whole:
        raise Unlike("its records are longer than it is")
    places: dict[str, _Record] = {}
    for entry in entries:
        folder, _, name = entry.filename.partition("/")
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size or entry.flag_bits & 1:
            raise Unlike(f"its record {name!r:.80} is compressed")
        if name in places or folder != entries[0].filename.partition("/")[0]:
            raise Unlike(f"its record {name!r:.80} is there twice")
        if not 0 <= entry.header_offset <= whole - _LOCAL.size:
            raise Unlike(f"its record {name!r:.80} is not in it")
        file.seek(entry.header_offset)
        signature, name_bytes, extra_bytes = _LOCAL.unpack(file.read(_LOCAL.size))
        if signature != b"PK\x03\x04":
            raise Unlike(f"its record {name!r:.80} is not where it should be")
        places[name] = _Record(entry.header_offset + _LOCAL.size + name_bytes + extra_bytes, entry.file_size)
    found = _Records(file, places)
    if "byteorder" in places and found.read("byteorder", 16) != b"little":
        raise Unlike("its bytes are in another order")
    return found


# ---- the description: as much of pickle as plain values need, as a table ----


class _Name(str):
    """A function or class that is named, and never looked for."""

    __slots__ = ()


class _Storage(NamedTuple):
    dtype: str
    body: bytearray


_MARK: Final = object()
_VALUES: Final = {b"(": _MARK, b"N": None, b"\x88": True, b"\x89": False}


class _Machine:
    """A stack, a memo, and the steps that a description may have."""

    def __init__(self, records: _Records) -> None:
        self._records = records
        self._storages: dict[str, bytearray] = {}
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self._body = b""
        self._at = 0

    def run(self, body: bytes | bytearray) -> Any:
        self._body, self._at = bytes(body), 0
        while (step := self.take(1)) != b".":
            if step in _VALUES:
                self.push(_VALUES[step])
            elif step in _STEPS:
                _STEPS[step](self)
            else:
                raise Unlike(f"its description has the step {step!r}, which plain values do not need")
        (value,) = self.stack
        _see_plain([value])
        return value

    def take(self, count: int) -> bytes:
        piece = self._body[self._at : self._at + count]
        self._at += count
        if len(piece) != count:
            raise Unlike("its description is cut off")
        return piece

    def number(self, width: int, *, signed: bool = False) -> int:
        return int.from_bytes(self.take(width), "little", signed=signed)

    def text(self, width: int) -> str:
        return self.take(self.number(width)).decode("utf-8")

    def marked(self) -> list[Any]:
        at = len(self.stack) - 1
        while self.stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise Unlike("its description closes what it did not open")
        items = self.stack[at + 1 :]
        del self.stack[at:]
        return items

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def tuple(self, count: int) -> None:
        items = [self.stack.pop() for _ in range(count)]
        self.push(tuple(reversed(items)))

    def extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise Unlike("its description puts an item into what is no list")
        _see_plain(items)
        target.extend(items)

    def set(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not dict or not all(type(key) in {str, int} for key in items[::2]):
            raise Unlike("its description has a map whose keys are neither text nor numbers")
        _see_plain(items)
        target.update(zip(items[::2], items[1::2], strict=True))

    def name(self) -> None:
        end = self._body.index(b"\n", self._body.index(b"\n", self._at) + 1)
        module, name = self._body[self._at : end].decode("ascii").split("\n")
        self._at = end + 1
        self.push(_Name(f"{module}.{name}"))

    def storage(self) -> None:
        kind, named, key, _, count = self.stack.pop()
        if kind != "storage" or type(named) is not _Name or type(key) is not str or type(count) is not int:
            raise Unlike("its description refers to what is no storage")
        dtype = "U8" if named == "torch.storage.UntypedStorage" else _STORAGES.get(named.removeprefix("torch."))
        if dtype is None:
            raise Unlike(f"it has a storage of the kind {named!r:.80}")
        if key not in self._storages:
            self._storages[key] = self._records.read(f"data/{key}")
        body = self._storages[key]
        if len(body) != count * DTYPES[dtype]:
            raise Unlike(f"its storage {key!r:.80} has {len(body)} bytes, not {count} × {DTYPES[dtype]}")
        self.push(_Storage(dtype, body))

    def called(self) -> None:
        arguments, name = self.stack.pop(), self.stack.pop()
        if type(name) is _Name and name == "collections.OrderedDict" and arguments == ():
            self.push({})
        elif type(name) is _Name and name in {"torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"}:
            self.push(_tensor(*arguments))
        else:
            raise Unlike(f"it asks for {name!r:.80} to be called, which plain tensors do not need")


def _see_plain(items: Iterable[Any]) -> None:
    """That these are no parts of a tensor."""
    for item in items:
        if type(item) in {_Name, _Storage} or item is _MARK:
            raise Unlike(f"it has {item!r:.80} where a value should be")
        if type(item) is tuple:
            _see_plain(item)


_STEPS: Final[dict[bytes, Callable[[_Machine], Any]]] = {
    b"\x80": lambda m: m.take(1),
    b"}": lambda m: m.push({}), b"]": lambda m: m.push([]),
    b")": lambda m: m.push(()),
    b"K": lambda m: m.push(m.number(1)), b"M": lambda m: m.push(m.number(2)),
    b"J": lambda m: m.push(m.number(4, signed=True)),
    b"\x8a": lambda m: m.push(m.number(m.number(1), signed=True)),
    b"G": lambda m: m.push(struct.unpack(">d", m.take(8))[0]),
    b"X": lambda m: m.push(m.text(4)), b"\x8c": lambda m: m.push(m.text(1)),
    b"t": lambda m: m.push(tuple(m.marked())), b"\x85": lambda m: m.tuple(1), b"\x86": lambda m: m.tuple(2),
    b"\x87": lambda m: m.tuple(3),
    b"a": lambda m: m.extend([m.stack.pop()]), b"e": lambda m: m.extend(m.marked()),
    b"s": lambda m: m.set([m.stack.pop(), m.stack.pop()][::-1]), b"u": lambda m: m.set(m.marked()),
    b"q": lambda m: m.memo.__setitem__(m.number(1), m.stack[-1]),
    b"r": lambda m: m.memo.__setitem__(m.number(4), m.stack[-1]),
    b"h": lambda m: m.push(m.memo[m.number(1)]), b"j": lambda m: m.push(m.memo[m.number(4)]),
    b"c": lambda m: m.name(), b"Q": lambda m: m.storage(), b"R": lambda m: m.called(),
}  # fmt: skip


def _tensor(
    storage: Any, offset: Any, shape: Any, strides: Any, _gradient: Any, _hooks: Any, dtype: Any = None, *more: Any
) -> Tensor:
    """A view of a storage, seen to lie in it."""
    if type(storage) is not _Storage or more or not (dtype is None or type(dtype) is _Name):
        raise Unlike("it has a tensor that is not a plain one")
    named = storage.dtype if dtype is None else _TYPES.get(dtype)
    numbers = (offset, *shape, *strides)
    if named is None or len(shape) != len(strides) or len(shape) > MAX_DIMENSIONS:
        raise Unlike(f"it has a tensor of {dtype!r:.80}, or of other strides than sizes")
    if not all(type(each) is int and 0 <= each < 1 << 62 for each in numbers):
        raise Unlike("it has a tensor of sizes that are none")
    count = len(storage.body) // DTYPES[named]
    last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if prod(shape) and last >= count:
        raise Unlike(f"it has a tensor of {list(shape)!s:.80} that does not lie in its storage")
    if named == "BOOL" and storage.body.strip(b"\0\1"):
        raise Unlike("it has truth values that are neither true nor false")
    body = memoryview(storage.body)[: count * DTYPES[named]]
    return as_tensor(body, named, (count,)).as_strided(shape, strides, offset)
