"""The ladder of sizes and gradients, made tiny: the same on any number of processes, and never done twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.timeout(400)  # on a busy machine; alone it takes a tenth of that

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "zeroth_order_scaling"
sys.path.insert(0, str(EXAMPLE))

from shards import Rows, write  # noqa: E402
from sizes import Run, Size  # noqa: E402
from train import train  # noqa: E402

TINY = Size(width=16, layers=2, heads=2, hidden=24, length=16, rows=4, steps=6, lr=1e-2, warmup=2)
HELDOUT, LOOK = 4, 3
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(autouse=True, scope="module")
def _as_it_was():
    before, threads = signal.getsignal(signal.SIGTERM), torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write(folder, "python:topics", tokens=3000, shard_tokens=1000)
    return folder


def command(folder, data, *words, processes=1):
    ranks = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    return [sys.executable, *ranks, EXAMPLE / "train.py", folder, "--data", data, "--micro-rows=2", *words]


def begun(folder, data, digest=None):
    """A folder of a run that has not begun."""
    digest = digest or Rows(data, TINY.length, HELDOUT).digest
    run = Run("tiny", TINY, probes=4, data=digest, heldout_rows=HELDOUT, look_every=LOOK)
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps(asdict(run)))
    return folder


def told(folder):
    """Each line of its log, without the seconds."""
    lines = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


def trained(folder, data, *words, processes=1):
    ran = subprocess.run(
        command(folder, data, *words, processes=processes), env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return told(folder)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, data):
    folder = begun(tmp_path_factory.mktemp("whole") / "run", data)
    assert train(folder, data, micro_rows=2, save_every=100)
    return told(folder)


def test_each_step_and_each_look_is_logged_and_queries_are_counted(whole):
    steps = [line for line in whole if "loss" in line]
    looks = [line for line in whole if "heldout_loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in looks] == [0, 3, 6]
    passes, cores, probes = 2, 2 * TINY.layers, 4
    assert [line["queries"] for line in steps] == [2 * probes * passes * cores * step for step in range(1, 7)]
    assert looks[-1]["heldout_loss"] < looks[0]["heldout_loss"]
    for look in looks:
        assert 0 < look["cosine"] < 1
        assert look["noise_to_signal"] > 0
        assert len(look["branch_gain"]) == TINY.layers


def test_two_processes_share_the_same_steps(tmp_path, data, whole):
    shared = trained(begun(tmp_path / "run", data), data, processes=2)
    assert [line["step"] for line in shared] == [line["step"] for line in whole]
    for ours, one in zip(shared, whole, strict=True):
        (name,) = {"loss", "heldout_loss"} & set(one)
        assert ours[name] == pytest.approx(one[name], rel=1e-4)


def test_what_is_killed_goes_on_and_ends_in_the_same_bits(tmp_path, data, whole):
    folder = begun(tmp_path / "run", data)
    running = subprocess.Popen(command(folder, data, "--save-every=2"), env=ENVIRONMENT)
    while not (folder / "checkpoint.pt").exists():
        time.sleep(0.01)
    running.send_signal(signal.SIGKILL)
    assert running.wait() == -signal.SIGKILL
    assert not (folder / "result.json").exists()
    assert trained(folder, data, "--save-every=2") == whole


def test_another_text_than_the_run_s_is_refused(tmp_path, data):
    with pytest.raises(SystemExit, match="the run is of sha256:other"):
        train(begun(tmp_path / "run", data, "sha256:other"), data, micro_rows=2, save_every=100)


LADDER = "import ladder, sizes; sizes.SIZES['mini'] = sizes.Size(**{}); ladder.main()"


def climbed(home, *words):
    """The command with its smallest size made tiny."""
    code = LADDER.replace("{}", repr(asdict(TINY)))
    ran = subprocess.run(
        [sys.executable, "-c", code, "--output", home, *words],
        env={**ENVIRONMENT, "PYTHONPATH": str(EXAMPLE)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_a_dry_run_tells_the_plan_and_trains_nothing(tmp_path):
    said = climbed(tmp_path / "home", "--tokens=3000", "--dry-run")
    assert [line.split()[0].rpartition("-")[0] for line in said.splitlines()[1:]] == [
        f"mini-{arm}-seed0" for arm in ("backprop", "n4", "n16", "n64")
    ]
    assert not (tmp_path / "home" / "runs").exists()


def test_the_ladder_compares_its_arms_and_does_none_twice(tmp_path):
    words = ["--tokens=3000", "--arms", "backprop", "n=4"]
    said = climbed(tmp_path / "home", *words)
    table = (tmp_path / "home" / "table.md").read_text()
    assert said.endswith(table)
    assert [line.split(" | ")[2] for line in table.splitlines()[2:]] == ["backprop", "n=4"]
    assert (tmp_path / "home" / "gap.svg").read_text().startswith("<svg")
    made = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("result.json")}
    assert len(made) == 2
    assert climbed(tmp_path / "home", *words).count(" done") == 2
    assert {path: path.stat().st_mtime_ns for path in made} == made
