"""Durations, sizes, digests and times as people write and read them."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from zgstore.errors import Invalid
from zgstore.format.digest import SHORT_DIGITS

_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)([smhdw]?)")
_SECONDS: Final = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_CENTURY_SECONDS: Final = 36525 * 86400
_PREFIX: Final = "blake3:"
_STEPS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def parse_duration(text: str, *, bare: bool = False) -> float:
    """Seconds of ``30s``, ``10m``, ``24h``, ``7d``, ``2w`` or ``0``.

    Args:
        text: What was typed.
        bare: Whether a number alone is seconds: of what is waited for, not of what is kept; ``gc --grace 3`` is rarely
            meant so.

    Raises:
        Invalid: for anything else.
    """
    match = _DURATION.fullmatch(text.strip().lower())
    if match is None:
        raise Invalid(f"{text!r} is not a duration", hint="write it as 30s, 10m, 24h or 7d")
    if not (match[2] or bare) and float(match[1]):
        raise Invalid(f"{text!r:.40} has no unit", hint="write it as 30s, 10m, 24h or 7d")
    seconds = float(match[1]) * _SECONDS[match[2]]
    if seconds > _CENTURY_SECONDS:
        raise Invalid(f"{text!r:.40} is longer than a century", hint="write it as 30s, 10m, 24h or 7d")
    return seconds


def see_count(count: int | None, what: str, option: str) -> None:
    """See that what an option counts, if it was given, is some and not more than there can be.

    Raises:
        Invalid: if it is not.
    """
    from zgstore.building.sections import MAX_COUNT  # noqa: PLC0415 - most commands count nothing

    if count is not None and count < 1:
        raise Invalid(f"{count} {what} are none", hint=f"give {option} at least 1")
    if count is not None and count > MAX_COUNT:
        raise Invalid(f"{option} is more {what} than there can be", hint=f"give at most {MAX_COUNT}")


def parse_part(text: str, *, first: int) -> tuple[int, int]:
    """``I/N`` as two numbers, I counted from ``first``.

    Raises:
        Invalid: if it is not that, or I is not among the N.
    """
    match = re.fullmatch(r"(\d+)/(\d+)", text.strip())
    if match is None or not first <= int(match[1]) < int(match[2]) + first:
        example = f"{first}/4" if first == 0 else "1/4"
        raise Invalid(f"{text!r} is no part of a whole", hint=f"write I/N with I counted from {first}, as {example}")
    return int(match[1]), int(match[2])


def parse_list(text: str | None) -> tuple[str, ...] | None:
    """Names separated by commas; None stays None."""
    if text is None:
        return None
    return tuple(name.strip() for name in text.split(",") if name.strip())


def size_text(count: float) -> str:
    """``1.5 GiB``: binary steps, three digits."""
    value, step = float(count), 0
    while abs(value) >= 1023.5 and step < len(_STEPS) - 1:
        value, step = value / 1024, step + 1
    if step == 0:
        return f"{int(value)} B"
    return f"{value:.{0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2}f} {_STEPS[step]}"


def shape_text(shape: Sequence[int | None]) -> str:
    """``…×768``: the ragged axis is the one whose size is not known."""
    return "×".join("…" if size is None else str(size) for size in shape) or "scalar"


def duration_text(seconds: float) -> str:
    """``0.42 s``, ``42 s``, ``3 m 05 s``, ``2 h 10 m``, ``5 d 03 h``."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} m {whole % 60:02} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02} m"
    return f"{whole // 86400} d {whole % 86400 // 3600:02} h"


def time_text(seconds: float | None) -> str:
    """A moment in local time, to the minute; empty where there is none, or none that a calendar has."""
    try:
        return "" if seconds is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
    except (ValueError, OverflowError, OSError):
        return ""


def hold_text(hold: Mapping[str, Any]) -> str:
    """``by ada since 2026-01-31 12:00: for table 3``: who holds, since when, and why if they said."""
    since = time_text(hold["time_seconds"])
    return f"by {hold['user']}{f' since {since}' if since else ''}{f': {reason}' if (reason := hold['reason']) else ''}"


def short(digest: object) -> str:
    """The 12 digits shown to people of a text digest, which can be pasted back; any other text as it is."""
    text = str(digest) if digest else ""
    return text.removeprefix(_PREFIX)[:SHORT_DIGITS] if text.startswith(_PREFIX) else text


def value_text(value: object) -> str:
    """A pin's single value: a digest cut short, yes or no for what is true or not, none where there is none."""
    named = {None: "none", True: "yes", False: "no"}
    return short(named[value] if value is None or isinstance(value, bool) else str(value))


def middle(text: str, width: int) -> str:
    """The text in at most ``width`` characters, its middle left out: both ends of a point's name tell it apart."""
    if len(text) <= width:
        return text
    if width < 5:
        return text[:width]
    head = (width - 1) // 2
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"


def printable(text: object) -> str:
    """Text from outside with whatever a terminal would act on written out."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in str(text))


def plural(count: int, noun: str) -> str:
    """``1 shard``, ``2 shards``."""
    return f"{count} {noun if count == 1 else noun + 's'}"


def listing(names: Sequence[str], *, most: int = 4) -> str:
    """The first names, and how many more there are."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
