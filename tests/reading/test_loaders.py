"""Under the loaders people use: DataLoader by fork and spawn, StatefulDataLoader, accelerate."""

import itertools
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from stored import dense, make_store
from torch.utils.data import DataLoader
from watched import Watched

from zgstore.reading.opening import read
from zgstore.reading.sampler import Sampler

HERE = Path(__file__).parent


@pytest.mark.parametrize(("workers", "method"), [(0, None), (2, "fork"), (2, "spawn")])
def test_a_loader_gives_the_sampler_s_batches(dense_store, workers, method):
    with read(dense_store.store, "main", columns=["h.0", "input_ids"]) as reader:
        sampler = Sampler(reader, seed=1, batch_size=4)
        wanted = list(Sampler(reader, seed=1, batch_size=4))
        loader = DataLoader(reader, batch_sampler=sampler, num_workers=workers, multiprocessing_context=method)
        got = list(loader)
        assert len(got) == len(loader) == len(wanted)
        for batch, rows in zip(got, wanted, strict=True):
            assert torch.equal(batch["h.0"], torch.stack([dense_store.rows["h.0"][row] for row in rows]))
            assert torch.equal(batch["input_ids"], torch.stack([dense_store.rows["input_ids"][row] for row in rows]))


def test_ragged_rows_are_padded_by_the_reader_in_the_worker(ragged_store):
    with read(ragged_store.store, "main", columns=["h.0"]) as reader:
        sampler = Sampler(reader, token_budget=12)
        loader = DataLoader(reader, sampler=sampler, batch_size=None, num_workers=1, multiprocessing_context="fork")
        for batch, rows in zip(loader, list(Sampler(reader, token_budget=12)), strict=True):
            wanted = reader.batch(rows)
            assert all(torch.equal(batch[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_no_worker_opens_the_index_and_the_parent_goes_on(tmp_path, method):
    made = make_store(tmp_path / "store", dense(8, 2, 2))
    store = made.store
    store.index.stamps([made.digest.raw])  # the parent has used its index before the workers begin
    with read(store, "main", columns=["h.0"]) as reader:
        steps = [[step % 8] for step in range(2 * 130)]
        loader = DataLoader(
            Watched(reader), sampler=steps, batch_size=None, num_workers=2, multiprocessing_context=method
        )
        pids, spawned = set(), method == "spawn"
        for number, batch in enumerate(loader):
            assert torch.equal(batch["h.0"][0], made.rows["h.0"][number % 8])
            assert not batch["lmdb_open"]
            assert not (spawned and (batch["lmdb_imported"] or batch["store_imported"]))
            pids.add(batch["pid"])
            if number % 50 == 0:
                store.index.stamps([made.digest.raw])
        assert len(pids) == 2
        for _ in range(130):
            store.index.stamps([made.digest.raw])
        assert torch.equal(reader[3]["h.0"], made.rows["h.0"][3])
    assert store.leases.all() == []
    assert read(store, "main")[0]


def test_what_a_worker_verified_is_verified_for_all(dense_store):
    with read(dense_store.store, "main", columns=["h.0"]) as reader:
        loader = DataLoader(reader, batch_sampler=Sampler(reader, batch_size=4), num_workers=1,
                            multiprocessing_context="fork")  # fmt: skip
        list(loader)
        reader.batch(list(range(18)))
        assert reader.bytes_verified == 0


def test_a_fork_of_a_reader_with_open_files_leaves_them_to_its_parent(dense_store):
    with read(dense_store.store, "main", columns=["h.0"]) as reader:
        reader.batch([0, 5, 9])

        def child():
            ok = torch.equal(reader[9]["h.0"], dense_store.rows["h.0"][9])
            reader.close()
            os._exit(0 if ok else 1)

        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join(30)
        assert process.exitcode == 0
        assert len(dense_store.store.leases.all()) == 1
        assert torch.equal(reader[5]["h.0"], dense_store.rows["h.0"][5])


def first_and_rest(make_loader, at):
    """Batches of two epochs, broken off after ``at`` and resumed by a new loader."""
    loader = make_loader()
    seen, position = [], iter(loader)
    while len(seen) < at:
        try:
            seen.append(next(position))
        except StopIteration:
            position = iter(loader)
    state = loader.state_dict()
    del position, loader
    again = make_loader()
    again.load_state_dict(state)
    while len(seen) < 2 * 5:
        seen += list(again)
    return [batch["input_ids"][:, 0].tolist() for batch in seen[: 2 * 5]]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # the loader's own
@pytest.mark.parametrize(("workers", "stops"), [(0, range(10)), (1, [1, 4, 5, 7])])
def test_a_stateful_loader_resumes_in_the_middle_of_an_epoch_and_at_its_end(dense_store, workers, stops):
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    with read(dense_store.store, "main", columns=["input_ids"]) as reader:

        def loader():
            return stateful(reader, batch_sampler=Sampler(reader, batch_size=4), num_workers=workers,
                            multiprocessing_context="fork" if workers else None)  # fmt: skip

        sampler = Sampler(reader, batch_size=4)
        wanted = [
            [int(dense_store.rows["input_ids"][row][0]) for row in rows]
            for rows in itertools.chain(list(sampler), list(sampler))
        ]
        for at in stops:
            assert first_and_rest(loader, at) == wanted


def test_accelerate_prepares_a_loader_and_moves_its_epochs(dense_store):
    accelerate = pytest.importorskip("accelerate")
    with read(dense_store.store, "main", columns=["h.0", "input_ids"]) as reader:
        accelerator = accelerate.Accelerator(cpu=True)
        wanted = Sampler(reader, batch_size=4)
        prepared = accelerator.prepare(DataLoader(reader, batch_sampler=Sampler(reader, batch_size=4)))
        for epoch in range(2):
            wanted.set_epoch(epoch)
            rows = list(wanted)
            got = [batch["input_ids"] for batch in prepared]
            assert len(got) == len(rows)
            for batch, each in zip(got, rows, strict=True):
                assert torch.equal(batch, torch.stack([dense_store.rows["input_ids"][row] for row in each]))


FEW_DESCRIPTORS = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
import torch
from zgstore.reading.opening import read
from zgstore.storage.store import Store
from zgstore.reading.sampler import Sampler
with read(Store.open(sys.argv[1]), "main") as reader:
    seen = 0
    for batch in reader.prefetch(Sampler(reader, batch_size=100)):
        seen += len(batch["h.0"])
    assert seen == 500, seen
    assert len(reader.tokens("h.0")) == 1000
    views = [reader.column("h.0")[row:row + 1] for row in range(500)]
    assert sum(len(view) for view in views) == 500
print("ok")
"""


def test_five_hundred_shards_are_read_with_sixty_four_descriptors(tmp_path):
    rows = {"h.0": [torch.full((2, 4), float(row)) for row in range(500)]}
    made = make_store(tmp_path / "store", rows, per_shard=1)
    done = subprocess.run([sys.executable, "-c", FEW_DESCRIPTORS, str(made.store.path)], capture_output=True, text=True,
                          check=False, timeout=100)  # fmt: skip
    assert done.stdout.strip() == "ok", done.stderr
