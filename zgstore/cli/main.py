"""The ``zgstore`` command: the options that all its commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from zgstore.cli.application import Program, Table
from zgstore.cli.catalogue import COMMANDS
from zgstore.cli.units import parse_duration
from zgstore.errors import Invalid


class Commands(Table):
    """Those of the catalogue."""

    entries = COMMANDS
    package = "zgstore.cli"


app = typer.Typer(
    name="zgstore",
    cls=Commands,
    help="Git for caches of a teacher's hidden states: snapshots with identity, versions, integrity and sharing.",
    epilog="REV is a ref, a tag, a digest or a prefix of one, NAME@{N}, or lock:NAME.",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def _print_version(value: bool) -> None:  # noqa: FBT001 - what an option's callback is given
    if value:
        from importlib.metadata import version  # noqa: PLC0415 - 20 ms that no other command needs

        typer.echo(f"zgstore {version('zgstore')}")
        raise typer.Exit


@app.callback()
def everywhere(
    ctx: typer.Context,
    *,
    store: Annotated[
        str | None,
        typer.Option(help="The store; else $ZGSTORE_DIR, else the nearest .zgstore upward.", metavar="PATH"),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object, also when it fails.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Print tracebacks.")] = False,
    wait: Annotated[
        str | None, typer.Option(help="Wait that long for a busy store: 30s, 10m, 2h.", metavar="DUR")
    ] = None,
    version: Annotated[  # noqa: ARG001 - its callback has printed it
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Read the options of every command into the session."""
    from zgstore.cli.session import Options, Session  # noqa: PLC0415 - a command's help needs no store

    if store == "":
        raise Invalid("--store names nothing", hint="name a store, or leave --store out")
    options = Options(
        store=None if store is None else Path(store),
        json=json,
        quiet=quiet,
        debug=debug,
        wait_seconds=parse_duration(wait, bare=True) if wait else 0.0,
    )
    ctx.obj = Session(options, ctx.obj)


PROGRAM: Final = Program("zgstore", app, valued=("--store", "--wait"))
main, run = PROGRAM.main, PROGRAM.run

if __name__ == "__main__":
    run()
