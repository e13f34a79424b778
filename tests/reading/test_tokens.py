"""A column by token: every real token once, in stored order or shuffled, for those who train on single tokens."""

import pytest
import torch
from stored import RAGGED, make_store, ragged

import zgstore.reading.views as views
from zgstore.errors import Invalid
from zgstore.reading.opening import read


def test_tokens_of_a_ragged_column_are_its_rows_end_to_end(ragged_store):
    whole = torch.cat(ragged_store.rows["h.0"])
    with read(ragged_store.store, "main", columns=["h.0"]) as reader:
        tokens = reader.tokens("h.0")
        assert len(tokens) == len(whole)
        assert reader.bytes_verified == 0  # sizes alone say how many there are
        assert torch.equal(tokens[5], whole[5])
        assert torch.equal(tokens[-1], whole[-1])
        some = [60, 3, 4, 5, 3, 17, 0]
        assert torch.equal(tokens[some], whole[some])
        assert torch.equal(torch.stack(tokens.__getitems__(some)), whole[some])
        with pytest.raises(IndexError):
            tokens[len(whole)]
        with pytest.raises(IndexError):
            tokens.batch(torch.tensor([2**63], dtype=torch.uint64))
        for strange in ([0.9, 1.9], torch.tensor([True, False, True])):
            with pytest.raises(TypeError):
                tokens.batch(strange)


def test_tokens_of_a_padded_column_are_those_that_the_mask_keeps(dense_store):
    mask = torch.stack(dense_store.rows["attention_mask"]).bool()
    with read(dense_store.store, "main", columns=["h.0"]) as reader:
        tokens = reader.tokens("h.0")
        assert torch.equal(tokens[list(range(len(tokens)))], torch.stack(dense_store.rows["h.0"])[mask])
    with read(dense_store.store, "main", columns=["input_ids", "attention_mask"]) as reader:
        tokens = reader.tokens("input_ids")
        assert torch.equal(tokens[list(range(len(tokens)))], torch.stack(dense_store.rows["input_ids"])[mask])


def test_tokens_of_a_padded_column_without_a_mask_are_all(tmp_path, dense_store):
    rows = {"h.0": dense_store.rows["h.0"]}
    made = make_store(tmp_path / "store", rows, int8=("h.0",), masked=(3,))
    with read(made.store, "main") as reader:
        tokens = reader.tokens("h.0")
        assert len(tokens) == 17 * 6
        assert torch.equal(tokens[list(range(len(tokens)))], reader.batch(list(range(17)))["h.0"].flatten(0, 1))


@pytest.mark.parametrize("size", [1, 7, 64, 1000])
def test_shuffled_batches_have_every_token_once_and_begin_anywhere(ragged_store, size, monkeypatch):
    monkeypatch.setattr(views, "CHUNK_BYTES", 16 * 5)  # five tokens
    monkeypatch.setattr(views, "WINDOW_BYTES", 16 * 5 * 4)
    whole = torch.cat(ragged_store.rows["input_ids"]) * 1000 + torch.arange(sum(map(len, ragged_store.rows["h.0"])))
    with read(ragged_store.store, "main", columns=["h.0", "input_ids"]) as reader:
        tokens = reader.tokens("h.0")
        stored = torch.cat(ragged_store.rows["h.0"])
        epoch = list(tokens.batches(size, seed=3))
        assert all(len(batch) == size for batch in epoch[:-1])
        both = torch.cat(epoch).float(), stored.float()
        assert sorted(map(tuple, both[0].tolist())) == sorted(map(tuple, both[1].tolist()))
        assert len(whole) == len(stored)
        if size <= 7:
            assert not torch.equal(torch.cat(epoch), stored)
            assert not torch.equal(torch.cat(list(tokens.batches(size, seed=3, epoch=1))), torch.cat(epoch))
        for start in (0, 1, len(epoch) - 1):
            again = list(tokens.batches(size, seed=3, start=start))
            assert all(torch.equal(a, b) for a, b in zip(again, epoch[start:], strict=True))
        plain = list(tokens.batches(size, shuffle=False, drop_last=True))
        assert len(plain) == len(stored) // size
        assert torch.equal(torch.cat([torch.zeros(0, 8).bfloat16(), *plain]), stored[: len(plain) * size])


def test_skipped_rows_have_no_tokens(tmp_path):
    made = make_store(tmp_path / "store", ragged(), ragged=RAGGED, masked=(2, 3, 4, 5, 6, 7, 9))
    with read(made.store, "main", columns=["h.1"]) as reader:
        tokens = reader.tokens("h.1")
        assert torch.equal(tokens[list(range(len(tokens)))], torch.cat(made.rows["h.1"]))


def test_a_column_without_a_sequence_has_no_tokens(tmp_path):
    made = make_store(tmp_path / "store", {"h.0": [torch.zeros(4)] * 3, "y": [torch.tensor(1)] * 3})
    with read(made.store, "main") as reader:
        for name in ("h.0", "y"):
            with pytest.raises(Invalid):
                reader.tokens(name)
        with pytest.raises(Invalid, match="batch"):
            next(make_and_read(tmp_path).batches(0))


def make_and_read(tmp_path):
    made = make_store(tmp_path / "other", ragged(3), ragged=RAGGED)
    return read(made.store, "main").tokens("h.0")
