"""What no input may do, whatever it is: take more memory or time than its bound, or raise what is no typed error."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.faults.hostile import BOUND_BYTES, begin_peak, peak_bytes
from tests.fuzz.trees import Choose
from zgstore.errors import MAX_CHARACTERS, ZgError

SECONDS = 5.0  # of processor time, for one input; a core that is lent to others makes it no shorter
MAX_INPUT_BYTES = 1 << 16


class TooSlow(BaseException):
    """No `except Exception` takes it."""


class Broken(AssertionError):
    """A rule that an input broke."""


@dataclass(frozen=True, slots=True)
class Target:
    """One surface.

    Args:
        name: What is fuzzed.
        rule: What holds of any bytes; it lets the refusals through, and nothing else.
        refusals: The errors that may tell why bytes are not taken.
        change: A real input, changed.
        seeds: Real inputs; none where the bytes are choices, of what is done to a folder.
        tight: Whether the address space is bounded too, which threads and maps of files would fill.
        cost: How long one execution takes, next to the fastest.
    """

    name: str
    rule: Callable[[bytes], None]
    refusals: tuple[type[ZgError], ...]
    change: Callable[[Choose], bytes] | None = None
    seeds: tuple[bytes, ...] = ()
    tight: bool = True
    cost: int = 1

    def __call__(self, body: bytes) -> None:
        """Hold the rule."""
        base = 0 if self.tight else begin_peak()
        _begin(tight=self.tight)
        try:
            self.rule(body)
        except self.refusals as error:
            see_refusal(error)
        finally:
            _end()
        taken = 0 if self.tight else peak_bytes() - base
        require(taken <= BOUND_BYTES, f"{taken >> 20} MiB of memory")


def see_refusal(error: ZgError) -> None:
    """That it says what to do, is not as long as what it refuses, and does not hide that memory ran out."""
    require(bool(error.message and error.hint), f"{error.kind} without a remedy")
    longest = max(len(error.message), len(str(error.hint)))
    require(longest <= MAX_CHARACTERS, f"{error.kind} of {longest} characters")
    cause: BaseException | None = error
    while cause is not None:
        short = isinstance(cause, MemoryError) or "allocate memory" in str(cause)[:1000]
        require(not short, "memory ran out, and that was taken for the input's fault")
        cause = cause.__cause__ or cause.__context__


def require(holds: bool, what: str) -> None:
    if not holds:
        raise Broken(what)


def _too_slow(*_: Any) -> None:
    raise TooSlow(f"over {SECONDS} s of processor time")


_PAGE = resource.getpagesize()
_SOFT, _HARD = resource.getrlimit(resource.RLIMIT_AS)


def _begin(*, tight: bool) -> None:
    """The clock and, where it is tight, the address space as it is now and the bound."""
    if tight:
        status = os.open("/proc/self/statm", os.O_RDONLY)
        pages = int(os.read(status, 32).split()[0])
        os.close(status)
        resource.setrlimit(resource.RLIMIT_AS, (pages * _PAGE + BOUND_BYTES, _HARD))
    signal.signal(signal.SIGPROF, _too_slow)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)


def _end() -> None:
    signal.setitimer(signal.ITIMER_PROF, 0)
    resource.setrlimit(resource.RLIMIT_AS, (_SOFT, _HARD))
