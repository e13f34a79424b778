"""The ``zgtrain`` command: the options that all its commands take."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from zgstore.cli.application import Program, Table
from zgstore.cli.units import parse_duration
from zgtrain.cli.catalogue import COMMANDS


class Commands(Table):
    """Those of the catalogue."""

    entries = COMMANDS
    package = "zgtrain.cli"


app = typer.Typer(
    name="zgtrain",
    cls=Commands,
    help="Train a student block by block on verified snapshots of a teacher's hidden states.",
    epilog="JOB is a job file; its paths are relative to it.",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def _print_version(value: bool) -> None:  # noqa: FBT001 - what an option's callback is given
    if value:
        from importlib.metadata import version  # noqa: PLC0415 - 20 ms that no other command needs

        typer.echo(f"zgtrain {version('zgstore')}")
        raise typer.Exit


@app.callback()
def everywhere(
    ctx: typer.Context,
    *,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", help="Over the job file, as in train.steps=64; may be repeated.", metavar="KEY=VALUE"),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object, also when it fails.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Print tracebacks.")] = False,
    wait: Annotated[
        str | None,
        typer.Option(help="Wait that long for a busy block or store, or a build: 30s, 10m, 2h.", metavar="DUR"),
    ] = None,
    version: Annotated[  # noqa: ARG001 - its callback has printed it
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Read the options of every command into the session."""
    from zgstore.cli.session import Session  # noqa: PLC0415 - a command's help needs no store
    from zgtrain.cli.arguments import Options  # noqa: PLC0415 - nor any job

    options = Options(
        json=json,
        quiet=quiet,
        debug=debug,
        wait_seconds=parse_duration(wait, bare=True) if wait else 0.0,
        overrides=tuple(overrides or ()),
    )
    ctx.obj = Session(options, ctx.obj)


PROGRAM: Final = Program("zgtrain", app, valued=("--set", "--wait"))
main, run = PROGRAM.main, PROGRAM.run

if __name__ == "__main__":
    run()
