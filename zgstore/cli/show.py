"""``zgstore show``: a snapshot's pins, columns and statistics; or one row as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from zgstore.cli.arguments import Rev, complete_recipe
from zgstore.cli.console import Answer, Block, Facts, Line, Rows, plain
from zgstore.cli.session import session_of
from zgstore.cli.units import hold_text, plural, shape_text, short, size_text, time_text, value_text
from zgstore.errors import Invalid
from zgstore.upkeep import inspector


def show(
    ctx: typer.Context,
    rev: Rev,
    decode: Annotated[
        int | None, typer.Option(metavar="ROW", help="Show this row as text instead.", show_default=False)
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            metavar="RECIPE", help="Whose data factory decodes it.", autocompletion=complete_recipe, show_default=False
        ),
    ] = None,
) -> Answer:
    """Show one snapshot."""
    session = session_of(ctx)
    store = session.store()
    digest = session.resolve(store, rev)
    if decode is None:
        if recipe is not None:
            raise Invalid("--recipe decodes a row, and none was named", hint="add --decode ROW")
        return Answer(inspector.show(store, digest).as_json(), _view)
    if recipe is None:
        raise Invalid("a row is decoded by its data factory", hint="name the recipe: --recipe cache.toml")
    from zgstore.cli.decoding import decode_row  # noqa: PLC0415 - torch is loaded for this alone

    return Answer(decode_row(store, digest, decode, recipe), _view_row)


def _view(value: dict[str, Any]) -> Iterator[Block]:
    record, here = value["record"] or {}, value["partial"]
    yield Facts(
        [
            ("snapshot", short(value["snapshot"])),
            ("recipe", short(value["recipe"]) or None),
            ("pins", short(value["pins"])),
            ("names", ", ".join(name for name in value["names"] if not name.startswith("hold ")) or None),
            *(("held", f"{hold['name']}, {hold_text(hold)}") for hold in value["holds"]),
            ("samples", value["samples"]),
            ("dropped", _dropped(value["dropped"])),
            ("size", f"{_size(value)} in {plural(value['shards'], 'shard')}"),
            ("partial", None if here is None else f"only {', '.join(here) or 'no column'}"),
            ("built", _built(record) or None),
        ]
    )
    for part in ("teacher", "data", "capture"):
        yield Line("")
        yield Line(part, style="bold")
        yield Facts([(f"  {name}", text) for name, text in _flat(plain(value[part]))])
    lossy = any("error" in column["statistics"] for column in value["columns"])
    yield Line("")
    yield Rows(
        ("COLUMN", "ROLE", "DTYPE", "CODEC", "SHAPE", "SIZE", "RMS", "MAX", *(["ERROR"] if lossy else [])),
        [_column_cells(column)[: 9 if lossy else 8] for column in value["columns"]],
        right=(5, 6, 7, 8)[: 4 if lossy else 3],
    )


def _size(value: dict[str, Any]) -> str:
    whole = size_text(value["bytes"])
    return whole if value["partial"] is None else f"{size_text(value['bytes_here'])} here of {whole}"


def _dropped(value: dict[str, int]) -> str | None:
    return f"{value['masked']} masked, {value['left_out']} left out" if any(value.values()) else None


def _column_cells(column: dict[str, Any]) -> tuple[object, ...]:
    shape = shape_text(column["shape"])
    statistics = column["statistics"]
    extremes = [abs(statistics[name]) for name in ("min", "max") if isinstance(statistics.get(name), int | float)]
    rms, error = statistics.get("rms"), statistics.get("error")
    return (
        column["name"], column["role"], column["dtype"], column["codec"], shape,
        size_text(column["bytes"]) if column["here"] else "not here",
        f"{rms:.3g}" if isinstance(rms, int | float) else "", f"{max(extremes):.3g}" if extremes else "",
        f"{error:.3g}" if isinstance(error, int | float) else "",
    )  # fmt: skip


def _built(record: Mapping[str, Any]) -> str:
    who = "@".join(str(record[name]) for name in ("user", "host") if record.get(name))
    return f"{time_text(record.get('time_seconds'))} {f'by {who}' if who else ''}".strip()


_FIRST = {"id": 0, "revision": 1, "measured": 2, "digest": 2}


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Maps entered, lists in one line, digests cut short."""
    if isinstance(value, Mapping) and value:
        for key, item in sorted(value.items(), key=lambda each: _FIRST.get(each[0], len(_FIRST))):
            yield from _flat(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        yield path, ", ".join(map(value_text, value)) or "none"
    elif value not in ({}, None, ""):
        yield path, value_text(value)


def _view_row(value: dict[str, Any]) -> Iterator[Block]:
    yield Facts([("snapshot", short(value["snapshot"])), ("row", value["row"]), ("tokens", value["tokens"])])
    yield Line("")
    for line in value["text"].splitlines():
        yield Line(line)
