"""Canonical msgpack: one value, one encoding. The only importer of msgpack."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, Final

import msgpack

from zgstore.errors import Corrupt, Invalid

MAX_BYTES: Final = 64 << 20
MAX_DEPTH: Final = 16
MAX_ELEMENTS: Final = 1 << 16
FLOAT_KEY: Final = "$f64"

# What the generic value may hold: None, bool, int, float, str, bytes, list, dict.
Value = Any


def encode(value: Value) -> bytes:
    """The one encoding of ``value``.

    Args:
        value: None, bool, int of at most 64 bits, float, str, bytes, list or tuple, or a mapping with str keys
            that do not begin with ``$``.

    Raises:
        Invalid: if the value holds anything else, or breaks the bounds of depth, count or size.
    """
    try:
        body: bytes = msgpack.packb(_ordered(value, 0), use_bin_type=True, strict_types=True)
    except UnicodeEncodeError as error:
        raise Invalid(f"{error.object!r:.80} is not valid text", hint="remove its lone surrogates") from error
    if len(body) > MAX_BYTES:
        raise Invalid(f"a value of {len(body)} bytes is over the bound of {MAX_BYTES}", hint="split it into pages")
    return body


def decode(body: bytes | memoryview, *, what: str = "value") -> Value:
    """The value that ``body`` is the one encoding of; floats come back as floats.

    The bytes are scanned for size, depth and counts before anything is built from them, and the value is encoded
    again and compared: two encodings never mean the same value.

    Args:
        body: The whole encoding.
        what: What it is, for the message.

    Raises:
        Corrupt: if it is not canonical.
    """
    body = bytes(body)
    try:
        _scan(body)
        raw = msgpack.unpackb(
            body, raw=False, strict_map_key=True, object_pairs_hook=_unique, max_ext_len=0, use_list=True
        )
        value = _floats_out(raw)
        again = encode(value)
    except (ValueError, TypeError, RecursionError, struct.error, msgpack.exceptions.UnpackException, Invalid) as error:
        raise _corrupt(what, str(error)) from error
    if again != body:
        raise _corrupt(what, "its bytes are not the canonical ones")
    return value


def _corrupt(what: str, why: str) -> Corrupt:
    return Corrupt(
        f"{what} is not canonical msgpack: {why}",
        hint="run `zgstore verify` to see what it hurts and what mends it",
        object=what,
        expected="canonical msgpack",
        actual=why,
    )


def _ordered(value: Value, depth: int) -> Value:
    """The value with maps sorted by their keys' UTF-8 bytes, tuples as lists, floats wrapped; bounds checked."""
    if value is None or isinstance(value, bool | str | bytes):
        return value
    if isinstance(value, int):
        if not -(1 << 63) <= value < 1 << 64:
            raise Invalid("an integer needs more than 64 bits", hint="store it as text or bytes")
        return value
    if isinstance(value, float):
        # A float takes a level of its own, as it does in its encoding.
        _bound(1, depth + 1)
        return {FLOAT_KEY: struct.pack("<d", value)}
    if isinstance(value, list | tuple):
        _bound(len(value), depth + 1)
        return [_ordered(item, depth + 1) for item in value]
    if isinstance(value, Mapping):
        _bound(len(value), depth + 1)
        for key in value:
            if not isinstance(key, str) or key.startswith("$"):
                raise Invalid(f"{key!r:.80} cannot be a key", hint="use text that does not begin with $")
        return {key: _ordered(value[key], depth + 1) for key in sorted(value, key=_utf8)}
    raise Invalid(f"a {type(value).__name__} has no canonical encoding", hint="use plain numbers, text, lists and maps")


def _utf8(key: str) -> bytes:
    return key.encode("utf-8")


def _bound(count: int, depth: int) -> None:
    if count > MAX_ELEMENTS:
        raise Invalid(f"a container of {count} elements is over the bound of {MAX_ELEMENTS}", hint="split it")
    if depth > MAX_DEPTH:
        raise Invalid(f"values nest deeper than {MAX_DEPTH}", hint="flatten them")


def _unique(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a map has a key twice")
    return result


def _floats_out(value: Value) -> Value:
    if isinstance(value, list):
        return [_floats_out(item) for item in value]
    if isinstance(value, dict):
        if FLOAT_KEY in value:
            bits = value[FLOAT_KEY]
            if len(value) != 1 or not isinstance(bits, bytes) or len(bits) != 8:
                raise ValueError("a float is a map of $f64 alone to 8 bytes")
            return struct.unpack("<d", bits)[0]
        return {key: _floats_out(item) for key, item in value.items()}
    return value


# The scan walks the heads alone: for each first byte, how many bytes of length follow, or what the item is.
_SIZED: Final = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_COUNTED: Final = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}
_FIXED: Final = {0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}


def _scan(body: bytes) -> None:
    """Bound size, depth and counts, and see that the items end where the bytes do, before the library allocates."""
    if len(body) > MAX_BYTES:
        raise ValueError(f"{len(body)} bytes are over the bound of {MAX_BYTES}")
    at, end = 0, len(body)
    left = [1]  # items still to come, for each open container
    while left:
        if left[-1] == 0:
            left.pop()
            continue
        left[-1] -= 1
        if at >= end:
            raise ValueError("it ends in the middle of a value")
        at, elements = _step(body, at)
        if elements:
            if elements > end - at:
                raise ValueError("a container claims more elements than there are bytes")
            left.append(elements)
            if len(left) > MAX_DEPTH + 1:
                raise ValueError(f"values nest deeper than {MAX_DEPTH}")
    if at != end:
        raise ValueError("it ends in the middle of a value" if at > end else f"{end - at} bytes follow the value")


def _step(body: bytes, at: int) -> tuple[int, int]:
    """Past the item at ``at``, or past its head if it is a container: where the next begins, and how many it holds."""
    head = body[at]
    at += 1
    if head < 0x80 or head >= 0xE0:
        return at, 0
    if head < 0xA0:
        return at, (head & 0x0F) * (2 if head < 0x90 else 1)
    if head < 0xC0:
        return at + (head & 0x1F), 0
    if head in _FIXED:
        return at + _FIXED[head], 0
    if head in _SIZED:
        width = _SIZED[head]
        return at + width + int.from_bytes(body[at : at + width], "big"), 0
    if head in _COUNTED:
        width, each = _COUNTED[head]
        elements = int.from_bytes(body[at : at + width], "big")
        if elements > MAX_ELEMENTS:
            raise ValueError(f"a container of {elements} elements is over the bound of {MAX_ELEMENTS}")
        return at + width, each * elements
    raise ValueError(f"the type byte {head:#x} is not one of nil, bool, int, str, bin, array, map")
