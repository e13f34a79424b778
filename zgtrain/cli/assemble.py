"""``zgtrain assemble``: the trained blocks joined into the whole student."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from zgstore.cli.console import Answer, Block, Facts, Line, Rows
from zgstore.cli.session import session_of
from zgstore.cli.units import short
from zgtrain.cli.arguments import JobFile, Relay, job_of
from zgtrain.cli.running import count_text


def assemble(
    ctx: typer.Context,
    job: JobFile,
    *,
    output: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Where to write it; without it only looked at.", show_default=False),
    ] = None,
    relay: Relay = False,
) -> Answer:
    """Assemble it."""
    loaded = job_of(ctx, job, relay=relay)
    with session_of(ctx).progress("assembling"):
        from zgtrain import assembler  # noqa: PLC0415 - loads torch, which the help need not

        made = assembler.assemble(loaded, output)
    value = {"output": None if made.output is None else str(made.output), **made.manifest}
    return Answer(value, _view)


def _view(value: dict[str, Any]) -> Iterator[Block]:
    yield Facts(
        [
            ("student", value["output"] or "fits together; --output DIR writes it"),
            ("parameters", count_text(value["parameters"])),
            ("state", short(value["state_digest"])),
            ("snapshot", short(value["snapshot"])),
            ("job", short(value["job"])),
        ]
    )
    yield Line("")
    yield Rows(
        ("BLOCK", "SOURCE", "TARGET", "TARGETS", "STEPS", "STATE DIGEST"),
        [
            (
                each["block"], each["source"], each["target"], each["targets"], each["steps"],
                short(each["state_digest"]),
            )
            for each in value["blocks"]
        ],
        right=(0, 4), shrink=(1, 2),
    )  # fmt: skip
