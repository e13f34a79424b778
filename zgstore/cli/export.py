"""``zgstore export``: plain files that need no zgstore."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from zgstore.cli.arguments import Columns, Rev
from zgstore.cli.console import Answer, Block, Facts, Line, summary
from zgstore.cli.session import session_of
from zgstore.cli.units import listing, parse_list
from zgstore.upkeep import inspector


def export(
    ctx: typer.Context,
    rev: Rev,
    directory: Annotated[
        str, typer.Argument(metavar="DIR", help="A folder that is empty or not there.", show_default=False)
    ],
    columns: Columns = None,
    *,
    decode: Annotated[bool, typer.Option("--decode", help="Write int8 columns as what they stand for.")] = False,
) -> Answer:
    """Write the files."""
    from zgstore.upkeep import exporter  # noqa: PLC0415 - may load torch, which the help of this command need not

    session = session_of(ctx)
    store = session.store()
    digest = session.resolve(store, rev)
    chosen = parse_list(columns)
    size = sum(each.bytes for each in inspector.show(store, digest).columns if not chosen or each.column.name in chosen)
    with session.progress("exporting", total=size) as progress:
        report = exporter.export(store, digest, directory, columns=chosen, decode=decode, progress=progress.add)
    return Answer(report.as_json(), _view)


def _view(value: dict[str, Any]) -> Iterator[Block]:
    yield Line(f"wrote {summary(value['files'], 'file', value['bytes'])} to {value['directory']}")
    yield Facts([("columns", listing(value["columns"])), ("manifest", f"{value['directory']}/manifest.json")])
