"""Commands run one by one in the demo's folder, each answer checked to be one JSON object."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
SCRATCH = HERE.parent.parent / ".demo"


def zgstore(*words: str, say: bool = True) -> dict:
    return run("zgstore", *words, say=say)


def zgtrain(*words: str, say: bool = True) -> dict:
    return run("zgtrain", *words, say=say)


def run(program: str, *words: str, say: bool = True) -> dict:
    """Run one command and return its JSON object; a failure ends the demo with what the command said."""
    line = f"{program} {' '.join(words)}"
    if say:
        print(f"\n$ {line}", flush=True)
    began = time.monotonic()
    command = [Path(sys.executable).with_name(program), *words, "--json"]
    ran = subprocess.run(command, cwd=SCRATCH, stdout=subprocess.PIPE, text=True, check=False)
    try:
        answer = json.loads(ran.stdout)
    except ValueError:
        sys.exit(f"{line} printed no JSON object:\n{ran.stdout}")
    if ran.returncode != 0:
        error = answer.get("error", {})
        sys.exit(f"error: {error.get('message')}\nhint: {error.get('hint')}\n(exit code {ran.returncode})")
    answer["took"] = time.monotonic() - began
    return answer


def found(text: str, answer: dict) -> None:
    print(f"  {text}  [{answer['took']:.1f} s]", flush=True)


def size(count: int) -> str:
    return f"{count / 1e6:.1f} MB"
