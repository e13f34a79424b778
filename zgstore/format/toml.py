"""TOML that came from outside, within bounds. The only importer of tomllib."""

from __future__ import annotations

import tomllib
from typing import Any, Final

MAX_BYTES: Final = 1 << 20
MAX_DEPTH: Final = 32


def parse(text: str | bytes) -> dict[str, Any]:
    """The tables that a text means.

    Args:
        text: TOML; bytes are UTF-8.

    Raises:
        ValueError: if it is not TOML, or larger, deeper or of wider integers than any file of ours: the parser itself
            bounds none of them.
    """
    if len(text) > MAX_BYTES:
        raise ValueError(f"it has {len(text)} bytes, and a file of ours at most {MAX_BYTES}")
    try:
        value = tomllib.loads(text if isinstance(text, str) else text.decode("utf-8"))
    except RecursionError as error:
        raise ValueError("its values nest too deep") from error
    _see_bounds(value, 0)
    return value


def _see_bounds(value: Any, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise ValueError(f"its values nest deeper than {MAX_DEPTH}")
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            _see_bounds(each, depth + 1)
    elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        raise ValueError("it holds an integer of more than 64 bits")
