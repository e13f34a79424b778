"""One value, one encoding; and hostile bytes cost nothing."""

from __future__ import annotations

import struct
import tracemalloc

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zgstore.errors import Corrupt, Invalid
from zgstore.format import canonical

KEYS = st.text(max_size=8).filter(lambda key: not key.startswith("$"))
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.binary(max_size=40)
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(KEYS, inner, max_size=5), max_leaves=20
)


@given(VALUES)
def test_a_value_is_read_back_with_its_types(value):
    again = canonical.decode(canonical.encode(value))
    assert again == value
    assert repr(again) == repr(_sorted(value))


def _sorted(value):
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value, key=lambda key: key.encode())}
    return [_sorted(item) for item in value] if isinstance(value, list) else value


@given(st.dictionaries(KEYS, SCALARS, min_size=2, max_size=6))
def test_the_order_in_which_a_map_was_made_changes_nothing(value):
    assert canonical.encode(dict(reversed(value.items()))) == canonical.encode(value)


@given(VALUES, st.data())
def test_one_changed_byte_never_means_the_same_value(value, data):
    body = bytearray(canonical.encode(value))
    at = data.draw(st.integers(0, len(body) - 1))
    body[at] ^= data.draw(st.integers(1, 255))
    try:
        again = canonical.decode(bytes(body))
    except Corrupt:
        return
    assert canonical.encode(again) != canonical.encode(value)


def test_floats_are_their_eight_bytes():
    body = canonical.encode(1.5)
    assert msgpack.unpackb(body) == {"$f64": struct.pack("<d", 1.5)}
    assert canonical.decode(canonical.encode(-0.0)).hex() == (-0.0).hex()
    assert type(canonical.decode(canonical.encode(2.0))) is float


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "middle"),
        (b"\xcc\x05", "canonical"),  # 5 fits one byte
        (b"\xd9\x01a", "canonical"),
        (b"\xdc\x00\x00", "canonical"),
        (b"\xcb" + bytes(8), "type byte"),  # a msgpack float
        (b"\xd4\x01\x00", "type byte"),  # an extension
        (b"\xc1", "type byte"),
        (b"\x82\xa1a\x01\xa1a\x01", "twice"),
        (b"\x82\xa1b\x01\xa1a\x01", "canonical"),  # unsorted
        (b"\x81\x01\x01", "not canonical"),  # a key that is no text
        (b"\x81\xa2$x\x01", "cannot be a key"),
        (b"\x81\xa4$f64\xc4\x02ab", "8 bytes"),
        (b"\x92\x01", "more elements"),
        (b"\x92\x01\xa5a", "middle"),
        (b"\x01\x01", "follow"),
        (b"\xa1\xff", "not canonical"),  # not UTF-8
    ],
)
def test_what_is_not_canonical_is_corrupt(body, why):
    with pytest.raises(Corrupt, match=why):
        canonical.decode(body)


@pytest.mark.parametrize(
    "body",
    [
        b"\xdd\xff\xff\xff\xff" + bytes(20),
        b"\xdf\x00\x01\x00\x01" + bytes(20),
        b"\xdd\x00\x01\x00\x00" + b"\xdd\x00\x01\x00\x00" * 15 + bytes(50),
        b"\x91" * 1000 + b"\x00",
        b"\xc6\xff\xff\xff\xff",
    ],
)
def test_containers_that_lie_about_their_size_cost_no_memory(body):
    tracemalloc.start()
    with pytest.raises(Corrupt):
        canonical.decode(body)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_sixteen_levels_are_read_and_seventeen_refused():
    def nest(levels):
        return [] if levels == 1 else [nest(levels - 1)]

    assert canonical.decode(canonical.encode(nest(16))) == nest(16)
    with pytest.raises(Invalid, match="deeper"):
        canonical.encode(nest(17))
    with pytest.raises(Corrupt, match="deeper"):
        canonical.decode(b"\x91" * 16 + b"\x90")


NO_ENCODING = [
    {1: 2}, {"$a": 1}, 1 << 64, -(1 << 63) - 1, object(), {1, 2}, [0] * (1 + (1 << 16)), "\ud800", {"\ud800": 1},
]  # fmt: skip


@pytest.mark.parametrize("value", NO_ENCODING)
def test_what_has_no_encoding_is_invalid(value):
    with pytest.raises(Invalid):
        canonical.encode(value)


def test_tuples_are_lists():
    assert canonical.decode(canonical.encode((1, (2,)))) == [1, [2]]
