"""The protocol of collecting garbage (FORMAT 1, section 8) as a small model, and its exhaustive search.

Processes share a store of two objects: a *blob* and the *snapshot* that refers to it. Each moves in atomic steps,
named as the format names them and no coarser than the holds of the store lock in the code; any may be killed between
two steps. ``search`` walks every interleaving of a scenario and returns a shortest way into a violation, if there is
one. The modules, in the order in which they are read:

    protocol.py    the promises, each of which can be taken back: a mutation
    logs.py        names and their logs: what a move leaves, what is kept of it, what goes
    world.py       what is shared, and what must never be
    processes.py   builders, copies, taggers, readers, followers: their steps
    collecting.py  the collector's steps
    lifetimes.py   leases alone: when one is dead, what its file says, what goes with it
    scenarios.py   who meets whom, and what befalls them
    search.py      every interleaving

``python -m tests.properties.gc_model`` searches all scenarios and prints how many states each has; with ``--deep``
with a builder and a misfortune more. docs/explanation/gc.md has the table from rule to promise to code to mutation.
"""

from tests.properties.gc_model.lifetimes import of_leases
from tests.properties.gc_model.protocol import PROMISES, Protocol
from tests.properties.gc_model.scenarios import of_stores
from tests.properties.gc_model.search import Outcome, Scenario, search

__all__ = ["PROMISES", "Outcome", "Protocol", "Scenario", "all_scenarios", "search"]


def all_scenarios(*, deep: bool = False) -> dict[str, Scenario]:
    """Every scenario by its name."""
    return {scenario.name: scenario for scenario in (*of_stores(deep=deep), *of_leases())}
