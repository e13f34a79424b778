"""``zgstore why``: the chains from roots to an object."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from zgstore.cli.console import Answer, Block, Line
from zgstore.cli.session import session_of
from zgstore.cli.units import hold_text, short
from zgstore.upkeep import accounts


def why(
    ctx: typer.Context,
    digest: Annotated[str, typer.Argument(metavar="DIGEST", help="Of any object, or a prefix.", show_default=False)],
) -> Answer:
    """Find what keeps it."""
    return Answer(accounts.why(session_of(ctx).store(), digest).as_json(), _view)


_PLACES = {
    "trash": "it is in the trash: `zgstore gc` frees it after its grace",
    "absent": "it is missing: `zgstore verify` names what that hurts and what mends it",
}

# As `zgstore ls` calls them.
_KINDS = {"head": "ref"}


def _view(value: dict[str, Any]) -> Iterator[Block]:
    if value["place"] in _PLACES:
        yield Line(_PLACES[value["place"]])
    elif not value["chains"]:
        yield Line(f"nothing keeps {short(value['object'])}: `zgstore gc` takes it once it is old enough")
    holds = {hold["name"]: hold_text(hold) for hold in value["holds"]}
    for at, chain in enumerate(value["chains"]):
        if at:
            yield Line("")
        for depth, link in enumerate(chain):
            digest = short(link["digest"])
            name = "" if link["name"] == digest else link["name"]
            kind = _KINDS.get(link["kind"], link["kind"])
            said = holds.get(link["name"]) if link["kind"] == "hold" else None
            yield Line("  " * depth + " ".join(part for part in (kind, name, digest, said) if part))
