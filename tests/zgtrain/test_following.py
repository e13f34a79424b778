"""A build that is followed: the bits of the cached and the live job, a builder that is killed, one that is to come."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from students import CODE, built, make_job

import zgstore
from zgtrain.blockreport import finished
from zgtrain.blocks import growing_build, run
from zgtrain.checkpoint import load
from zgtrain.jobfile import load_job

torch.set_num_threads(1)
CLASSES = ["plain", "llama", "qwen2", "gpt2"]


@pytest.fixture(autouse=True)
def _own_import_path(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))


def beside(job, *, publishing):
    """A thread that builds the job's snapshot, and publishes it only when it may."""

    def progress(now):
        if now.stage == "publishing":
            publishing.wait(30)

    thread = threading.Thread(target=zgstore.build, args=(store_of(job), job.snapshot.recipe), kwargs={
        "ref": "cache", "progress": progress})  # fmt: skip
    thread.start()
    return thread


def store_of(job):
    return zgstore.Store.init(job.snapshot.store)


@pytest.mark.parametrize(("order", "block"), [("sequential", 0), ("sequential-first", 1)])
@pytest.mark.parametrize("kind", CLASSES)
def test_following_cached_and_live_end_in_the_same_state(tmp_path, kind, order, block):
    if kind != "plain":
        pytest.importorskip("transformers")
    train = f'order = "{order}"\nsteps = 8'  # six steps an epoch
    path = make_job(tmp_path, kind=kind, ragged=True, rows=22, storage='dtype = "bfloat16"', train=train)
    job, publishing = load_job(path), threading.Event()
    thread = beside(job, publishing=publishing)

    def note(line):
        if line["step"] == 4:  # it learns although nothing is published
            assert finished(job, block) is None
            publishing.set()

    followed = run(job, block=block, follow=True, patience_seconds=30, progress=note)
    thread.join()
    cached = run(load_job(path, ["output=cached"]), block=block)
    live = run(load_job(path, ["output=live"]), block=block, source="live")
    assert [each.targets for each in (followed, cached, live)] == ["following", "cached", "live"]
    assert followed.state_digest == cached.state_digest == live.state_digest != cached.initial_digest
    assert followed.last_window_mean_loss == cached.last_window_mean_loss == live.last_window_mean_loss
    assert followed.snapshot == cached.snapshot == live.snapshot == str(store_of(job).resolve("cache"))
    assert followed.pins == cached.pins == live.pins
    assert followed.job == cached.job == live.job
    assert followed.live_teacher_parameters <= cached.live_teacher_parameters < live.live_teacher_parameters
    assert live.bytes_read < cached.bytes_read


@pytest.mark.parametrize("kind", CLASSES)
def test_cached_and_live_end_in_the_same_state_shuffled_too(tmp_path, kind):
    if kind != "plain":
        pytest.importorskip("transformers")
    path = make_job(tmp_path, kind=kind, ragged=True, train='loss = "cosine"')
    job, _, _ = built(path)
    cached = run(job, block=1)
    live = run(load_job(path, ["output=live"]), block=1, source="live")
    assert cached.state_digest == live.state_digest
    assert cached.last_window_mean_loss == live.last_window_mean_loss


# ---- a builder that is killed ----


@pytest.mark.timeout(90)
def test_a_builder_that_is_killed_is_not_waited_for_and_all_resume(tmp_path):
    stuck = CODE.replace(
        "        x = self.embed",
        """        import os, time
        self.calls = getattr(self, "calls", 0) + 1
        while self.calls == 5 and not os.path.exists(KILLED):
            time.sleep(0.02)
        x = self.embed""",
    )
    stuck += f"\n\nKILLED = {str(tmp_path / 'killed')!r}\n"
    train = 'order = "sequential-first"\nsteps = 12'
    path = make_job(tmp_path, rows=22, train=train, code=stuck, ragged=True)
    job, shorter = load_job(path), load_job(path, ["train.steps=4"])
    store = store_of(job)
    words = ["build", job.snapshot.recipe, "--store", store.path, "--ref", "cache", "--quiet"]
    builder = subprocess.Popen([sys.executable, "-m", "zgstore.cli.main", *map(str, words)])

    def kill(line):
        if line["step"] == 4:  # four shards are there, and the teacher hangs
            time.sleep(1.5)
            builder.send_signal(signal.SIGKILL)
            builder.wait()

    with pytest.raises(zgstore.Interrupted, match="ended after 16 rows and was not published") as caught:
        run(job, block=1, follow=True, patience_seconds=60, progress=kill)
    assert builder.returncode == -signal.SIGKILL
    assert f"`zgstore build {job.snapshot.recipe} --store {store.path}` resumes it" in caught.value.hint
    with pytest.raises(zgstore.NotFound, match="no build grows"):
        run(job, block=1, follow=True)
    with pytest.raises(zgstore.Interrupted, match="was not published"):  # all of its steps are done
        run(shorter, block=0, follow=caught.value.fields["build"])
    assert [load(job.folder(block) / "checkpoint.pt")["ledger"]["step"] for block in (0, 1)] == [4, 4]
    assert finished(shorter, 0) is None

    (tmp_path / "killed").touch()
    publishing = threading.Event()
    thread = beside(job, publishing=publishing)
    again = growing_build(store, patience_seconds=30)
    publishing.set()
    followed = run(job, block=1, follow=again)
    thread.join()
    assert followed.resumed_from == run(shorter, block=0).resumed_from == 4
    whole = [run(load_job(path, ["output=whole", f"train.steps={each}"]), block=b) for b, each in ((0, 4), (1, 12))]
    assert [each.state_digest for each in whole] == [run(shorter, block=0).state_digest, followed.state_digest]
    assert followed.snapshot == whole[0].snapshot


def test_who_waits_for_a_build_can_be_stopped(tmp_path):
    job = load_job(make_job(tmp_path, train='order = "sequential"'))
    store_of(job)
    with pytest.raises(zgstore.NotFound, match="no build grows") as caught:
        run(job, block=0, follow=True, patience_seconds=0.2)
    assert "--wait" in caught.value.hint
    asked = []
    with pytest.raises(zgstore.Interrupted, match="stopped as asked"):
        run(job, block=0, follow=True, patience_seconds=60, stop=lambda: bool(asked.append(1)) or len(asked) > 2)
