"""The search: every interleaving of a scenario's steps, breadth first, to a shortest way into a violation."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, NamedTuple

from tests.properties.gc_model.protocol import Protocol

Steps = Callable[[Any, Protocol], Iterator[tuple[str, Any]]]


class Scenario(NamedTuple):
    """Processes that share a store: where they begin, what each may do next, and what must never be.

    ``violation`` says in words what is wrong with a state, or None.
    """

    name: str
    starts: Iterable[Hashable]
    steps: Steps
    violation: Callable[[Any], str | None]


class Outcome(NamedTuple):
    """What a search found: the violation and a shortest way to it, or neither; and how many states it saw."""

    violation: str | None
    way: tuple[str, ...]
    states: int


def search(scenario: Scenario, protocol: Protocol) -> Outcome:
    """Walk every interleaving of the scenario under the protocol, until one violates what must be."""
    came_from: dict[Any, tuple[Any, str] | None] = dict.fromkeys(scenario.starts)
    waiting = deque(came_from)
    while waiting:
        state = waiting.popleft()
        wrong = scenario.violation(state)
        if wrong is not None:
            return Outcome(wrong, _way_to(state, came_from), len(came_from))
        for name, after in scenario.steps(state, protocol):
            if after not in came_from:
                came_from[after] = (state, name)
                waiting.append(after)
    return Outcome(None, (), len(came_from))


def _way_to(state: Any, came_from: dict[Any, tuple[Any, str] | None]) -> tuple[str, ...]:
    way = [str(state)]
    while (step := came_from[state]) is not None:
        state, name = step
        way.append(name)
    return (f"from {state}", *way[:0:-1], f"to {way[0]}")
