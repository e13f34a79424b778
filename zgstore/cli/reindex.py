"""``zgstore reindex``: the index made anew."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from zgstore.cli.console import Answer, Block, Line
from zgstore.cli.session import session_of


def reindex(ctx: typer.Context) -> Answer:
    """Throw the index away; what it knew is found out again as it is needed."""
    store = session_of(ctx).store()
    store.index.clear()
    return Answer({"store": str(store.path), "index": str(store.index.path.parent)}, _view)


def _view(value: dict[str, Any]) -> Iterator[Block]:
    yield Line(f"the index in {value['index']} is new: `zgstore verify` fills it with stamps")
