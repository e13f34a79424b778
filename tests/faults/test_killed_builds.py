"""Builds that are killed at the worst moments, for real: SIGKILL to another process, then look and run again."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from zgstore.building.builder import build
from zgstore.storage.store import Store
from zgstore.upkeep.verifier import verify

sys.path.insert(0, str(Path(__file__).parents[1] / "building"))

from projects import CODE, make_project

SLOW = CODE.replace("x = self.embed(input_ids)", "import time; time.sleep(0.02); x = self.embed(input_ids)")
PROGRAM = """
import sys
import torch
torch.set_num_threads(1)
from zgstore.building.builder import build
from zgstore.storage.store import Store
share = tuple(int(x) for x in sys.argv[3].split("/")) if len(sys.argv) > 3 else None
print(build(Store.open(sys.argv[1]), sys.argv[2], worker=share).snapshot, flush=True)
"""


@pytest.fixture(autouse=True)
def _own_import_path(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))


def start(store, path, *more, **environment):
    command = [sys.executable, "-c", PROGRAM, str(store.path), str(path), *more]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])} | environment
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def finish(process):
    out, _ = process.communicate(timeout=100)
    assert process.returncode == 0
    return out.strip()


def actions(store):
    return sorted((store.path / "actions").glob("*/*.msgpack"))


def wait_for_actions(store, count, process):
    ends = time.monotonic() + 60
    while len(actions(store)) < count:
        assert process.poll() is None, "it ended before it was killed"
        assert time.monotonic() < ends
        time.sleep(0.002)


@pytest.fixture
def project(tmp_path):
    path, _ = make_project(tmp_path / "p", code=SLOW, rows=40)
    return path, build(Store.init(tmp_path / "whole"), path).snapshot


@pytest.mark.parametrize("columns", [1, 13, 25])
def test_a_killed_build_leaves_a_sound_store_and_resumes_to_the_same_snapshot(tmp_path, project, columns):
    path, whole = project
    store = Store.init(tmp_path / "store")
    process = start(store, path)
    wait_for_actions(store, columns, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert store.refs.get("cache") is None
    assert not list(verify(store))
    done = len(actions(store)) // 6
    report = build(store, path)
    assert report.snapshot == whole
    assert report.shards_reused >= done
    assert not list(verify(store))


DYING = """

_whole = Teacher.forward
_calls = 0


def _dying(self, input_ids, attention_mask=None):
    global _calls
    _calls += 1
    if _calls == int(pathlib.Path(__file__).with_name("dies-at").read_text()):
        import os, signal
        os.kill(os.getpid(), signal.SIGKILL)
    return _whole(self, input_ids, attention_mask)


Teacher.forward = _dying
"""


def test_a_build_killed_in_the_middle_of_a_shard_repeats_that_one_and_at_most_the_one_before(tmp_path):
    """Though its teacher is far faster than its disk: two batches a shard, killed in the first of the twenty-first."""
    path, _ = make_project(tmp_path / "p", code=CODE + DYING, rows=120)
    (tmp_path / "p" / "dies-at").write_text("41")
    process = start(Store.init(tmp_path / "store"), path)
    process.communicate(timeout=100)
    assert process.returncode == -signal.SIGKILL
    (tmp_path / "p" / "dies-at").write_text("0")
    report = build(Store.open(tmp_path / "store"), path)
    assert report.shards_reused >= 20 - 1
    assert report.shards_built <= 30 - 19
    assert report.snapshot == build(Store.init(tmp_path / "whole"), path).snapshot


def test_two_workers_one_killed_restarted_as_three_give_the_same_snapshot(tmp_path, project):
    path, whole = project
    store = Store.init(tmp_path / "store")
    two = [start(store, path, f"{index}/2") for index in range(2)]
    wait_for_actions(store, 7, two[1])
    two[1].send_signal(signal.SIGKILL)
    two[1].communicate()
    assert finish(two[0]) == "None"
    three = [start(store, path, f"{index}/3", PYTHONHASHSEED=str(index)) for index in range(3)]
    assert [finish(process) for process in three] == ["None"] * 3
    report = build(store, path)
    assert (report.snapshot, report.shards_built, report.teacher_loaded) == (whole, 0, False)
    assert not list(verify(store))


def test_three_builds_of_one_recipe_at_once_agree(tmp_path, project):
    path, whole = project
    store = Store.init(tmp_path / "store")
    three = [start(store, path, PYTHONHASHSEED=str(index)) for index in range(3)]
    assert [finish(process) for process in three] == [str(whole)] * 3
    assert store.refs.get("cache") == whole
    assert not list(verify(store))


def test_a_torn_action_is_a_miss(tmp_path, project):
    path, whole = project
    store = Store.init(tmp_path / "store")
    assert build(store, path, worker=(0, 1)).snapshot is None
    for torn in actions(store)[:3]:
        torn.write_bytes(torn.read_bytes()[:-5])
    report = build(store, path)
    assert report.snapshot == whole
    assert 0 < report.shards_built <= 3


WRITER = """
import sys
import torch
import zgstore
pins = zgstore.Pins(teacher={"id": "t", "revision": "1"}, data={"id": "d", "revision": "1"}, capture={})
brought = 0
with zgstore.writer(zgstore.Store.open(sys.argv[1]), pins, cut=2) as w:
    for at in range(8):
        batch = {"k": torch.arange(3) + 3 * at}
        todo = w.missing(zgstore.row_digests(batch))
        if todo:
            brought += len(todo)
            w.add(zgstore.SampleBatch(columns={"h": batch["k"][todo].unsqueeze(1).float()}))
        if at == int(sys.argv[2]):
            import os, signal
            os.kill(os.getpid(), signal.SIGKILL)
    print(brought, w.commit(ref="main"))
"""


def bring(store, kill_at):
    command = [sys.executable, "-c", WRITER, str(store.path), str(kill_at)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    return done.returncode, done.stdout.split()


def test_a_killed_writer_asks_for_the_rest_only(tmp_path):
    whole = bring(Store.init(tmp_path / "whole"), -1)
    store = Store.init(tmp_path / "store")
    assert bring(store, 4)[0] == -signal.SIGKILL
    assert not list(verify(store))
    code, (brought, digest) = bring(store, -1)
    assert (code, digest) == (0, whole[1][1])
    assert int(brought) == 24 - 12
