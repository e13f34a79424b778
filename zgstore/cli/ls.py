"""``zgstore ls``: refs and tags."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from zgstore.cli.console import Answer, Block, Line, Rows
from zgstore.cli.session import session_of
from zgstore.cli.units import short, size_text
from zgstore.upkeep import inspector


def ls(ctx: typer.Context) -> Answer:
    """List what is named."""
    refs = inspector.listing(session_of(ctx).store())
    return Answer({"refs": [ref.as_json() for ref in refs]}, _view)


def _view(value: dict[str, Any]) -> Iterator[Block]:
    if not value["refs"]:
        yield Line("nothing is named yet: `zgstore build RECIPE` makes a snapshot and a ref")
        return
    yield Rows(
        ("NAME", "KIND", "SNAPSHOT", "SAMPLES", "COLUMNS", "SIZE"),
        [
            (
                ref["name"], "tag" if ref["kind"] == "tag" else "ref", short(ref["snapshot"]),
                "?" if ref["samples"] is None else ref["samples"],
                "?" if ref["columns"] is None else ref["columns"],
                "unreadable" if ref["bytes"] is None else size_text(ref["bytes"]),
            )
            for ref in value["refs"]
        ],
        right=(3, 4, 5),
    )  # fmt: skip
