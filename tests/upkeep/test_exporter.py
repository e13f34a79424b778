"""Plain files that need no zgstore."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest
import small_stores as small
import torch
from safetensors.torch import load_file

from zgstore.errors import Corrupt, Invalid, NoSpace, Partial
from zgstore.format.digest import digest_of
from zgstore.format.manifest import Column
from zgstore.format.pages import Dropped
from zgstore.storage.store import Store
from zgstore.upkeep.copier import copy
from zgstore.upkeep.exporter import export

H0 = small.boundary("model.layers.0:in", 0)
H1 = small.boundary("model.layers.1:in", 1, codec="int8")
RAGGED = small.boundary("words", 2, shape=(None, 4))
IDS = Column("input_ids", "context", "I64", "raw", (4,))
DROPPED = Dropped(masked=(2,), masked_reasons=("not finite",))


@pytest.fixture
def store(tmp_path):
    return Store.init(tmp_path / "store")


@pytest.fixture
def columns():
    return {
        H0: [small.values(at, 2) for at in range(2)],
        H1: [small.values(10 + at, 2) for at in range(2)],
        RAGGED: [(small.values(20 + at, 5, width=4), torch.tensor([2, 3])) for at in range(2)],
        IDS: [torch.arange(8).view(2, 4) + at for at in range(2)],
    }


@pytest.fixture
def main(store, columns):
    return small.publish(store, columns, ref="main", dropped=DROPPED, constants={"rope": torch.ones(3)})


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def test_files_are_read_by_safetensors_with_the_manifest_alone(store, main, columns, out):
    report = export(store, "main", out)
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["snapshot"] == str(main)
    assert (manifest["samples"], manifest["rows"]) == (3, 4)
    assert manifest["masked"] == [{"row": 2, "reason": "not finite"}]
    assert manifest["teacher"]["measured"].startswith("blake3:")
    assert [column["name"] for column in manifest["columns"]] == list(report.columns)
    by_name = {column["name"]: column for column in manifest["columns"]}
    for column, parts in columns.items():
        for part, file in zip(parts, by_name[column.name]["files"], strict=True):
            tensors = load_file(out / file["file"])
            assert sorted(tensors) == sorted(by_name[column.name]["tensors"])
            if column is not H1:
                assert torch.equal(tensors["data"], part[0] if isinstance(part, tuple) else part)
            assert file["rows"] == 2
    assert by_name["words"]["ragged"]
    (constant,) = manifest["constants"]
    assert torch.equal(load_file(out / constant["file"])["data"], torch.ones(3))


def test_blobs_are_copied_bit_for_bit_under_readable_names(store, main, out):
    export(store, "main", out)
    (shard, _) = store.shards(store.snapshot(main))
    exported = out / "model.layers.0_in" / "000000.safetensors"
    assert exported.read_bytes() == store.objects.path(shard.blobs[0].digest, "objects").read_bytes()


def test_int8_stays_as_it_is_with_a_note_or_is_decoded(store, main, columns, out, tmp_path):
    export(store, "main", out, columns=["model.layers.1:in"])
    (column,) = json.loads((out / "manifest.json").read_text())["columns"]
    assert "scale" in column["note"]
    tensors = load_file(out / column["files"][0]["file"])
    by_hand = (tensors["data"].float() * tensors["scale"].float()).to(torch.bfloat16)
    export(store, "main", tmp_path / "decoded", columns=["model.layers.1:in"], decode=True)
    (decoded,) = json.loads((tmp_path / "decoded" / "manifest.json").read_text())["columns"]
    assert (decoded["codec"], decoded["tensors"]) == ("raw", ["data"])
    data = load_file(tmp_path / "decoded" / decoded["files"][0]["file"])["data"]
    assert torch.equal(data, by_hand)
    assert (data - columns[H1][0]).abs().max() < 0.1


def test_every_file_has_its_sum(store, main, out):
    report = export(store, "main", out)
    lines = [re.fullmatch(r"([0-9a-f]{64})  (.+)", line) for line in (out / "B3SUMS").read_text().splitlines()]
    files = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    assert {line[2] for line in lines} == files - {"B3SUMS"}
    assert report.files == len(files)
    assert report.bytes == sum((out / name).stat().st_size for name in files)
    for line in lines:
        assert digest_of(None, (out / line[2]).read_bytes()).hex == line[1]


def test_only_the_chosen_columns_are_written(store, main, out):
    assert export(store, "main", out, columns=["input_ids"]).columns == ("input_ids",)
    assert sorted(path.name for path in out.iterdir()) == ["B3SUMS", "constants", "input_ids", "manifest.json"]


@pytest.mark.parametrize(
    "name", ["../../escape", "/etc/passwd", "..", "", "a b/c\n", "constants", "manifest.json", "CON", "x" * 300]
)
def test_a_name_cannot_lead_out_of_the_folder(store, out, tmp_path, name):
    small.publish(store, {small.boundary(name, 0): [small.values(0, 2)]}, ref="odd")
    before = sorted(tmp_path.iterdir())
    export(store, "odd", out)
    (column,) = json.loads((out / "manifest.json").read_text())["columns"]
    assert column["name"] == name
    assert (out / column["files"][0]["file"]).resolve().is_relative_to(out.resolve())
    assert sorted(tmp_path.iterdir()) == sorted([*before, out])


def test_names_that_would_fall_together_are_told_apart(store, out):
    names = ["h:0", "h 0", "H_0", "h_0"]
    columns = {small.boundary(name, at): [small.values(at, 2)] for at, name in enumerate(names)}
    small.publish(store, columns, ref="odd")
    export(store, "odd", out)
    folders = [column["folder"] for column in json.loads((out / "manifest.json").read_text())["columns"]]
    assert len({folder.lower() for folder in folders}) == 4


def test_a_folder_that_holds_something_is_refused(store, main, out):
    out.mkdir()
    export(store, "main", out)
    with pytest.raises(Invalid):
        export(store, "main", out)
    file = out / "manifest.json"
    with pytest.raises(Invalid):
        export(store, "main", file)


def test_a_corrupt_blob_is_named_and_leaves_no_manifest(store, main, out):
    (shard, _) = store.shards(store.snapshot(main))
    path = store.objects.path(shard.blobs[0].digest, "objects")
    path.chmod(0o644)
    body = bytearray(path.read_bytes())
    body[-1] ^= 1
    path.write_bytes(body)
    with pytest.raises(Corrupt) as caught:
        export(store, "main", out)
    assert caught.value.object == str(shard.blobs[0].digest)
    assert not (out / "manifest.json").exists()
    assert not (out / "model.layers.0_in" / "000000.safetensors").exists()


def test_a_part_is_exported_as_far_as_it_is_here(store, main, out, tmp_path):
    part = Store.init(tmp_path / "part")
    copy(store, "main", to=part, columns=["input_ids"])
    assert export(part, "main", out).columns == ("input_ids",)
    with pytest.raises(Partial):
        export(part, "main", tmp_path / "more", columns=["words"])


def test_too_little_space_is_said_before_anything_is_written(store, main, out, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _path: SimpleNamespace(free=10))
    with pytest.raises(NoSpace):
        export(store, "main", out)
    assert list(out.iterdir()) == []
