"""``zgstore copy``: a snapshot carried to another store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from zgstore.cli.arguments import Columns, Rev
from zgstore.cli.console import Answer, Block, Facts, Line, summary
from zgstore.cli.session import session_of
from zgstore.cli.units import duration_text, listing, parse_list, short
from zgstore.storage.store import Store
from zgstore.upkeep import copier


def copy(
    ctx: typer.Context,
    rev: Rev,
    to: Annotated[str, typer.Option("--to", metavar="STORE", help="The store to carry it to.", show_default=False)],
    columns: Columns = None,
) -> Answer:
    """Carry what is missing there."""
    session = session_of(ctx)
    store, target = session.store(), Store.open(Path(to))
    text = session.rev(rev)
    chosen = parse_list(columns)
    plan = copier.plan_copy(store, text, to=target, columns=chosen)
    with session.progress("copying", total=plan.bytes_to_copy) as progress:
        report = copier.copy(store, text, to=target, columns=chosen, progress=progress.add)
    return Answer(report.as_json(), _view)


def _view(value: dict[str, Any]) -> Iterator[Block]:
    copied, present = ((value["objects"][name], value["bytes"][name]) for name in ("copied", "present"))
    yield Line(f"copied {short(value['snapshot'])} to {value['to']}")
    yield Facts(
        [
            ("ref", value["ref"]),
            ("copied", f"{summary(copied[0], 'blob', copied[1])} in {duration_text(value['seconds'])}"),
            ("there already", summary(present[0], "blob", present[1])),
            ("a part", listing(value["columns"]) if value["partial"] else None),
        ]
    )
