"""Fields of fixed width, and maps whose fields are checked."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any, Final

from zgstore.errors import Corrupt
from zgstore.format.digest import DIGEST_BYTES, Digest

FORMAT: Final = 1
_DIGEST: Final = struct.Struct(f"{DIGEST_BYTES}s")
_ITEM: Final[itemgetter[int]] = itemgetter(0)


def pack_u64(numbers: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(numbers)}Q", *numbers)


def all_u64(packed: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(packed) // 8}Q", packed)


def unpack_u64(packed: bytes, index: int) -> int:
    return int(struct.unpack_from("<Q", packed, 8 * index)[0])


def nth_digest(packed: bytes, index: int) -> Digest:
    return Digest(packed[DIGEST_BYTES * index : DIGEST_BYTES * (index + 1)])


def raw_digests(packed: bytes) -> Iterator[bytes]:
    return map(_ITEM, _DIGEST.iter_unpack(packed))  # five times as fast as slices, of which a page has ten thousand


def all_digests(packed: bytes) -> Iterator[Digest]:
    return map(Digest, raw_digests(packed))


def broken(what: str, why: str) -> Corrupt:
    return Corrupt(
        f"a {what} breaks format {FORMAT}: {why}",
        hint="run `zgstore verify` to see what it hurts and what mends it",
        object=what,
        expected=f"a {what} of format {FORMAT}",
        actual=why,
    )


def of_kind(kind: str, value: Any) -> Any:
    if not isinstance(value, dict) or value.get("kind") != kind:
        raise broken(kind, f"its kind is {value.get('kind')!r:.40}" if isinstance(value, dict) else "it is no map")
    return value


def checked_fields(what: str, value: Any, **types: type) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise broken(what, "it is no map")
    for name, kind in types.items():
        if type(value.get(name)) is not kind:
            raise broken(what, f"{name} is {value.get(name)!r:.40}, not {kind.__name__}")
    return {name: value[name] for name in types}


def shape_of(what: str, value: Any, *, ragged: bool = True) -> tuple[int | None, ...]:
    """Sizes; the first may be None, which stands for the ragged axis."""
    shape = tuple(value)
    fits = all(type(size) is int and size >= 0 for size in (shape[1:] if ragged and shape[:1] == (None,) else shape))
    if not fits:
        raise broken(what, f"shape {value!r:.80}")
    return shape


def texts_of(what: str, value: dict[str, Any]) -> dict[str, str]:
    if not all(isinstance(each, str) for each in value.values()):
        raise broken(what, f"a text that is none in {value!r:.80}")
    return value


def natural(what: str, name: str, number: int, *, least: int = 0) -> int:
    if number < least:
        raise broken(what, f"{name} is {number}, less than {least}")
    return number


def many_u64(what: str, packed: Any) -> tuple[int, ...]:
    """Numbers, however many."""
    return all_u64(fixed_width(what, packed, len(packed) // 8 if isinstance(packed, bytes) else 0, each=8))


def fixed_width(what: str, packed: Any, count: int, *, each: int = DIGEST_BYTES) -> bytes:
    if not isinstance(packed, bytes) or len(packed) != count * each:
        raise broken(what, f"a field is not {count} × {each} bytes")
    return packed
