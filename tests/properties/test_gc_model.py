"""The protocol of section 8 loses nothing in any interleaving, and each of its promises is needed."""

from dataclasses import replace

import pytest

from tests.properties.gc_model import Protocol, broken_promise, lost, search

MUTATIONS = {
    "the re-check is dropped": {"rechecks": False},
    "reserving comes after looking": {"reserves_first": False},
    "reservations are dropped": {"reserves": False},
    "the lease closes before the ref": {"closes_last": False},
    "tagging does not check": {"tagging_checks": False},
    "a live holder's lease is taken and the ref step does not notice": {"ref_step_notices": False},
}


@pytest.mark.parametrize("invariant", [lost, broken_promise])
def test_no_interleaving_of_the_protocol_loses_data_or_breaks_a_promise(invariant):
    way, states = search(Protocol(), invariant)
    assert way is None, "\n".join(way or [])
    assert states > 10_000, "the model has become too small to say anything"


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_data_is_lost_when(mutation):
    way, _ = search(replace(Protocol(), **MUTATIONS[mutation]))
    assert way is not None


@pytest.mark.parametrize("mutation", [each for each in MUTATIONS if each.startswith(("reserv", "the lease closes"))])
def test_looking_at_publication_saves_the_refs_but_not_the_work_when(mutation):
    mutated = replace(Protocol(), publish_looks=True, **MUTATIONS[mutation])
    assert search(mutated, lost)[0] is None
    assert search(mutated, broken_promise)[0] is not None
