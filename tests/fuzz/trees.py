"""Real inputs taken apart, changed where a chooser says, and written again: rightly, or as only an attacker would."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import msgpack

Choose = Callable[[int], int]  # a number below n


class Choices:
    """Numbers below n out of bytes; 0 when these are used up."""

    def __init__(self, body: bytes) -> None:
        self.body = body
        self.at = 0

    def __call__(self, n: int) -> int:
        width = 1 if n <= 256 else 3
        taken, self.at = self.body[self.at : self.at + width], self.at + width
        return int.from_bytes(taken, "little") % n if n > 1 else 0

    @property
    def used_up(self) -> bool:
        return self.at >= len(self.body)


class Raw(bytes):
    """Written as it is, whatever the format."""


class Deep:
    """Lists in lists, deeper than any stack."""


class Pairs(list):
    """A map as (key, value): a key may come twice, in any order, and be anything."""


def tree_of(value: Any) -> Any:
    """A plain value with its maps as pairs."""
    if isinstance(value, dict):
        return Pairs((key, tree_of(each)) for key, each in value.items())
    return [tree_of(each) for each in value] if isinstance(value, list | tuple) else value


def plain(tree: Any) -> Any:
    """The value again; of a key that is there twice, the last."""
    if isinstance(tree, Pairs):
        return {key: plain(each) for key, each in tree}
    return [plain(each) for each in tree] if isinstance(tree, list) else tree


# ---- what is put in ----


def nested(levels: int) -> list[Any]:
    tree: list[Any] = []
    for _ in range(levels):
        tree = [tree]
    return tree


INTEGERS = (
    0, 1, -1, 2, 3, 7, 127, 128, 255, 4095, 4096, 1 << 16, (1 << 16) + 1, (1 << 31) - 1, 1 << 31, 1 << 40, 1 << 48,
    (1 << 48) + 1, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 64, -(1 << 63), 10**400, 1 << 20000,
)  # fmt: skip
TEXTS = (
    "", ".", "..", "/", "../../outside/mine", "/etc/passwd", "\0", "a\0b", "x" * 200, "ä" * 200, "a" * 5000, "\x1b[31m",
    "\u202e", "data", "offsets", "scale", "kind", "main", "F32", "I64", "BOOL", "int8", "raw", "boundary", "context",
    "h.0:in", "id", "start", "$f64", "__metadata__", "torch.float32", "CON", "-rf", "a.lock", "blake3:" + "0" * 64,
    "0" * 64, "module:function", "os:system", "builtins:eval", "nan", "1e400", " ", "\n", "main@{0}", "lock:main",
)  # fmt: skip
OTHERS = (
    None, True, False, 0.0, -0.0, 0.5, 1e308, -1e308, 5e-324, math.nan, math.inf, -math.inf, b"", b"\0", b"\xff" * 7,
    bytes(8), b"\xff" * 8, bytes(32), bytes(33), b"\xff" * 64, bytes(5000),
)  # fmt: skip


def hostile(choose: Choose) -> Any:
    """A value that somebody may not have thought of."""
    kind = choose(8)
    if kind < 3:
        return INTEGERS[choose(len(INTEGERS))]
    if kind < 5:
        return TEXTS[choose(len(TEXTS))]
    if kind < 7:
        return OTHERS[choose(len(OTHERS))]
    wide = choose(6)
    return [[], Pairs(), nested(1 + choose(20)), Deep(), [0] * (1 + choose(300)), Pairs([("k", 1), ("k", 2)])][wide]


# ---- trees ----


def changed(tree: Any, choose: Choose) -> Any:
    """The tree with one to three changes."""
    box = [copy.deepcopy(tree)]
    for _ in range(1 + choose(3)):
        spots = list(_spots(box))
        holder, at = spots[choose(len(spots))]
        CHANGES[choose(len(CHANGES))](holder, at, choose, box)
        if not box:
            box = [None]
    return box[0]


def _spots(holder: list[Any], depth: int = 0) -> Iterator[tuple[list[Any], int]]:
    for at, item in enumerate(holder):
        yield holder, at
        inner = item[1] if isinstance(holder, Pairs) else item
        if isinstance(inner, list) and depth < 20:
            yield from _spots(inner, depth + 1)


def _get(holder: list[Any], at: int) -> Any:
    return holder[at][1] if isinstance(holder, Pairs) else holder[at]


def _set(holder: list[Any], at: int, value: Any) -> None:
    holder[at] = (holder[at][0], value) if isinstance(holder, Pairs) else value


def _replace(holder: list[Any], at: int, choose: Choose, box: list[Any]) -> None:
    _set(holder, at, hostile(choose))


def _remove(holder: list[Any], at: int, choose: Choose, box: list[Any]) -> None:
    del holder[at]


def _twice(holder: list[Any], at: int, choose: Choose, box: list[Any]) -> None:
    for _ in range((1, 2, 20)[choose(3)]):
        holder.insert(at, copy.deepcopy(holder[at]))


def _rename(holder: list[Any], at: int, choose: Choose, box: list[Any]) -> None:
    if isinstance(holder, Pairs):
        holder[at] = (hostile(choose) if choose(4) == 0 else TEXTS[choose(len(TEXTS))], holder[at][1])


def _exchange(holder: list[Any], at: int, choose: Choose, box: list[Any]) -> None:
    other = choose(len(holder))
    first, second = _get(holder, at), _get(holder, other)
    _set(holder, at, second)
    _set(holder, other, first)


def _reorder(holder: list[Any], at: int, choose: Choose, box: list[Any]) -> None:
    holder.insert(choose(len(holder)), holder.pop(at))


def _graft(holder: list[Any], at: int, choose: Choose, box: list[Any]) -> None:
    spots = list(_spots(box))
    _set(holder, at, copy.deepcopy(_get(*spots[choose(len(spots))])))


def _nudge(holder: list[Any], at: int, choose: Choose, box: list[Any]) -> None:
    value = _get(holder, at)
    if isinstance(value, bool):
        _set(holder, at, int(value))
    elif isinstance(value, int | float):
        _set(
            holder, at, [value + 1, value - 1, -value, value * 2, float(value) if abs(value) < 1e300 else 0][choose(5)]
        )
    elif isinstance(value, bytes):
        _set(holder, at, bytes_changed(value, choose))
    elif isinstance(value, str):
        _set(holder, at, [value[:-1], value + "x", value.swapcase(), value[1:] + value[:1], value * 2][choose(5)])
    elif isinstance(value, list):
        value.append(hostile(choose) if not isinstance(value, Pairs) else (TEXTS[choose(len(TEXTS))], hostile(choose)))


def _wrap(holder: list[Any], at: int, choose: Choose, box: list[Any]) -> None:
    _set(holder, at, [_get(holder, at)] if choose(2) else Pairs([("k", _get(holder, at))]))


CHANGES = (_replace, _nudge, _remove, _twice, _rename, _exchange, _reorder, _graft, _wrap)


# ---- bytes ----

PIECES = (
    b"\0", b"\xff", bytes(8), b"\xff" * 8, b"\xff\xff\xff\x7f", (1 << 62).to_bytes(8, "little"), b"\x91" * 40,
    b"\xdd\xff\xff\xff\xff", b"\xdf\x00\x01\x00\x01", b"\xc6\xff\xff\xff\xff", b"\xd4\x01\x00", b"\xc7\x05\x01abcde",
    b"\xcb" + bytes(8), b"\xc1", b"\xcc\x05", b"\xd9\x01a", b"\xa1\xff", b"\x81\x01\x01", b"[" * 3000, b"{", b"}", b'"',
    b"\n", b"9" * 5000, b"0x" + b"f" * 5000, b"NaN", b"1e999", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"[[a]]\n",
    b"a.b.c=1\n",
    b"1979-05-27", b"'''", b"\\u0000", b"PK\x03\x04",
)  # fmt: skip


def bytes_changed(body: bytes, choose: Choose) -> bytes:
    """Bits flipped, pieces cut, put in, said twice or written over."""
    at = choose(len(body) + 1)
    until = min(len(body), at + 1 + choose(64))
    piece = PIECES[choose(len(PIECES))]
    return [
        body[:at] + bytes([body[at] ^ (1 << choose(8))]) + body[at + 1 :] if at < len(body) else body + b"\0",
        body[:at] + bytes([choose(256)]) + body[at + 1 :],
        body[:at] + body[until:],
        body[:at],
        body[:until] + body[at:],
        body[:at] + piece + body[at:],
        body[:at] + piece + body[at + len(piece) :],
        body[at:] + body[:at],
    ][choose(8)]


# ---- written ----


def from_msgpack(body: bytes) -> Any:
    return msgpack.unpackb(body, raw=False, object_pairs_hook=Pairs, strict_map_key=False)


def as_msgpack(tree: Any, *, ordered: bool = True) -> bytes:
    """In the shortest way; maps in the order of their keys, unless an attacker wants another."""
    packer = msgpack.Packer(use_bin_type=True)
    if isinstance(tree, Raw | Deep):
        return bytes(tree) if isinstance(tree, Raw) else b"\x91" * 5000 + b"\x90"
    if isinstance(tree, Pairs):
        pairs = sorted(tree, key=lambda pair: _word(pair[0]).encode("utf-8", "replace")) if ordered else tree
        parts = [as_msgpack(each, ordered=ordered) for pair in pairs for each in pair]
        return packer.pack_map_header(len(pairs)) + b"".join(parts)
    if isinstance(tree, list):
        return packer.pack_array_header(len(tree)) + b"".join(as_msgpack(each, ordered=ordered) for each in tree)
    if isinstance(tree, float):
        return b"\x81\xa4$f64" + packer.pack(msgpack.packb(tree)[:0:-1])
    if isinstance(tree, int) and not -(1 << 63) <= tree < 1 << 64:
        return b"\xcf" + b"\xff" * 8
    return packer.pack(tree)


def as_json(tree: Any) -> str:
    """Compact."""
    if isinstance(tree, Pairs):
        return "{" + ",".join(f"{json.dumps(_word(key))}:{as_json(each)}" for key, each in tree) + "}"
    if isinstance(tree, list):
        return "[" + ",".join(map(as_json, tree)) + "]"
    return _leaf(tree)


def as_toml(tree: Any) -> str:
    """One line for each key of the whole, all below it in inline tables."""
    if not isinstance(tree, Pairs):
        return f"value = {_toml(tree)}\n"
    return "".join(f"{json.dumps(_word(key))} = {_toml(each)}\n" for key, each in tree)


def _toml(tree: Any) -> str:
    if isinstance(tree, Pairs):
        return "{" + ", ".join(f"{json.dumps(_word(key))} = {_toml(each)}" for key, each in tree) + "}"
    if isinstance(tree, list):
        return "[" + ", ".join(map(_toml, tree)) + "]"
    if tree is None:
        return "1979-05-27T07:32:00Z"  # TOML has no nothing, and times that nobody else has
    return repr(tree) if isinstance(tree, float) else _leaf(tree)


def _leaf(value: Any) -> str:
    """As JSON has it; where Python writes no integer as long, in sixteens."""
    if isinstance(value, Deep):
        return "[" * 5000 + "]" * 5000
    if type(value) is int and value.bit_length() > 10000:
        return hex(value)
    return json.dumps(value.hex() if isinstance(value, bytes) else value)


def _word(key: Any) -> str:
    """A key that is no text, as text."""
    return key if isinstance(key, str) else type(key).__name__
