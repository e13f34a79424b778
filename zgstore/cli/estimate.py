"""``zgstore estimate``: what a build would store."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from zgstore.cli.arguments import Recipe
from zgstore.cli.console import Answer, Block, Facts, Line, Rows
from zgstore.cli.session import session_of
from zgstore.cli.units import see_count, size_text


def estimate(
    ctx: typer.Context,
    recipe: Recipe,
    *,
    limit: Annotated[
        int | None, typer.Option(metavar="ROWS", help="As for build: exactly so many rows.", show_default=False)
    ] = None,
) -> Answer:
    """Look at the inputs and at the shapes."""
    see_count(limit, "rows", "--limit")
    store = session_of(ctx).store()
    from zgstore.building import estimator  # noqa: PLC0415 - loads torch, which the help need not

    return Answer(estimator.estimate(store, recipe, limit=limit).as_value(), _view)


_HOW = {
    "known": "not loaded: earlier builds tell the shapes",
    "skeleton": "not loaded: its skeleton tells the shapes",
    "loaded": "loaded, for its recipe has no skeleton",
}


def _view(value: dict[str, Any]) -> Iterator[Block]:
    sizes = {name: size_text(size) for name, size in value["bytes"].items()}
    new = f"at most {sizes['new']} new" if value["bytes"]["new"] else "nothing new"
    yield Facts(
        [
            ("samples", value["samples"]),
            ("shards", value["shards"]),
            ("size", f"{new} of {sizes['total']}; equal bytes are stored once"),
            ("free", sizes["free"]),
            ("teacher", _HOW[value["teacher"]]),
            ("advice", f"batches_per_shard = {value['batches_per_shard']} makes blobs of about 32 MiB"),
        ]
    )
    yield Line("")
    yield Rows(("COLUMN", "SIZE"), [(name, size_text(size)) for name, size in value["columns"].items()], right=(1,))
