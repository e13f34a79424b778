"""Jobs that are killed at any step, by SIGTERM and by SIGKILL, and run again: they end as if nothing had happened.

One process imports torch once and forks a child for each run; a child kills itself exactly where it is told to, or is
killed by its parent at a moment that nobody chose.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PROGRAM = """
import gc, json, os, random, shutil, signal, sys, time

import torch

torch.set_num_threads(1)
import zgstore
import zgtrain.blocks
from zgtrain.jobfile import load_job

# What the children share: all that is loaded late, and counted as nobody's parameter.
torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]).step()
public = [getattr(zgstore, name) for name in zgstore.__all__]
gc.collect()
gc.freeze()


def child(job, block, *, at=None, by=None):
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        asked = []
        signal.signal(signal.SIGTERM, lambda *_: asked.append(True))

        def progress(line):
            if line["step"] == at:
                os.kill(os.getpid(), by)

        zgtrain.blocks.run(job, block=block, stop=lambda: bool(asked), progress=progress)
        code = 0
    except zgstore.Interrupted as error:
        code = error.exit_code
    finally:
        os._exit(code)


def wait(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def report(job, block):
    value = json.loads((job.folder(block) / "report.json").read_text())
    keys = ("state_digest", "first_window_mean_loss", "last_window_mean_loss", "steps", "snapshot")
    return {key: value[key] for key in keys}


def neighbour(job):
    return [[str(each), each.stat().st_mtime_ns, each.read_bytes()] for each in sorted(job.folder(0).iterdir())]


def at_each_step(path, ways):
    first = load_job(path, ["output=first"])
    assert wait(child(first, 0)) == 0
    results = []
    for number, (signals, workers) in enumerate(ways):
        job = load_job(path, [f"output=out{number}", f"train.workers={workers}"])
        shutil.copytree(first.output, job.output)
        before = neighbour(job)
        codes = [wait(child(job, 1, at=at, by=by)) for at, by in signals]
        codes.append(wait(child(job, 1)))
        results.append({"codes": codes, "untouched": neighbour(job) == before, **report(job, 1)})
    return results


def at_any_moment(path, kills):
    job = load_job(path, ["output=random"])
    chance = random.Random(1)
    for _ in range(kills):
        pid = child(job, 1)
        time.sleep(0.01 + 0.08 * chance.random())
        os.kill(pid, signal.SIGKILL)
        wait(pid)
    codes = [wait(child(job, 1))]
    return {"codes": codes, **report(job, 1)}


path, ways, kills = json.loads(sys.argv[1])
print(json.dumps({"each": at_each_step(path, ways), "any": at_any_moment(path, kills)}))
"""

sys.path.insert(0, str(HERE.parent / "zgtrain"))

from students import built, make_job  # noqa: E402

KILL, TERM = 9, 15
LIMIT_SECONDS = 300  # some 130 processes, of a tenth of a second each where nothing else runs
pytestmark = pytest.mark.timeout(LIMIT_SECONDS + 20)

# Seven steps, three an epoch: the last batch of one is at 3 and at 6.
ONCE = [([(step, by)], workers) for step in range(1, 8) for by in (KILL, TERM) for workers in (0, 1, 3)]
PAIRS = itertools.product([(1, 2), (2, 3), (4, 6)], itertools.product((KILL, TERM), repeat=2))
TWICE = [
    ([*zip(steps, signals, strict=True)], (0, 1, 3)[number % 3]) for number, (steps, signals) in enumerate(PAIRS)
]  # each two of steps, signals and workers meet
WAYS = [([], 0), *ONCE, *TWICE]


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A job of seven steps, three an epoch, saved at each second."""
    path = make_job(tmp_path_factory.mktemp("killed"), ragged=True, train="checkpoint_every = 2")
    built(path)
    return path


@pytest.fixture(scope="module")
def ended(job):
    """How the runs of one process ended: killed in each of the ways, and at any moment."""
    command = [sys.executable, "-c", PROGRAM, json.dumps([str(job), WAYS, 8])]
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
    process = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=LIMIT_SECONDS, check=False
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


def learned(run):
    return {name: value for name, value in run.items() if name not in {"codes", "untouched"}}


def test_killed_at_every_step_once_or_twice_in_an_epoch_with_any_workers_it_ends_the_same(ended):
    whole, *others = ended["each"]
    assert whole["codes"] == [0]
    for (signals, workers), other in zip(WAYS[1:], others, strict=True):
        assert learned(other) == learned(whole), (signals, workers)
        assert other["untouched"], (signals, workers)  # the block beside it
        # Asked to stop at the last step, there is nothing left to stop.
        expected = [-KILL if by == KILL else 130 if step < 7 else 0 for step, by in signals]
        assert other["codes"] == [*expected, 0]


def test_killed_at_moments_that_nobody_chose_it_ends_the_same(ended):
    assert learned(ended["any"]) == learned(ended["each"][0])
    assert ended["any"]["codes"] == [0]


def test_kills_leave_nothing_else_behind_and_a_whole_log(ended, job):
    folder = job.parent / "random"
    assert sorted(each.name for each in folder.iterdir()) == ["block-001", "private.json"]
    left = {each.name for each in (folder / "block-001").iterdir() if not each.name.startswith(".")}
    assert left == {"checkpoint.pt", "checkpoint.json", "job.json", "log.jsonl", "report.json"}
    steps = [json.loads(line)["step"] for line in (folder / "block-001" / "log.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 8))
