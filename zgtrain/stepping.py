"""The steps to come: which rows they take, in what order, and their batches as they arrive."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import zgstore
from zgtrain.ledger import Ledger
from zgtrain.ranks import Ranks
from zgtrain.source import Batch, interrupted, micro_batches


class Plan:
    """The rows of the steps to come, epoch after epoch, and the order's state behind each that was taken."""

    def __init__(self, sampler: zgstore.Sampler, size: int, *, first: int, steps: int, ranks: Ranks) -> None:
        self._sampler, self._first, self._steps, self._ranks = sampler, first, steps, ranks
        self._size = -(-size // ranks.replicas)
        self._states: deque[Mapping[str, Any]] = deque()

    def __iter__(self) -> Iterator[list[list[int]]]:
        left = self._steps
        while left > 0:
            for rows in self._sampler:  # one pass is one epoch
                self._states.append(self._sampler.state_dict())
                yield micro_batches(self._ranks.share(rows), self._size, first=self._first)
                left -= 1
                if left <= 0:
                    return

    def taken(self) -> Mapping[str, Any]:
        """The state behind the next step: reading runs ahead, and a checkpoint must not."""
        return self._states.popleft()


def arriving(
    coming: Iterator[list[Batch]],
    ledger: Ledger,
    *,
    keep: Callable[[], None],
    check: Callable[[Batch], None],
    stop: Callable[[], bool],
    ranks: Ranks,
) -> Iterator[list[Batch]]:
    """The batches; where they fail, or somebody asks to stop, the state behind the step before is saved first."""
    ledger.begin()
    try:
        while True:
            began = time.perf_counter()
            batches = next(coming, None)
            ledger.seconds["data"] += time.perf_counter() - began
            if batches is None:
                return
            if ranks.any(stop()):
                raise interrupted()
            for batch in batches:
                check(batch)
            yield batches
    except zgstore.ZgError as error:
        # Several processes save together or not at all: what one of them met alone leaves the checkpoint before.
        if ranks.world == 1 or isinstance(error, zgstore.Interrupted):
            keep()
        raise
    finally:
        close: Any = getattr(coming, "close", None)
        if close is not None:
            close()
