"""Text from outside costs what it is worth."""

from __future__ import annotations

import tracemalloc

import pytest

from zgstore.format import foreign


def test_what_is_in_bounds_is_read():
    assert foreign.parse_toml(b'a = 1\n[b]\nc = [1.5, "x", {d = true}]') == {
        "a": 1,
        "b": {"c": [1.5, "x", {"d": True}]},
    }
    assert foreign.parse_toml(f"a = {-(1 << 63)}\nb = {(1 << 63) - 1}") == {"a": -(1 << 63), "b": (1 << 63) - 1}
    assert foreign.parse_json(b'{"a": [1, 2.5, null, "x"]}') == {"a": [1, 2.5, None, "x"]}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"a = " + b"[" * 40 + b"]" * 40, "deeper"),
        (b"a = " + b"[" * 9000, "deep"),
        (b"a" + b".c" * 9000 + b" = 1", "deep"),
        (b"a = 9223372036854775808", "64 bits"),
        (b"a = 0x" + b"f" * 9000, "64 bits"),
        (b"a = " + b"9" * 9000, "digits"),
        (b"a = '\xff'", "utf-8"),
        (b"#" * ((1 << 20) + 1), "bytes"),
    ],
)
def test_toml_out_of_bounds_is_a_value_error(text, why):
    with pytest.raises(ValueError, match=why):
        foreign.parse_toml(text)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"[" * 90_000, "deep"), (b'{"a":1,"a":1}', "twice"), (b"[NaN]", "NaN"), (b"[-Infinity]", "Infinity"),
        (b"9" * 9000, "digits"), (b'"\xff"', "utf-8"), (b"", "Expecting"), (b"{}{}", "Extra"),
    ],
)  # fmt: skip
def test_json_out_of_bounds_is_a_value_error(body, why):
    with pytest.raises(ValueError, match=why):
        foreign.parse_json(body)


@pytest.mark.parametrize("piece", [b"[],", b"{},", b"0,"])
def test_many_small_values_are_counted_before_they_are_made(piece):
    body = b"[" + piece * (1 << 22) + b"0]"
    tracemalloc.start()
    with pytest.raises(ValueError, match="elements"):
        foreign.parse_json(body)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 16
