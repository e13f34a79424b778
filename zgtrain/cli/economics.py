"""``zgtrain economics``: what the cache cost and saved, from measured reports."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from zgstore.cli.console import Answer, Block, Facts, Line, Rows
from zgstore.cli.units import duration_text, short
from zgtrain import economics as books
from zgtrain.cli.arguments import JobFile, Others, job_of, others_of


def economics(ctx: typer.Context, job: JobFile, others: Others = None) -> Answer:
    """Weigh them."""
    found = books.economics([job_of(ctx, job), *others_of(ctx, job, others)])
    return Answer(found.as_value(), _view)


def _view(value: dict[str, Any]) -> Iterator[Block]:
    yield Facts([("snapshot", short(value["snapshot"])), ("steps", value["steps"])])
    yield Line("")
    yield Line("T(K): what one of K trainings costs with its share of the cache")
    yield Line("EVEN AT K: from there on it costs no more than a live run")
    curves = [("all blocks", value["all"]), *((f"block {each['block']}", each) for each in value["blocks"])]
    for kind, said in (("wall", "wall time: the slowest block"), ("device", "device seconds: all blocks together")):
        yield Line("")
        yield Line(said, style="bold")
        yield Rows(
            ("", "CACHE", *(f"T({k})" for k in books.KS), "LIVE", "EVEN AT K"),
            [_row(name, curve[kind]) for name, curve in curves],
            right=tuple(range(1, len(books.KS) + 4)), shrink=(),
        )  # fmt: skip
    for note in value["notes"]:
        yield Line("")
        yield Line(note)


def _row(name: str, curve: dict[str, Any]) -> tuple[object, ...]:
    even = curve["break_even"]
    return (
        name,
        duration_text(curve["cache"]),
        *(duration_text(each["seconds"]) for each in curve["t"]),
        "" if curve["live_mean"] is None else duration_text(curve["live_mean"]),
        "never" if even is None and curve["live_mean"] is not None else even,
    )
