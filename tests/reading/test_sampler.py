"""Batches of a seeded order: complete, resumable at every step, the same for everybody who asks."""

import itertools

import numpy as np
import pytest
import torch
from stored import make_store

from zgstore.errors import Invalid, Refused
from zgstore.reading.opening import read
from zgstore.reading.sampler import Sampler


class Rows:
    """What a sampler looks at: how many rows, of which data, how long."""

    def __init__(self, count, data="blake3:" + "0" * 64, longest=9):
        self.count, self.data_digest = count, data
        self._lengths = torch.arange(count) * 7 % longest + 1

    def __len__(self):
        return self.count

    def lengths(self):
        return self._lengths


ARGUMENTS = [
    {"batch_size": 4},
    {"batch_size": 4, "drop_last": True},
    {"batch_size": 50},
    {"batch_size": 1, "shuffle": False},
    {"token_budget": 12},
    {"token_budget": 3},
    {"token_budget": 1000, "seed": 4},
    {"batch_size": 3, "order": "sequential-first"},
]


@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_resuming_after_every_step_gives_the_rest_and_the_next_epochs(arguments):
    whole = Sampler(Rows(30), **arguments)
    states, batches = [whole.state_dict()], []
    for _ in range(3):
        for batch in whole:
            batches.append(batch)
            states.append(whole.state_dict())
    for step, state in enumerate(states):
        again = Sampler(Rows(30), **arguments)
        again.load_state_dict(state)
        rest = []
        while len(rest) < len(batches) - step:
            rest += list(again)
        assert rest[: len(batches) - step] == batches[step:]


@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_every_epoch_has_every_row_once_and_says_how_many_steps_it_takes(arguments):
    sampler = Sampler(Rows(30), **arguments)
    epochs = []
    for _ in range(3):
        steps = len(sampler)
        batches = list(sampler)
        assert len(batches) == steps
        rows = list(itertools.chain(*batches))
        dropped = 30 % 4 if arguments.get("drop_last") else 0
        assert len(set(rows)) == len(rows) == 30 - dropped
        epochs.append(rows)
    if sampler.order == "sequential":
        assert epochs[0] == epochs[1] == list(range(30))
    elif sampler.order == "sequential-first":
        assert epochs[0] == list(range(30)) != epochs[1]
        assert epochs[1] != epochs[2]
    else:
        assert epochs[0] != epochs[1] != epochs[2]


def test_twice_interrupted_in_one_epoch_is_not_interrupted():
    batches = list(Sampler(Rows(30), batch_size=4))
    first = Sampler(Rows(30), batch_size=4)
    got = list(itertools.islice(first, 2))
    second = Sampler(Rows(30), batch_size=4)
    second.load_state_dict(first.state_dict())
    got += list(itertools.islice(second, 3))
    third = Sampler(Rows(30), batch_size=4)
    third.load_state_dict(second.state_dict())
    assert got + list(third) == batches


def test_breaking_off_begins_the_epoch_again_unless_a_state_says_otherwise():
    sampler = Sampler(Rows(30), batch_size=4)
    first = next(iter(sampler))
    assert next(iter(sampler)) == first


def test_the_rows_of_a_step_are_known_without_taking_the_steps_before():
    for arguments in ({"batch_size": 4}, {"token_budget": 12}):
        sampler = Sampler(Rows(30), **arguments)
        for epoch in range(2):
            for step, batch in enumerate(sampler):
                assert sampler.rows(step, epoch=epoch) == batch
                probe = Sampler(Rows(30), **arguments)
                probe.load_state_dict(sampler.state_after(step + 1, epoch=epoch))
                assert probe.state_dict() == {**sampler.state_dict(), "rows": 30}


def test_the_order_does_not_depend_on_the_batch_size():
    small, large = Sampler(Rows(30), batch_size=2), Sampler(Rows(30), batch_size=7)
    assert list(itertools.chain(*small)) == list(itertools.chain(*large))


def test_a_budget_is_kept_and_used():
    rows = Rows(200)
    sampler = Sampler(rows, token_budget=20)
    batches = list(sampler)
    totals = [int(rows.lengths()[batch].sum()) for batch in batches]
    assert max(totals) <= 20
    for total, after in itertools.pairwise(zip(totals, batches, strict=True)):
        assert total[0] + int(rows.lengths()[after[1][0]]) > 20
    long = Sampler(rows, token_budget=1)
    assert all(len(batch) == 1 for batch in long)


@pytest.mark.parametrize("arguments", [{"batch_size": 4}, {"token_budget": 12}])
@pytest.mark.parametrize("count", [30, 32, 33, 2])
def test_ranks_take_as_many_steps_and_together_every_row(arguments, count):
    world = 3
    ranks = [list(Sampler(Rows(count), rank=rank, world=world, **arguments)) for rank in range(world)]
    assert len({len(batches) for batches in ranks}) == 1
    assert all(batch for batches in ranks for batch in batches)
    rows = [row for batches in ranks for batch in batches for row in batch]
    assert set(rows) == set(range(count))
    assert len(rows) == max(count, world) or arguments != {"batch_size": 4}
    whole = list(Sampler(Rows(count), **arguments))
    if "batch_size" in arguments:
        assert [batches[0] for batches in ranks][:1] == whole[:1] or count < 12


def test_the_epoch_can_be_set_and_a_loaded_state_is_not_lost_by_it():
    sampler = Sampler(Rows(30), batch_size=4)
    epochs = [list(sampler) for _ in range(3)]
    sampler = Sampler(Rows(30), batch_size=4)
    sampler.set_epoch(2)
    assert list(sampler) == epochs[2]
    sampler.set_epoch(1)
    state = {**sampler.state_dict(), "position": 8}
    again = Sampler(Rows(30), batch_size=4)
    again.load_state_dict(state)
    again.set_epoch(1)
    assert list(again) == epochs[1][2:]
    again.load_state_dict(state)
    with pytest.raises(Invalid, match="epoch 1 is loaded"):
        again.set_epoch(0)


def test_a_state_of_other_data_is_refused():
    state = Sampler(Rows(30), batch_size=4).state_dict()
    for other in (Rows(31), Rows(30, data="blake3:" + "1" * 64)):
        with pytest.raises(Refused):
            Sampler(other, batch_size=4).load_state_dict(state)
    with pytest.raises(Invalid, match="position"):
        Sampler(Rows(30), batch_size=4).load_state_dict({"seed": 0, "order": "shuffled", "epoch": 0})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "needs batch_size or token_budget"),
        ({"batch_size": 0}, "at least 1"),
        ({"token_budget": -1}, "at least 1"),
        ({"batch_size": 1, "token_budget": 5}, "both were given"),
        ({"batch_size": 0, "token_budget": 0}, "both were given"),
        ({"batch_size": 1, "rank": 1}, "rank 1 of 1"),
        ({"batch_size": 1, "order": "random"}, "'random' is no order"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments, said):
    with pytest.raises(Invalid, match=said):
        Sampler(Rows(30), **arguments)


def test_ten_million_rows_are_resumed_near_the_end_at_once():
    class Many:
        data_digest = "blake3:" + "0" * 64

        def __len__(self):
            return 10_000_000

        def lengths(self):
            raise AssertionError

    sampler = Sampler(Many(), batch_size=4)
    sampler.load_state_dict({**sampler.state_dict(), "position": 9_000_000})
    assert len(next(iter(sampler))) == 4
    assert sampler.state_dict()["position"] == 9_000_004


def test_columns_and_codec_do_not_touch_the_order(tmp_path, dense_store):
    rows = {"h.0": [row.float() for row in dense_store.rows["h.0"]]}
    other = make_store(tmp_path / "store", rows, per_shard=7, int8=("h.0",))
    assert other.data == dense_store.data
    with read(dense_store.store, "main", columns=["h.1"]) as one, read(other.store, "main") as two:
        assert list(Sampler(one, batch_size=4, seed=9)) == list(Sampler(two, batch_size=4, seed=9))


def test_no_rows_make_no_steps():
    assert list(Sampler(Rows(0), batch_size=4)) == []
    assert len(Sampler(Rows(0), token_budget=4)) == 0
    assert np.asarray(Sampler(Rows(1), token_budget=4).rows(0)).tolist() == [0]
