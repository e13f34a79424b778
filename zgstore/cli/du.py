"""``zgstore du``: bytes own and shared."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from zgstore.cli.console import Answer, Block, Facts, Line, Rows
from zgstore.cli.session import session_of
from zgstore.cli.units import short, size_text
from zgstore.upkeep import accounts


def du(ctx: typer.Context) -> Answer:
    """Count what each named snapshot takes."""
    return Answer(accounts.usage(session_of(ctx).store()).as_json(), _view)


def _view(value: dict[str, Any]) -> Iterator[Block]:
    if value["snapshots"]:
        yield Rows(
            ("NAMES", "SNAPSHOT", "BLOBS", "SIZE", "OWN", "SHARED"),
            [
                (
                    ", ".join(share["refs"]), short(share["snapshot"]), share["objects"], size_text(share["bytes"]),
                    size_text(share["own_bytes"]), size_text(share["shared_bytes"]),
                )
                for share in value["snapshots"]
            ],
            right=(2, 3, 4, 5),
        )  # fmt: skip
        yield Line("")
    yield Facts(
        [
            ("snapshots", size_text(value["total_bytes"])),
            ("other blobs", size_text(value["other_bytes"])),
            ("metadata", size_text(value["metadata_bytes"])),
            ("trash", size_text(value["trash_bytes"])),
        ]
    )
