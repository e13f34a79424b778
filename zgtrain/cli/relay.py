"""``zgtrain relay``: blocks trained in depth order on the student's own states."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Annotated, Any

import typer

from zgstore.cli.console import Answer, Block, Facts, Line, Rows
from zgstore.cli.session import session_of
from zgstore.cli.units import short
from zgtrain.cli.arguments import JobFile, job_of
from zgtrain.cli.run import DETERMINISTIC
from zgtrain.cli.running import StepLine, loss_text


def relay(
    ctx: typer.Context,
    job: JobFile,
    *,
    steps: Annotated[
        int | None, typer.Option(metavar="N", help="Of each block; the job's if not given.", show_default=False)
    ] = None,
    from_scratch: Annotated[
        bool, typer.Option("--from-scratch", help="Begin with new blocks, not with those of a launch.")
    ] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget an earlier relay.")] = False,
    device: Annotated[
        str | None, typer.Option(metavar="D", help="Where; CUDA if there is one.", show_default=False)
    ] = None,
) -> Answer:
    """Relay it."""
    session = session_of(ctx)
    loaded = job_of(ctx, job)
    if loaded.train.deterministic:
        os.environ.setdefault(*DETERMINISTIC)  # before CUDA starts
    shown = sys.stderr.isatty() and not session.options.quiet
    with (
        ExitStack() as lines,
        session.stops_by(lambda _: session.note("saving; Ctrl-C again ends at once"), saves=True),
    ):

        def of(block: int) -> StepLine:
            lines.close()
            return lines.enter_context(StepLine(f"block {block}", steps or loaded.train.steps, shown))

        from zgtrain import prefixes, relaying  # noqa: PLC0415 - loads torch, which the help need not

        reports = relaying.relay(
            loaded, steps=steps, from_scratch=from_scratch, fresh=fresh, device=device,
            stop=lambda: session.stopping, progress=of,
        )  # fmt: skip
    relayed = prefixes.relayed(loaded, steps=steps or loaded.train.steps)
    blocks = [report.as_value() for report in reports]
    return Answer(
        {
            "job": relayed.identity(), "snapshot": reports[0].snapshot, "output": str(relayed.output),
            "steps": relayed.train.steps, "from_scratch": from_scratch, "blocks": blocks,
        },
        _view,
    )  # fmt: skip


def _view(value: dict[str, Any]) -> Iterator[Block]:
    yield Facts([("relay", value["output"]), ("snapshot", short(value["snapshot"])), ("steps", value["steps"])])
    yield Line("")
    yield Rows(
        ("BLOCK", "ON", "STEPS", "FIRST LOSS", "LAST LOSS", "SECONDS", "STATE DIGEST"),
        [
            (
                each["block"], "the student's" if each["targets"] == "relay" else "the teacher's", each["steps"],
                loss_text(each["first_window_mean_loss"]), loss_text(each["last_window_mean_loss"]),
                f"{each['seconds']['total']:.1f}", short(each["state_digest"]),
            )
            for each in value["blocks"]
        ],
        right=(0, 2, 3, 4, 5), shrink=(),
    )  # fmt: skip
    yield Line("")
    yield Line("`zgtrain assemble JOB --relay` and `zgtrain evaluate JOB --relay` use these blocks")
