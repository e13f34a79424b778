"""``zgstore verify``: every byte against its name; with ``--repair`` what is bad made anew."""

from __future__ import annotations

import typer

from zgstore.cli.console import Answer


def verify(ctx: typer.Context) -> Answer:
    raise NotImplementedError
