"""``zgstore ref set``, ``zgstore ref rm``: names that move."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from zgstore.cli.arguments import Rev, complete_rev
from zgstore.cli.console import Answer, Block, Line
from zgstore.cli.session import session_of
from zgstore.cli.units import short
from zgstore.storage.refs import ANY
from zgstore.upkeep import keeper

Name = Annotated[str, typer.Argument(metavar="NAME", help="The ref.", autocompletion=complete_rev, show_default=False)]


def point(
    ctx: typer.Context,
    name: Name,
    rev: Rev,
    expect: Annotated[
        str | None,
        typer.Option(metavar="REV", help="Only if it is there now.", autocompletion=complete_rev, show_default=False),
    ] = None,
) -> Answer:
    """Move a name."""
    session = session_of(ctx)
    store = session.store()
    digest = session.resolve(store, rev)
    keeper.set_ref(store, name, digest, expect=session.resolve(store, expect) if expect else ANY)
    return Answer({"name": name, "kind": "head", "snapshot": str(digest)}, view_named)


def remove(ctx: typer.Context, name: Name) -> Answer:
    """Forget a name."""
    digest = keeper.forget(session_of(ctx).store(), name, "head")
    return Answer({"name": name, "kind": "head", "snapshot": str(digest)}, view_removed)


_WORDS = {"head": "ref", "tag": "tag"}


def view_named(value: dict[str, Any]) -> Iterator[Block]:
    yield Line(f"{_WORDS[value['kind']]} {value['name']} is {short(value['snapshot'])}")


def view_removed(value: dict[str, Any]) -> Iterator[Block]:
    yield Line(f"removed {_WORDS[value['kind']]} {value['name']}, which was {short(value['snapshot'])}")
