"""``zgtrain status``: how far each block is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from zgstore.cli.console import Answer, Block, Line, Rows
from zgtrain import progress
from zgtrain.cli.arguments import JobFile, job_of
from zgtrain.cli.running import HEADS, status_row


def status(ctx: typer.Context, job: JobFile) -> Answer:
    """Show it."""
    loaded = job_of(ctx, job)
    blocks = [each.as_value() for each in progress.status(loaded)]
    return Answer({"job": loaded.identity(), "output": str(loaded.output), "blocks": blocks}, _view)


def _view(value: dict[str, Any]) -> Iterator[Block]:
    yield Rows(HEADS, [status_row(each) for each in value["blocks"]], right=(0, 2, 3, 4, 5), shrink=())
    for each in value["blocks"]:
        if each["error"]:
            yield Line("")
            yield Line(f"block {each['block']}: {each['error']}")
