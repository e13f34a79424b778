from dataclasses import replace

import pytest
import torch

import zgstore
from zgstore.building.rows import SampleBatch, join, row_digests
from zgstore.building.writer import writer
from zgstore.errors import Conflict, Invalid, NonFinite, Refused
from zgstore.format.digest import digest_of
from zgstore.format.manifest import Pins
from zgstore.format.tensorfile import decode
from zgstore.storage.store import Store
from zgstore.upkeep.verifier import verify

PINS = Pins(
    teacher={"id": "server/model", "revision": "r1"}, data={"id": "logs", "revision": "d1"}, capture={"by": "server"}
)


def inputs(at):
    return {"input_ids": torch.full((3, 4), at) + torch.arange(3).unsqueeze(1) * 100}


def states(at, rows=slice(None)):
    torch.manual_seed(at)
    x = torch.randn(3, 4, 8)
    return SampleBatch(
        columns={"h.0": x[rows].to(torch.bfloat16), "h.1": (2 * x)[rows].to(torch.bfloat16)},
        context={"attention_mask": torch.ones(3, 4, dtype=torch.int64)[rows]},
    )


def bring(store, count, *, stop_after=None, ref="main", brought=None):
    with writer(store, PINS, cut=2) as w:
        for at in range(count):
            todo = w.missing(row_digests(inputs(at)))
            if todo:
                w.add(states(at, torch.tensor(todo)))
                if brought is not None:
                    brought.append(at)
            if stop_after == at:
                raise KeyboardInterrupt
        return w.commit(ref=ref)


def test_what_is_brought_comes_back_bit_for_bit(store):
    digest = bring(store, 5)
    snapshot = store.snapshot(digest)
    assert [column.name for column in snapshot.columns] == ["h.0", "h.1", "attention_mask", "id"]
    assert (snapshot.samples, snapshot.cut) == (15, 2)
    assert [shard.rows for shard in store.shards(snapshot)] == [6, 6, 3]
    first = next(store.shards(snapshot))
    content = store.objects.path(first.blobs[1].digest, "objects").read_bytes()
    data = decode(content, snapshot.columns[1]).data
    assert torch.equal(data, torch.cat([states(0).columns["h.1"], states(1).columns["h.1"]]))


def test_an_unfinished_writer_is_resumed_at_its_rows_with_the_same_digest(store, tmp_path):
    whole = bring(Store.init(tmp_path / "other"), 7)
    with pytest.raises(KeyboardInterrupt):
        bring(store, 7, stop_after=4)
    brought = []
    assert bring(store, 7, brought=brought) == whole
    assert brought == [4, 5, 6]


def test_a_finished_stream_is_extended(store, tmp_path):
    bring(store, 5)
    brought = []
    longer = bring(store, 7, brought=brought)
    assert brought == [4, 5, 6]
    assert longer == bring(Store.init(tmp_path / "other"), 7)


def bring_tokens(store, stream, *, stop_after=None):
    """A stream of batches given by the tokens of their rows; what each was asked for."""
    asked = []
    with writer(store, PINS, cut=1) as w:
        for at, tokens in enumerate(stream):
            rows = torch.tensor([[token] for token in tokens])
            todo = w.missing(row_digests({"input_ids": rows}))
            asked.append(len(todo))
            if todo:
                w.add(SampleBatch({"h": rows[todo].float()}, {"input_ids": rows[todo]}))
            if stop_after == at:
                raise KeyboardInterrupt
        return w.commit(), asked


def test_a_row_that_comes_twice_is_kept_twice_when_a_stream_is_resumed(store, tmp_path):
    stream = [(1, 2), (1, 3), (1, 2), (3, 3)]
    for stop_after in range(3):
        for other in (store, Store.init(tmp_path / f"stopped-{stop_after}")):
            with pytest.raises(KeyboardInterrupt):
                bring_tokens(other, stream, stop_after=stop_after)
            digest, asked = bring_tokens(other, stream)
            assert other.snapshot(digest).samples == 8
            assert digest == bring_tokens(Store.init(tmp_path / f"whole-{stop_after}-{other is store}"), stream)[0]
            if other is not store:
                assert asked == [0] * (stop_after + 1) + [2] * (3 - stop_after)
    assert bring_tokens(store, stream) == (digest, [0, 0, 0, 0])


def test_a_shard_that_is_gone_is_asked_for_again_in_its_place(store):
    stream = [(1, 2), (1, 3), (1, 2)]
    digest = bring_tokens(store, stream)[0]
    shard = list(store.shards(store.snapshot(digest)))[1]
    store.objects.path(shard.blobs[0].digest, "objects").unlink()
    assert bring_tokens(store, stream) == (digest, [0, 2, 0])
    assert bring_tokens(store, stream) == (digest, [0, 0, 0])


def test_another_stream_under_the_same_pins_takes_nothing_of_the_first(store, tmp_path):
    bring_tokens(store, [(1, 2), (3, 4)])
    digest, asked = bring_tokens(store, [(3, 4), (1, 2)])
    assert (digest, asked) == (bring_tokens(Store.init(tmp_path / "other"), [(3, 4), (1, 2)])[0], [2, 2])
    with pytest.raises(Refused, match="not the one"):
        bring_tokens(store, [(3, 5)])


def test_everything_brought_again_is_the_same_snapshot(store):
    first = bring(store, 3)
    with writer(store, PINS, cut=2) as w:
        for at in range(3):
            w.add(SampleBatch(states(at).columns, states(at).context, digests=join(row_digests(inputs(at)))))
        assert w.commit(ref="main", expect=first) == first


def test_the_owner_may_fill_the_same_tensors_again(store, tmp_path):
    reused = states(0)
    with writer(store, PINS, cut=2) as w:
        for at in range(2):
            w.missing(row_digests(inputs(at)))
            for name, tensor in states(at).columns.items():
                reused.columns[name].copy_(tensor)
            w.add(reused)
        digest = w.commit()
    assert digest == bring(Store.init(tmp_path / "other"), 2, ref=None)


def test_the_owner_may_fill_the_same_ids_again(store):
    ids = torch.zeros(3, dtype=torch.int64)
    with writer(store, PINS, cut=2) as w:
        for at in range(2):
            ids.copy_(torch.arange(3) + 10 * at)
            w.add(SampleBatch(states(at).columns, inputs(at), ids=ids))
        w.commit(ref="main")
    with zgstore.read(store, "main", columns=["id"]) as reader:
        assert reader.column("id")[:].tolist() == [0, 1, 2, 10, 11, 12]


def test_commit_compares_the_ref_with_what_was_expected(store):
    first = bring(store, 2)
    with writer(store, PINS, cut=2) as w:
        for at in range(3):
            todo = w.missing(row_digests(inputs(at)))
            if todo:
                w.add(states(at, torch.tensor(todo)))
        with pytest.raises(Conflict):
            w.commit(ref="main", expect=None)
    assert store.refs.get("main") == first


def test_what_makes_no_sense_is_refused(store):
    with pytest.raises(Invalid, match=r"teacher\.revision"):
        writer(store, Pins({"id": "x"}, {"id": "y", "revision": "1"}, {}))
    with writer(store, PINS, cut=2) as w:
        with pytest.raises(Invalid, match="nothing was added"):
            w.commit()
        w.missing(row_digests(inputs(0))[:1])
        with pytest.raises(Invalid, match="3 rows were added"):
            w.add(states(0))
    with writer(store, PINS, cut=1) as w, pytest.raises(NonFinite, match=r"h\.0"):
        w.add(SampleBatch({"h.0": torch.tensor([[1.0], [float("inf")]])}, {"k": torch.arange(2)}))


def test_a_captured_batch_is_looked_at_as_it_is_brought(store):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
    captured = zgstore.capture.run(model, {"input": torch.randn(2, 4)}, ["0:out"], context=["input"])
    captured.columns["0:out"][1] = float("nan")
    with writer(store, PINS, cut=1) as w, pytest.raises(NonFinite, match="0:out"):
        w.add(captured)


def test_batches_of_different_columns_do_not_go_together(store):
    with writer(store, PINS, cut=1) as w:
        w.add(states(0))
        w.add(SampleBatch({"h.0": states(1).columns["h.0"]}, {"attention_mask": torch.ones(3, 4, dtype=torch.int64)}))
        with pytest.raises(Invalid, match=r"h\.1"):
            w.commit()


def test_ragged_columns_can_be_brought_without_padding(store):
    with writer(store, PINS, cut=4) as w:
        w.add(
            SampleBatch(
                columns={"h": torch.arange(10.0).view(5, 2)},
                context={"k": torch.arange(2)},
                lengths=torch.tensor([2, 3]),
                packed=frozenset({"h"}),
            )
        )
        snapshot = store.snapshot(w.commit())
    assert snapshot.columns[0].shape == (None, 2)


def test_the_public_names_lead_here(store):
    with zgstore.writer(store, zgstore.Pins(PINS.teacher, PINS.data, PINS.capture), cut=16) as w:
        assert w.missing(zgstore.row_digests(inputs(0))) == [0, 1, 2]
        w.add(zgstore.SampleBatch(columns=states(0).columns, context=states(0).context))
        assert w.commit(ref="main", expect=None) == store.refs.get("main")


def test_torchs_default_device_and_dtype_are_somebody_elses(store):
    torch.manual_seed(0)
    dense = SampleBatch({"h.0": torch.randn(4, 3, 8), "h.1": torch.randn(4, 3, 8).to(torch.bfloat16)})
    ragged = SampleBatch(
        {"h.0": torch.randn(5, 8), "h.1": torch.randn(5, 8).to(torch.bfloat16)},
        lengths=torch.tensor([2, 3]), packed=frozenset({"h.0", "h.1"}),
    )  # fmt: skip
    rows = [digest_of("row", bytes([row])).raw for row in range(4)]
    try:
        torch.set_default_device("meta")
        torch.set_default_dtype(torch.float16)
        for ref, brought in (("dense", dense), ("ragged", ragged)):
            pins = Pins(PINS.teacher, PINS.data, {"by": ref})
            with writer(store, pins, cut=1, codecs={"h.1": "int8"}) as into:
                into.add(replace(brought, digests=b"".join(rows[: len(brought)])))
                into.commit(ref)
        even, uneven = (zgstore.read(store, ref).batch([1, 0]) for ref in ("dense", "ragged"))
        assert verify(store).report.ok
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    assert torch.equal(even["h.0"], dense.columns["h.0"][[1, 0]])
    assert torch.equal(uneven["h.0"][0, :3], ragged.columns["h.0"][2:])
    assert torch.allclose(even["h.1"].float(), dense.columns["h.1"][[1, 0]].float(), atol=0.05)
