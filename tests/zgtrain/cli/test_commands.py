"""Every command: its JSON, its page, its errors in two lines, its exit code."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest
from students import CODE, built, make_job

from zgtrain import status
from zgtrain.cli.catalogue import COMMANDS
from zgtrain.jobfile import load_job
from zgtrain.locks import held

NAMED = {"plan", "run", "launch", "relay", "status", "assemble", "evaluate", "economics", "report"}
REFERENCE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "zgtrain.md"


def test_every_command_is_there_has_help_and_is_in_the_reference(zg):
    assert {entry.name for entry in COMMANDS} == NAMED
    text = REFERENCE.read_text(encoding="utf-8")
    for name in NAMED:
        ran = zg(name, "--help")
        assert ran.code == 0
        for option in set(re.findall(r"--[a-z][a-z-]+", ran.out)) - {"--help"}:
            assert option in text, f"{name} {option}"
        assert f"## {name}" in text


def test_a_plan_counts_the_cores_that_would_be_asked(zg, tmp_path):
    cored = """
from zgtrain.gradient.cores import PhysicalCore

def block(number, **_):
    return nn.Sequential(Block(), *(PhysicalCore(torch.tanh) for _ in range(1 + number)))
"""
    job = make_job(tmp_path, code=CODE + cored, train='gradient = "zeroth-order"')
    built(job)
    assert re.findall(r"\d cores?\b", zg("plan", job).out) == ["1 core", "2 cores"]


def test_a_job_from_plan_to_report(zg, trained, tmp_path):
    plan = zg("plan", trained, "--json").json
    assert plan["ok"]
    assert [each["done"] for each in plan["blocks"]] == [False] * 4
    assert "0 of 12" in zg("plan", trained).out
    assert "the whole block" not in zg("plan", trained).out
    assert zg("plan", trained, "--set", "train.gradient.name=zeroth-order").out.count("the whole block") == 4
    assert zg("status", trained, "--json").json["blocks"][2]["state"] == "to do"
    for block in range(4):
        ran = zg("run", trained, "--block", block, "--json")
        assert ran.json["block"] == block
        assert ran.json["steps"] == 12
        assert ran.code == 0
    page = zg("run", trained, "--block", "3")
    assert "block 3: 12 steps on cached targets" in page.out
    assert page.err == ""
    assert "0 B of it left the block" in page.out
    assert zg("launch", trained).out.count("done before") == 4
    shown = zg("status", trained)
    assert shown.out.count("done") == 4
    assert shown.out.splitlines()[1].split()[:5] == ["0", "done", "12", "of", "12"]
    made = zg("assemble", trained, "--output", tmp_path / "student", "--json").json
    assert (tmp_path / "student" / "zgtrain.json").exists()
    assert [each["steps"] for each in made["blocks"]] == [12] * 4
    assert "fits together" in zg("assemble", trained).out
    relayed = zg("relay", trained, "--steps", "3", "--json").json
    assert [each["targets"] for each in relayed["blocks"]] == ["cached", *["relay"] * 3]
    assert zg("assemble", trained, "--relay", "--json").json["relay"] is True
    assert "the student's" in zg("relay", trained, "--steps", "3").out
    assert zg("economics", trained, "--json").json["all"]["wall"]["cache"] > 0
    assert "T(K): what one of K trainings costs" in zg("economics", trained).out
    assert zg("report", trained, "--output", tmp_path / "report.html", "--json").json["bytes"] > 1000
    left = {path.name for path in load_job(trained).output.rglob("*") if path.is_file()}
    assert {"checkpoint.pt", "private.json", "relay.json"} <= left
    assert [name for name in left if f"{name}`" not in REFERENCE.read_text(encoding="utf-8")] == []


def test_what_is_set_stands_over_the_file_wherever_it_is_typed(zg, trained):
    before = zg("--set", "train.steps=24", "plan", trained, "--json").json
    behind = zg("plan", trained, "--json", "--set=train.steps=24").json
    assert before["blocks"][0]["steps"] == behind["blocks"][0]["steps"] == 24
    ran = zg("plan", trained, "--set", "train.stpes=24")
    assert ran.code == 2
    assert "did you mean 'steps'?" in ran.error


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["run", "JOB", "--block", "9"], 2, "no block 9"),
        (["run", "JOB"], 2, "--block"),
        (["run", "nowhere.toml", "--block", "0"], 2, "there is no job"),
        (["plan", "JOB", "--set", "snapshot.rev=other"], 10, "other"),
        (["launch", "JOB", "--follow", "cache.toml"], 2, "shuffled"),
        (["evaluate", "JOB"], 2, "no gate may be left out"),
        (["assemble", "JOB", "--set", "train.seed=9", "--set", "output=none"], 10, "not trained"),
        (["launch", "JOB", "--source", "lve"], 2, "cached or live"),
        (["lanch", "JOB"], 2, "launch"),
        (["plan", "JOB", "--set", "steps=9"], 2, "did you mean 'train.steps'?"),
        (["plan", "RECIPE"], 2, "is a recipe, not a job"),
        (["run", "JOB", "--block", "0", "--fresh", "--device", "cuda:4096"], 2, "cuda:4096"),
        (["run", "JOB", "--block", "0", "--fresh", "--device", "nope"], 2, "no device here"),
        (["launch", "JOB", "--parallel", "-1"], 2, "--parallel"),
        (["relay", "JOB", "--steps", "0"], 2, "--steps"),
    ],
)
def test_errors_are_two_lines_and_one_object(zg, trained, words, code, said):
    files = {"JOB": str(trained), "RECIPE": str(trained.with_name("cache.toml"))}
    words = [files.get(word, word) for word in words]
    ran = zg(*words)
    assert ran.code == code
    assert said in ran.error
    assert ran.out == ""
    ran = zg(*words, "--json")
    assert ran.json["ok"] is False
    assert said in ran.json["error"]["message"] + ran.json["error"]["hint"]
    assert ran.code == code


def test_a_signal_saves_and_a_second_run_ends_as_one_that_was_not_stopped(zg, tmp_path):
    path = make_job(tmp_path, rows=16, train="steps = 3000\ncheckpoint_every = 1000")
    job, _, _ = built(path)

    def end():
        while not status(job)[1].step:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=end)
    thread.start()
    ran = zg("run", path, "--block", "1", "--json")
    thread.join()
    assert ran.code == 130
    assert ran.json["error"]["kind"] == "interrupted"
    assert ran.err == "saving; Ctrl-C again ends at once\n"
    at = status(job)[1]
    assert at.state == "stopped"
    assert 0 < at.checkpoint_step == at.step < 3000
    steps = f"train.steps={at.step + 5}"
    resumed = zg("run", path, "--block", "1", "--json", "--set", steps).json
    assert resumed["resumed_from"] == at.step
    whole = zg("run", path, "--block", "1", "--json", "--set", steps, "--set", "output=whole").json
    assert resumed["state_digest"] == whole["state_digest"]


def test_status_of_a_running_block_names_rate_and_time_left(zg, tmp_path):
    path = make_job(tmp_path, rows=16, train="steps = 100")
    job, _, _ = built(path)
    folder = job.folder(0)
    folder.mkdir(parents=True)
    lines = [{"step": n, "loss": 1 / n, "seconds": float(n // 5)} for n in range(1, 51)]
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 51, "lo')
    (folder / "checkpoint.json").write_text(json.dumps({"step": 40, "snapshot": "", "job": job.identity()}))
    with held(folder / ".lock", "it"):
        first = zg("status", path, "--json").json["blocks"][0]
    assert (first["state"], first["step"], first["checkpoint_step"]) == ("running", 50, 40)
    assert first["rate"] == pytest.approx(4.6)
    assert first["eta_seconds"] == pytest.approx(50 / first["rate"])
    assert first["holder"] == f"pid {os.getpid()} on {os.uname().nodename}"
    assert status(load_job(path))[0].state == "stopped"
