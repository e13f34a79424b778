"""Launches: all blocks as real processes, failed and killed for real."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time

import pytest
import torch
from students import CODE, built, make_job

import zgstore
from zgtrain.assembler import gather
from zgtrain.blockreport import command, command_for_all, read_report
from zgtrain.blocks import run
from zgtrain.crew import DONE, FAILED, STOPPED, cause
from zgtrain.jobfile import load_job
from zgtrain.launcher import launch, plan, status
from zgtrain.progress import block_status
from zgtrain.sharded import newest

torch.set_num_threads(1)
FOUR = ["layers.0:in", "layers.1:in", "layers.2:in", "layers.3:in", "norm:in"]
# Block 1 ends its process by a signal the first time that it is asked for step 6; block 0 is refused each time.
TROUBLED = "import os\n\nimport zgstore\n" + CODE.replace(
    "        self.calls += self.training\n",
    """        self.calls += self.training
        if self.number == 1 and int(self.calls) == 6 and not os.path.exists(KILLED):
            open(KILLED, "w").close()
            os.kill(os.getpid(), 9)
        if self.number == 0 and int(self.calls) == 3:
            raise zgstore.Refused("the oven is cold", hint="heat it")
""",
).replace(
    "    return Block(dropout=dropout)", "    made = Block(dropout=dropout)\n    made.number = number\n    return made"
)
# Only in processes of a launch.
SLOW = "        import sys, time; time.sleep(0.2 * (sys.argv[0] == 'zgtrain'))\n"


@pytest.fixture(autouse=True)
def _own_import_path(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def gone(pattern, seconds=20):
    """Wait until no process has the text in its command line."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        found = subprocess.run(["pgrep", "-f", pattern], capture_output=True, text=True, check=False).stdout.split()
        if not found:
            return True
        time.sleep(0.1)
    return False


def test_one_failure_never_stops_the_others_and_a_killed_block_goes_on_from_its_checkpoint(tmp_path):
    code = TROUBLED + f"\n\nKILLED = {str(tmp_path / 'killed')!r}\n"
    path = make_job(tmp_path, rows=16, train="steps = 9\ncheckpoint_every = 4", code=code)
    job, _, snapshot = built(path)
    report = launch(job, parallel=2, retries=1)
    assert [(each.state, each.attempts) for each in report.blocks] == [(FAILED, 1), (DONE, 2)]
    assert report.error.message == "block 0 of 2 failed: the oven is cold"
    assert (report.error.hint, report.error.exit_code) == ("heat it", 25)
    assert report.error.fields["blocks"] == [0]
    assert report.snapshot == snapshot
    assert read_report(job, 1).resumed_from == 4
    whole = run(load_job(path, ["output=whole"]), block=1)
    assert read_report(job, 1).state_digest == whole.state_digest
    assert whole.state_digest in json.dumps(report.as_value())
    shown = status(job)
    assert [each.state for each in shown] == ["stopped", "done"]
    assert (shown[1].step, shown[1].checkpoint_step) == (9, 9)


def test_a_plan_says_what_is_done_and_loads_no_teacher(tmp_path):
    code = CODE.replace("def teacher(", "def teacher(*_, **__):\n    raise RuntimeError\n\n\ndef unused(")
    path = make_job(tmp_path, rows=16, boundaries=FOUR)
    job, _, snapshot = built(path)
    for file in tmp_path.glob("toy_student_*.py"):
        file.write_text(code)
    sys.modules.pop(job.student.block.text.partition(":")[0])
    run(job, block=2)
    found = plan(job, parallel=3, devices=["cpu"])
    assert (found.snapshot, found.rows, found.parallel, found.devices) == (snapshot, 16, 3, ("cpu",))
    assert [each.done for each in found.blocks] == [False, False, True, False]
    first = found.blocks[0]
    assert (first.parameters, first.trained_parameters) == (1088, 1072)
    # Two boundaries of 6 × 16 floats, four context columns of 6 whole numbers, and where each row began.
    assert first.bytes_to_read >= 7 * 4 * (2 * 6 * 16 * 4 + 4 * 6 * 8)
    assert found.blocks[2].bytes_to_read == 0
    assert json.dumps(found.as_value())


def test_a_launch_that_is_stopped_or_killed_leaves_no_process_and_resumes(tmp_path):
    slow = CODE.replace("        self.calls += self.training\n", SLOW + "        self.calls += self.training\n")
    path = make_job(tmp_path, rows=16, train="steps = 12\ncheckpoint_every = 4", code=slow)
    job, _, _ = built(path)
    whole = [run(load_job(path, ["output=whole"]), block=block).state_digest for block in (0, 1)]
    report = launch(job, parallel=2, stop=lambda: all(each.step for each in status(job)))
    assert report.stopped
    assert report.error.exit_code == 130
    assert [each.state for each in report.blocks] == [STOPPED, STOPPED]
    first = status(job)
    assert all(0 < each.checkpoint_step == each.step < 12 for each in first)

    words = [sys.executable, "-m", "zgtrain.cli.main", "launch", str(path), "--parallel", "1", "--json"]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 40
    while status(job)[0].step == first[0].step:
        assert time.monotonic() < until
        time.sleep(0.02)
    process.kill()
    assert process.communicate()[1] == ""
    assert gone(str(path))
    assert status(job)[0].checkpoint_step > first[0].checkpoint_step  # its block was told, and saved
    assert [run(job, block=block).state_digest for block in (0, 1)] == whole
    assert [each.attempts for each in launch(job).blocks] == [0, 0]


@pytest.mark.timeout(60)
def test_following_trains_on_a_build_that_is_killed_and_ends_as_the_cached_job(tmp_path):
    slow = CODE.replace(  # the teacher's fifth batch waits for the file that says that its builder was killed
        "        x = self.embed",
        """        import os, time
        self.calls = getattr(self, "calls", 0) + 1
        for _ in range(1000 * (self.calls == 5)):
            if os.path.exists(KILLED):
                break
            time.sleep(0.05)
        x = self.embed""",
    )
    slow += f"\n\nKILLED = {str(tmp_path / 'killed')!r}\n"
    train = 'order = "sequential-first"\nsteps = 12\ncheckpoint_every = 1'
    two = ["layers.2:in", "norm:in"]
    path = make_job(tmp_path, rows=44, train=train, code=slow, ragged=True, boundaries=two)
    job = load_job(path)
    killed = []

    def kill(_runs):
        """The builder, once, when the jobs have learned something of it."""
        if not killed and block_status(job, 0).step:
            store = zgstore.Store.open(job.snapshot.store)
            building = store.memos.builds()
            pids = [lease.pid for lease in store.leases.all() if lease.alive and lease.uuid in building]
            killed.extend(pids)
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            (tmp_path / "killed").touch()

    report = launch(job, follow=job.snapshot.recipe, parallel=2, on_change=kill)
    assert report.error is None, report
    assert killed
    assert [each.report["resumed_from"] is not None for each in report.blocks] == [True]
    assert report.build["shards"]["reused"] > 0
    other = zgstore.Store.init(tmp_path / "other")
    assert str(zgstore.build(other, job.snapshot.recipe).snapshot) == report.snapshot == report.build["snapshot"]
    cached = run(load_job(path, ["output=cached"]), block=0)
    assert report.blocks[0].report["state_digest"] == cached.state_digest


def of_two_processes(tmp_path, **more):
    """A job of one block that two processes shard between them, built."""
    code = CODE.replace(
        "    return Block(dropout=dropout)",
        """    made = Block(dropout=0.0)
    if torch.distributed.is_initialized():
        from torch.distributed.fsdp import fully_shard

        fully_shard(made, ignored_params={made.frozen})
    return made""",
    )
    processes = "[launch.blocks.0]\nprocesses = 2"
    path = make_job(tmp_path, rows=16, boundaries=["layers.2:in", "norm:in"], code=code, more=processes, **more)
    return path, built(path)[0]


def test_a_block_of_two_processes_learns_what_one_learns_and_is_gathered(tmp_path):
    path, job = of_two_processes(tmp_path)
    report = launch(job)
    assert report.error is None, report.error
    together = read_report(job, 0)
    alone = run(load_job(path, ["output=alone"]), block=0)  # in this one process
    assert newest(job.folder(0)) is not None  # they saved it together
    assert newest(job.output.with_name("alone") / "block-000") is None
    assert together.last_window_mean_loss == pytest.approx(alone.last_window_mean_loss, rel=1e-5)
    (block,) = gather(job).blocks
    (other,) = gather(load_job(path, ["output=alone"])).blocks
    for mine, theirs in zip(block.parameters(), other.parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-4)


def test_processes_of_a_block_save_and_end_when_what_started_them_is_killed(tmp_path):
    path, job = of_two_processes(tmp_path, train="steps = 100000")
    words = [sys.executable, "-m", "zgtrain.cli.main", "run", str(path), "--block", "0", "--json"]
    with (tmp_path / "out.json").open("wb") as out:
        run_ = subprocess.Popen(words, stdout=out, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 60
    while not status(job)[0].step and time.monotonic() < until:
        time.sleep(0.1)
    (torchrun,) = subprocess.run(
        ["pgrep", "-f", f"cli.tied .* torchrun .*{path}"], capture_output=True, text=True, check=True
    ).stdout.split()
    os.kill(int(torchrun), signal.SIGKILL)
    assert run_.wait(60) == 30
    assert "SIGKILL" in (tmp_path / "out.json").read_text()
    assert gone(str(path), seconds=60)
    left = status(job)[0]
    assert left.state == "stopped"
    assert left.checkpoint_step == left.step > 0  # all of them saved, together


def test_what_only_one_of_several_processes_says_is_what_the_block_failed_of(tmp_path):
    log = tmp_path / "stderr.log"
    log.write_text('{"ok": false, "error": {"kind": "corrupt", "message": "of an earlier run"}}\n')
    begin = log.stat().st_size
    gone = '{"ok": false, "error": {"kind": "invalid", "message": "RuntimeError: connection closed by peer"}}\n'
    with log.open("a") as file:
        file.write(f"W1129 torch/distributed: a death signal\n{gone}[1, 2]\n")
    assert cause(log, begin) is None
    with log.open("a") as file:
        file.write('{"ok": false, "error": {"kind": "refused", "message": "the oven is cold", "hint": "heat it"}}\n')
    assert cause(log, begin) == {"kind": "refused", "message": "the oven is cold", "hint": "heat it"}


def test_a_shuffled_job_cannot_follow(tmp_path):
    job = load_job(make_job(tmp_path))
    with pytest.raises(zgstore.Invalid, match="shuffled") as caught:
        launch(job, follow=job.snapshot.recipe)
    assert "sequential-first" in caught.value.hint


def test_fewer_attempts_than_none_are_refused(tmp_path):
    with pytest.raises(zgstore.Invalid, match="-1 further attempts are none"):
        launch(load_job(make_job(tmp_path)), retries=-1)


def test_what_is_no_device_is_refused_before_a_block_begins(tmp_path):
    job = load_job(make_job(tmp_path))
    for begin in (plan, launch):
        with pytest.raises(zgstore.Invalid, match="'gpu' is no device here") as caught:
            begin(job, devices=["cpu", "gpu"])
        assert "cuda:0" in caught.value.hint
    assert not list(job.output.glob("block-*"))


def test_a_hint_s_command_is_one_word_for_a_path_with_spaces(tmp_path):
    folder = tmp_path / "my jobs"
    folder.mkdir()
    job = load_job(make_job(folder))
    for words in (command(job, 1, fresh=True), command_for_all(job)):
        assert shlex.split(words)[2] == str(job.path)


def test_a_build_that_fails_is_named(tmp_path):
    path = make_job(tmp_path, train='order = "sequential"')
    job = load_job(path)
    job.snapshot.recipe.write_text(job.snapshot.recipe.read_text().replace("norm:in", "nrom:in"))
    with pytest.raises(zgstore.Invalid, match=r"the build failed: .*nrom"):
        launch(job, follow=job.snapshot.recipe, retries=0)
