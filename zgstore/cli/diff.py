"""``zgstore diff``: two snapshots compared."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import typer

from zgstore.cli.arguments import Rev
from zgstore.cli.console import Answer, Block, Facts, Line, Rows
from zgstore.cli.session import session_of
from zgstore.cli.units import listing, see_count, shape_text, short, size_text, value_text
from zgstore.errors import Invalid
from zgstore.upkeep import differ


def diff(
    ctx: typer.Context,
    a: Rev,
    b: Rev,
    *,
    values: Annotated[bool, typer.Option("--values", help="Compare the columns' values too.")] = False,
    samples: Annotated[
        int | None,
        typer.Option(metavar="N", help="With --values: this many rows, spread evenly.", show_default=False),
    ] = None,
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit by 1 if they differ.")] = False,
) -> Answer:
    """Compare them."""
    if samples is not None and not values:
        raise Invalid("--samples says how many rows' values to compare", hint="add --values")
    see_count(samples, "rows", "--samples")
    session = session_of(ctx)
    store = session.store()
    digests = session.resolve(store, a), session.resolve(store, b)
    with session.progress("comparing") as progress:
        found = differ.diff(store, *digests, values=values, samples=samples, progress=progress.add)
    return Answer(found.as_json(), _view, exit_code=int(exit_code and not found.same))


def _view(value: dict[str, Any]) -> Iterator[Block]:
    a, b = short(value["a"]), short(value["b"])
    if value["same"]:
        yield Line(f"the same snapshot: {a}")
    else:
        yield Facts([("a", a), ("b", b), ("why", value["cause"])])
    for title, changes in (("pins", value["pins"]), ("head", value["head"])):
        yield from _view_changes(title.upper(), changes)
    yield Line("")
    yield Rows(
        ("", "ADDED", "REMOVED", "CHANGED", "SAME"),
        [
            (name, *(_count(value[name][kind]) for kind in ("added", "removed", "changed", "same")))
            for name in ("columns", "constants", "shards")
        ],
        right=(1, 2, 3, 4),
    )
    yield from _view_columns(value)
    sizes = value["bytes"]
    yield Line("")
    yield Facts([(name, size_text(sizes[key])) for name, key in _SIZES])
    yield from _view_values(value)


_SIZES = (("shared", "shared"), ("only in a", "only_a"), ("only in b", "only_b"))


def _view_changes(title: str, changes: Sequence[dict[str, Any]]) -> Iterator[Block]:
    """A table of single values; lists below it, for a cell would cut them where they differ."""
    lists = [change for change in changes if _is_of_lists(change["a"], change["b"])]
    cells = [
        (change["field"], value_text(change["a"]), value_text(change["b"])) for change in changes if change not in lists
    ]
    if cells:
        yield Line("")
        yield Rows((title, "A", "B"), cells, shrink=(1, 2, 0))
    for change in lists:
        yield Line("")
        yield Line(change["field"], style="bold")
        yield Facts(list(_unlike(change["a"] or [], change["b"] or [])))


def _is_of_lists(a: Any, b: Any) -> bool:
    """Whether they are two lists, or one that holds something and nothing."""
    return all(isinstance(each, list) for each in (a, b) if each is not None) and bool(a or b)


def _unlike(a: list[Any], b: list[Any]) -> Iterator[tuple[str, str]]:
    """What only one of two lists has; or that they differ in their order alone."""
    only_a, only_b = _without(a, b), _without(b, a)
    if only_a:
        yield "  only in A", ", ".join(map(value_text, only_a))
    if only_b:
        yield "  only in B", ", ".join(map(value_text, only_b))
    if not only_a and not only_b:
        yield "  in both", "the same, in another order"


def _without(items: list[Any], others: list[Any]) -> list[Any]:
    """The items, less one for each of the others."""
    left = list(items)
    for other in others:
        if other in left:
            left.remove(other)
    return left


def _view_columns(value: dict[str, Any]) -> Iterator[Block]:
    for kind in ("added", "removed"):
        if names := value["columns"][kind]:
            yield Line(f"{kind}: {listing(names)}")
    alike: defaultdict[str, list[str]] = defaultdict(list)
    for name in value["columns"]["changed"]:
        alike[", ".join(map(_redefined, value["definitions"].get(name, ())))].append(name)
    for how, names in alike.items():
        yield Line(f"changed: {listing(names)}{f' ({how})' if how else ''}")


def _redefined(change: dict[str, Any]) -> str:
    a, b = (shape_text(each) if change["field"] == "shape" else each for each in (change["a"], change["b"]))
    return f"{change['field']} {a} → {b}"


def _view_values(value: dict[str, Any]) -> Iterator[Block]:
    if "values" not in value:
        return
    yield Line("")
    yield Rows(
        ("COLUMN", "MAX ABS", "MEAN ABS", "REL L2", "COS MIN", "COS MEAN", "FIRST ROW"),
        [
            (
                name, *(_number(found[key]) for key in ("max_abs", "mean_abs", "rel_l2", "cos_min", "cos_mean")),
                "none" if found["first_row"] is None else found["first_row"],
            )
            for name, found in value["values"].items()
        ],
        right=(1, 2, 3, 4, 5, 6),
    )  # fmt: skip
    for name, reason in value["skipped"].items():
        yield Line(f"{name} was not compared: {reason}")


def _count(found: Any) -> int:
    return found if isinstance(found, int) else len(found)


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"
