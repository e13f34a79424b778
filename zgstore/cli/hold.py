"""``zgstore hold``, ``zgstore unhold``: what gc keeps for good."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from zgstore.cli.arguments import Rev
from zgstore.cli.console import Answer, Block, Line
from zgstore.cli.session import session_of
from zgstore.cli.units import short
from zgstore.upkeep import keeper

Name = Annotated[str, typer.Argument(metavar="NAME", help="The hold's own name.", show_default=False)]


def hold(
    ctx: typer.Context,
    name: Name,
    rev: Rev,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Why, for whoever wonders later.")] = "",
) -> Answer:
    """Keep a snapshot."""
    session = session_of(ctx)
    store = session.store()
    digest = keeper.hold(store, name, session.resolve(store, rev), reason)
    return Answer({"name": name, "snapshot": str(digest), "reason": reason}, _view)


def unhold(ctx: typer.Context, name: Name) -> Answer:
    """Let it go."""
    digest = keeper.unhold(session_of(ctx).store(), name)
    return Answer({"name": name, "snapshot": str(digest)}, _view_unheld)


def _view(value: dict[str, Any]) -> Iterator[Block]:
    yield Line(f"holding {short(value['snapshot'])} as {value['name']}")


def _view_unheld(value: dict[str, Any]) -> Iterator[Block]:
    yield Line(f"let {short(value['snapshot'])} go, which {value['name']} held")
