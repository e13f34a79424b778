"""``zgtrain launch``: all blocks trained, each in a process of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zgstore.cli.arguments import complete_recipe
from zgstore.cli.console import Answer, Block, Facts, Line, Rows
from zgstore.cli.session import session_of
from zgstore.cli.units import duration_text, parse_list, short
from zgtrain.cli.arguments import JobFile, job_of
from zgtrain.cli.running import HEADS, LiveTable, loss_text, status_row
from zgtrain.progress import block_status

if TYPE_CHECKING:
    from zgtrain.launcher import BlockRun


def launch(
    ctx: typer.Context,
    job: JobFile,
    *,
    parallel: Annotated[int | None, typer.Option(metavar="N", help="Blocks at a time.", show_default=False)] = None,
    devices: Annotated[str | None, typer.Option(metavar="D,…", help="Spread over these.", show_default=False)] = None,
    follow: Annotated[
        str | None,
        typer.Option(
            metavar="RECIPE", help="Build it beside the jobs, which read its shards as they come.",
            autocompletion=complete_recipe, show_default=False,
        ),
    ] = None,
    source: Annotated[str, typer.Option(metavar="SOURCE", help="Targets: cached, or live.")] = "cached",
    retries: Annotated[
        int | None, typer.Option(metavar="N", help="Further attempts of a block that fails.", show_default=False)
    ] = None,
) -> Answer:  # fmt: skip
    """Launch it."""
    session = session_of(ctx)
    loaded = job_of(ctx, job)
    with (
        LiveTable(sys.stderr.isatty() and not session.options.quiet) as table,
        session.stops_by(
            lambda _: session.note("stopping all blocks, so that they save; Ctrl-C again ends at once"), saves=True
        ),
    ):
        from zgtrain import launcher  # noqa: PLC0415 - loads torch, which the help need not

        def show(runs: Sequence[BlockRun]) -> None:
            if table.due:
                rows = [status_row(block_status(loaded, run.block).as_value(), state=_state(run)) for run in runs]
                table.draw(HEADS, rows or [("", "building", "", "", "", "", "")])

        report = launcher.launch(
            loaded,
            parallel=parallel,
            devices=parse_list(devices) or (),
            follow=follow,
            source=source,
            retries=retries,
            on_change=show,
            stop=lambda: session.stopping,
        )
    return Answer(report.as_value(), _view, error=report.error)


def _state(run: BlockRun) -> str:
    return f"{run.state}, try {run.attempts}" if run.attempts > 1 and run.state == "running" else run.state


def _view(value: dict[str, Any]) -> Iterator[Block]:
    done = sum(each["state"] == "done" for each in value["blocks"])
    yield Facts(
        [
            ("blocks", f"{done} of {len(value['blocks'])} done"),
            ("snapshot", short(value["snapshot"]) or None),
            ("job", short(value["job"])),
            ("time", duration_text(value["seconds"])),
        ]
    )
    yield Line("")
    yield Rows(
        ("BLOCK", "STATE", "TRIES", "STEPS", "FIRST LOSS", "LAST LOSS", "SECONDS", "STATE DIGEST"),
        [_row(each) for each in value["blocks"]],
        right=(0, 2, 3, 4, 5, 6), shrink=(),
    )  # fmt: skip
    for each in value["blocks"]:
        if each["error"] and each["state"] == "failed":
            yield Line("")
            yield Line(f"block {each['block']}: {each['error'].get('message')}", style="red")


def _row(each: dict[str, Any]) -> tuple[object, ...]:
    told = each["report"]
    if not told:
        return each["block"], each["state"], each["attempts"], "", "", "", "", ""
    state = "done before" if each["state"] == "done" and not each["attempts"] else each["state"]
    return (
        each["block"], state, each["attempts"], told["steps"], loss_text(told["first_window_mean_loss"]),
        loss_text(told["last_window_mean_loss"]), f"{told['seconds']['total']:.1f}", short(told["state_digest"]),
    )  # fmt: skip
