"""The same of what reads or makes tensors: imports, repairs, builds, trainings."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.faults.operations import Operation, source_and_target
from tests.upkeep import bare_stores as bare
from zgstore.building.builder import build
from zgstore.storage.store import Store
from zgstore.upkeep.copier import copy
from zgstore.upkeep.importer import import_safetensors
from zgstore.upkeep.repairer import repair
from zgstore.upkeep.verifier import verify
from zgtrain import blocks, checkpoint, progress, sharded
from zgtrain.blockreport import read_report
from zgtrain.jobfile import load_job
from zgtrain.journal import read_lines
from zgtrain.ranks import Ranks

sys.path[:0] = [str(Path(__file__).parents[1] / name) for name in ("building", "zgtrain")]

from projects import make_project, write_rows  # noqa: E402
from students import built, make_job  # noqa: E402

torch.set_num_threads(1)  # a process that is forked has one thread
torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]).step()  # what torch loads late, once for all forks


# ---- from elsewhere ----


def _import(place: Path) -> str:
    return str(import_safetensors(Store.open(place / "store"), place / "plain", ref="main").snapshot)


def _plain_files(place: Path) -> None:
    bare.publish(Store.init(place / "store"), "main", [1])
    (place / "plain").mkdir()
    for at in range(2):
        states = torch.arange(6.0).reshape(3, 2) + at
        save_file({"h.0": states, "h.1": states * 2}, place / "plain" / f"{at}.safetensors")


def _damage(store: Store, rev: str) -> None:
    """A blob flipped, one gone, one in the trash; a page torn that hides nothing else, a record gone."""
    snapshot = store.snapshot(store.resolve(rev))
    flipped, gone, trashed = [shard.blobs[0].digest for shard in store.shards(snapshot)][:3]
    path = store.objects.path(flipped, "objects")
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-1] + b"\7")
    store.objects.path(gone, "objects").unlink()
    with store.leases.store_lock(exclusive=True):
        store.objects.all_to_trash("1", [("objects", trashed)])
    rows = store.objects.path(store.rows_root_of(snapshot), "meta")
    rows.chmod(0o644)
    rows.write_bytes(rows.read_bytes()[:-1])
    store.objects.path(store.refs.log(rev)[0].record, "meta").unlink()


def _damaged_copy(place: Path) -> None:
    source_and_target(place)
    target = Store.open(place / "target")
    copy(Store.open(place / "source"), "main", to=target)
    _damage(target, "main")


def _mended(store: Store, **source) -> str:
    problems = list(verify(store))
    if problems:
        repair(store, problems, **source)
    assert list(verify(store)) == []
    return str(store.resolve("main"))


def _repair_from_store(place: Path) -> str:
    return _mended(Store.open(place / "target"), source=Store.open(place / "source"))


# ---- a teacher ----


def _recipe(place: Path, *, rows: int) -> None:
    capture = 'lengths = "attention_mask"\nsequence = ["input_ids", "labels"]'
    make_project(place / "project", rows=rows, name="main", boundaries=("layers.0:in", "norm:in"), capture=capture)
    write_rows(place / "project", rows, ragged=True, ids=True)


def _fresh(place: Path) -> None:
    Store.init(place / "store")
    _recipe(place, rows=8)


def _begun(place: Path) -> None:
    """A build of the first rows, and then there are more."""
    Store.init(place / "store")
    _recipe(place, rows=6)
    _build(place)
    write_rows(place / "project", 12, ragged=True, ids=True)


def _build(place: Path) -> str:
    return str(build(Store.open(place / "store"), place / "project" / "main.toml").snapshot)


def _damaged_build(place: Path) -> None:
    _begun(place)
    _build(place)
    _damage(Store.open(place / "store"), "main")


def _repair_from_recipe(place: Path) -> str:
    return _mended(Store.open(place / "store"), recipe=place / "project" / "main.toml")


# ---- a training ----


def _state(step: int) -> dict[str, object]:
    return {"step": step, "tensors": {"weight": torch.full((64, 64), float(step)), "bias": torch.zeros(3)}}


def _first_checkpoint(place: Path) -> None:
    checkpoint.save(place / "out" / "checkpoint.pt", _state(1))


def _next_checkpoint(place: Path) -> str:
    checkpoint.save(place / "out" / "checkpoint.pt", _state(2))
    return "saved"


def _check_checkpoint(place: Path) -> None:
    found = checkpoint.load(place / "out" / "checkpoint.pt")
    assert found is not None
    wanted = _state(found["step"])
    assert all(torch.equal(found["tensors"][name], each) for name, each in wanted["tensors"].items())


def _save_sharded(place: Path, step: int) -> str:
    """A sharded block's state, and how many of them are left."""
    block = torch.nn.Linear(3, 3)
    for tensor in block.parameters():
        torch.nn.init.constant_(tensor, float(step))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is what is meant
        optimizer = torch.optim.AdamW(block.parameters())
        sharded.save_sharded(place / "out", {"step": step}, block, optimizer, initial={}, ranks=Ranks())
    return f"{len([*(place / 'out').iterdir()])} left"


def _check_sharded(place: Path) -> None:
    found = checkpoint.load(sharded.newest(place / "out") / "rank-0.pt")
    state = sharded.gathered_state(place / "out")
    assert {float(each) for tensor in state.values() for each in tensor.flatten()} == {float(found["step"])}


def _job(place: Path) -> None:
    built(make_job(place, rows=8, train="checkpoint_every = 2\nsteps = 4"))


def _train(place: Path) -> str:
    job = load_job(place / "job.toml")
    report = blocks.run(job, block=1)
    logged = [line["step"] for line in read_lines(job.folder(1) / "log.jsonl")]
    return f"{report.state_digest} {report.last_window_mean_loss} {report.steps} {logged}"


def _check_training(place: Path) -> None:
    job = load_job(place / "job.toml")
    progress.status(job)
    checkpoint.load(job.folder(1) / blocks.CHECKPOINT)
    read_report(job, 1)


OPERATIONS = {
    "import": Operation(_plain_files, _import),
    "repair from a store": Operation(_damaged_copy, _repair_from_store, courtesies=("leases",)),
    "repair from a recipe": Operation(_damaged_build, _repair_from_recipe, courtesies=("leases",)),
    "build": Operation(_fresh, _build),
    "build of more rows": Operation(_begun, _build),
    "checkpoint": Operation(_first_checkpoint, _next_checkpoint, _check_checkpoint, program="zgtrain"),
    "sharded checkpoint": Operation(
        lambda place: _save_sharded(place, 1), lambda place: _save_sharded(place, 2), _check_sharded, program="zgtrain"
    ),
    "training": Operation(_job, _train, _check_training, program="zgtrain"),
}
