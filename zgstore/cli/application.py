"""A program of commands: a table of them, the options of all, each loaded when it is run, and where errors leave."""

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
from dataclasses import dataclass
from typing import Any, ClassVar, Final, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from zgstore.cli.console import Answer, Screen, error_value, print_error
from zgstore.cli.faults import USAGE_ERROR, explain
from zgstore.cli.units import printable
from zgstore.errors import Busy, Interrupted, Invalid, ZgError

_RETRY_SECONDS: Final = 0.2


@dataclass(frozen=True, slots=True)
class Entry:
    """One command.

    Args:
        name: What is typed.
        panel: The group it is shown in.
        target: Module of the program's folder and its function, imported when the command is run.
        sentence: What it does.
        examples: Lines shown under its help.
    """

    name: str
    panel: str
    target: str
    sentence: str
    examples: tuple[str, ...] = ()


class Table(TyperGroup):
    """The commands whose names begin with ``prefix``; each one's module is imported when it is run.

    A program has a class of its own with its ``entries``, and the ``package`` that their targets are in.
    """

    entries: ClassVar[tuple[Entry, ...]] = ()
    package: ClassVar[str] = ""
    prefix = ""

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        names = [name.removeprefix(self.prefix) for name in self._named() if name.startswith(self.prefix)]
        if ctx.resilient_parsing:  # completion goes word by word
            return list(dict.fromkeys(name.partition(" ")[0] for name in names))
        return names

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        """What help and completion show of a command; nothing is imported for it."""
        entry = self._named().get(self.prefix + cmd_name)
        if entry is not None:
            return TyperCommand(cmd_name, help=entry.sentence, rich_help_panel=entry.panel)
        return self._subtable(cmd_name)

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> Any:  # type: ignore[override]
        named = self._named()
        words = 2 if " ".join(args[:2]) in named else 1
        name = " ".join(args[:words])
        if entry := named.get(self.prefix + name):
            return name, _load(entry, self.package, ctx.find_root().command.params), args[words:]
        if table := self._subtable(name):
            return name, table, args[1:]
        return super().resolve_command(ctx, args)

    def _named(self) -> dict[str, Entry]:
        return {entry.name: entry for entry in self.entries}

    def _subtable(self, name: str) -> Table | None:
        prefix = f"{self.prefix}{name} "
        children = [entry for entry in self.entries if entry.name.startswith(prefix)]
        if not children:
            return None
        table = type(self)(name=name, help=f"One of: {', '.join(entry.name for entry in children)}.")
        table.prefix = prefix
        table.rich_help_panel = children[0].panel
        table.commands = {entry.name.removeprefix(prefix): TyperCommand(entry.name) for entry in children}
        return table


@dataclass(frozen=True, slots=True)
class Program:
    """A command with commands below it.

    Args:
        name: What is typed first; also the package whose code is its own.
        app: The options of all commands; its class is a `Table` of the program's own.
        flags: Those options that take nothing.
        valued: Those that take a value.
    """

    name: str
    app: typer.Typer
    flags: tuple[str, ...] = ("--json", "--quiet", "-q", "--debug")
    valued: tuple[str, ...] = ("--wait",)

    def run(self) -> NoReturn:
        """What the console script calls."""
        open_standard_files()
        code = self.main(sys.argv[1:], Screen())
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except BrokenPipeError:
            _die_of_the_pipe()
        sys.exit(code)

    def main(self, arguments: Sequence[str], screen: Screen) -> int:
        """Run one command.

        Args:
            arguments: What was typed after the program's name.
            screen: Where the answer goes.

        Returns:
            The exit code.
        """
        options, words = self.hoist(arguments)
        as_json = "--json" in options
        try:
            return self._answer(options, words, screen)
        except (BrokenPipeError, SystemExit):  # typer leaves by SystemExit where the reader of its help has gone
            _die_of_the_pipe()
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - the door: whatever it is leaves as one of ours
            if "--debug" in options:
                traceback.print_exc()
            fault = explain(error, program=self.name)
        try:
            if as_json:
                screen.write_json({"ok": False, "error": error_value(fault)})
            else:
                print_error(fault)
        except BrokenPipeError:
            _die_of_the_pipe()
        return fault.exit_code

    def _answer(self, options: Sequence[str], words: Sequence[str], screen: Screen) -> int:
        """Run the command and print what it found."""
        as_json = "--json" in options
        if not words:
            if as_json:
                raise Invalid("no command was given", hint=f"run `{self.name} --help` to see them")
            self._group().main(["--help"], prog_name=self.name, standalone_mode=False)
            return Invalid.exit_code
        answer = self._group().main([*options, *words], prog_name=self.name, standalone_mode=False, obj=screen)
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

    def hoist(self, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
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
            if word in self.flags or word.startswith(tuple(f"{name}=" for name in self.valued)):
                options.append(word)
            elif word in self.valued and at + 1 < len(arguments):
                options += arguments[at : at + 2]
                at += 1
            else:
                words.append(word)
            at += 1
        return options, words

    def _group(self) -> Any:
        group: Any = typer.main.get_command(self.app)
        # What a misspelt command is near to.
        group.commands = {entry.name.partition(" ")[0]: None for entry in group.entries}
        _read_plainly(group)
        return group


def open_standard_files() -> None:
    """See that descriptors 0 to 2 are open: the next file that is opened would become a closed one's stand-in."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def _die_of_the_pipe() -> NoReturn:
    """End as any filter does whose reader has gone: quietly, by SIGPIPE."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGPIPE)
    os._exit(128 + signal.SIGPIPE)


def _load(entry: Entry, package: str, everywhere: Sequence[Any]) -> Any:
    """Import a command and make it one of typer's; its help shows the options of all commands too."""
    module, _, function = entry.target.partition(":")
    command_app = typer.Typer(add_completion=False, rich_markup_mode="rich")
    command_app.command(
        entry.name,
        help=entry.sentence,
        epilog="\n".join(("[bold]Examples[/bold]", *(line.replace("[", r"\[") for line in entry.examples)))
        if entry.examples
        else None,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
    )(_answering(getattr(importlib.import_module(f"{package}.{module}"), function)))
    command = typer.main.get_command(command_app)
    for option in everywhere:
        if option.name not in ("help", "version", "install_completion", "show_completion"):
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
                    left = deadline - time.monotonic()
                    if left <= 0:
                        raise
                    time.sleep(min(left, _RETRY_SECONDS))
                except (ZgError, typer.Exit, typer.Abort, USAGE_ERROR):
                    raise
                except BaseException as error:  # the door: whatever it is leaves as one of ours
                    raise explain(error, program=kwargs["ctx"].find_root().command_path) from error

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
