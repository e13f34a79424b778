"""Search every scenario and every mutation, and print what they come to."""

from __future__ import annotations

import sys
import time

from tests.properties.gc_model import Protocol, all_scenarios, search
from tests.properties.gc_model.mutations import MUTATIONS, tried


def main(*, deep: bool) -> int:
    """Whether a scenario was violated."""
    scenarios = all_scenarios(deep=deep)
    total, failed, began = 0, 0, time.process_time()
    for scenario in scenarios.values():
        found = search(scenario, Protocol())
        total += found.states
        failed += found.violation is not None
        print(f"{scenario.name:12} {found.states:9,} states  {found.violation or 'no violation'}", flush=True)
        print(*(f"    {line}\n" for line in found.way), sep="", end="")
    print(f"{total:,} states in {time.process_time() - began:.1f} s of processor time")
    if not deep:
        for mutation in MUTATIONS:
            found = tried(scenarios[mutation.scenario], mutation.promise)
            what = found.violation or "no violation"
            print(f"without {mutation.promise:34} {mutation.scenario:12} {max(0, len(found.way) - 2):3} steps  {what}")
    return failed


if __name__ == "__main__":
    sys.exit(main(deep="--deep" in sys.argv[1:]))
