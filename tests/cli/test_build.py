"""build, estimate, points, show --decode: the commands that run a recipe."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from made import flip

from zgstore.cli import build as building
from zgstore.errors import Invalid
from zgstore.format.digest import Digest
from zgstore.storage.store import Store

CODE = """
import os
import time
import torch
from torch import nn

torch.set_num_threads(1)

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.inner(x))

class Teacher(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.norm = nn.LayerNorm(8)

    def forward(self, input_ids):
        if os.path.exists("slow"):
            time.sleep(0.2)
        h = self.embed(input_ids)
        for layer in self.layers:
            h = layer(h)
        return self.norm(h)

def teacher(seed=0):
    print("the teacher speaks")
    os.write(1, b"and so does its library\\n")
    torch.manual_seed(seed)
    return Teacher()

def skeleton(seed=0):
    return Teacher()

def broken(**_):
    raise ValueError("no weights\\nanywhere")

def missing(**_):
    return open("no/such/weights")

def leaving(**_):
    raise SystemExit(3)

class Batches:
    pins = {"length": 4}

    def __init__(self, rows, nan=False, pause=0.0):
        self.rows, self.nan, self.pause = rows, nan, pause

    def __iter__(self):
        for start in range(0, self.rows, 2):
            ids = torch.arange(start, start + 2).unsqueeze(1).expand(2, 4) % 50
            yield {"input_ids": ids.clone()}

    def decode(self, ids):
        return "row of " + ",".join(str(int(each)) for each in ids)

def batches(rows=16):
    return Batches(rows)
"""

RECIPE = """
[teacher]
factory = "toy:{teacher}"
{skeleton}
args = {{ {args} }}
id = "org/toy"
revision = "{revision}"
[data]
factory = "toy:batches"
args = {{ rows = {rows} }}
id = "org/data"
revision = "2222222222222222222222222222222222222222"
[capture]
boundaries = [{boundaries}]
context = ["input_ids"]
[storage]
batches_per_shard = 2
"""


def write_recipe(
    folder: Path,
    name: str = "toy",
    *,
    teacher: str = "teacher",
    rows: int = 16,
    args: str = "",
    revision: str = "1" * 40,
    skeleton: bool = True,
    boundaries: tuple[str, ...] = ("layers.0:in", "norm:in"),
) -> Path:
    (folder / "toy.py").write_text(CODE)
    path = folder / f"{name}.toml"
    text = RECIPE.format(
        teacher=teacher,
        rows=rows,
        args=args,
        revision=revision,
        boundaries=", ".join(f'"{each}"' for each in boundaries),
        skeleton='skeleton = "toy:skeleton"' if skeleton else "",
    )
    path.write_text(text)
    return path


@pytest.fixture
def made(tmp_path):
    """An empty store beside a recipe."""
    write_recipe(tmp_path)
    return Store.init(tmp_path / ".zgstore")


@pytest.fixture(autouse=True)
def fresh_modules(monkeypatch):
    """Two recipes with different modules of one name in one process are refused; each test is a process of its own."""
    from zgstore.building import sections  # noqa: PLC0415

    monkeypatch.setattr(sections, "_directories", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("toy", None)


def test_build_publishes_and_a_second_loads_no_teacher(made, zg):
    first = zg("build", "toy.toml", "--json")
    assert first.code == 0, first.err
    value = first.json
    assert {
        "snapshot",
        "recipe",
        "pins",
        "ref",
        "samples",
        "teacher",
        "teacher_loaded",
        "shards",
        "columns",
        "bytes",
        "seconds",
    } <= set(value)
    assert "the teacher speaks" in first.err
    assert "its library" in first.err
    assert value["ref"] == "toy"
    assert value["shards"] == {"built": 4, "reused": 0}
    assert set(value["seconds"]) == {"inputs", "teacher", "store", "total"}
    second = zg("build", "toy.toml", "--json").json
    assert second["snapshot"] == value["snapshot"] == str(made.resolve("toy"))
    assert second["teacher_loaded"] is False
    assert second["shards"] == {"built": 0, "reused": 4}
    assert "nothing was missing" in zg("build", "toy.toml").out


def test_a_dry_run_builds_nothing_and_explain_names_what_changed(made, zg, tmp_path):
    dry = zg("build", "toy.toml", "--dry-run", "--explain", "--json").json
    assert dry["dry_run"] is True
    assert dry["snapshot"] is None
    assert {line["hit"] for line in dry["explain"]} == {False}
    assert made.refs.list() == []
    assert "0 B new" not in zg("build", "toy.toml", "--dry-run").out
    zg("build", "toy.toml")
    write_recipe(tmp_path, boundaries=("layers.0:in", "layers.1:in", "norm:in"))
    page = zg("build", "toy.toml", "--dry-run", "--explain").out
    assert "new column" in page
    assert "0–3" in page


def test_a_dry_run_says_of_which_columns_it_does_not_know_the_size(made, zg, tmp_path):
    zg("build", "toy.toml")
    write_recipe(tmp_path, "wide", boundaries=("layers.0:in", "layers.1:in", "norm:in"))
    assert zg("build", "wide.toml", "--dry-run", "--json").json["unsized"] == ["layers.1:in"]
    assert ", and that of layers.1:in: `zgstore estimate` tells" in zg("build", "wide.toml", "--dry-run").out
    assert "unsized" not in zg("build", "toy.toml", "--dry-run", "--json").json


def test_a_limit_moves_no_ref_and_takes_exactly_that_many(made, zg):
    value = zg("build", "toy.toml", "--limit", "5", "--json").json
    assert value["samples"] == 5
    assert value["ref"] is None
    assert made.refs.list() == []
    assert zg("build", "toy.toml", "--limit", "5", "--ref", "few", "--json").json["ref"] == "few"
    assert zg("build", "toy.toml", "--no-ref", "--json").json["ref"] is None


def test_workers_share_and_a_plain_build_publishes(made, zg, monkeypatch):
    told = zg("build", "toy.toml", "--worker", "0/2", "--json").json
    assert told["snapshot"] is None
    assert "plain `zgstore build`" in zg("build", "toy.toml", "--worker", "1/2").out
    assert zg("build", "toy.toml", "--json").json["teacher_loaded"] is False


@pytest.mark.parametrize(
    ("environment", "share"),
    [
        ({"RANK": "3", "WORLD_SIZE": "8"}, (3, 8)),
        ({"SLURM_ARRAY_TASK_ID": "7", "SLURM_ARRAY_TASK_MIN": "5", "SLURM_ARRAY_TASK_COUNT": "4"}, (2, 4)),
        (
            {"SLURM_ARRAY_TASK_ID": "9", "SLURM_ARRAY_TASK_MIN": "1", "SLURM_ARRAY_TASK_COUNT": "3",
             "SLURM_ARRAY_TASK_STEP": "4"},
            (2, 3),
        ),
    ],
)  # fmt: skip
def test_worker_auto_asks_the_launcher(environment, share):
    assert building._share("auto", environment) == share


def test_worker_auto_without_a_launcher_is_a_mistake():
    for environment in ({}, {"RANK": "a", "WORLD_SIZE": "2"}, {"SLURM_ARRAY_TASK_ID": "1"}):
        with pytest.raises(Invalid, match=r"auto|variables"):
            building._share("auto", environment)


@pytest.mark.parametrize(
    "words",
    [
        ["none.toml"],
        ["toy.toml", "--worker", "2/2"],
        ["toy.toml", "--worker", "x"],
        ["toy.toml", "--limit", "0"],
        ["toy.toml", "--ref", "a", "--no-ref"],
        ["toy.toml", "--on-nonfinite", "ignore"],
        ["toy.toml", "--ref", "../up"],
    ],
    ids=" ".join,
)
def test_build_refuses_what_makes_no_sense(made, zg, words):
    ran = zg("build", *words, "--json")
    assert ran.code == 2
    assert ran.json["error"]["kind"] == "invalid"


def test_locked_without_a_lock_file_is_not_found(made, zg):
    ran = zg("build", "toy.toml", "--locked")
    assert ran.code == 10
    assert "or above" not in ran.err  # it is looked for beside the recipe


def test_locked_verifies_what_is_there_and_exits_by_1_if_another_comes_out(made, zg, tmp_path):
    zg("build", "toy.toml")
    zg("lock", "toy")
    told = zg("build", "toy.toml", "--locked", "--json").json
    assert told["locked"] == "present"
    assert told["problems"] == []
    blob = next(made.shards(made.snapshot(made.resolve("toy")))).blobs[0].digest
    flip(made, blob)
    assert zg("build", "toy.toml", "--locked").code == 20
    fresh = Store.init(tmp_path / "fresh")
    same = zg("build", "toy.toml", "--locked", "--json", "--store", str(fresh.path))
    assert (same.code, same.json["locked"]) == (0, "same")
    write_recipe(tmp_path, rows=8)
    other = Store.init(tmp_path / "another")
    differs = zg("build", "toy.toml", "--locked", "--json", "--store", str(other.path))
    assert differs.code == 1
    assert differs.json["ok"] is False
    assert "pins" in differs.json["locked"]
    assert other.refs.list() == []


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        ("broken", "toy:broken raised ValueError: no weights anywhere"),
        ("missing", "toy:missing raised FileNotFoundError"),
        ("leaving", "toy:leaving raised exit(3)"),
    ],
)
def test_a_factory_that_fails_is_named_in_one_line(made, zg, tmp_path, factory, said):
    write_recipe(tmp_path, "bad", teacher=factory, skeleton=False)
    ran = zg("build", "bad.toml")
    assert ran.code == 2
    assert said in ran.error
    told = zg("build", "bad.toml", "--json").json["error"]
    assert told["kind"] == "invalid"
    assert told["factory"] == f"toy:{factory}"


def test_a_keyword_that_a_factory_does_not_take_is_named_with_those_that_it_takes(made, zg, tmp_path):
    write_recipe(tmp_path, "bad", args="sead = 1", skeleton=False)
    told = zg("build", "bad.toml", "--json").json["error"]
    assert (told["kind"], told["factory"]) == ("invalid", "toy:teacher")
    assert "'sead'" in told["message"]
    assert told["hint"] == "it takes seed"


def test_show_tells_the_error_of_a_lossy_column(made, zg, tmp_path):
    zg("build", "toy.toml")
    assert "ERROR" not in zg("show", "toy").out
    path = tmp_path / "toy.toml"
    path.write_text(path.read_text() + '\n[storage.columns."layers.0:in"]\ncodec = "int8"\n')
    assert zg("build", "toy.toml").code == 0
    assert "ERROR" in zg("show", "toy").out


def test_another_teacher_under_the_same_pins_is_refused(made, zg, tmp_path):
    zg("build", "toy.toml")
    (tmp_path / "toy.py").write_text(CODE.replace("torch.manual_seed(seed)", "torch.manual_seed(seed + 1)"))
    sys.modules.pop("toy")
    ran = zg("build", "toy.toml", "--check-teacher", "--json")
    assert ran.code == 25
    assert ran.json["error"]["kind"] == "refused"


def test_estimate_is_an_upper_bound_and_a_build_says_why_it_stored_less(made, zg, tmp_path):
    write_recipe(tmp_path, boundaries=("embed:out", "layers.0:in", "norm:in"))  # the first two are the same bytes
    assert "size     at most " in zg("estimate", "toy.toml").out
    estimated = zg("estimate", "toy.toml", "--json").json
    stored = zg("build", "toy.toml", "--json").json["bytes"]["new"]
    assert stored < estimated["bytes"]["new"]  # by one of the two columns that are the same
    assert stored == estimated["bytes"]["new"] - estimated["columns"]["embed:out"]
    assert "equal bytes" not in zg("build", "toy.toml").out
    zg("init", "other")
    assert zg("build", "toy.toml", "--store", "other").out.count("; equal bytes are stored once") == 1


def test_estimate_and_points_ask_the_skeleton(made, zg, tmp_path):
    value = zg("estimate", "toy.toml", "--json").json
    assert value["samples"] == 16
    assert value["teacher_loaded"] is False
    assert value["bytes"]["new"] == value["bytes"]["total"] == sum(value["columns"].values())
    assert zg("build", "toy.toml", "--json").json["bytes"]["new"] == value["bytes"]["new"]
    assert "free" in zg("estimate", "toy.toml").out
    assert zg("estimate", "toy.toml", "--limit", "0").code == 2
    assert zg("estimate", "none.toml").code == 2
    names = [point["name"] for point in zg("points", "toy.toml", "--json").json["points"]]
    assert "layers.1.inner:out" in names
    page = zg("points", "toy.toml").out
    assert "2×4×8" in page
    assert "not loaded" in page
    write_recipe(tmp_path, "whole", skeleton=False)
    assert "loaded" in zg("points", "whole.toml").out
    assert zg("points", "none.toml", "--json").code == 2


def test_show_decodes_a_row(made, zg):
    zg("build", "toy.toml")
    value = zg("show", "toy", "--decode", "3", "--recipe", "toy.toml", "--json").json
    assert value["text"] == "row of 3,3,3,3"
    assert "row of 3,3,3,3" in zg("show", "toy", "--decode", "3", "--recipe", "toy.toml").out
    assert zg("show", "toy", "--decode", "16", "--recipe", "toy.toml").code == 2


def test_verify_repairs_from_the_recipe_and_recomputes(made, zg):
    zg("build", "toy.toml")
    blob = next(made.shards(made.snapshot(made.resolve("toy")))).blobs[0].digest
    flip(made, blob)
    ran = zg("verify", "toy", "--repair", "--recipe", "toy.toml")
    assert ran.code == 0, ran.err
    assert "from the recipe" in ran.out
    assert zg("verify").code == 0
    again = zg("verify", "toy", "--recompute", "2", "--recipe", "toy.toml", "--json").json
    assert again["recomputed"]["shards"] == 2
    assert zg("verify", "--recompute", "1", "--recipe", "toy.toml").code == 0


def start(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", "from zgstore.cli.main import run; run()", "build", "toy.toml", "--json"],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={name: text for name, text in os.environ.items() if name != "ZGSTORE_DIR"},
    )  # fmt: skip


@pytest.mark.parametrize("times", [1, 2])
def test_a_signal_stops_a_build_and_a_rerun_resumes_to_the_same_snapshot(made, zg, tmp_path, times):
    (tmp_path / "slow").touch()
    process = start(tmp_path)
    until = time.monotonic() + 60
    while not list((made.path / "actions").rglob("*.msgpack")) and time.monotonic() < until:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    if times == 2:
        time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert '"interrupted"' in out
    assert out.count("\n") == 1
    assert zg("verify").code == 0
    (tmp_path / "slow").unlink()
    whole = Store.init(tmp_path / "whole")
    assert (
        zg("build", "toy.toml", "--json").json["snapshot"]
        == (zg("build", "toy.toml", "--json", "--store", str(whole.path)).json["snapshot"])
    )
    assert Digest.parse(zg("show", "toy", "--json").json["snapshot"])
