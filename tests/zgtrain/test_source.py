"""Cached, following and live targets are the same bits, for real model classes, dtypes, codecs and paddings."""

from __future__ import annotations

import sys
import threading
from itertools import pairwise

import pytest
import torch
from students import built, make_job, written

import zgstore
from zgtrain.source import Trained, cached, following, live

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _own_import_path(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))


def same(a, b):
    assert a.source.dtype == b.source.dtype
    assert torch.equal(a.source, b.source)
    assert torch.equal(a.target, b.target)
    assert a.context.keys() == b.context.keys()
    for name, value in a.context.items():
        assert torch.equal(value, b.context[name]), name


INT8 = '[storage.columns."{}"]\ncodec = "int8"'


@pytest.mark.parametrize(
    ("kind", "ragged", "dtype", "storage"),
    [
        ("plain", False, "float32", ""),
        ("plain", True, "float32", 'dtype = "float16"'),
        ("llama", True, "float32", 'dtype = "bfloat16"'),
        ("llama", False, "bfloat16", INT8.format("model.layers.2:in")),
        ("qwen2", True, "bfloat16", ""),
        ("gpt2", True, "float32", 'dtype = "bfloat16"\n' + INT8.format("transformer.h.2:in")),
    ],
)
def test_live_targets_are_bitwise_the_stored_ones_at_every_boundary_in_any_order(
    tmp_path, kind, ragged, dtype, storage
):
    if kind != "plain":
        pytest.importorskip("transformers")
    job, store, snapshot = built(make_job(tmp_path, kind=kind, ragged=ragged, dtype=dtype, storage=storage))
    columns = [column.name for column in store.snapshot(store.resolve(snapshot)).boundaries()]
    context = ["input_ids", "attention_mask", "labels"]
    for source, target in pairwise(columns):
        with (
            cached(zgstore.read(store, snapshot, [source, target, *context]), source, target) as stored,
            live(store, snapshot, job.snapshot.recipe, source, target, context=context) as again,
        ):
            for rows in ([0, 1, 2, 3], [9, 2, 5], [7], [3, 3, 8, 0]):
                same(stored.batch(rows), again.batch(rows))
            assert again.bytes_read < stored.bytes_read
            assert sum(parameter.numel() for parameter in again.teacher.parameters()) > 0


def test_live_runs_the_teacher_only_as_deep_as_its_target(tmp_path):
    job, store, snapshot = built(make_job(tmp_path))
    with live(store, snapshot, job.snapshot.recipe, "layers.0:in", "layers.2:in") as data:
        data.batch([0])  # the first batch runs through
        met = []
        for layer in data.teacher.layers:
            layer.register_forward_hook(lambda module, _inputs, _output: met.append(module))
        data.batch([4, 9])
    assert [*data.teacher.layers[:2]] * 2 == met


def test_live_refuses_another_teacher_and_other_data(tmp_path):
    job, store, snapshot = built(make_job(tmp_path))
    text = job.snapshot.recipe.read_text()
    wider = _moved(tmp_path / "wider.toml", text.replace('dtype = "float32"', 'dtype = "float64"'))
    with pytest.raises(zgstore.Refused, match="teacher"):
        live(store, snapshot, wider, "layers.0:in", "layers.2:in")
    shifted = _moved(tmp_path / "data.toml", text.replace("batch_size = 4", "batch_size = 4, length = 5"))
    with pytest.raises(zgstore.Refused, match="data"):
        live(store, snapshot, shifted, "layers.0:in", "layers.2:in")


def _moved(path, text):
    path.write_text(text)
    return path


def test_live_follows_a_limit_and_dropped_rows(tmp_path):
    job, store, snapshot = built(make_job(tmp_path, ragged=True), limit=7)
    reader = zgstore.read(store, snapshot, ["layers.2:in", "norm:in"])
    with (
        cached(reader, "layers.2:in", "norm:in") as stored,
        live(store, snapshot, job.snapshot.recipe, "layers.2:in", "norm:in") as again,
    ):
        assert len(reader) == 7
        same(stored.batch([6, 4, 0]), again.batch([6, 4, 0]))


def test_labels_in_the_padding_are_no_tokens(tmp_path):
    store = written(tmp_path, ragged=True)
    with cached(zgstore.read(store, "main"), "h.0", "h.1") as data:
        batch = data.batch([0, 1, 4])
    mask = batch.context["mask"]
    assert not mask.all()
    assert (batch.context["labels"][~mask] == -100).all()
    assert (batch.context["labels"][mask] != -100).all()


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_batches_come_in_order_whatever_reads_ahead(tmp_path, workers):
    store = written(tmp_path)
    steps = [[[at % 10], [(3 * at) % 10, (at + 1) % 10]] for at in range(12)]
    with cached(zgstore.read(store, "main"), "h.0", "h.1") as data:
        for step, batches in zip(steps, data.ahead(steps, workers=workers), strict=True):
            for rows, batch in zip(step, batches, strict=True):
                same(batch, data.batch(rows))


def test_a_build_is_followed_to_the_same_batches(tmp_path):
    path = make_job(tmp_path, ragged=True)
    module = next(tmp_path.glob("toy_*.py"))
    lookup = "        x = self.embed(input_ids)"
    module.write_text(module.read_text().replace(lookup, "        import time; time.sleep(0.1)\n" + lookup))
    store = zgstore.Store.init(tmp_path / "store")
    builds, told = [], threading.Event()

    def progress(now):
        if now.build:
            builds.append(now.build)
            told.set()

    thread = threading.Thread(target=lambda: zgstore.build(store, path.with_name("cache.toml"), progress=progress))
    thread.start()
    assert told.wait(30)
    with following(store, builds[0], "layers.0:in", "layers.2:in", context=["labels"]) as data:
        trained = Trained(data.reader)
        early = data.snapshot
        grown = [data.batch(rows) for rows in zgstore.Sampler(trained, batch_size=3, order="sequential")]
        assert trained.done
        assert data.pins == str(store.snapshot(store.resolve("cache")).pins.digest())
        assert data.snapshot == str(store.resolve("cache"))
        assert early in {"", data.snapshot}
    thread.join()
    with cached(zgstore.read(store, "cache", ["layers.0:in", "layers.2:in", "labels"]), "layers.0:in",
                "layers.2:in") as stored:  # fmt: skip
        for at, batch in enumerate(grown):
            same(batch, stored.batch(range(3 * at, min(10, 3 * at + 3))))


def test_held_out_rows_are_the_first_and_must_leave_some(tmp_path):
    reader = zgstore.read(written(tmp_path), "main")
    trained = Trained(reader, held_out=4)
    assert len(trained) == 6
    assert torch.equal(trained.lengths(), reader.lengths()[4:])
    with pytest.raises(zgstore.Invalid, match="leave none"):
        Trained(reader, held_out=10)


def test_a_reader_without_a_boundary_is_refused(tmp_path):
    reader = zgstore.read(written(tmp_path), "main")
    with pytest.raises(zgstore.Invalid, match="h\\.7"):
        cached(reader, "h.0", "h.7")
    with pytest.raises(zgstore.Invalid, match="no source or no target was named") as caught:
        cached(reader, "", "")
    assert "source and target: h.0, " in caught.value.hint
