"""``zgstore tag``, ``zgstore tag rm``: names that do not move."""

from __future__ import annotations

from typing import Annotated

import typer

from zgstore.cli.arguments import Rev, complete_rev
from zgstore.cli.console import Answer
from zgstore.cli.ref import view_named, view_removed
from zgstore.cli.session import session_of
from zgstore.errors import Invalid
from zgstore.upkeep import keeper

Name = Annotated[str, typer.Argument(metavar="NAME", help="The tag.", autocompletion=complete_rev, show_default=False)]


def tag(
    ctx: typer.Context,
    name: Name,
    rev: Rev,
    *,
    force: Annotated[bool, typer.Option("--force", help="Move a tag that names another snapshot.")] = False,
) -> Answer:
    """Name a snapshot."""
    if name == "rm":
        raise Invalid("no tag can be called rm", hint="that word removes one: `zgstore tag rm NAME`")
    session = session_of(ctx)
    store = session.store()
    digest = keeper.tag(store, name, session.resolve(store, rev), force=force)
    return Answer({"name": name, "kind": "tag", "snapshot": str(digest)}, view_named)


def remove(ctx: typer.Context, name: Name) -> Answer:
    """Remove a name."""
    digest = keeper.forget(session_of(ctx).store(), name, "tag")
    return Answer({"name": name, "kind": "tag", "snapshot": str(digest)}, view_removed)
