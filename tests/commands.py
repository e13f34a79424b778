"""A command run in this process, and what it gave."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from zgstore.cli.console import Screen


class Ran(NamedTuple):
    """One run of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        assert self.out.count("\n") == 1, f"not one line: {self.out!r}"
        value = json.loads(self.out)
        assert isinstance(value, dict)
        return value

    @property
    def error(self) -> str:
        """Both lines of the error, seen to be two."""
        lines = self.err.splitlines()
        assert len(lines) == 2, self.err
        assert lines[0].startswith("error: ")
        assert lines[1].startswith("hint: ")
        return self.err


def runner(main: Callable[..., int], capfd: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """A function of a command's words, which runs it here: torch is loaded once for all of them."""

    def run(*words: object) -> Ran:
        capfd.readouterr()
        screen = Screen()
        try:
            code = main([str(word) for word in words], screen)
        finally:
            screen.restore()
        return Ran(code, *capfd.readouterr())

    return run
