"""``zgstore log``: a ref's past."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from zgstore.cli.arguments import complete_rev
from zgstore.cli.console import Answer, Block, Line, Rows
from zgstore.cli.session import session_of
from zgstore.cli.units import short, time_text
from zgstore.upkeep import inspector


def log(
    ctx: typer.Context,
    ref: Annotated[
        str | None,
        typer.Argument(metavar="[REF]", help="Whose past; all refs' if not given.", autocompletion=complete_rev),
    ] = None,
) -> Answer:
    """List the moves, newest first."""
    moves = inspector.log(session_of(ctx).store(), ref)
    return Answer({"ref": ref, "entries": [move.as_json() for move in moves]}, _view)


def _view(value: dict[str, Any]) -> Iterator[Block]:
    if not value["entries"]:
        yield Line("no ref has moved within what the reflogs keep")
        return
    yield Rows(
        ("REV", "SNAPSHOT", "WHEN", "BY", "WHAT"),
        [
            (
                entry["rev"], short(entry["new"]), time_text(entry["time_seconds"]),
                (entry["record"] or {}).get("user", ""), _what(entry),
            )
            for entry in value["entries"]
        ],
        shrink=(4, 0),
    )  # fmt: skip


def _what(entry: dict[str, Any]) -> str:
    record = entry["record"] or {}
    return str(record.get("message") or record.get("command") or ("made" if entry["old"] is None else "moved"))
