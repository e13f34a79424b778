"""The order of rows: complete, reproducible, and evaluated anywhere at once."""

import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zgstore.errors import Invalid
from zgstore.reading.order import permutation

DATA = "blake3:" + "ab" * 32


@given(seed=st.integers(-(2**63), 2**64 - 1), epoch=st.integers(0, 10**6), size=st.integers(0, 3000))
@settings(max_examples=60, deadline=None)
def test_every_epoch_is_a_complete_permutation(seed, epoch, size):
    rows = permutation(seed, epoch, DATA, size).rows(0, size)
    assert sorted(rows.tolist()) == list(range(size))


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 17, 255, 1009])
def test_a_position_alone_gives_what_the_whole_epoch_gives(size):
    order = permutation(7, 3, DATA, size)
    whole = order.rows(0, size)
    assert [int(order.rows(at, at + 1)[0]) for at in range(size)] == whole.tolist()


def test_the_order_depends_on_seed_epoch_and_data_and_on_nothing_else():
    first = permutation(0, 0, DATA, 500).rows(0, 500).tolist()
    assert permutation(0, 0, DATA, 500).rows(0, 500).tolist() == first
    for other in (permutation(1, 0, DATA, 500), permutation(0, 1, DATA, 500), permutation(0, 0, DATA + "0", 500)):
        assert other.rows(0, 500).tolist() != first


def test_the_order_is_pinned_because_trainings_resume_across_versions():
    assert permutation(0, 0, DATA, 10).rows(0, 10).tolist() == [0, 5, 6, 8, 3, 9, 1, 7, 4, 2]
    assert permutation(1, 2, "", 10**9).rows(0, 3).tolist() == [506495768, 809382168, 830883114]


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_small_sizes_reach_every_permutation_about_equally_often(size):
    count = 4000
    seen = Counter(tuple(permutation(seed, 0, DATA, size).rows(0, size).tolist()) for seed in range(count))
    possible = int(np.prod(np.arange(1, size + 1)))
    assert len(seen) == possible
    expected = count / possible
    chi_squared = sum((number - expected) ** 2 / expected for number in seen.values())
    freedom = possible - 1
    assert chi_squared < freedom + 5 * (2 * freedom) ** 0.5


def test_neighbours_in_the_order_are_not_neighbours_in_the_rows():
    size = 100_000
    rows = permutation(0, 0, DATA, size).rows(0, size)
    assert abs(np.corrcoef(rows[:-1], rows[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(np.arange(size), rows)[0, 1]) < 0.02
    assert int((np.abs(np.diff(rows)) == 1).sum()) < 20


def test_two_epochs_share_no_more_places_than_chance():
    size = 100_000
    first, second = (permutation(0, epoch, DATA, size).rows(0, size) for epoch in (0, 1))
    assert int((first == second).sum()) < 10


def test_ten_million_rows_open_and_resume_at_ninety_percent_at_once():
    begun = time.perf_counter()
    order = permutation(0, 0, DATA, 10_000_000)
    tail = order.rows(9_000_000, 9_000_004)
    assert len(set(tail.tolist())) == 4
    assert time.perf_counter() - begun < 1.0  # a bound of kind, not of speed: nothing is materialised


def test_positions_out_of_range_are_refused():
    with pytest.raises(Invalid, match=r"\[0, 4\)"):
        permutation(0, 0, DATA, 4).at(np.array([4]))
    with pytest.raises(Invalid):
        permutation(0, 0, DATA, -1)
