"""``zgtrain plan``: what there is to do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from zgstore.cli.console import Answer, Block, Facts, Line, Rows
from zgstore.cli.session import session_of
from zgstore.cli.units import parse_list, short, size_text
from zgtrain.cli.arguments import JobFile, job_of
from zgtrain.cli.running import count_text


def plan(
    ctx: typer.Context,
    job: JobFile,
    *,
    parallel: Annotated[int | None, typer.Option(metavar="N", help="Blocks at a time.", show_default=False)] = None,
    devices: Annotated[str | None, typer.Option(metavar="D,…", help="Spread over these.", show_default=False)] = None,
) -> Answer:
    """Plan it."""
    loaded = job_of(ctx, job)
    with session_of(ctx).progress("making each block"):
        from zgtrain import launcher  # noqa: PLC0415 - loads torch, which the help need not

        found = launcher.plan(loaded, parallel=parallel, devices=parse_list(devices) or ())
    return Answer(found.as_value(), _view)


def _view(value: dict[str, Any]) -> Iterator[Block]:
    blocks = value["blocks"]
    asked = any(each["cores"] is not None for each in blocks)
    yield Facts(
        [
            ("snapshot", short(value["snapshot"])),
            ("pins", short(value["pins"])),
            ("job", short(value["job"])),
            ("rows", value["rows"]),
            ("at a time", value["parallel"]),
            ("devices", ", ".join(value["devices"]) or None),
            ("gradient", "zeroth-order: from forward queries of black boxes" if asked else None),
        ]
    )
    yield Line("")
    yield Rows(
        ("BLOCK", "SOURCE", "TARGET", "TRAINED", "STEPS", "TO READ", *["BLACK BOXES"] * asked),
        [
            (
                _name(each), each["source"], each["target"], count_text(each["trained_parameters"]),
                "done" if each["done"] else f"{each['step']} of {each['steps']}",
                size_text(each["bytes_to_read"]), *[_boxes(each["cores"])] * asked,
            )
            for each in blocks
        ],
        right=(0, 3, 4, 5), shrink=(1, 2),
    )  # fmt: skip


def _boxes(cores: int | None) -> str:
    return "the whole block" if not cores else f"{cores} core{'s' * (cores > 1)}"


def _name(block: dict[str, Any]) -> str:
    return str(block["block"]) if block["processes"] == 1 else f"{block['block']} × {block['processes']}"
