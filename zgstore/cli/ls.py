"""``zgstore ls``: refs, tags and holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import typer

from zgstore.cli.console import Answer, Block, Facts, Line, Rows
from zgstore.cli.session import session_of
from zgstore.cli.units import hold_text, short, size_text
from zgstore.upkeep import inspector


def ls(ctx: typer.Context) -> Answer:
    """List what is named."""
    store = session_of(ctx).store()
    refs, holds = inspector.listing(store), inspector.holds(store)
    value = {"refs": [ref.as_json() for ref in refs], "holds": [hold.as_json() for hold in holds]}
    return Answer(value, _view)


def _view(value: dict[str, Any]) -> Iterator[Block]:
    yield (
        _refs(value["refs"])
        if value["refs"]
        else Line("nothing is named yet: `zgstore build RECIPE` makes a snapshot and a ref")
    )
    if value["holds"]:
        yield Line("")
        yield Line("holds", style="bold")
        yield Facts([(f"  {hold['name']}", f"{short(hold['snapshot'])} {hold_text(hold)}") for hold in value["holds"]])


def _refs(refs: Sequence[dict[str, Any]]) -> Rows:
    return Rows(
        ("NAME", "KIND", "SNAPSHOT", "SAMPLES", "COLUMNS", "SIZE"),
        [
            (
                ref["name"], _kind(ref), short(ref["snapshot"]),
                "?" if ref["samples"] is None else ref["samples"],
                "?" if ref["columns"] is None else _columns(ref),
                "unreadable" if ref["bytes"] is None else size_text(ref["bytes_here"]),
            )
            for ref in refs
        ],
        right=(3, 4, 5),
    )  # fmt: skip


def _kind(ref: dict[str, Any]) -> str:
    kind = "tag" if ref["kind"] == "tag" else "ref"
    return kind if ref["partial"] is None else f"partial {kind}"


def _columns(ref: dict[str, Any]) -> str:
    return str(ref["columns"]) if ref["partial"] is None else f"{len(ref['partial'])} of {ref['columns']}"
