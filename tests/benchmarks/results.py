"""What was measured, as a table for people and in ``bench.json`` for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.benchmarks.measuring import Entry, machine

PATH = Path("bench.json")


def show(entries: Sequence[Entry]) -> None:
    """The table; what misses its bound is red."""
    table = Table(title="Ratios in one run", title_justify="left")
    for heading in ("what", "ours", "other", "ratio", "bound", "n", "spread"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    for entry in entries:
        verdict = "green" if entry.holds else "red"
        table.add_row(
            entry.name, f"{entry.ours:.3g} {entry.unit}", f"{entry.other:.3g} {entry.unit}",
            f"[{verdict}]{entry.ratio:.3g}", entry.bound, str(entry.n), f"{entry.spread:.0%}",
        )  # fmt: skip
    Console(width=max(140, Console().width)).print(table)


def keep(benchmark: str, entries: Sequence[Entry], *, path: Path = PATH, **more: Any) -> None:
    """Put one benchmark's entries in place of its earlier ones; those of other benchmarks stay, if of this machine.

    Args:
        benchmark: Its name.
        entries: What it measured.
        path: The file.
        more: Further values of the benchmark, each under its own name.
    """
    here = machine()
    known = json.loads(path.read_text()) if path.exists() else {}
    if known.get("machine") != here:
        known = {}
    others = [entry for entry in known.get("entries", ()) if entry.get("benchmark") != benchmark]
    mine = [{"benchmark": benchmark, **asdict(entry), "machine": here["cpu"]} for entry in entries]
    path.write_text(json.dumps({**known, "machine": here, **more, "entries": others + mine}, indent=2) + "\n")
