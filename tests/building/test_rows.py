"""Batches are what they should be or say what they are; rows lose their padding and keep their digests."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zgstore.building.rows import (
    SampleBatch,
    batch_digest,
    check_batch,
    ids_of,
    join,
    labels_masked,
    lengths_of,
    row_digests,
    strip,
)
from zgstore.errors import Invalid
from zgstore.format.fields import all_digests


def mask_of(runs, positions):
    mask = torch.zeros(len(runs), positions, dtype=torch.int64)
    for row, (start, length) in enumerate(runs):
        mask[row, start : start + length] = 1
    return mask


RUNS = st.integers(1, 9).flatmap(
    lambda positions: st.tuples(
        st.just(positions),
        st.lists(
            st.integers(0, positions - 1).flatmap(
                lambda start: st.tuples(st.just(start), st.integers(1, positions - start))
            ),
            min_size=1,
            max_size=5,
        ),
    )
)


@given(RUNS, st.sampled_from([torch.int64, torch.bool, torch.float32, torch.bfloat16, torch.uint8]))
def test_every_run_of_ones_is_found(case, dtype):
    positions, runs = case
    mask = mask_of(runs, positions).to(dtype)
    lengths, starts = lengths_of({"mask": mask}, "mask")
    assert list(zip(starts.tolist(), lengths.tolist(), strict=True)) == runs
    assert lengths.dtype == starts.dtype == torch.int64
    x = torch.arange(mask.numel() * 2).view(*mask.shape, 2)
    assert torch.equal(strip(x, lengths, starts), x[mask.bool()])


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([[1, 1, 1], [1, 0, 1]], "row 1.*one run"),
        ([[0, 0, 0], [1, 1, 1]], "row 0.*all zeros"),
        ([[1, 2, 1]], "row 0.*0 and 1"),
        ([[1, -1, 0]], "row 0.*0 and 1"),
        ([[[1]]], "shape"),
        ([3, 0], "row 1.*no position"),
    ],
)
def test_a_mask_that_is_no_run_of_ones_is_refused_with_its_row(rows, why):
    with pytest.raises(Invalid, match=why):
        lengths_of({"mask": torch.tensor(rows)}, "mask")


def test_a_fraction_is_no_mask():
    with pytest.raises(Invalid, match="0 and 1"):
        lengths_of({"mask": torch.tensor([[1.0, 0.5]])}, "mask")


def test_integer_lengths_mean_padding_on_the_right():
    lengths, starts = lengths_of({"n": torch.tensor([2, 3], dtype=torch.int32)}, "n")
    assert (lengths.tolist(), starts.tolist()) == ([2, 3], [0, 0])


def test_a_missing_rule_names_what_there_is():
    with pytest.raises(Invalid, match="no 'mask'") as caught:
        lengths_of({"ids": torch.zeros(2, 3)}, "mask")
    assert "ids" in caught.value.hint


def test_stripping_what_has_no_padding_copies_nothing():
    x = torch.zeros(2, 3, 4)
    assert strip(x, torch.tensor([3, 3]), torch.tensor([0, 0])).data_ptr() == x.data_ptr()


@pytest.mark.parametrize("shape", [(2, 2, 4), (1, 3, 4), (2,)])
def test_stripping_what_is_too_short_is_refused(shape):
    with pytest.raises(Invalid, match="lengths must agree"):
        strip(torch.zeros(shape), torch.tensor([3, 1]), torch.tensor([0, 0]))


class MappingLike:
    def __getitem__(self, key):
        return torch.zeros(2)

    def keys(self):
        return ["a"]


@pytest.mark.parametrize(
    ("batch", "why"),
    [
        (torch.zeros(2), "gave a torch.Tensor where"),
        ([torch.zeros(2)], "list of 1"),
        ((1, 2), "tuple of 2"),
        (MappingLike(), "MappingLike"),
        (None, "NoneType"),
        ("text", "str of 4"),
        ({"a": [1, 2]}, "'a' is a list of 2"),
        ({"a": torch.zeros(2), "texts": ["x", "y"]}, "'texts' is a list"),
        ({"a": {"b": torch.zeros(2)}}, "'a' is a dict"),
        ({1: torch.zeros(2)}, "key 1"),
        ({}, "without tensors"),
        ({"a": torch.zeros(2), "b": torch.zeros(3)}, "a 2, b 3"),
        ({"a": torch.zeros(0, 3)}, "zero rows"),
        ({"a": torch.tensor(1.0)}, "no axis"),
        ({"a": torch.zeros(2, dtype=torch.complex64)}, "complex"),
        ({"a": torch.eye(2).to_sparse()}, "sparse"),
    ],
)
def test_what_is_no_batch_is_refused_saying_what_was_got(batch, why):
    with pytest.raises(Invalid, match=why):
        check_batch(batch)


def test_any_mapping_of_tensors_is_a_batch():
    assert check_batch(OrderedDict(a=torch.zeros(2), b=torch.zeros(2, 5))) == 2
    assert check_batch({"a": torch.zeros(2), "w": torch.zeros(5)}, constants=["w"]) == 2
    assert check_batch({"a": torch.zeros(2), "id": [b"x", b"y"]}) == 2


def test_labels_are_masked_only_if_all_are():
    masked = torch.full((2, 3), -100)
    assert labels_masked({"labels": masked})
    one = masked.clone()
    one[1, 2] = 5
    assert not labels_masked({"labels": one})
    assert not labels_masked({"input_ids": masked})


def test_ids_are_the_batchs_or_the_stream_index():
    x = torch.zeros(3)
    assert ids_of({"x": x}, first=40).tolist() == [40, 41, 42]
    assert ids_of({"x": x, "id": torch.tensor([7, 5, 6], dtype=torch.int32)}).tolist() == [7, 5, 6]
    assert ids_of({"x": x, "id": [b"ab", b"cd", b"ef"]}).tolist() == [[97, 98], [99, 100], [101, 102]]
    for wrong in (torch.zeros(3), torch.zeros(3, 2), [b"a", b"bc", b"d"], ["a", "b", "c"]):
        with pytest.raises(Invalid, match="'id'"):
            ids_of({"x": x, "id": wrong})


def batch(**changes):
    base = {"input_ids": torch.tensor([[5, 6, 7, 0], [0, 0, 8, 9]]), "mask": torch.tensor([[1, 1, 1, 0], [0, 0, 1, 1]])}
    return base | changes


def digests(which, **changes):
    return row_digests(which, **({"lengths": "mask", "sequence": ["input_ids"]} | changes))


def test_padding_is_no_part_of_a_row():
    longer = {
        "input_ids": torch.tensor([[1, 5, 6, 7, 2, 2], [8, 9, 3, 3, 3, 3]]),
        "mask": torch.tensor([[0, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0]]),
    }
    assert digests(longer) == digests(batch())
    assert batch_digest(longer) != batch_digest(batch())


def test_a_rows_digest_is_its_own():
    both = digests(batch())
    alone = [digests({key: value[row : row + 1] for key, value in batch().items()})[0] for row in (0, 1)]
    assert both == alone
    turned = digests({key: value.flip(0) for key, value in batch().items()})
    assert turned == both[::-1]


def test_ids_and_constants_are_no_part_of_a_row():
    assert digests(batch(id=torch.tensor([3, 4]))) == digests(batch())
    assert digests(batch(id=[b"a", b"b"])) == digests(batch())
    assert digests(batch(w=torch.zeros(7)), constants=["w"]) == digests(batch())
    assert batch_digest(batch(id=torch.tensor([3, 4]))) == batch_digest(batch())
    assert batch_digest(batch(id=torch.tensor([3, 4])), ids=True) != batch_digest(
        batch(id=torch.tensor([3, 5])), ids=True
    )


def test_key_dtype_shape_and_value_each_change_a_row():
    ids = batch()["input_ids"]
    plain = row_digests({"x": ids})
    others = [
        row_digests({"y": ids}),
        row_digests({"x": ids.view(torch.float64)}),
        row_digests({"x": ids.view(2, 2, 2)}),
        row_digests({"x": ids + 1}),
        row_digests({"x": ids, "z": ids}),
    ]
    assert len({digest[0] for digest in [plain, *others]}) == 6


def test_the_order_of_keys_and_the_layout_in_memory_change_nothing():
    one = batch(more=torch.randn(2, 3, 4))
    other = {key: one[key] for key in reversed(one)}
    other["more"] = one["more"].transpose(1, 2).contiguous().transpose(1, 2)
    assert digests(one) == digests(other)
    assert batch_digest(one) == batch_digest(other)


@given(st.text(max_size=4), st.text(max_size=4), st.binary(min_size=2, max_size=6), st.binary(min_size=2, max_size=6))
def test_no_two_batches_are_written_alike(a, b, x, y):
    def of(*pairs):
        return {key: torch.frombuffer(bytearray(value), dtype=torch.uint8).view(1, -1) for key, value in pairs}

    one, other = of((a, x)), of((b, y))
    if (a, x) != (b, y) and "id" not in (a, b):
        assert batch_digest(one) != batch_digest(other)
        assert row_digests(one) != row_digests(other)


def test_large_rows_are_digested_as_small_ones_are(monkeypatch):
    before = digests(batch(x=torch.zeros(2, 50)))
    monkeypatch.setattr("zgstore.building.rows._JOIN_BYTES", 8)
    assert digests(batch(x=torch.zeros(2, 50))) == before


def test_digests_are_joined_and_split():
    found = digests(batch())
    assert len(join(found)) == 64
    assert list(all_digests(join(found))) == found


def test_a_sample_batch_knows_its_rows():
    assert len(SampleBatch(columns={"h": torch.zeros(5, 2)})) == 5
    assert len(SampleBatch(columns={"h": torch.zeros(5, 2)}, lengths=torch.tensor([2, 3]))) == 2
    assert len(SampleBatch(columns={}, context={"x": torch.zeros(4)})) == 4
    waited = []
    ready = SampleBatch(columns={}, ready=lambda: waited.append(1)).wait()
    assert ready.wait() is ready
    assert waited == [1]
