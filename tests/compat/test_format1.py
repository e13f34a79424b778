"""A store that an early version wrote, as this version reads it."""

from __future__ import annotations

import json
import subprocess
import tarfile

import make_store as made
import pytest
import torch

from zgstore.format import tensorfile
from zgstore.format.digest import digest_of
from zgstore.storage.memos import platform_tag
from zgstore.storage.store import Store
from zgstore.upkeep.collector import collect
from zgstore.upkeep.differ import diff
from zgstore.upkeep.verifier import verify

RECORDED = json.loads(made.RECORDED.read_text())


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compat")
    with tarfile.open(made.ARCHIVE) as tar:
        tar.extractall(folder, filter="tar")
    return Store.open(folder / "store")


def test_the_archive_is_small():
    assert made.ARCHIVE.stat().st_size < 200_000


def test_nothing_is_wrong_with_it(store):
    found = verify(store)
    assert list(found) == []
    assert found.report.objects >= len(RECORDED["objects"])


def test_names_mean_what_they_meant(store):
    kinds = {"heads": "head", "tags": "tag"}
    for part, kind in kinds.items():
        found = {each.name: str(each.snapshot) for each in store.refs.list() if each.kind == kind}
        assert found == RECORDED[part]
    assert {each.name: str(each.snapshot) for each in store.refs.holds()} == RECORDED["holds"]
    assert str(store.resolve("main@{1}")) == RECORDED["tags"]["v1"]
    assert store.record_of(store.resolve("main")).fields["message"] == "3 shards"


@pytest.mark.parametrize(("rev", "shards", "teacher"), [("main", 3, 0), ("v1", 2, 0), ("quantised", 2, 1)])
def test_every_value_is_what_was_written(store, rev, shards, teacher):
    snapshot = store.snapshot(store.resolve(rev))
    listed = list(store.shards(snapshot))
    assert len(listed) == shards
    for at, shard in enumerate(listed):
        wanted, lengths = made.tensors(at, teacher=teacher)
        for column, blob in zip(snapshot.columns, shard.blobs, strict=True):
            body = store.objects.path(blob.digest, "objects").read_bytes()
            data, offsets = tensorfile.decode(body, column)
            value = wanted[column.name]
            if column.ragged:
                assert offsets.diff().tolist() == lengths.tolist()
            if column.codec == "int8":
                assert (data - value).abs().max() < 0.005
            else:
                assert data.dtype == value.dtype
                assert torch.equal(data.nan_to_num(), value.nan_to_num())


def test_what_is_left_out_is_listed(store):
    snapshot = store.snapshot(store.resolve("main"))
    dropped = store.dropped(snapshot)
    assert (dropped.masked, dropped.masked_reasons) == ((3,), ("pooled is not finite",))
    assert (dropped.left_out, dropped.left_out_reasons) == ((6,), (made.TOO_SHORT,))
    assert snapshot.samples == 5


def test_memos_are_found(store):
    action = store.memos.action(digest_of("action", b"main 3"), platform_tag(made.PLATFORM))
    assert action is not None
    assert action.statistics["rms"] == 0.5
    assert store.memos.measurement(digest_of("measurement", b"org/data"))["count"] == 7


def test_snapshots_are_compared(store):
    found = diff(store, "v1", "main", values=True)
    assert (found.shards.same, found.shards.added) == (2, 1)
    assert diff(store, "v1", "quantised").shards.changed == 2


def test_nothing_of_it_is_garbage(store):
    # Its reflog is older than what is kept of one by default.
    report = collect(store, dry_run=True, now=True, expire_reflog_seconds=1e11).as_json()
    assert report["trashed"]["objects"] == 0


def test_this_version_writes_the_same_objects(tmp_path):
    again = made.write(tmp_path / "store")
    for part in ("heads", "tags", "holds", "objects", "meta"):
        assert again[part] == RECORDED[part], part


def test_the_frozen_store_is_not_written_again():
    found = subprocess.run(
        [made.sys.executable, made.__file__], capture_output=True, text=True, check=False, timeout=60
    )
    assert found.returncode != 0
    assert "frozen" in found.stderr
