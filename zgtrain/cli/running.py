"""Trainings under way, on a terminal's standard error: one block as a line, all of them as a table."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

from zgstore.cli.units import duration_text

_REFRESH_SECONDS: Final = 0.25


@dataclass(slots=True)
class StepLine:
    """Loss, rate and the time left of one block.

    Args:
        title: What is trained.
        steps: In all.
        shown: Whether to show anything.
    """

    title: str
    steps: int
    shown: bool
    _status: Any = field(default=None, init=False)
    _first: tuple[int, float] | None = field(default=None, init=False)

    def __enter__(self) -> Self:
        if self.shown:
            from rich.console import Console  # noqa: PLC0415 - only a terminal pays for it

            self._status = Console(stderr=True).status(f"{self.title}: starting")
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def __call__(self, line: Mapping[str, Any]) -> None:
        """A line of the log."""
        if self._status is None or "loss" not in line:
            return
        now = time.monotonic()
        first = self._first = self._first or (line["step"], now)
        rate = (line["step"] - first[0]) / (now - first[1]) if line["step"] > first[0] and now > first[1] else None
        parts = [f"{self.title}: step {line['step']} of {self.steps}", f"loss {loss_text(line['loss'])}"]
        if rate:
            parts += [rate_text(rate), f"{duration_text((self.steps - line['step']) / rate)} left"]
        self._status.update(", ".join(parts))


@dataclass(slots=True)
class LiveTable:
    """How every block is, drawn again where it stands.

    Args:
        shown: Whether to show anything.
    """

    shown: bool
    _live: Any = field(default=None, init=False)
    _next: float = field(default=0.0, init=False)

    def __enter__(self) -> Self:
        if self.shown:
            from rich.console import Console  # noqa: PLC0415
            from rich.live import Live  # noqa: PLC0415

            self._live = Live(console=Console(stderr=True), auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    @property
    def due(self) -> bool:
        """Whether it is time to draw again; what is drawn costs reading files."""
        return self._live is not None and time.monotonic() >= self._next

    def draw(self, heads: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Draw it."""
        from rich.table import Table  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415

        self._next = time.monotonic() + _REFRESH_SECONDS
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for name in heads:
            table.add_column(name, justify="left" if name in {"STATE", "CHECKPOINT"} else "right", no_wrap=True)
        for row in rows:
            table.add_row(*(Text("" if cell is None else str(cell)) for cell in row))
        self._live.update(table, refresh=True)


HEADS: Final = ("BLOCK", "STATE", "STEP", "LOSS", "RATE", "LEFT", "CHECKPOINT")


def status_row(value: Mapping[str, Any], *, state: str | None = None) -> tuple[object, ...]:
    """A block's status as cells under ``HEADS``."""
    saved = value["checkpoint_step"]
    when = value["checkpoint_time"]
    age = "" if when is None else f", {duration_text(max(0.0, round(time.time() - when)))} ago"
    return (
        value["block"], state or value["state"], f"{value['step']} of {value['steps']}",
        "" if value["loss"] is None else loss_text(value["loss"]),
        "" if value["rate"] is None else rate_text(value["rate"]),
        "" if value["eta_seconds"] is None else duration_text(value["eta_seconds"]),
        "" if saved is None else f"step {saved}{age}",
    )  # fmt: skip


def loss_text(loss: float) -> str:
    """Four digits."""
    return f"{loss:.4g}"


def rate_text(rate: float) -> str:
    """Steps a second, or seconds a step where it is slower."""
    return f"{rate:.3g}/s" if rate >= 1 else f"{1 / rate:.3g} s each"


def count_text(count: float) -> str:
    """``12.3 M``."""
    for size, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g} {name}"
    return str(int(count))
