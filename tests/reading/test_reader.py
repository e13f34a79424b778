"""Samples, batches and columns: what comes out is what was put in, in every layout."""

import gc
import os
import pickle
import random
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from stored import RAGGED, dense, make_store, ragged

import zgstore.reading.blobs as blobs_module
from zgstore.errors import Corrupt, Invalid, Missing, Partial
from zgstore.reading.layouts import Buffers
from zgstore.reading.opening import read


def test_a_sample_is_what_was_stored_bit_for_bit(dense_store):
    with read(dense_store.store, "main") as reader:
        assert len(reader) == 18
        for row in range(18):
            sample = reader[row]
            assert set(sample) == set(dense_store.rows)
            for name, value in sample.items():
                assert value.dtype == dense_store.rows[name][row].dtype
                assert torch.equal(value, dense_store.rows[name][row])


def test_indices_count_from_the_end_and_end(dense_store):
    with read(dense_store.store, "main", columns=["h.1"]) as reader:
        assert torch.equal(reader[-1]["h.1"], dense_store.rows["h.1"][17])
        for outside in (18, -19):
            with pytest.raises(IndexError):
                reader[outside]
        with pytest.raises(IndexError, match="row 18 of 18"):
            reader.batch([0, 18])
        with pytest.raises(TypeError):
            reader.batch([0.5])
        assert list(reader.columns) == ["h.1"]
        assert set(reader[0]) == {"h.1"}


def test_columns_come_in_the_order_asked_for_and_describe_themselves(dense_store):
    with read(dense_store.store, "main", columns=["input_ids", "h.0"]) as reader:
        assert reader.columns == ("input_ids", "h.0")
        assert reader.schema["h.0"].dtype == "BF16"
        assert reader.snapshot == str(dense_store.digest)
        assert reader.pins == str(dense_store.store.snapshot(dense_store.digest).pins.digest())
        assert reader.data_digest == dense_store.data
    with pytest.raises(Invalid, match=r"h\.9"):
        read(dense_store.store, "main", columns=["h.9"])
    with pytest.raises(Invalid, match="one text") as caught:
        read(dense_store.store, "main", columns="h.0")
    assert caught.value.hint == "give a list: columns=['h.0']"


@pytest.mark.parametrize("rows", [[3, 16, 4], [0, 1, 2, 3, 4, 5], [17, 0], [5, 5], [], [-1, 2]])
def test_a_padded_batch_of_ragged_rows(ragged_store, rows):
    with read(ragged_store.store, "main", columns=["h.0", "h.1"]) as reader:
        batch = reader.batch(rows)
    wanted = [ragged_store.rows["h.0"][row] for row in rows]
    longest = max((len(row) for row in wanted), default=0)
    assert batch["h.0"].shape == (len(rows), longest, 8)
    assert batch["lengths"].tolist() == [len(row) for row in wanted]
    assert set(batch) == {"h.0", "h.1", "lengths", "mask", "positions"}
    for at, (row, value) in enumerate(zip(rows, wanted, strict=True)):
        assert torch.equal(batch["h.0"][at, : len(value)], value)
        assert not batch["h.0"][at, len(value) :].any()
        assert batch["mask"][at].tolist() == [True] * len(value) + [False] * (longest - len(value))
        start = int(ragged_store.rows["start"][row])
        assert batch["positions"][at, : len(value)].tolist() == list(range(start, start + len(value)))
        assert torch.equal(batch["h.1"][at, : len(value)], ragged_store.rows["h.1"][row])


def test_a_packed_batch_of_ragged_rows(ragged_store):
    rows = [3, 16, 4, 5]
    with read(ragged_store.store, "main", columns=["h.0"]) as reader:
        batch = reader.batch(rows, layout="packed")
    wanted = [ragged_store.rows["h.0"][row] for row in rows]
    assert torch.equal(batch["h.0"], torch.cat(wanted))
    assert batch["offsets"].tolist() == [0, *torch.tensor([len(row) for row in wanted]).cumsum(0).tolist()]
    starts = [int(ragged_store.rows["start"][row]) for row in rows]
    positions = [s + i for s, row in zip(starts, wanted, strict=True) for i in range(len(row))]
    assert batch["positions"].tolist() == positions


def test_a_listed_batch_keeps_rows_apart(ragged_store):
    with read(ragged_store.store, "main", columns=["h.0"]) as reader:
        batch = reader.batch([3, 16], layout="list")
        assert all(
            torch.equal(a, b)
            for a, b in zip(batch["h.0"], [ragged_store.rows["h.0"][3], ragged_store.rows["h.0"][16]], strict=True)
        )
        with pytest.raises(Invalid, match="layout"):
            reader.batch([0], layout="stacked")


def test_stored_positions_are_preferred_to_a_start(tmp_path):
    rows = ragged(6, start=False)
    rows["position_ids"] = [torch.arange(len(row)) * 2 + 5 for row in rows["h.0"]]
    made = make_store(tmp_path / "store", rows, ragged=RAGGED)
    with read(made.store, "main", columns=["h.0"]) as reader:
        padded, packed = reader.batch([2, 4]), reader.batch([2, 4], layout="packed")
    for at, row in enumerate([2, 4]):
        assert torch.equal(padded["positions"][at][padded["mask"][at]], rows["position_ids"][row])
    assert torch.equal(packed["positions"], torch.cat([rows["position_ids"][2], rows["position_ids"][4]]))


def test_left_padded_dense_rows_come_with_their_mask_and_positions(dense_store):
    rows = [1, 9, 5]
    with read(dense_store.store, "main", columns=["h.0"]) as reader:
        batch = reader.batch(rows)
        packed = reader.batch(rows, layout="packed")
    mask = torch.stack([dense_store.rows["attention_mask"][row] for row in rows]).bool()
    positions = torch.stack([dense_store.rows["position_ids"][row] for row in rows])
    assert set(batch) == {"h.0", "lengths", "mask", "positions"}
    assert torch.equal(batch["mask"], mask)
    assert torch.equal(batch["positions"], positions)
    assert batch["lengths"].tolist() == mask.sum(1).tolist()
    assert torch.equal(packed["h.0"], torch.stack([dense_store.rows["h.0"][row] for row in rows])[mask])
    assert torch.equal(packed["positions"], positions[mask])


def test_int8_columns_come_back_in_their_own_dtype(tmp_path):
    rows = dense()
    made = make_store(tmp_path / "dense", rows, int8=("h.1",))
    with read(made.store, "main", columns=["h.1"]) as reader:
        got = reader.batch([7, 8, 2])["h.1"]
        assert got.dtype == torch.bfloat16
        wanted = torch.stack([rows["h.1"][row] for row in (7, 8, 2)])
        assert (got - wanted).abs().max() < 0.05
        one = reader.column("h.1")[8]
        assert torch.equal(one, got[1])
    lists = ragged()
    made = make_store(tmp_path / "ragged", lists, ragged=RAGGED, int8=("h.1",))
    with read(made.store, "main", columns=["h.1"]) as reader:
        batch = reader.batch([7, 8, 2])
        assert (batch["h.1"][1][batch["mask"][1]] - lists["h.1"][8]).abs().max() < 0.05
        assert torch.equal(reader.tokens("h.1")[3], reader.batch([0, 1], layout="packed")["h.1"][3])


def test_skipped_rows_are_not_there(tmp_path):
    made = make_store(tmp_path / "store", ragged(), ragged=RAGGED, masked=(0, 4, 5, 17))
    with read(made.store, "main") as reader:
        assert len(reader) == 14
        for row in range(14):
            assert torch.equal(reader[row]["h.0"], made.rows["h.0"][row])
        assert reader.lengths().tolist() == [len(row) for row in made.rows["h.0"]]
        assert torch.equal(reader.tokens("h.0")[list(range(len(reader.tokens("h.0"))))], torch.cat(made.rows["h.0"]))
        assert all(torch.equal(a, b) for a, b in zip(reader.column("h.0")[:], made.rows["h.0"], strict=True))


def test_constants_have_no_row_axis(tmp_path):
    constant = torch.arange(6).view(2, 3)
    made = make_store(tmp_path / "store", dense(5), constants={"rope": constant})
    with read(made.store, "main", columns=["h.0"]) as reader:
        assert torch.equal(reader.constants["rope"], constant)
        assert "rope" not in reader[0]
        assert torch.equal(reader[4]["h.0"], made.rows["h.0"][4])


def test_reused_memory_gives_the_same_batches(ragged_store, dense_store):
    for made in (ragged_store, dense_store):
        memory = Buffers()
        with read(made.store, "main") as reader:
            for rows in ([3, 16], [1, 2, 3, 9], [0]):
                fresh, reused = reader.batch(rows), reader.batch(rows, out=memory)
                assert all(torch.equal(fresh[name], reused[name]) for name in fresh)
            first = reader.batch([1, 2], out=memory)["h.0"].data_ptr()
            assert reader.batch([3, 4], out=memory)["h.0"].data_ptr() == first


def test_a_slice_inside_a_shard_is_a_private_map(dense_store):
    with read(dense_store.store, "main", columns=["h.0"]) as reader:
        view = reader.column("h.0")
        mapped = view[4:7]
        assert torch.equal(mapped, torch.stack(dense_store.rows["h.0"][4:7]))
        mapped.zero_()
        assert torch.equal(view[4:7], torch.stack(dense_store.rows["h.0"][4:7]))
    assert torch.equal(mapped, torch.zeros_like(mapped))


@pytest.mark.parametrize("index", [slice(2, 9), slice(None, None, 5), slice(9, 2), slice(9, 2, -1), slice(-3, None)])
def test_any_slice_of_a_column_is_that_of_its_rows(dense_store, ragged_store, index):
    with read(dense_store.store, "main", columns=["h.0"]) as reader:
        assert len(reader.column("h.0")[index]) == len(dense_store.rows["h.0"][index])
        for got, wanted in zip(reader.column("h.0")[index], dense_store.rows["h.0"][index], strict=True):
            assert torch.equal(got, wanted)
    with read(ragged_store.store, "main", columns=["h.0"]) as reader:
        for got, wanted in zip(reader.column("h.0")[index], ragged_store.rows["h.0"][index], strict=True):
            assert torch.equal(got, wanted)


def test_a_column_that_was_not_asked_for_is_named(dense_store):
    with read(dense_store.store, "main", columns=["h.0"]) as reader, pytest.raises(Partial, match=r"h\.1"):
        reader.column("h.1")


def test_a_pickled_reader_reads_on(dense_store):
    with read(dense_store.store, "main") as reader:
        reader[0]
        again = pickle.loads(pickle.dumps(reader))
        assert torch.equal(again[9]["h.0"], dense_store.rows["h.0"][9])
        again.close()
        assert torch.equal(reader[9]["h.0"], dense_store.rows["h.0"][9])


def test_only_the_bytes_of_the_wanted_columns_are_touched(tmp_path):
    made = make_store(tmp_path / "store", dense(8, 64, 32), per_shard=4)
    for shard in range(2):
        made.path("h.1", shard).chmod(0o600)
        made.path("h.1", shard).write_bytes(b"\0" * made.path("h.1", shard).stat().st_size)
    with read(made.store, "main", columns=["h.0"]) as reader:
        assert torch.equal(reader.batch(list(range(8)))["h.0"], torch.stack(made.rows["h.0"]))
        boundary = 8 * 64 * 32 * 2
        assert boundary <= reader.bytes_read <= boundary * 1.6  # mask and positions come along


def test_rows_that_follow_each_other_are_one_system_call(dense_store, monkeypatch):
    calls = []
    with read(dense_store.store, "main", columns=["h.0"], verify="never") as reader:
        reader.batch([0, 8])
        real = blobs_module.os.preadv
        monkeypatch.setattr(blobs_module.os, "preadv", lambda *args: calls.append(args) or real(*args))
        reader.batch([0, 1, 2, 3, 8, 9])
    assert len(calls) == 2 * 3  # two runs of three columns: the boundary, mask and positions


def test_first_use_verifies_once_and_a_stamp_saves_even_that(tmp_path):
    made = make_store(tmp_path / "store", dense())
    with read(made.store, "main", columns=["h.0"]) as reader:
        reader.batch([0])
        first = reader.bytes_verified
        assert first == sum(made.blobs[name][0].size for name in ("h.0", "attention_mask", "position_ids"))
        reader.batch([1, 2])
        assert reader.bytes_verified == first
        reader.batch([17])
        assert reader.bytes_verified > first
    with read(made.store, "main", columns=["h.0"], verify="never") as reader:
        reader.batch([0, 17])
        assert reader.bytes_verified == 0


def test_closing_stamps_what_was_verified_unless_it_is_too_young(tmp_path, monkeypatch):
    made = make_store(tmp_path / "store", dense())
    with read(made.store, "main", columns=["h.0"]) as reader:
        reader.batch([0])
    with read(made.store, "main", columns=["h.0"]) as reader:
        reader.batch([0])
        assert reader.bytes_verified > 0  # written less than two seconds ago: no stamp
    monkeypatch.setattr(blobs_module, "SETTLE_SECONDS", 0.0)
    monkeypatch.setattr("zgstore.storage.index.SETTLE_SECONDS", 0.0)
    with read(made.store, "main", columns=["h.0"]) as reader:
        reader.batch([0])
    monkeypatch.undo()
    with read(made.store, "main", columns=["h.0"]) as reader:
        reader.batch([0])
        assert reader.bytes_verified == 0
        reader.batch([17])
        assert reader.bytes_verified > 0


def test_opening_can_verify_everything_at_once(tmp_path):
    made = make_store(tmp_path / "store", dense())
    with read(made.store, "main", columns=["h.0"], verify="open") as reader:
        whole = sum(blob.size for name in ("h.0", "attention_mask", "position_ids") for blob in made.blobs[name])
        assert reader.bytes_verified == whole
    path = made.path("h.0", 3)
    path.chmod(0o600)
    path.write_bytes(bytes([path.read_bytes()[0]]) + path.read_bytes()[1:-1] + b"\7")
    with pytest.raises(Corrupt):
        read(made.store, "main", columns=["h.0"], verify="open")
    with pytest.raises(Invalid, match="verify"):
        read(made.store, "main", verify="always")


def test_a_reader_holds_a_lease_until_it_is_closed(tmp_path):
    made = make_store(tmp_path / "store", dense(4))
    reader = read(made.store, "main")
    (lease,) = made.store.leases.all()
    assert lease.alive
    assert lease.digests == made.digest.raw
    reader.close()
    reader.close()
    with pytest.raises(Invalid, match="closed"):
        reader[0]
    assert made.store.leases.all() == []
    reader = read(made.store, "main")
    del reader
    assert made.store.leases.all() == []
    made.path("h.0", 0).unlink()
    with pytest.raises(Missing):
        read(made.store, "main")
    assert made.store.leases.all() == []


def test_prefetched_batches_are_the_batches(ragged_store):
    steps = [[3, 1], [17], [4, 5, 6], [0, 9]]
    with read(ragged_store.store, "main") as reader:
        for got, rows in zip(reader.prefetch(steps, depth=2), steps, strict=True):
            wanted = reader.batch(rows)
            assert all(torch.equal(got[name], wanted[name]) for name in wanted)
        first = next(reader.prefetch(steps, layout="packed"))
        assert torch.equal(first["h.0"], reader.batch(steps[0], layout="packed")["h.0"])
        with pytest.raises(IndexError):
            list(reader.prefetch([[0], [99]]))


def test_lengths_are_those_of_every_visible_row(ragged_store, dense_store):
    with read(ragged_store.store, "main", columns=["h.0"]) as reader:
        assert reader.lengths().tolist() == [len(row) for row in ragged_store.rows["h.0"]]
    with read(dense_store.store, "main", columns=["h.0"]) as reader:
        assert reader.lengths().tolist() == [int(row.sum()) for row in dense_store.rows["attention_mask"]]


def test_rows_without_a_sequence_axis_have_no_mask(tmp_path):
    rows = {"h.0": [torch.full((4,), float(row)) for row in range(5)], "y": [torch.tensor(row) for row in range(5)]}
    made = make_store(tmp_path / "store", rows)
    with read(made.store, "main") as reader:
        assert set(reader.batch([1, 2])) == {"h.0", "y"}
        assert reader.lengths().tolist() == [1] * 5
        assert reader[3]["y"].item() == 3


def test_an_interrupted_batch_writes_into_no_later_one(tmp_path, monkeypatch, interrupts):
    """As in a notebook: a cell is interrupted, and the next one reads on into the same memory."""
    rows = {name: [torch.full((64, 1024), float(row)) for row in range(16)] for name in ("h.0", "h.1")}
    reader, out = read(make_store(tmp_path / "s", rows).store, "main"), Buffers()
    reader.batch(range(16), out=out)
    real, in_second, go_on = os.preadv, threading.Event(), threading.Event()

    def slow_in_the_second_thread(*args):
        if threading.current_thread() is threading.main_thread():
            assert in_second.wait(10)
        elif not in_second.is_set():
            in_second.set()
            # To the main thread, as a terminal's is: one that waits is woken by its own signals alone.
            threading.Timer(0.1, signal.pthread_kill, (threading.main_thread().ident, interrupts.signal)).start()
            assert go_on.wait(10)
        return real(*args)

    monkeypatch.setattr(os, "preadv", slow_in_the_second_thread)
    with pytest.raises(KeyboardInterrupt), interrupts.within():
        reader.batch([0, 1, 2, 3] * 4, out=out)
    batch = reader.batch([8] * 16, out=out)
    go_on.set()
    reader.batch(range(16))  # both threads again: the late one has ended
    for name in rows:
        assert torch.equal(batch[name], torch.full((16, 64, 1024), 8.0))


def test_interrupts_at_any_moment_leave_the_reader_as_it_was(tmp_path, interrupts):
    rows = {name: [torch.full((64, 1024), float(row)) for row in range(16)] for name in ("h.0", "h.1")}
    reader, out = read(make_store(tmp_path / "s", rows).store, "main"), Buffers()
    draw, came = random.Random(0), 0
    while came < 20:  # a busy machine has its clock tick seldom: not as many as come in some time
        try:
            with interrupts.within(draw.uniform(1e-5, 3e-3)):
                reader.batch(draw.choices(range(16), k=16), out=out)
            continue
        except KeyboardInterrupt:
            came += 1
        wanted = draw.choices(range(16), k=16)
        batch = reader.batch(wanted, out=out)
        for name in rows:
            assert batch[name][:, 0, 0].tolist() == wanted


def _descriptors():
    return {path.name for path in Path("/proc/self/fd").iterdir()}


def test_a_failed_batch_keeps_no_descriptor_once_its_reader_is_closed(tmp_path):
    made = make_store(tmp_path / "s", {"h.0": [torch.randn(300, 1024) for _ in range(8)]}, per_shard=1)
    blob = next(iter(made.store.shards(made.store.snapshot(made.store.resolve("main"))))).blobs[0]
    gc.disable()
    try:
        before = _descriptors()
        with read(made.store, "main") as reader:
            made.store.objects.path(blob.digest, "objects").unlink()
            with pytest.raises(Missing):
                reader.batch(range(8))
        del reader
        assert _descriptors() == before
    finally:
        gc.enable()


@pytest.mark.parametrize("index", [2**64 - 1, 2**63, -(2**62)])
def test_no_index_wraps_to_another_row(dense_store, index):
    kind = np.uint64 if index > 0 else np.int64
    with read(dense_store.store, "main") as reader:
        for ask in (
            lambda: reader.batch(np.array([index], kind)),
            lambda: reader[index],
            lambda: reader.column("h.0")[index],
        ):
            with pytest.raises(IndexError):
                ask()


def test_an_empty_row_asks_the_disk_for_nothing(tmp_path, monkeypatch):
    rows = [torch.randn(3, 8), torch.zeros(0, 8), torch.randn(2, 8), torch.zeros(0, 8)]
    with read(make_store(tmp_path / "s", {"h.0": rows}, ragged={"h.0"}).store, "main") as reader:
        asked = []
        monkeypatch.setattr(os, "posix_fadvise", lambda *args: asked.append(args))
        reader.batch([3, 1, 0])
    assert [size for _, _, size, advice in asked if advice == os.POSIX_FADV_WILLNEED] == [3 * 8 * 4]


def test_given_rows_are_as_many_as_the_indices(dense_store):
    with read(dense_store.store, "main") as reader:
        row = reader[0]["h.0"]
        with pytest.raises(Invalid, match=r"1 rows are given for column 'h\.0', and 3"):
            reader.batch([0, 1, 2], given={"h.0": [row]})
        assert reader.batch([], given={"h.0": []})["h.0"].shape == (0, *row.shape)
