"""Results that are kept, functions in processes of their own, and a look at blocks while they train."""

from __future__ import annotations

import json
import os
import resource
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from pieces import SCRATCH

import zgtrain

RESULTS = SCRATCH / "results"
LOOK_SECONDS = 30


def result(name):
    """A kept result; None if there is none."""
    file = RESULTS / f"{name}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


def kept(name, make, *args):
    """Make a result, unless there is one."""
    if result(name) is not None:
        print(f"{name}: done", flush=True)
        return
    print(f"{name}:", flush=True)
    value = make(*args)
    file = RESULTS / f"{name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.with_suffix(".new").write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    file.with_suffix(".new").replace(file)


def apart(function, *args):
    """Call it in a process of its own, so that memory and threads are its own.

    Returns:
        What it returned, the seconds that it took, and the most bytes that its process held.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the blocks' processes have it; read when torch is loaded
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_measured, function, *args).result()


def _measured(function, *args):
    began = time.perf_counter()
    value = function(*args)
    return value, time.perf_counter() - began, peak_bytes()


def peak_bytes():
    """The most bytes that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def watching(job):
    """Print now and then how far the blocks are; for `zgtrain.launch(on_change=…)`."""
    last = time.monotonic()

    def look(_runs):
        nonlocal last
        if time.monotonic() - last > LOOK_SECONDS:
            last = time.monotonic()
            found = [f"{each.step}/{each.steps} ({each.loss:.4f})" for each in zgtrain.status(job) if each.loss]
            print("  " + "   ".join(found), flush=True)

    return look
