"""``zgtrain report``: one self-contained page with plots."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from zgstore.cli.arguments import complete_recipe
from zgstore.cli.console import Answer, Block, Facts
from zgstore.cli.units import size_text
from zgtrain import report as pages
from zgtrain.cli.arguments import JobFile, Relay, job_of

Others = Annotated[
    list[str] | None,
    typer.Argument(metavar="[OTHER]...", help="Further runs of the same blocks, cached or live, to compare with.",
                   autocompletion=complete_recipe),
]  # fmt: skip


def report(
    ctx: typer.Context,
    job: JobFile,
    others: Others = None,
    *,
    output: Annotated[str, typer.Option(metavar="FILE", help="The page.")] = "report.html",
    relay: Relay = False,
) -> Answer:
    """Write it."""
    loaded = job_of(ctx, job, relay=relay)
    path = pages.write_report(loaded, Path(output), others=[job_of(ctx, other) for other in others or ()])
    return Answer({"path": str(path.absolute()), "bytes": path.stat().st_size, "job": loaded.identity()}, _view)


def _view(value: dict[str, Any]) -> Iterator[Block]:
    yield Facts([("page", value["path"]), ("size", size_text(value["bytes"]))])
