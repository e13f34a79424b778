"""Durations, sizes and names as people write and read them."""

from __future__ import annotations

import pytest

from zgstore.cli import units
from zgstore.cli.console import Facts, Line, Rows, _lay_out, progress_text
from zgstore.errors import Invalid


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30s", 30), ("10m", 600), ("24h", 86400), ("7d", 604800), ("0", 0), ("1.5h", 5400), ("2W", 1209600)],
)
def test_a_duration_is_read(text, seconds):
    assert units.parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "-1s", "1 day", "1y", "1e3"])
def test_what_is_no_duration_is_refused(text):
    with pytest.raises(Invalid, match="not a duration"):
        units.parse_duration(text)


@pytest.mark.parametrize("text", ["3", "0.5", " 10 ", "9" * 400])
def test_a_number_without_a_unit_is_refused(text):
    with pytest.raises(Invalid, match="no unit") as caught:
        units.parse_duration(text)
    assert "10m" in caught.value.hint


@pytest.mark.parametrize("text", ["5219w", "9" * 400 + "d"])
def test_a_duration_that_nobody_lives_to_see_is_refused(text):
    assert units.parse_duration("5217w") == 5217 * 604800
    with pytest.raises(Invalid, match="longer than a century"):
        units.parse_duration(text)


def test_a_hold_without_a_reason_has_none_to_tell():
    assert units.hold_text({"user": "ada", "time_seconds": None, "reason": ""}) == "by ada"


def test_a_count_is_some_and_no_more_than_there_can_be():
    units.see_count(None, "rows", "--limit")
    units.see_count(1, "rows", "--limit")
    for count, said in ((0, "0 rows are none"), (-3, "-3 rows are none"), (10**18, "--limit is more rows")):
        with pytest.raises(Invalid, match=said):
            units.see_count(count, "rows", "--limit")


def test_a_part_counts_from_where_it_says():
    assert units.parse_part("3/20", first=1) == (3, 20)
    assert units.parse_part("0/2", first=0) == (0, 2)
    for text, first in (("0/4", 1), ("5/4", 1), ("1/0", 1), ("", 1), ("4/4", 0), ("1", 1), ("a/b", 0)):
        with pytest.raises(Invalid, match="no part of a whole"):
            units.parse_part(text, first=first)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536 << 20, "1.50 GiB"),
        (1 << 20, "1.00 MiB"),
        (300 << 20, "300 MiB"),
        (1023 * 1024 + 1000, "1.00 MiB"),
        (10 << 40, "10.0 TiB"),
    ],
)
def test_a_size_has_three_digits(count, text):
    assert units.size_text(count) == text


def test_a_time_has_its_unit():
    assert [units.duration_text(each) for each in (0.417, 42, 185, 7800, 190000)] == [
        "0.42 s", "42 s", "3 m 05 s", "2 h 10 m", "2 d 04 h",
    ]  # fmt: skip


@pytest.mark.parametrize("seconds", [None, float("nan"), float("inf"), 1e300, -1e300])
def test_a_moment_that_no_calendar_has_is_left_out(seconds):
    assert units.time_text(seconds) == ""


def test_a_long_name_loses_its_middle():
    text = units.middle("model.language_model.layers.27.self_attn:out", 20)
    assert len(text) == 20
    assert text.startswith("model.")
    assert text.endswith("attn:out")


def test_a_table_fits_its_page():
    rows = Rows(("NAME", "SIZE"), [("n" * 200, "1 B"), ("short", "20 GiB")], right=(1,))
    assert {len(text) for text, _ in _lay_out(rows, 80)} == {80}
    assert max(len(text) for text, _ in _lay_out(rows, None)) == 208


def test_a_table_of_many_numbers_stands_closer_before_it_is_wider_than_its_page():
    rows = Rows(tuple(f"T({at:>5})" for at in range(9)), [("1 m 56 s",) * 9])
    assert {len(text) for text, _ in _lay_out(rows, 80)} == {80}
    assert {len(text) for text, _ in _lay_out(rows, 100)} == {88}


def test_a_long_line_is_wrapped_between_words_and_keeps_its_indent():
    lines = [text for text, _ in _lay_out(Line("  do     run " + "again " * 20), 80)]
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("  do     run again")
    assert lines[1].startswith("  again again")
    assert _lay_out(Line("word " * 40), None) == [("word " * 40, ())]


def test_a_long_fact_is_wrapped_and_a_digest_never_broken():
    lines = [text for text, _ in _lay_out(Facts([("why", "word " * 40), ("digest", "f" * 90)]), 80)]
    assert max(map(len, lines[:-1])) <= 80
    assert "f" * 90 in lines[-1]


def test_progress_says_as_much_as_is_known():
    assert progress_text(0, None, 1.0) == ""
    assert progress_text(1 << 20, None, 0.1) == "1.00 MiB"
    assert progress_text(1 << 20, None, 2.0) == "1.00 MiB, 512 KiB/s"
    assert progress_text(1 << 20, 3 << 20, 2.0) == "1.00 MiB of 3.00 MiB, 512 KiB/s, 4.00 s left"
