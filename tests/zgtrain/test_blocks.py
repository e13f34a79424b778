"""Blocks of a job: the same state from every source, and refusals of what does not belong together."""

from __future__ import annotations

import itertools
import json
import shlex
import sys
import threading
from dataclasses import replace

import pytest
import torch
from students import CODE, built, make_job

import zgstore
from zgtrain.assembler import load_block
from zgtrain.blockreport import command, command_for_all, finished, note, read_report
from zgtrain.blocks import boundaries_of, make_block, open_source, refuse_shared, resolve_snapshot, run
from zgtrain.checkpoint import load, restore_block, state_digest
from zgtrain.jobfile import load_job
from zgtrain.journal import read_lines
from zgtrain.progress import block_status
from zgtrain.relaying import relay

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _own_import_path(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_following_a_build_ends_in_the_state_of_the_cached_job_and_only_then(tmp_path):
    slow = CODE.replace(
        "        x = self.embed(input_ids)", "        import time; time.sleep(0.05)\n        x = self.embed(input_ids)"
    )
    train = 'order = "sequential-first"\nsteps = 11\ncheckpoint_every = 1'
    path = make_job(tmp_path / "grown", ragged=True, rows=22, train=train, code=slow)
    job = load_job(path)
    store = zgstore.Store.init(job.snapshot.store)
    builds, told, release = [], threading.Event(), threading.Event()

    def progress(now):
        if now.build:
            builds.append(now.build)
            told.set()
        if now.stage == "publishing":
            release.wait(20)

    thread = threading.Thread(target=lambda: zgstore.build(store, job.snapshot.recipe, progress=progress))
    thread.start()
    assert told.wait(30)
    seen = []

    def note(line):
        seen.append(line["step"])
        if line["step"] == 4:  # it learns from what is there although nothing is published
            state = load(job.folder(1) / "checkpoint.pt")
            assert (state["snapshot"], state["build"]) == ("", builds[0])
            assert state["shards"] >= 3
        if line["step"] == 5:
            assert finished(job, 1) is None
            release.set()

    report = run(job, block=1, follow=builds[0], progress=note)
    thread.join()
    stored = run(load_job(path, ["output=cached"]), block=1)
    assert report.state_digest == stored.state_digest
    assert report.snapshot == stored.snapshot == str(store.resolve("cache"))
    assert report.pins == stored.pins
    assert (report.targets, stored.targets) == ("following", "cached")
    assert finished(job, 1).state_digest == report.state_digest


def test_a_block_that_followed_a_build_is_finished_on_its_snapshot(tmp_path):
    path = make_job(tmp_path, train='order = "sequential"\nsteps = 6')
    job, store, _ = built(path)
    build = store.memos.builds()[0]
    with pytest.raises(zgstore.Interrupted):
        run(job, block=0, follow=build, **stopped_at(2))
    report = run(job, block=0)
    assert report.resumed_from == 2
    assert report.state_digest == run(load_job(path, ["output=whole"]), block=0).state_digest


def stopped_at(step):
    seen = []
    return {"progress": lambda line: seen.append(line["step"]), "stop": lambda: bool(seen) and seen[-1] >= step}


def test_a_block_that_was_trained_on_is_done_only_when_it_ends(tmp_path):
    path = make_job(tmp_path, train="checkpoint_every = 1")
    job, _, _ = built(path)
    run(job, block=0)
    longer = load_job(path, ["train.steps=20"])
    with pytest.raises(zgstore.Interrupted):
        run(longer, block=0, **stopped_at(11))
    for ask in (lambda: finished(job, 0), lambda: run(job, block=0), lambda: relay(job)):
        with pytest.raises(zgstore.Refused, match="done at step 7, and its checkpoint is at step 11") as caught:
            ask()
        assert "train.steps=11" in caught.value.hint
        assert "--block 0 --fresh" in caught.value.hint
    shown = block_status(job, 0)
    assert (shown.state, shown.step, shown.steps, shown.checkpoint_step) == ("stopped", 11, 7, 11)
    assert "longer run" in shown.error
    note(job.folder(0) / "checkpoint.pt", step=7, snapshot="", job=job.identity())  # a kill before it was said again
    with pytest.raises(zgstore.Refused, match="checkpoint is at step 11"):
        load_block(job, 0, read_report(job, 0))
    assert run(load_job(path, ["train.steps=11"]), block=0).steps == 11
    whole = run(load_job(path, ["train.steps=20", "output=whole"]), block=0)
    assert run(longer, block=0).state_digest == whole.state_digest


def test_a_report_and_a_log_lie_beside_the_checkpoint(tmp_path):
    job, store, _ = built(make_job(tmp_path, train="checkpoint_every = 2"))
    with pytest.raises(zgstore.Interrupted):
        run(job, block=1, **stopped_at(3))
    assert read_report(job, 1) is None
    report = run(job, block=1)
    folder = job.folder(1)
    assert json.loads((folder / "report.json").read_text())["state_digest"] == report.state_digest
    assert [line["step"] for line in read_lines(folder / "log.jsonl")] == list(range(1, 8))
    assert read_report(job, 1) == finished(job, 1) == report
    block = make_block(job, 1)
    assert state_digest(block) == report.initial_digest
    restore_block(block, load(folder / "checkpoint.pt")["block_state"])
    assert state_digest(block) == report.state_digest
    assert not job.folder(0).exists()
    assert boundaries_of(job, store) == ["layers.0:in", "layers.2:in", "norm:in"]


def test_a_block_that_is_done_is_left_as_it_is_and_can_be_made_longer_or_fresh(tmp_path):
    path = make_job(tmp_path)
    job, _, _ = built(path)
    first = run(job, block=0)
    assert run(job, block=0, progress=lambda _: pytest.fail("it trained")) == first
    longer = run(load_job(path, ["train.steps=9"]), block=0)
    assert (longer.resumed_from, longer.steps) == (7, 9)
    fresh = run(job, block=0, fresh=True)
    assert fresh.resumed_from is None
    assert fresh.state_digest == first.state_digest


def test_another_job_in_the_same_folder_is_refused(tmp_path):
    path = make_job(tmp_path)
    job, _, _ = built(path)
    run(job, block=0)
    other = load_job(path, ["train.seed=9"])
    theirs, mine = (zgstore.Digest.parse(each.identity()).short for each in (job, other))
    with pytest.raises(zgstore.Refused, match=f"is of job '{theirs}', and this is '{mine}'\n") as caught:
        run(other, block=0)
    assert f"begin anew with `zgtrain run {path} --set train.seed=9 --block 0 --fresh`" in caught.value.hint
    with pytest.raises(zgstore.Refused, match="is of targets"):
        run(job, block=0, source="live")


def test_a_command_that_a_hint_gives_makes_the_very_job_that_it_is_about(tmp_path):
    path = make_job(tmp_path)
    job = load_job(path, ["output=my runs/a b", "train.loss='smooth-l1'"])
    said = ["--set", "output=my runs/a b", "--set", "train.loss='smooth-l1'"]
    assert shlex.split(command_for_all(job)) == ["zgtrain", "launch", str(path), *said]
    longer = ["--block", "1", "--set", "train.steps=9"]
    assert shlex.split(command(job, 1, steps=9)) == ["zgtrain", "run", str(path), *said, *longer]
    relay = ["--steps", "9"]
    assert shlex.split(command(replace(job, relay=True), 1, steps=9)) == ["zgtrain", "relay", str(path), *said, *relay]
    again = load_job(path, [word for at, word in enumerate(said) if at % 2])
    assert again == job
    assert job.identity() == load_job(path, {"train.loss": "smooth-l1"}).identity() != load_job(path).identity()


def test_a_job_corrected_before_its_first_step_begins_without_being_told_to_begin_anew(tmp_path):
    path = make_job(tmp_path, ragged=True)
    built(path)
    right = path.read_text()
    path.write_text("\n".join(line for line in right.splitlines() if not line.startswith("forward")))
    wrong = load_job(path)
    with pytest.raises(zgstore.Refused, match="padded"):
        run(wrong, block=0)
    assert block_status(wrong, 0).state == "to do"
    path.write_text(right)
    report = run(load_job(path), block=0)
    assert report.state_digest == run(load_job(path, ["output=whole"]), block=0).state_digest


def test_pins_that_are_not_the_lock_files_are_refused(tmp_path):
    path = make_job(tmp_path)
    job, store, snapshot = built(path)
    zgstore.lock(store, "cache", file=tmp_path / "zgstore.lock")
    locked = load_job(path, ["snapshot.rev=lock:cache"])
    assert str(resolve_snapshot(locked, store)) == snapshot == str(resolve_snapshot(job, store))
    text = job.snapshot.recipe.read_text()
    job.snapshot.recipe.write_text(text.replace("rows = 10", "rows = 9, length = 5").replace('"1"', '"2"'))
    zgstore.build(store, job.snapshot.recipe, ref="cache")
    assert str(resolve_snapshot(locked, store)) == snapshot
    with pytest.raises(zgstore.Refused, match="lock file"):
        run(job, block=0)
    lock = tmp_path / "zgstore.lock"
    lock.write_text(lock.read_text().replace(snapshot, str(store.resolve("cache"))))
    with pytest.raises(zgstore.Refused, match="lock file") as caught:
        run(locked, block=0)
    assert caught.value.exit_code == 25
    with pytest.raises(zgstore.NotFound):
        resolve_snapshot(load_job(path, ["snapshot.rev=lock:other"]), store)


def test_a_shared_parameter_is_refused_unless_frozen_or_private(tmp_path):
    def sharing(name, made="SHARED", shared="nn.Linear(16, 32)"):
        code = CODE.replace("return Block(dropout=dropout)", f"made = Block(); made.up = {made}; return made")
        return built(make_job(tmp_path / name, code=f"{code}\n\nSHARED = {shared}\n"))[0]

    with pytest.raises(zgstore.Refused, match=r"'up\.weight' of block 1 is also 'up\.weight' of block 0"):
        run(sharing("shared"), block=1)
    refuse_shared(sharing("frozen", shared="nn.Linear(16, 32).requires_grad_(False)"), 2)
    refuse_shared(sharing("private", made="__import__('copy').deepcopy(SHARED)"), 2)


def test_a_damaged_shard_is_named_with_the_command_that_mends_it_here(tmp_path):
    path = make_job(tmp_path, train='order = "sequential"')
    job, store, _ = built(path)
    whole = run(load_job(path, ["output=whole"]), block=0)
    blob = store.read_plan("cache", ["layers.2:in"]).columns[0].blobs[1]
    file = store.path / "objects" / blob.name[:2] / f"{blob.name}.safetensors"
    file.chmod(0o600)
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    with pytest.raises(zgstore.Corrupt) as caught:
        run(job, block=0)
    assert str(job.snapshot.recipe) in caught.value.hint
    assert f"--store {store.path}" in caught.value.hint
    assert load(job.folder(0) / "checkpoint.pt")["ledger"]["step"] == 1
    problems = list(zgstore.verify(store, ["cache"]))
    assert zgstore.repair(store, problems, recipe=job.snapshot.recipe).mended
    assert run(job, block=0).state_digest == whole.state_digest


def test_only_the_last_block_has_token_losses(tmp_path):
    student = 'interface = "MODULE:interface"'
    train = "loss = { boundary_weight = 1.25, token_ce = 0.1, token_kl = 0.1 }"
    storage = 'dtype = "bfloat16"'  # the interface computes in float32 all the same
    job, _, _ = built(make_job(tmp_path, ragged=True, student=student, train=train, storage=storage))
    assert run(job, block=0).frozen_interface_parameters == 0
    last = run(job, block=1)
    assert last.frozen_interface_parameters == 16 * 2 + 16 * 37 + 37
    assert last.live_teacher_parameters == run(job, block=0).live_teacher_parameters


def test_functions_of_the_project_are_loss_and_optimizer(tmp_path):
    code = CODE + "\ndef sgd(parameters, lr):\n    return torch.optim.SGD(parameters, lr=lr)\n"
    train = 'loss = "MODULE:absolute"\noptimizer = { name = "MODULE:sgd", lr = 0.01 }'
    job, _, _ = built(make_job(tmp_path, train=train, code=code))
    assert run(job, block=0).steps == 7


def test_what_there_is_none_of_is_said(tmp_path):
    path = make_job(tmp_path)
    job, _, _ = built(path)
    with pytest.raises(zgstore.Invalid, match="no block 2"):
        run(job, block=2)
    with pytest.raises(zgstore.Invalid, match="source"):
        run(job, block=0, source="cash")
    with pytest.raises(zgstore.NotFound, match="no build grows"):
        run(job, block=0, follow=True)
    with pytest.raises(zgstore.Invalid, match="no column"):
        run(load_job(path, ['student.boundaries=["layers.0:in", "layers.9:in"]']), block=0)


def test_a_block_is_trained_by_one_process_at_a_time(tmp_path):
    job, store, _ = built(make_job(tmp_path))
    caught = []

    def meanwhile(_line):
        if not caught:
            with pytest.raises(zgstore.Busy) as error:
                run(job, block=0)
            caught.append(error.value)

    run(job, block=0, progress=meanwhile)
    assert "pid" in caught[0].message
    with open_source(job, store, 1) as data:
        assert (data.source, data.target) == ("layers.2:in", "norm:in")


# Eight layers, and a callback that notes the rows that it is given.
NOTING = (
    CODE.replace("layers=4", "layers=8")
    + """

SEEN = []


def noting(block, source, context):
    SEEN.append([ids[real].tolist() for ids, real in zip(context["input_ids"], context["mask"])])
    return forward(block, source, context)
"""
)


def test_the_rows_of_a_step_are_the_same_for_any_partition_and_codec(tmp_path):
    def at(*layers):
        return [f"layers.{layer}:in" for layer in layers] + ["norm:in"]

    path = make_job(tmp_path, ragged=True, rows=22, boundaries=at(0, 4), code=NOTING, train="steps = 13")
    path.write_text(path.read_text().replace(":forward", ":noting"))
    job, store, _ = built(path)
    text, points = job.snapshot.recipe.read_text(), json.dumps(at(0, 4))
    codec = '[storage.columns."layers.4:in"]\ncodec = "int8"\n'
    for name, layers, more in [("b4", (0, 2, 4, 6), ""), ("b8", range(8), ""), ("int8", (0, 4), codec)]:
        recipe = tmp_path / f"{name}.toml"
        recipe.write_text(text.replace(points, json.dumps(at(*layers))) + more)
        zgstore.build(store, recipe)
    seen = sys.modules[job.student.block.text.partition(":")[0]].SEEN
    rows, digests, data = {}, {}, set()
    for name, blocks in {"cache": (0, 1), "b4": (3,), "b8": (7,), "int8": (1,)}.items():
        data.add(store.snapshot(store.resolve(name)).pins.data["digest"])
        for block in blocks:
            seen.clear()
            again = run(load_job(path, [f'snapshot.rev="{name}"', f"output=out-{name}"]), block=block)
            rows[name, block], digests[name, block] = list(seen), again.state_digest
    assert len(data) == 1
    assert len(set(digests.values())) == len(digests)  # they learned from other columns
    first = rows["cache", 0]
    assert len(first) == 13
    once, twice = ([*itertools.chain(*first[at : at + 6])] for at in (0, 6))
    assert once != twice  # two epochs, each complete
    assert sorted(once) == sorted(twice)
    assert all(each == first for each in rows.values())
