"""One run of the command: its options, its store, its screen, and what a signal does to it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Final

import typer

from zgstore.cli.console import Progress, Screen, error_value, print_error
from zgstore.errors import Interrupted, NotFound

if TYPE_CHECKING:  # a command's help needs no store: loading it takes 45 ms
    from zgstore.format.digest import Digest
    from zgstore.storage.store import Store

STORE_VARIABLE: Final = "ZGSTORE_DIR"
STORE_FOLDER: Final = ".zgstore"


@dataclass(frozen=True, slots=True)
class Options:
    """The options of every command.

    Args:
        store: Where the store is; None: the variable's, else the nearest upward.
        json: Print one JSON object instead of a page.
        quiet: Print errors alone.
        debug: Print tracebacks.
        wait_seconds: How long to wait for whoever is busy with the store.
    """

    store: Path | None = None
    json: bool = False
    quiet: bool = False
    debug: bool = False
    wait_seconds: float = 0.0


class Session:
    """What a command function is given, as ``ctx.obj``."""

    def __init__(self, options: Options, screen: Screen) -> None:
        self.options = options
        self.screen = screen
        self.stopping = False
        self._on_signal: Callable[[int], None] | None = None
        self._saves = False

    def store_path(self) -> Path:
        """Where the store is.

        Raises:
            NotFound: if none was named and no folder upward has one.
        """
        if self.options.store is not None:
            return self.options.store
        if named := os.environ.get(STORE_VARIABLE):
            return Path(named)
        here = Path.cwd()
        for folder in (here, *here.parents):
            if (folder / STORE_FOLDER).is_dir():
                return folder / STORE_FOLDER
        raise NotFound(
            f"no {STORE_FOLDER} in {here} or above it",
            hint=f"run `zgstore init` to make one, or name one by --store or ${STORE_VARIABLE}",
        )

    def store(self) -> Store:
        """The store, opened."""
        from zgstore.storage.store import Store  # noqa: PLC0415 - a command's help needs no store

        return Store.open(self.store_path())

    def rev(self, text: str) -> str:
        """A REV with ``lock:NAME`` looked up in the nearest lock file; any other as it is."""
        from zgstore.building import lockfile  # noqa: PLC0415 - a command's help needs no store

        return lockfile.resolve(text, Path.cwd())

    def resolve(self, store: Store, text: str) -> Digest:
        """The snapshot that a REV names.

        Raises:
            NotFound: if it names none.
        """
        return store.resolve(self.rev(text))

    def progress(self, title: str, *, total: int | None = None) -> Progress:
        """A bar on standard error; shows nothing unless that is a terminal."""
        return Progress(title, total=total, shown=sys.stderr.isatty() and not self.options.quiet)

    def note(self, text: str) -> None:
        """A line on standard error, unless told to be quiet."""
        if not self.options.quiet:
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()

    @contextmanager
    def signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM stop the command: once in order, twice at once. None spoils its last words."""
        before = {number: signal.signal(number, self._signalled) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_IGN if self.stopping else handler)

    @contextmanager
    def stops_by(self, act: Callable[[int], None], *, saves: bool = False) -> Iterator[None]:
        """The first signal calls ``act`` with its number instead of ending the command.

        Args:
            act: What is done.
            saves: Whether there is something to be saved, which SIGTERM once more does not cut short: a batch system
                sends it to each process, and so does the process's own parent.
        """
        self._on_signal, self._saves = act, saves
        try:
            yield
        finally:
            self._on_signal, self._saves = None, False

    @contextmanager
    def finishes_shards(self, under_way: Callable[[], bool]) -> Iterator[Callable[[], bool]]:
        """Once shards are under way the first signal only sets a flag; yields the function that reads it."""

        def act(_: int) -> None:
            if not under_way():
                raise KeyboardInterrupt
            self.note("stopping after the shard in flight; once more stops at once")

        with self.stops_by(act):
            yield lambda: self.stopping

    def _signalled(self, number: int, _: FrameType | None) -> None:
        if self.stopping:
            if self._saves and number == signal.SIGTERM:
                return
            self._end_at_once()
        self.stopping = True
        if self._on_signal is None:
            raise KeyboardInterrupt
        self._on_signal(number)

    def _end_at_once(self) -> None:
        """Say so and go. Any moment is one at which a store may be left: FORMAT 1, section 7."""
        if self.options.json:
            self.screen.write_json({"ok": False, "error": error_value(interrupted())})
        else:
            print_error(interrupted())
        os._exit(Interrupted.exit_code)


def interrupted() -> Interrupted:
    """What a signal's end is called."""
    return Interrupted("stopped by a signal", hint="the store is sound: run the same command again to go on")


def session_of(ctx: typer.Context) -> Session:
    """The session of a command's context."""
    session = ctx.find_object(Session)
    if session is None:
        raise RuntimeError("a command runs inside zgstore.cli.main")
    return session
