"""The small files of a job's output: whatever is put in their place, the command says which, and what to do."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time

import pytest
import torch
from students import built, make_job

import zgstore
from zgtrain.blockreport import read_report
from zgtrain.blocks import run
from zgtrain.jobfile import load_job
from zgtrain.launcher import launch, status
from zgtrain.relaying import relay

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _own_import_path(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A job with both blocks, and a relay of them."""
    folder = tmp_path_factory.mktemp("whole")
    before = list(sys.path)
    job, _, _ = built(make_job(folder))
    for block in (0, 1):
        run(job, block=block)
    relay(job)
    sys.path[:] = before
    return folder


@pytest.fixture
def place(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "place")
    forget_code()
    yield tmp_path / "place"
    forget_code()


def forget_code():
    """Of the copy before: a module belongs to one folder as long as a process lasts."""
    for name in [name for name in sys.modules if name.startswith("toy_student_")]:
        del sys.modules[name]


def a_folder(path):
    path.mkdir()


def a_pipe(path):
    os.mkfifo(path)


def a_link_to_itself(path):
    path.symlink_to(path.name)


def text(what):
    return lambda path: path.write_bytes(what)


STRANGE = {
    "a folder": a_folder,
    "a pipe": a_pipe,
    "a link to itself": a_link_to_itself,
    "nothing": text(b""),
    "half": text(b'{"step": 7, "job'),
    "no text": text(b"\xff\xfe\x00"),
    "a list": text(b"[1, 2]"),
    "null": text(b"null"),
    "deep": text(b"[" * 100_000),
    "another value": text(b'{"step": "seven", "steps": "7", "job": 1}'),
}
NO_FILES = {"a folder", "a pipe", "a link to itself"}
READ_BY = {
    "block-000/checkpoint.pt": ("assemble", "run --set train.steps=9"),
    "block-000/report.json": ("run", "assemble", "economics", "report"),
    "block-000/checkpoint.json": ("run", "plan"),
    "relay/relay.json": ("relay", "assemble --relay"),
    "relay/block-001/report.json": ("relay", "assemble --relay"),
}
WORDS = {"run": ["--block", "0"], "report": ["--output", "page.html"]}


@pytest.mark.parametrize("strange", STRANGE)
@pytest.mark.parametrize("file", READ_BY)
def test_what_is_no_such_file_is_named_with_its_remedy_once(strange, file, place, zg, monkeypatch):
    monkeypatch.chdir(place)
    path = place / "out" / file
    path.unlink()
    STRANGE[strange](path)
    for command in READ_BY[file]:
        began = time.monotonic()
        name, *options = command.split()
        ran = zg(name, "job.toml", *options, *WORDS.get(name, []), "--json")
        assert time.monotonic() - began < 5
        assert ran.code == 20, command
        error = ran.json["error"]
        assert str(path) in error["message"]
        assert len(error["hint"]) > 10
        assert error["hint"].count("run the block again") <= 1
    shown = status(load_job(place / "job.toml"))
    if "relay" not in file and file.endswith(".json"):  # status loads no tensor
        assert path.name in shown[0].error
    assert shown[1].state == "done"
    assert shown[1].error is None


@pytest.mark.parametrize("strange", [name for name in STRANGE if name not in NO_FILES])
def test_a_log_is_read_as_far_as_it_is_one(strange, place):
    path = place / "out" / "block-000" / "log.jsonl"
    kept = path.read_bytes()
    STRANGE[strange](path)
    path.write_bytes(path.read_bytes() + b'\n{"step": 3, "loss": "low"}\n{"step": 3, "loss": null}\n' + kept)
    shown = status(load_job(place / "job.toml"))[0]
    assert (shown.state, shown.error) == ("done", None)
    assert shown.loss == json.loads(kept.splitlines()[-1])["loss"]


def test_one_damaged_report_stops_no_other_block(place):
    (place / "out" / "block-000" / "report.json").write_text('{"a')
    shutil.rmtree(place / "out" / "block-001")
    report = launch(load_job(place / "job.toml"))
    assert [each.state for each in report.blocks] == ["failed", "done"]
    assert report.error.exit_code == 20
    assert "report.json" in report.error.message
    assert read_report(load_job(place / "job.toml"), 1).steps == 7


def test_a_file_in_the_place_of_a_blocks_folder_stops_that_block_alone(place, zg, monkeypatch):
    monkeypatch.chdir(place)
    shutil.rmtree("out")
    (place / "out").mkdir()
    (place / "out" / "block-000").write_text("")
    shown = zg("status", "job.toml", "--json").json["blocks"]
    assert [each["state"] for each in shown] == ["to do", "to do"]
    assert "Not a directory" in shown[0]["error"]
    report = launch(load_job(place / "job.toml"))
    assert [each.state for each in report.blocks] == ["failed", "done"]
    assert report.error.exit_code == 2


@pytest.mark.parametrize("what", ["device", "factory"])
def test_what_fresh_cannot_begin_loses_nothing(what, place, zg, monkeypatch):
    monkeypatch.chdir(place)
    job = load_job(place / "job.toml")
    if what == "factory":
        module = next(place.glob("toy_student_*.py"))
        module.write_text(module.read_text() + "\n\ndef block(number, **_):\n    raise RuntimeError('no block')\n")
        (place / "out" / "private.json").unlink()
        (place / "out" / "relay" / "private.json").unlink()
    device = ("--device", "nope") if what == "device" else ()
    before = {path: path.read_bytes() for path in (place / "out").rglob("*") if path.is_file()}
    assert zg("run", "job.toml", "--block", "0", "--fresh", *device).code == 2
    assert zg("relay", "job.toml", "--fresh", *device).code == 2
    for path, content in before.items():
        assert path.read_bytes() == content, path
    assert read_report(job, 0).steps == 7


def test_a_block_whose_log_cannot_be_begun_stops_no_other(place):
    shutil.rmtree(place / "out")
    (place / "out" / "block-000").mkdir(parents=True)
    os.mkfifo(place / "out" / "block-000" / "stderr.log")
    report = launch(load_job(place / "job.toml"))
    assert [each.state for each in report.blocks] == ["failed", "done"]
    assert "stderr.log" in report.error.message


def test_folders_that_are_no_blocks_are_passed_over(place):
    (place / "out" / "block-old").mkdir()
    shutil.rmtree(place / "store")
    assert [each.state for each in status(load_job(place / "job.toml"))] == ["done", "done"]


def test_what_is_set_over_a_job_is_set_over_no_other_file(place, zg, monkeypatch):
    monkeypatch.chdir(place)
    shutil.copytree("out", "moved")
    for path in place.glob("moved/block-*/report.json"):
        report = json.loads(path.read_text())
        path.write_text(json.dumps({**report, "seconds": {**report["seconds"], "total": 1000.0}}))
    shutil.copy("job.toml", "other.toml")
    own = zg("economics", "other.toml", "--json").json["all"]["wall"]["runs"]
    both = zg("economics", "job.toml", "other.toml", "--set", "output=moved", "--json").json["all"]["wall"]["runs"]
    assert both == [1000.0, *own]
    assert own[0] < 1000
    twice = zg("economics", "job.toml", "out")
    assert twice.code == 2
    assert "named twice" in twice.error


def test_a_checkpoint_of_another_job_or_snapshot_is_no_progress_of_this_one(place, zg, monkeypatch):
    monkeypatch.chdir(place)
    for name in ("report.json", "log.jsonl"):
        (place / "out" / "block-000" / name).unlink()
    mine = zg("status", "job.toml", "--json").json["blocks"][0]
    assert (mine["state"], mine["step"], mine["error"]) == ("stopped", 7, None)
    other = ("--set", "train.optimizer.lr=0.5")
    theirs = zg("status", "job.toml", *other, "--json").json["blocks"][0]
    assert (theirs["state"], theirs["step"]) == ("to do", 0)
    assert "of another job (train.optimizer.lr was 0.01, and is 0.5)" in theirs["error"]
    run_ = zg("run", "job.toml", "--block", "0", *other)
    assert run_.code == 25
    assert "train.optimizer.lr was 0.01, and is 0.5: say it as it was, train into another output" in run_.error
    assert "--fresh" in theirs["error"]
    assert [each["step"] for each in zg("plan", "job.toml", *other, "--json").json["blocks"]] == [0, 0]
    (place / "cache.toml").write_text((place / "cache.toml").read_text().replace("rows = 10", "rows = 12"))
    zgstore.build(zgstore.Store.open(place / "store"), place / "cache.toml", ref="cache")
    moved = zg("status", "job.toml", "--json").json["blocks"]
    assert [each["state"] for each in moved] == ["to do", "to do"]
    assert all("of another snapshot" in each["error"] for each in moved)
    assert [each["step"] for each in zg("plan", "job.toml", "--json").json["blocks"]] == [0, 0]
