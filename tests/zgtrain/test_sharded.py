"""A block on two processes: sharded by FSDP2 or shared out, it learns what one process learns, and resumes bit for bit.

One process imports torch once and forks each pair of processes; they meet through a file (gloo, on the CPU).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from students import written

from zgtrain.checkpoint import restore_block, state_digest
from zgtrain.sharded import gathered_state, newest

PROGRAM = """
import json, os, shutil, sys, warnings

warnings.simplefilter("ignore")
import torch
import torch.distributed as dist
from pathlib import Path
from torch import nn
from torch.distributed.fsdp import fully_shard

torch.set_num_threads(1)
import zgstore
from zgtrain.trainer import train_block

torch.optim.AdamW([nn.Parameter(torch.zeros(1))]).step()  # what torch loads late, once for all children


class Tanh(nn.Tanh):
    "With a table that it makes longer, as rotary ones are, one that it makes, and one that cannot be written into."

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.ones(2), persistent=False)
        self.register_buffer("ones", torch.ones(1).expand(13))

    def forward(self, x):
        if len(self.table) < x.shape[1]:
            self.register_buffer("table", torch.linspace(1, 2, x.shape[1]), persistent=False)
            self.register_buffer("calls", torch.zeros(()), persistent=False)
        self.calls += 1
        return super().forward(x) * self.table[:, None] * self.ones + 1e-3 * self.calls


def train(folder, name, *, steps=7, stop_at=None, shard=True, replicas=1, **options):
    torch.manual_seed(3)
    block = nn.Sequential(nn.Linear(8, 13), Tanh(), nn.Linear(13, 8))
    if shard and dist.is_initialized():
        fully_shard(block[0])  # a layer that is whole only while it runs
        fully_shard(block)
    seen, losses = [], []

    def log(line):
        seen.append(line["step"])
        losses.append(line["loss"])

    stop = lambda: bool(seen) and stop_at is not None and seen[-1] >= stop_at
    with zgstore.read(zgstore.Store.open(folder + "/store"), "main") as reader:
        try:
            report = train_block(
                block, reader, source="h.0", target="h.1", steps=steps, batch_size=4, seed=5, log=log, log_every=1,
                optimizer=torch.optim.AdamW(block.parameters(), lr=1e-2), stop=stop, replicas=replicas,
                checkpoint=Path(folder) / name / "checkpoint.pt", checkpoint_every=3, **options)
        except zgstore.Interrupted:
            return {"losses": losses, "interrupted": True}
        except zgstore.Refused as refused:
            return {"refused": refused.message}
    return {"losses": losses, **report.as_value()}


def together(folder, name, **options):
    meeting, pids = f"{folder}/{name}.meeting", []
    for rank in range(2):
        pid = os.fork()
        if not pid:
            code = 70
            try:
                dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
                result = train(folder, name, **options)
                if rank == 0:
                    Path(f"{folder}/{name}.json").write_text(json.dumps(result))
                dist.barrier()
                code = 0
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                os._exit(code)
        pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    os.unlink(meeting)
    assert codes == [0, 0], codes
    return json.loads(Path(f"{folder}/{name}.json").read_text())


folder = sys.argv[1]
Path(folder, "from one").mkdir()
Path(folder, "from one", "checkpoint.pt").touch()
found = {
    "sharded": together(folder, "sharded", anchor=0.5),
    "stopped": together(folder, "resumed", stop_at=2, anchor=0.5),
    "resumed": together(folder, "resumed", anchor=0.5),
    "from one": together(folder, "from one"),
    "replicas": together(folder, "replicas", replicas=2, accumulate=2),
    "plain": together(folder, "plain", replicas=2, shard=False, anchor=0.5),
}
shutil.copytree(folder + "/resumed", folder + "/from fewer")
for file in Path(folder, "from fewer").glob("*/rank-1.pt"):
    file.unlink()
found["from fewer"] = together(folder, "from fewer")
found["from several"] = train(folder, "resumed")
found["one"] = train(folder, "one", anchor=0.5)  # last: a process that has trained has threads, and forks no more
found["one accumulated"] = train(folder, "accumulated", accumulate=2)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def found(folder):
    written(folder)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", PROGRAM, str(folder)]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=100, check=False)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


@pytest.mark.parametrize(
    ("several", "one"),
    [("sharded", "one"), ("replicas", "one accumulated"), ("plain", "one")],
)
def test_two_processes_learn_what_one_does(found, several, one):
    assert found[several]["losses"] == pytest.approx(found[one]["losses"], rel=1e-4)
    assert found[several]["last_window_mean_loss"] == pytest.approx(found[one]["last_window_mean_loss"], rel=1e-4)
    assert found[several]["initial_digest"] == found[one]["initial_digest"]
    assert found[several]["snapshot"] == found[one]["snapshot"]


def test_stopped_and_resumed_they_end_in_the_same_state(found):
    assert found["stopped"]["interrupted"]
    assert found["resumed"]["resumed_from"] == 2
    assert found["resumed"]["state_digest"] == found["sharded"]["state_digest"]
    assert found["resumed"]["last_window_mean_loss"] == found["sharded"]["last_window_mean_loss"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("from one", "was saved by one process, and several would go on"),
        ("from several", "was saved by several processes, and one would go on"),
        ("from fewer", "was saved by 1 processes, and 2 train now"),
    ],
)
def test_a_checkpoint_of_other_processes_is_refused_by_all_alike(found, name, said):
    assert found[name]["refused"].endswith(said)


def test_nothing_is_counted_that_is_not_there(found):
    for name in ("sharded", "replicas", "plain"):
        assert found[name]["live_teacher_parameters"] == 0
        assert found[name]["inter_block_gradient_bytes"] == 0
        assert found[name]["trained_parameters"] == found["one"]["trained_parameters"]


def test_one_process_gathers_the_shards(found, folder):
    state = gathered_state(folder / "sharded")
    block = torch.nn.Sequential(torch.nn.Linear(8, 13), torch.nn.Tanh(), torch.nn.Linear(13, 8))
    block[1].register_buffer("ones", torch.zeros(13))
    restore_block(block, state, passing=["1.table", "1.calls"])
    assert block[1].calls == 7
    assert state_digest(block) == found["sharded"]["state_digest"]
    left = {each.name for each in (folder / "sharded").iterdir()}
    assert left == {newest(folder / "sharded").name, "checkpoint.json"}
