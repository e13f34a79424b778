"""``make bench``: a table for people, ``bench.json`` for programs."""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.benchmarks import build, ingest
from tests.benchmarks.measuring import Entry, machine, prefault


def show(entries: list[Entry]) -> None:
    """The table."""
    table = Table(title="Ratios in one run", title_justify="left")
    for heading in ("what", "ours", "other", "ratio", "bound", "n", "spread"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    for entry in entries:
        verdict = "green" if entry.holds else "red"
        table.add_row(
            entry.name, f"{entry.ours:.3g} {entry.unit}", f"{entry.other:.3g} {entry.unit}",
            f"[{verdict}]{entry.ratio:.2f}", entry.bound, str(entry.n), f"{entry.spread:.0%}",
        )  # fmt: skip
    Console().print(table)


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("only", nargs="*", choices=["ingest", "build", []], help="default: all")
    parser.add_argument("--gib", type=float, default=1.0, help="GiB of boundaries for ingest and verify")
    parser.add_argument("--rows", type=int, default=64, help="sequences of 128 tokens for the build")
    parser.add_argument("--n", type=int, default=5, help="rounds")
    parser.add_argument("--scratch", type=Path, help="folder on the disk to measure (default: a temporary one)")
    given = parser.parse_args()
    entries: list[Entry] = []
    with tempfile.TemporaryDirectory(dir=given.scratch or Path.cwd(), prefix=".bench-") as scratch:
        prefault(int(4 * given.gib * 2**30))
        if not given.only or "ingest" in given.only:
            entries += ingest.run(Path(scratch), gib=given.gib, n=given.n)
        if not given.only or "build" in given.only:
            entries += build.run(Path(scratch), rows=given.rows, n=given.n)
    show(entries)
    result = {"machine": machine(), "entries": [asdict(entry) | {"machine": machine()["cpu"]} for entry in entries]}
    Path("bench.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
