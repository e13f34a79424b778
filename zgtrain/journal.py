"""What a training says of itself: JSON lines always, TensorBoard and Weights & Biases where they are asked for."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Self

import zgstore
from zgtrain.files import opened, placed
from zgtrain.job import LogSpec

FILE_NAME = "log.jsonl"


class Journal:
    """A block's log; close it, or use it as a context.

    Args:
        folder: The block's.
        spec: What else is asked for.
        name: Of the run, for the services.

    Raises:
        zgstore.Invalid: if a library that was asked for is not installed.
    """

    def __init__(self, folder: Path, spec: LogSpec, *, name: str = "") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / FILE_NAME
        self._begin_board = _tensorboard(folder) if spec.tensorboard else None
        self._board: Any = None
        self._run = _wandb(spec.wandb, folder, name) if spec.wandb is not None else None
        self._file: IO[str] | None = None

    def __call__(self, line: Mapping[str, Any]) -> None:
        """Write one line: ``step``, and numbers by name.

        The first one drops what is there from that step on: the end of a run whose state was lost.
        """
        if self._file is None:
            if self._begin_board is not None:
                self._board = self._begin_board(purge_step=line["step"])
            kept = [each for each in read_lines(self._path) if each["step"] < line["step"]]
            with placed(self._path, by="new") as whole:  # a kill must not lose what is kept
                whole.write("".join(json.dumps(each) + "\n" for each in kept).encode())
            self._file = self._path.open("a", encoding="utf-8")
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        numbers = {key: value for key, value in line.items() if key != "step" and isinstance(value, int | float)}
        if self._board is not None:
            for key, value in numbers.items():
                self._board.add_scalar(key, value, line["step"])
        if self._run is not None:
            self._run.log(numbers, step=line["step"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file and end the services' runs."""
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()
        if self._run is not None:
            self._run.finish()


def read_lines(path: Path, *, tail_bytes: int | None = None) -> list[dict[str, Any]]:
    """The whole lines of a log: ``step``, and by name numbers, or None for what there was none of.

    What is no such line is left out: one that was cut off, by a kill or by beginning within it.

    Args:
        path: The log; there is none where nobody has said anything.
        tail_bytes: Read so much of its end; None: all.

    Raises:
        zgstore.Corrupt: if something that is no file has its name.
    """
    file = opened(path, remedy="remove it: a new one is begun")
    if file is None:
        return []
    with file:
        if tail_bytes is not None:
            file.seek(max(0, file.seek(0, os.SEEK_END) - tail_bytes))
        text = file.read().decode("utf-8", "replace")
    return [line for line in map(_line, text.splitlines()) if line is not None]


def _line(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("step"), int):
        return None
    return value if all(each is None or isinstance(each, int | float) for each in value.values()) else None


def _tensorboard(folder: Path) -> Callable[..., Any]:
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 — heavy, and optional
    except ImportError as error:
        raise zgstore.Invalid("log.tensorboard needs tensorboard", hint="pip install tensorboard") from error
    return partial(SummaryWriter, str(folder / "tensorboard"))


def _wandb(options: Mapping[str, Any], folder: Path, name: str) -> Any:
    try:
        wandb = import_module("wandb")
    except ImportError as error:
        raise zgstore.Invalid("log.wandb needs wandb", hint="pip install wandb") from error
    return wandb.init(**{"name": name, "dir": str(folder), **options})
