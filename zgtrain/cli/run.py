"""``zgtrain run``: one block trained."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from zgstore.cli.console import Answer, Block, Facts, Line
from zgstore.cli.session import Session, session_of
from zgstore.cli.units import duration_text, short, size_text
from zgtrain.cli.arguments import JobFile, job_of
from zgtrain.cli.running import StepLine, count_text, loss_text
from zgtrain.cli.tied import PARENT, tie
from zgtrain.job import BlockLaunch

DETERMINISTIC: Final = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
_LOOK_SECONDS: Final = 0.1


def run(
    ctx: typer.Context,
    job: JobFile,
    *,
    block: Annotated[int, typer.Option(metavar="B", help="Which block, from 0.", show_default=False)],
    device: Annotated[
        str | None, typer.Option(metavar="D", help="Where; CUDA if there is one.", show_default=False)
    ] = None,
    source: Annotated[str, typer.Option(metavar="SOURCE", help="Targets: cached, or live.")] = "cached",
    follow: Annotated[bool, typer.Option("--follow", help="Follow the build that grows in the store.")] = False,
    build: Annotated[
        str | None, typer.Option(metavar="UUID", help="With --follow: this one.", show_default=False)
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Begin anew, whatever was saved.")] = False,
) -> Answer:
    """Train it."""
    session = session_of(ctx)
    loaded = job_of(ctx, job)
    if loaded.train.deterministic:
        os.environ.setdefault(*DETERMINISTIC)  # before CUDA starts
    processes = loaded.launch.blocks.get(block, BlockLaunch()).processes
    if processes > 1 and "RANK" not in os.environ:
        return Answer(_together(session, processes, loaded.folder(block), block), view)
    if processes > 1:
        device = _join(session, device)
    shown = sys.stderr.isatty() and not session.options.quiet
    with (
        StepLine(f"block {block}", loaded.train.steps, shown) as line,
        session.stops_by(lambda _: session.note("saving; Ctrl-C again ends at once"), saves=True),
    ):
        from zgtrain import blocks  # noqa: PLC0415 - loads torch, which the help need not

        report = blocks.run(
            loaded,
            block=block,
            device=device,
            source=source,
            follow=build or follow,
            patience_seconds=session.options.wait_seconds,
            fresh=fresh,
            stop=lambda: session.stopping,
            progress=line,
        )
    return Answer(report.as_value(), view)


def _together(session: Session, processes: int, folder: Path, block: int) -> dict[str, Any]:
    """The same command in several processes under torchrun, whose talk goes to a file; what the first of them says.

    Raises:
        zgstore.ZgError: what they failed of.
    """
    from zgtrain.crew import ERRORS, Child, as_error, cause, started  # noqa: PLC0415 - loads torch
    from zgtrain.files import made  # noqa: PLC0415

    words = [word for word in sys.argv[1:] if word not in {"--quiet", "-q", "--json"}]
    torchrun = ["torchrun", "--standalone", f"--nproc-per-node={processes}", "-m", "zgtrain.cli.main"]
    child: list[Child] = []

    def end(_: int) -> None:
        session.note(f"saving in {processes} processes; Ctrl-C again ends at once")
        for each in child:
            each.terminate()

    with session.stops_by(end, saves=True), made(folder / ERRORS, remedy="remove it: a new one is begun") as errors:
        begin = errors.tell()
        child.append(started([*torchrun, *words, "--json", "--quiet"], errors))
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child[0].process.wait(_LOOK_SECONDS)  # a signal's handler runs between two looks
                break
    value = child[0].answer()
    if value.pop("ok"):
        return value
    error = cause(folder / ERRORS, begin) or value["error"]
    raise as_error(error, str(error["message"]), block=block, processes=processes)


def _join(session: Session, device: str | None) -> str | None:
    """This process among those of its block, as torchrun's variables say; the device it has."""
    import torch  # noqa: PLC0415 - the help need not load it
    from torch import distributed  # noqa: PLC0415

    tie(int(os.environ.get(PARENT, os.getppid())))  # torchrun itself may be killed, and would then end nobody
    if int(os.environ["RANK"]):
        os.dup2(sys.stderr.fileno(), session.screen.fd)  # the first speaks for all; the log has what the others say
    if device is None and torch.cuda.is_available():
        device = f"cuda:{os.environ['LOCAL_RANK']}"
    if device is not None and device.startswith("cuda"):
        torch.cuda.set_device(device)
    # Counts and questions to all are asked on the CPU, whatever the block is on.
    distributed.init_process_group("cpu:gloo,cuda:nccl" if device is not None and device.startswith("cuda") else "gloo")
    return device


def view(value: dict[str, Any]) -> Iterator[Block]:
    """The page of a block's report."""
    seconds, resumed = value["seconds"], value["resumed_from"]
    first, last = value["first_window_mean_loss"], value["last_window_mean_loss"]
    yield Line(f"block {value['block']}: {value['steps']} steps on {value['targets']} targets")
    yield Facts(
        [
            ("snapshot", short(value["snapshot"])),
            ("from, to", f"{value['source']}, {value['target']}"),
            ("loss", f"{loss_text(first)} at first, {loss_text(last)} at last"),
            ("held out", None if value["validation_loss"] is None else loss_text(value["validation_loss"])),
            ("residual error", None if value["residual_error"] is None else loss_text(value["residual_error"])),
            ("trained", f"{count_text(value['trained_parameters'])} parameters"),
            ("state", short(value["state_digest"])),
            ("resumed from", None if resumed is None else f"step {resumed}"),
            ("time", f"{duration_text(seconds['total'])} (data {duration_text(seconds['data'])})"),
            ("read", size_text(value["bytes_read"])),
            ("peak memory", size_text(value["peak_memory_bytes"])),
            ("queries", f"{queries} forward ones for the gradient" if (queries := value["gradient_queries"]) else None),
            ("gradient", f"{value['inter_block_gradient_bytes']} B of it left the block"),
            ("teacher", f"{count_text(value['live_teacher_parameters'])} parameters of it were alive"),
        ]
    )
