"""What is printed: one JSON object, or a page for people made from the same value; progress; errors in two lines."""

from __future__ import annotations

import json
import math
import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from zgstore.cli.units import duration_text, middle, printable, size_text
from zgstore.errors import ZgError
from zgstore.format.digest import DIGEST_BYTES, Digest

PAGE_WIDTH: Final = 80
_GAP: Final = 2
_NARROWEST: Final = 12


@dataclass(frozen=True, slots=True)
class Line:
    """One line of text."""

    text: str
    style: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """Names and what they are, one a line."""

    pairs: Sequence[tuple[str, object]]


@dataclass(frozen=True, slots=True)
class Rows:
    """A table.

    Args:
        heads: The columns' names.
        rows: As many cells in each.
        right: Columns whose cells end flush: numbers.
        shrink: Columns that give way, their names' middles left out, when the page is too narrow.
    """

    heads: Sequence[str]
    rows: Sequence[Sequence[object]]
    right: Sequence[int] = ()
    shrink: Sequence[int] = (0,)


Block = Line | Facts | Rows
View = Callable[[dict[str, Any]], Iterable[Block]]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command found.

    Args:
        value: The object that ``--json`` prints.
        view: The page for people, made from that same object.
        error: What is wrong although there is an answer: a ``verify`` that found problems.
        exit_code: 0, or what the command says by it; an error brings its own.
    """

    value: dict[str, Any]
    view: View
    error: ZgError | None = None
    exit_code: int = 0


class Screen:
    """The process's real standard output, kept apart from whatever a teacher prints.

    While a command runs, file descriptor 1 leads to standard error; only the answer goes where it led before.
    """

    def __init__(self) -> None:
        self._kept: int | None = None

    def divert(self) -> None:
        """Lead descriptor 1 to standard error from here on."""
        if self._kept is not None:
            return
        sys.stdout.flush()
        self._kept = os.dup(1)
        os.dup2(2, 1)

    def restore(self) -> None:
        """Lead descriptor 1 back."""
        if self._kept is not None:
            sys.stdout.flush()
            os.dup2(self._kept, 1)
            os.close(self._kept)
            self._kept = None

    @property
    def fd(self) -> int:
        """Where answers go."""
        return 1 if self._kept is None else self._kept

    @property
    def is_terminal(self) -> bool:
        return os.isatty(self.fd)

    def write(self, text: str) -> None:
        """Write all of it, or raise BrokenPipeError."""
        data = memoryview(text.encode("utf-8", "backslashreplace"))
        while data:
            data = data[os.write(self.fd, data) :]

    def answer(self, answer: Answer, *, as_json: bool, quiet: bool) -> None:
        """Print what a command found."""
        if as_json:
            error = {} if answer.error is None else {"error": error_value(answer.error)}
            self.write_json({"ok": answer.error is None, **answer.value, **error})
        elif not quiet:
            self.page(answer.view(answer.value))

    def write_json(self, value: Mapping[str, Any]) -> None:
        indent = 2 if self.is_terminal else None
        self.write(json.dumps(plain(value), indent=indent, allow_nan=False) + "\n")

    def page(self, blocks: Iterable[Block]) -> None:
        """Print blocks: at the terminal's width on a terminal, as wide as they are elsewhere."""
        width = _terminal_width(self.fd) if self.is_terminal else None
        lines = [line for block in blocks for line in _lay_out(block, width)]
        if not self.is_terminal:
            self.write("".join(f"{text.rstrip()}\n" for text, _ in lines))
            return
        from rich.console import Console  # noqa: PLC0415 - 50 ms that a pipe and --json need not pay
        from rich.text import Text  # noqa: PLC0415

        with os.fdopen(os.dup(self.fd), "w", encoding="utf-8", errors="backslashreplace") as file:
            console = Console(file=file, highlight=False, markup=False, soft_wrap=True)
            for text, spans in lines:
                styled = Text(text.rstrip())
                for start, end, style in spans:
                    styled.stylize(style, start, end)
                console.print(styled)


def error_value(error: ZgError) -> dict[str, Any]:
    """What ``--json`` says of an error."""
    return {**error.as_json(), "message": _one_line(error.message), "hint": _one_line(error.hint)}


def print_error(error: ZgError) -> None:
    """Two lines on standard error: what happened, and what to do next."""
    lines = (("error", "bold red", error.message), ("hint", "bold cyan", error.hint))
    colour = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    codes = {"bold red": "\x1b[1;31m", "bold cyan": "\x1b[1;36m"}
    for name, style, text in lines:
        head = f"{codes[style]}{name}:\x1b[0m" if colour else f"{name}:"
        sys.stderr.write(f"{head} {_one_line(text)}\n")
    sys.stderr.flush()


def plain(value: Any) -> Any:
    """The value in what JSON has: digests and bytes as text, paths as text, numbers that are none as null."""
    if value is None or isinstance(value, bool | int | str | float):
        return None if isinstance(value, float) and not math.isfinite(value) else value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, bytes):
        return str(Digest(value)) if len(value) == DIGEST_BYTES else value.hex()
    if isinstance(value, Digest | Path):
        return str(value)
    if isinstance(value, Iterable):
        return [plain(item) for item in value]
    return str(value)


def _one_line(text: str) -> str:
    return printable(" ".join(text.split()))


def _terminal_width(fd: int) -> int:
    try:
        return max(40, os.get_terminal_size(fd).columns)
    except OSError:
        return PAGE_WIDTH


_Styled = tuple[str, tuple[tuple[int, int, str], ...]]


def _lay_out(block: Block, width: int | None) -> list[_Styled]:
    if isinstance(block, Line):
        return _lay_out_line(block, width)
    if isinstance(block, Facts):
        return _lay_out_facts(block, width)
    return _lay_out_rows(block, width)


def _lay_out_line(block: Line, width: int | None) -> list[_Styled]:
    text = printable(block.text)
    indent = text[: len(text) - len(text.lstrip())]
    parts = [text]
    if width is not None and len(text) > width:
        parts = textwrap.wrap(
            text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )  # fmt: skip
    return [(part, ((0, len(part), block.style),) if block.style else ()) for part in parts]


def _lay_out_facts(block: Facts, width: int | None) -> list[_Styled]:
    pairs = [(name, printable(value)) for name, value in block.pairs if value is not None]
    edge = max((len(name) for name, _ in pairs), default=0) + _GAP
    lines: list[_Styled] = []
    for name, text in pairs:
        room = max(_NARROWEST, width - edge) if width else len(text) + 1
        # A digest or a path is never broken: it may be wanted whole.
        parts = textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False) or [""]
        lines.append((f"{name:<{edge}}{parts[0]}", ((0, len(name), "bold"),)))
        lines += [(" " * edge + part, ()) for part in parts[1:]]
    return lines


def _lay_out_rows(block: Rows, width: int | None) -> list[_Styled]:
    cells = [[printable("" if cell is None else cell) for cell in row] for row in block.rows]
    widths = [max(map(len, column)) for column in zip(block.heads, *cells, strict=True)]
    gap = _GAP
    if width is not None:
        over = sum(widths) + _GAP * (len(widths) - 1) - width
        for at in block.shrink:
            give = max(0, min(over, widths[at] - max(_NARROWEST, len(block.heads[at]))))
            widths[at] -= give
            over -= give
        gap = _GAP if over <= 0 else 1

    def line(row: Sequence[str]) -> str:
        return (" " * gap).join(
            f"{middle(cell, wide):>{wide}}" if at in block.right else f"{middle(cell, wide):<{wide}}"
            for at, (cell, wide) in enumerate(zip(row, widths, strict=True))
        )

    head = line(block.heads)
    return [(head, ((0, len(head), "bold"),)), *((line(row), ()) for row in cells)]


@dataclass(slots=True)
class Progress:
    """Bytes done, their rate and the time left, on standard error and only on a terminal.

    Args:
        title: What is going on.
        shown: Whether to show anything.
        total: Bytes in all; None where nobody knows yet.
    """

    title: str
    shown: bool
    total: int | None = None
    done: int = field(default=0, init=False)
    _bar: Any = field(default=None, init=False)
    _task: Any = field(default=None, init=False)
    _next: float = field(default=0.0, init=False)
    _began: float = field(default=0.0, init=False)

    def __enter__(self) -> Self:
        if self.shown:
            self._bar = _bar()
            self._bar.start()
            self._task = self._bar.add_task(self.title, total=None, told="")
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def add(self, count: int) -> None:
        """Say that ``count`` more bytes are done."""
        self.set(self.done + count)

    def set(self, done: int, total: int | None = None) -> None:
        """Say how many bytes are done, and of how many."""
        now = time.monotonic()
        if done and not self.done:
            self._began = now  # the rate is that of the work, not of what came before it
        self.done, self.total = done, total or self.total
        if self._bar is not None and (now >= self._next or done == self.total):
            self._next = now + 0.1
            told = progress_text(done, self.total, now - self._began)
            self._bar.update(self._task, description=self.title, completed=done, total=self.total, told=told)


def progress_text(done: int, total: int | None, seconds: float) -> str:
    """``1.2 of 2.6 GiB, 310 MiB/s, 4.50 s left``, as far as it is known."""
    if not done:
        return ""
    parts = [size_text(done) if total is None else f"{size_text(done)} of {size_text(total)}"]
    if seconds > 0.5:
        parts.append(f"{size_text(done / seconds)}/s")
        if total is not None and total > done:
            parts.append(f"{duration_text((total - done) * seconds / done)} left")
    return ", ".join(parts)


def _bar() -> Any:
    from rich.console import Console  # noqa: PLC0415 - only a terminal pays for it
    from rich.progress import BarColumn, SpinnerColumn, TextColumn  # noqa: PLC0415
    from rich.progress import Progress as Bar  # noqa: PLC0415

    return Bar(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=12),
        TextColumn("{task.fields[told]}", markup=False),
        console=Console(stderr=True),
        transient=True,
    )


def summary(count: int, noun: str, size: int) -> str:
    """``12 objects, 1.5 GiB``."""
    return f"{count} {noun if count == 1 else noun + 's'}, {size_text(size)}"
