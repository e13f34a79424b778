"""The application: the options of all commands, each loaded when it is run, and the door every error leaves by."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from zgstore.cli.catalogue import COMMANDS, TABLE, Entry
from zgstore.cli.console import Answer, Screen, error_value, print_error
from zgstore.cli.faults import USAGE_ERROR, explain
from zgstore.cli.units import parse_duration, printable
from zgstore.errors import Busy, Interrupted, Invalid, ZgError

_RETRY_SECONDS: Final = 0.2


_FLAGS: Final = ("--json", "--quiet", "-q", "--debug")
_VALUED: Final = ("--store", "--wait")


class Table(TyperGroup):
    """The commands whose names begin with ``prefix``; each one's module is imported when it is run."""

    prefix = ""

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        names = [name.removeprefix(self.prefix) for name in TABLE if name.startswith(self.prefix)]
        if ctx.resilient_parsing:  # completion goes word by word
            return list(dict.fromkeys(name.partition(" ")[0] for name in names))
        return names

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        """What help and completion show of a command; nothing is imported for it."""
        entry = TABLE.get(self.prefix + cmd_name)
        if entry is not None:
            return TyperCommand(cmd_name, help=entry.sentence, rich_help_panel=entry.panel)
        return self._subtable(cmd_name)

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> Any:  # type: ignore[override]
        words = 2 if len(args) > 1 and " ".join(args[:2]) in TABLE and args[0] in TABLE else 1
        name = " ".join(args[:words])
        if entry := TABLE.get(self.prefix + name):
            return name, _load(entry), args[words:]
        if table := self._subtable(name):
            return name, table, args[1:]
        return super().resolve_command(ctx, args)

    def _subtable(self, name: str) -> Table | None:
        prefix = f"{self.prefix}{name} "
        children = [entry for entry in COMMANDS if entry.name.startswith(prefix)]
        if not children:
            return None
        table = Table(name=name, help=f"One of: {', '.join(entry.name for entry in children)}.")
        table.prefix = prefix
        table.rich_help_panel = children[0].panel
        table.commands = {entry.name.removeprefix(prefix): TyperCommand(entry.name) for entry in children}
        return table


app = typer.Typer(
    name="zgstore",
    cls=Table,
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
        wait_seconds=parse_duration(wait) if wait else 0.0,
    )
    ctx.obj = Session(options, ctx.obj)


def run() -> NoReturn:
    """The ``zgstore`` command."""
    open_standard_files()
    code = main(sys.argv[1:], Screen())
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BrokenPipeError:
        _die_of_the_pipe()
    sys.exit(code)


def open_standard_files() -> None:
    """See that descriptors 0 to 2 are open: the next file that is opened would become a closed one's stand-in."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def main(arguments: Sequence[str], screen: Screen) -> int:
    """Run one command.

    Args:
        arguments: What was typed after ``zgstore``.
        screen: Where the answer goes.

    Returns:
        The exit code.
    """
    options, words = hoist(arguments)
    as_json = "--json" in options
    try:
        return _answer(options, words, screen)
    except (BrokenPipeError, SystemExit):  # typer leaves by SystemExit where the reader of its help has gone
        _die_of_the_pipe()
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - the door: whatever it is leaves as one of ours
        if "--debug" in options:
            traceback.print_exc()
        fault = explain(error)
    try:
        if as_json:
            screen.write_json({"ok": False, "error": error_value(fault)})
        else:
            print_error(fault)
    except BrokenPipeError:
        _die_of_the_pipe()
    return fault.exit_code


def _answer(options: Sequence[str], words: Sequence[str], screen: Screen) -> int:
    """Run the command and print what it found."""
    as_json = "--json" in options
    if not words:
        if as_json:
            raise Invalid("no command was given", hint="run `zgstore --help` to see them")
        _group().main(["--help"], prog_name="zgstore", standalone_mode=False)
        return Invalid.exit_code
    answer = _group().main([*options, *words], prog_name="zgstore", standalone_mode=False, obj=screen)
    if answer == Interrupted.exit_code:  # what typer makes of a signal before the command began
        raise KeyboardInterrupt
    if not isinstance(answer, Answer):  # help and completion print by themselves
        return answer if isinstance(answer, int) else 0
    screen.answer(answer, as_json=as_json, quiet="--quiet" in options or "-q" in options)
    if answer.error is None:
        return answer.exit_code
    if not as_json:
        print_error(answer.error)
    return answer.error.exit_code


def hoist(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Part what was typed into the options of every command, wherever they stood, and the rest.

    Nothing after ``--`` is looked at: it is another program's.
    """
    options: list[str] = []
    words: list[str] = []
    at = 0
    while at < len(arguments):
        word = arguments[at]
        if word == "--":
            words += arguments[at:]
            break
        if word in _FLAGS or word.startswith(tuple(f"{name}=" for name in _VALUED)):
            options.append(word)
        elif word in _VALUED and at + 1 < len(arguments):
            options += arguments[at : at + 2]
            at += 1
        else:
            words.append(word)
        at += 1
    return options, words


def _die_of_the_pipe() -> NoReturn:
    """End as any filter does whose reader has gone: quietly, by SIGPIPE."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGPIPE)
    os._exit(128 + signal.SIGPIPE)


def _group() -> Any:
    group: Any = typer.main.get_command(app)
    group.commands = {entry.name.partition(" ")[0]: None for entry in COMMANDS}  # what a misspelt one is near to
    _read_plainly(group)
    return group


def _load(entry: Entry) -> Any:
    """Import a command and make it one of typer's."""
    module, _, function = entry.target.partition(":")
    command_app = typer.Typer(add_completion=False, rich_markup_mode="rich")
    command_app.command(
        entry.name,
        help=entry.sentence,
        epilog="\n".join(("[bold]Examples[/bold]", *(line.replace("[", r"\[") for line in entry.examples)))
        if entry.examples
        else None,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
    )(_answering(getattr(importlib.import_module(f"zgstore.cli.{module}"), function)))
    command = typer.main.get_command(command_app)
    for option in _group().params:
        if option.name in ("store", "json", "quiet", "debug", "wait"):
            option.expose_value = False  # read already: `hoist` took it out; it stands here for the help alone
            option.rich_help_panel = "Everywhere"
            command.params.append(option)
    _read_plainly(command)
    return command


def _answering(function: Callable[..., Answer]) -> Callable[..., Answer]:
    """The command function with its output kept apart, signals heeded, and patience with a busy store."""

    @functools.wraps(function)
    def answer(**kwargs: Any) -> Answer:
        from zgstore.cli.session import session_of  # noqa: PLC0415

        session = session_of(kwargs["ctx"])
        session.screen.divert()
        deadline = time.monotonic() + session.options.wait_seconds
        with session.signals(), contextlib.redirect_stdout(sys.stderr):
            while True:
                try:
                    return function(**kwargs)
                except Busy:
                    if time.monotonic() + _RETRY_SECONDS > deadline:
                        raise
                    time.sleep(_RETRY_SECONDS)
                except (ZgError, typer.Exit, typer.Abort, USAGE_ERROR):
                    raise
                except BaseException as error:  # the door: whatever it is leaves as one of ours
                    raise explain(error) from error

    return answer


class _Plain:
    """Reads text as text and digits as a number, without the 90 ms that a validation library takes to start."""

    def __init__(self, number: bool) -> None:  # noqa: FBT001
        self._number = number

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        if value is None:
            return () if param.multiple or param.nargs == -1 else None
        if not self._number or isinstance(value, int):
            return value
        try:
            return int(value)
        except ValueError as error:
            raise typer.BadParameter(f"{printable(value)!r} is not a whole number", ctx=ctx, param=param) from error


def _read_plainly(command: Any) -> None:
    """Give parameters that are text, numbers or flags the plain reading; where typer has no such place, nothing."""
    context = typer.Context(command, **command.context_settings)
    for param in command.get_params(context):  # the help option too
        descriptor = getattr(param, "type_descriptor", None)
        annotation = getattr(descriptor, "annotation", None)
        if annotation is bool and not param.metavar:
            param.metavar = ""  # a flag takes nothing, and its help need not say <bool>
        if hasattr(param, "_runtime_param") and annotation in (str, int, bool, list[str]):
            param._runtime_param = _Plain(annotation is int)  # noqa: SLF001 - measured: 90 of 200 ms
