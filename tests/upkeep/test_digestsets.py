"""Sets of digests: a few in Python's own sets, many in sorted arrays, with the same answers."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zgstore.format.fields import pack_u64
from zgstore.upkeep import digestsets
from zgstore.upkeep.digestsets import DigestSet, both, chosen, inverse, singles, total


def named(*numbers):
    """Digests that all begin with the same 8 bytes, joined."""
    return b"".join(bytes(8) + number.to_bytes(24, "big") for number in numbers)


@pytest.fixture(params=[0, 1 << 15], ids=["arrays", "sets"])
def many(request, monkeypatch):
    """Both ways, whatever the size."""
    monkeypatch.setattr(digestsets, "MANY", request.param)


@pytest.mark.usefixtures("many")
def test_a_set_has_each_digest_and_no_other():
    joined, others = os.urandom(32 * 1000), os.urandom(32 * 1000)
    digests = DigestSet(joined + joined)
    assert digests.mask(joined + others) == bytes([1] * 1000 + [0] * 1000)
    assert digests.within(others + joined) == joined
    assert digests.without(joined + others) == others
    assert digests.firsts() == bytes([1] * 1000 + [0] * 1000)
    assert joined[:32] in digests
    assert others[:32] not in digests


@pytest.mark.usefixtures("many")
def test_a_set_tells_digests_apart_that_begin_alike():
    digests = DigestSet(named(5, 1, 3, 1))
    assert digests.mask(named(1, 2, 3, 4, 5)) == bytes([1, 0, 1, 0, 1])
    assert digests.firsts() == bytes([1, 1, 1, 0])


@pytest.mark.usefixtures("many")
def test_an_empty_set_has_nothing():
    assert DigestSet(b"").mask(named(1, 2)) == bytes(2)
    assert DigestSet(b"").firsts() == b""
    assert DigestSet(named(1)).mask(b"") == b""


@pytest.mark.usefixtures("many")
def test_singles_stand_there_only_once():
    assert singles(named(1, 2, 3, 2, 4, 4)) == bytes([1, 0, 1, 0, 0, 0])


@given(st.lists(st.integers(0, 9)), st.lists(st.integers(0, 9)))
def test_sets_and_arrays_agree(have, asked):
    few = DigestSet(named(*have))
    table = few._table
    assert table.mask(named(*asked)) == few.mask(named(*asked)) == bytes(each in have for each in asked)
    assert table.firsts() == few.firsts() == bytes(each not in have[:at] for at, each in enumerate(have))


def test_masks_choose_count_and_combine():
    mask = bytes([1, 0, 1])
    assert chosen(named(1, 2, 3), mask) == named(1, 3)
    assert chosen(pack_u64([7, 8, 9]), mask, each=8) == pack_u64([7, 9])
    assert total(pack_u64([7, 8, 9]), mask) == 16
    assert inverse(mask) == bytes([0, 1, 0])
    assert both(mask, bytes([1, 1, 0])) == bytes([1, 0, 0])
    assert both(b"", b"") == inverse(b"") == b""
