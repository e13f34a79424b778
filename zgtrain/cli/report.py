"""``zgtrain report``: one self-contained page with plots."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from zgstore.cli.console import Answer, Block, Facts
from zgstore.cli.units import size_text
from zgtrain import report as pages
from zgtrain.cli.arguments import JobFile, Others, Relay, job_of, others_of


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
    path = pages.write_report(loaded, Path(output), others=others_of(ctx, job, others))
    return Answer({"path": str(path.absolute()), "bytes": path.stat().st_size, "job": loaded.identity()}, _view)


def _view(value: dict[str, Any]) -> Iterator[Block]:
    yield Facts([("page", value["path"]), ("size", size_text(value["bytes"]))])
