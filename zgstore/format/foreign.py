"""TOML and JSON that came from outside, within bounds that their parsers do not have. The only importer of tomllib."""

from __future__ import annotations

import json
import tomllib
from typing import Any, Final

MAX_TOML_BYTES: Final = 1 << 20
MAX_DEPTH: Final = 32
MAX_JSON_ELEMENTS: Final = 1 << 22  # of all containers together: three bytes can be a list of a hundred


def parse_toml(text: str | bytes) -> dict[str, Any]:
    """The tables that a text means.

    Args:
        text: TOML; bytes are UTF-8.

    Raises:
        ValueError: if it is not TOML, or larger, deeper or of wider integers than any file of ours.
    """
    if len(text) > MAX_TOML_BYTES:
        raise ValueError(f"it has {len(text)} bytes, and a file of ours at most {MAX_TOML_BYTES}")
    try:
        value = tomllib.loads(text if isinstance(text, str) else text.decode("utf-8"))
    except RecursionError as error:
        raise ValueError("its values nest too deep") from error
    _see_bounds(value, 0)
    return value


def parse_json(body: bytes) -> Any:
    """The value that a text means.

    Args:
        body: JSON in UTF-8; as large as its reader allows.

    Raises:
        ValueError: if it is not JSON, has a key twice or NaN, or is deeper or of more elements than it may be.
    """
    if sum(map(body.count, (b",", b"[", b"{"))) > MAX_JSON_ELEMENTS:
        raise ValueError(f"it has more than {MAX_JSON_ELEMENTS} elements")
    try:
        return json.loads(body, object_pairs_hook=_unique, parse_constant=_no_number)
    except RecursionError as error:
        raise ValueError("its values nest too deep") from error


def _see_bounds(value: Any, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise ValueError(f"its values nest deeper than {MAX_DEPTH}")
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            _see_bounds(each, depth + 1)
    elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        raise ValueError("it holds an integer of more than 64 bits")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key is there twice")
    return result


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")
