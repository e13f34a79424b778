"""Many processes on one store, for minutes: killed, stopped and let go at random, with locks and clocks that lie.

``make stress`` runs each hazard for a minute and more; the suite a sample of some operations each. Afterwards every
name is whole, and everything that lies on the disk is accounted for.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.faults import lies


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hazard", default="none", help="its name in `hazards.HAZARDS`, or `all`")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each hazard")
    parser.add_argument("--operations", type=int, help="of each hazard, instead of a time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hands", type=int, default=8, help="processes at once")
    parser.add_argument("--folder", type=Path, help="where the stores lie; in memory where that can be")
    parser.add_argument("--json", action="store_true", help="a JSON object for each hazard, on a line")
    asked = parser.parse_args()
    # Loaded now, so that torch is loaded once, in the run that can be lied to.
    from tests.faults.conductor import runs  # noqa: PLC0415
    from tests.faults.hazards import HAZARDS  # noqa: PLC0415

    if asked.hazard not in {*HAZARDS, "all"}:
        parser.error(f"a hazard is one of all, {', '.join(HAZARDS)}")
    memory = Path("/dev/shm")
    home = asked.folder or (memory if os.access(memory, os.W_OK) else None)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # nothing stays mounted
    found = 0
    with tempfile.TemporaryDirectory(prefix="zgstore-stress-", dir=home) as folder:
        for told in runs(
            [*HAZARDS] if asked.hazard == "all" else [asked.hazard], Path(folder), hands=asked.hands, seed=asked.seed,
            seconds=asked.seconds, operations=asked.operations,
        ):  # fmt: skip
            found += len(told.get("findings", []))
            print(json.dumps(told) if asked.json else _page(told), flush=True)
    return 1 if found else 0


def _page(told: dict[str, Any]) -> str:
    title = f"{told['hazard']}, seed {told['seed']}, {told['hands']} hands"
    if "skipped" in told:
        return f"{title}: skipped: {told['skipped']}"
    done, heard = sum(told["done"].values()), sum(told["heard"].values())
    refused = f"{heard} refused as they may be, {len(told['findings'])} findings"
    lines = [f"{title}: {done} operations done, {refused}; {told['seconds']:.0f} s"]
    lines += [
        f"  {what}: " + ", ".join(f"{name} {n}" for name, n in sorted(told[what].items()))
        for what in ("done", "heard", "befell")
    ]
    lines.append("  files: " + ", ".join(f"{name} {n} of {size} bytes" for name, (n, size) in told["files"].items()))
    return "\n".join([*lines, *(f"--- {each}" for each in told["findings"])])


if __name__ == "__main__":
    lies.begin_anew("tests.faults.stress")
    sys.exit(main())
