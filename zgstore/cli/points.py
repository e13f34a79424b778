"""``zgstore points``: where a teacher can be listened to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from zgstore.cli.arguments import Recipe
from zgstore.cli.console import Answer, Block, Line, Rows
from zgstore.cli.units import plural


def points(ctx: typer.Context, recipe: Recipe) -> Answer:  # noqa: ARG001 - every command is given its context
    """List them in the order in which the first batch meets them."""
    from zgstore.building import estimator  # noqa: PLC0415 - loads torch, which the help need not

    return Answer(estimator.points(recipe).as_value(), _view)


def _view(value: dict[str, Any]) -> Iterator[Block]:
    yield Rows(
        ("POINT", "SHAPE", "DTYPE", "CALLS"),
        [
            (point["name"], "×".join(map(str, point["shape"])), point["dtype"], point["calls"])
            for point in value["points"]
        ],
        right=(3,),
    )
    how = "loaded" if value["teacher_loaded"] else "not loaded: its skeleton was asked"
    yield Line("")
    yield Line(f"{plural(len(value['points']), 'point')}; the teacher was {how}")
