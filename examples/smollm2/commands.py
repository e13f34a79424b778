"""Commands run one by one in the demo's folder, each answer checked to be one JSON object."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from zgstore.cli.units import size_text as size

__all__ = ["HERE", "SCRATCH", "found", "size", "zgstore", "zgtrain"]

HERE = Path(__file__).resolve().parent
SCRATCH = HERE.parent.parent / ".demo"
LOOK_SECONDS = 0.5


def zgstore(*words: str, say: bool = True) -> dict:
    return run("zgstore", *words, say=say)


def zgtrain(*words: str, meanwhile: Callable[[], None] | None = None) -> dict:
    return run("zgtrain", *words, meanwhile=meanwhile)


def run(program: str, *words: str, say: bool = True, meanwhile: Callable[[], None] | None = None) -> dict:
    """Run one command and return its JSON object; a failure ends the demo with what the command said.

    While it runs, what is done ``meanwhile`` says how far it is; then it shows nothing itself.
    """
    line = f"{program} {' '.join(words)}"
    if say:
        print(f"\n$ {line}", flush=True)
    began = time.monotonic()
    command = [Path(sys.executable).with_name(program), *words, "--json", *["--quiet"] * bool(meanwhile)]
    with subprocess.Popen(command, cwd=SCRATCH, stdout=subprocess.PIPE, text=True) as process:
        said = None
        while said is None:
            try:
                said, _ = process.communicate(timeout=LOOK_SECONDS if meanwhile else None)
            except subprocess.TimeoutExpired:
                meanwhile()
    try:
        answer = json.loads(said)
    except ValueError:
        sys.exit(f"{line} printed no JSON object:\n{said}")
    if process.returncode != 0:
        error = answer.get("error", {})
        sys.exit(f"error: {error.get('message')}\nhint: {error.get('hint')}\n(exit code {process.returncode})")
    answer["took"] = time.monotonic() - began
    return answer


def found(text: str, answer: dict) -> None:
    print(f"  {text}  [{answer['took']:.1f} s]", flush=True)
