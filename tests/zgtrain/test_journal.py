"""What a training says of itself, in the libraries that were asked for, where they are installed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from students import built, make_job

import zgstore
from zgtrain.blocks import run
from zgtrain.jobfile import load_job
from zgtrain.journal import read_lines

torch.set_num_threads(1)
NUMBERS = ("loss", "boundary_loss", "residual_error", "grad_norm", "lr", "tokens", "validation_loss")


@pytest.fixture(autouse=True)
def _own_import_path(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.parametrize(("library", "asked"), [("tensorboard", "log.tensorboard=true"), ("wandb", "log.wandb={}")])
def test_a_library_that_was_asked_for_and_is_not_there_is_named(tmp_path, library, asked):
    if importlib.util.find_spec(library):
        pytest.skip(f"{library} is installed")
    path = make_job(tmp_path)
    built(path)
    with pytest.raises(zgstore.Invalid, match=library) as caught:
        run(load_job(path, [asked]), block=0)
    assert caught.value.hint == f"pip install {library}"


def interrupted_job(folder, asked):
    """A job whose first run falls over after step 5, two steps behind its checkpoint; the folder of its block."""
    path = make_job(folder, train="steps = 9\ncheckpoint_every = 3", more="[validate]\nevery = 3\nrows = 2")
    built(path)
    job = load_job(path, [asked])

    def fall(line):
        if line["step"] == 5:
            raise RuntimeError("pulled the plug")

    with pytest.raises(RuntimeError, match="plug"):
        run(job, block=0, progress=fall)
    assert run(job, block=0).resumed_from == 3
    return job.folder(0)


def logged(folder):
    """Each number of the log: its steps and values."""
    lines = read_lines(folder / "log.jsonl")
    return {name: [(line["step"], line[name]) for line in lines if name in line] for name in NUMBERS}


def test_tensorboard_shows_each_number_of_each_step_once(tmp_path):
    events = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator",
        reason="tensorboard is not installed (pip install tensorboard)",
    )
    folder = interrupted_job(tmp_path, "log.tensorboard=true")
    shown = events.EventAccumulator(str(folder / "tensorboard")).Reload()
    for name, values in logged(folder).items():
        found = [(each.step, each.value) for each in shown.Scalars(name)]
        assert [step for step, _ in found] == [step for step, _ in values]
        assert [value for _, value in found] == pytest.approx([value for _, value in values])
    assert [step for step, _ in logged(folder)["validation_loss"]] == [3, 6, 9]


def test_wandb_is_told_each_number_of_each_step_and_writes_beside_the_block(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="wandb is not installed (pip install wandb)")
    path = make_job(tmp_path / "job", train="steps = 9", more="[validate]\nevery = 3\nrows = 2")
    built(path)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    job = load_job(path, ['log.wandb={mode="offline",project="toy"}'])
    told, runs = {}, set()

    def look(_line):  # its summary has the last step that is over
        runs.add((wandb.run.name, wandb.run.project, Path(wandb.run.dir).is_relative_to(job.folder(1))))
        summary = dict(wandb.run.summary)
        told[summary.get("_step")] = summary

    run(job, block=1, progress=look)
    assert runs == {("block 1", "toy", True)}
    assert wandb.run is None  # it was ended
    assert not [*(tmp_path / "elsewhere").iterdir()]
    for name, values in logged(job.folder(1)).items():
        before = dict(values[:-1])  # the last step ends with the run
        assert {step: told[step][name] for step in before} == pytest.approx(before)
