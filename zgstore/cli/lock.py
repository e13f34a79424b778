"""``zgstore lock``: what an experiment commits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from zgstore.building import lockfile
from zgstore.cli.arguments import complete_rev
from zgstore.cli.console import Answer, Block, Facts, Line
from zgstore.cli.session import session_of
from zgstore.cli.units import short


def lock(
    ctx: typer.Context,
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The section.", autocompletion=complete_rev, show_default=False)
    ],
    rev: Annotated[
        str | None,
        typer.Argument(
            metavar="[REV]",
            help="The snapshot; the ref NAME if not given.",
            autocompletion=complete_rev,
            show_default=False,
        ),
    ] = None,
    file: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="The lock file; the nearest upward if not given.", show_default=False),
    ] = None,
) -> Answer:
    """Write it down."""
    store = session_of(ctx).store()
    path, locked = lockfile.lock(store, name, rev, file=Path(file) if file else None)
    value = {
        "name": name,
        "file": str(path),
        "snapshot": str(locked.snapshot),
        "recipe": str(locked.recipe) if locked.recipe else None,
        "pins": str(locked.pins),
        "hold": f"lock/{name}/{locked.snapshot.short}",
    }
    return Answer(value, _view)


def _view(value: dict[str, Any]) -> Iterator[Block]:
    yield Line(f"locked {value['name']} in {value['file']}: commit it")
    yield Facts(
        [
            ("snapshot", short(value["snapshot"])),
            ("recipe", short(value["recipe"]) or None),
            ("pins", short(value["pins"])),
            ("hold", value["hold"]),
        ]
    )
