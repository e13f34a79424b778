"""A whole state in one file: it comes back bit for bit, or it is refused."""

from __future__ import annotations

import errno
import os
import random

import numpy as np
import pytest
import torch
from students import noise_of
from torch import nn

import zgstore
from tests.faults import steps
from zgtrain.checkpoint import (
    block_state,
    capture_rng,
    load,
    passing_buffers,
    restore_block,
    restore_rng,
    rng_kept,
    save,
    seed_all,
    state_digest,
)


def state():
    return {
        "job": "one", "block": None, "step": 3, "rate": 0.1, "losses": [1.5, 2.5], "rng": capture_rng(),
        "tensors": {"a": noise_of(2, 3).to(torch.bfloat16), "b": torch.tensor(True), "c": torch.empty(0)},
    }  # fmt: skip


def test_a_state_comes_back_bit_for_bit(tmp_path):
    before = state()
    save(tmp_path / "deep/er/c.pt", before)
    after = load(tmp_path / "deep/er/c.pt")
    assert after.keys() == before.keys()
    assert after["losses"] == before["losses"]
    for name, tensor in before["tensors"].items():
        assert torch.equal(after["tensors"][name], tensor)
        assert after["tensors"][name].dtype == tensor.dtype
    assert load(tmp_path / "none.pt") is None
    assert [each.name for each in (tmp_path / "deep/er").iterdir()] == ["c.pt"]


def test_a_save_that_fails_leaves_the_previous_one(tmp_path):
    path = tmp_path / "c.pt"
    save(path, {"step": 1})
    with pytest.raises((AttributeError, TypeError, RuntimeError)):
        save(path, {"step": 2, "what": lambda: None})
    assert load(path)["step"] == 1
    assert [each.name for each in tmp_path.iterdir()] == ["c.pt"]


@pytest.mark.skipif(bool(steps.cannot()), reason=steps.cannot() or "it can")
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_cannot_be_written_says_so_and_the_previous_one_stays(tmp_path, number):
    path = tmp_path / "c.pt"
    save(path, {"step": 1})

    def fails(step):
        return number if step.call in {"write", "writev"} else steps.GO

    # A tensor that goes through a buffer and one that does not: what torch makes of it differs.
    for size in (1, 1 << 20):
        run = steps.run(lambda size=size: save(path, {"step": 2, "tensor": torch.zeros(size)}), tmp_path, fails)
        assert (run.error, os.strerror(number) in run.message) == ("OSError", True), run.message
    assert load(path)["step"] == 1
    assert [each.name for each in tmp_path.iterdir()] == ["c.pt"]


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "text", "pickle"])
def test_a_damaged_file_is_corrupt_and_says_what_to_do(tmp_path, damage):
    path = tmp_path / "c.pt"
    save(path, {"step": 1, "tensor": torch.zeros(5000)})
    whole = path.read_bytes()
    at = len(whole) // 2
    changed = {
        "cut": whole[:at],
        "flip": whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :],
        "empty": b"",
        "text": b"step = 1",
        "pickle": b"\x80\x04\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x02id\x94\x85\x94R\x94.",
    }
    path.write_bytes(changed[damage])
    with pytest.raises(zgstore.Corrupt) as caught:
        load(path)
    assert "--fresh" in caught.value.hint
    assert caught.value.path == str(path)


def test_a_flipped_bit_anywhere_is_seen_or_changes_nothing(tmp_path):
    path, before = tmp_path / "c.pt", {"step": 1, "losses": [0.5], "tensor": noise_of(64)}
    save(path, before)
    whole = path.read_bytes()
    for at in range(0, len(whole), 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << at % 8)]) + whole[at + 1 :])
        try:
            after = load(path)
        except zgstore.Corrupt:
            continue
        assert (after["step"], after["losses"]) == (1, [0.5])
        assert torch.equal(after["tensor"], before["tensor"])


class Block(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.tied = self.linear
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("angles", torch.ones(3), persistent=False)


def test_a_blocks_state_has_buffers_that_no_state_dict_has():
    one, two = Block(), Block()
    one.seen += 1
    one.angles *= 2
    assert set(block_state(one)) == {"linear.weight", "linear.bias", "seen", "angles"}
    assert state_digest(one) != state_digest(two)
    restore_block(two, {name: tensor.clone() for name, tensor in block_state(one).items()})
    assert state_digest(one) == state_digest(two)


class Changing(nn.Module):
    """A block whose buffers are others once it has run: longer, of another dtype, made, gone."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("cos", torch.ones(2), persistent=False)
        self.register_buffer("sin", torch.ones(5), persistent=False)
        self.register_buffer("later", None, persistent=False)
        self.register_buffer("first", torch.ones(3), persistent=False)

    def run(self):
        self.register_buffer("cos", noise_of(5), persistent=False)
        self.sin = self.sin.double() / 3
        self.later = noise_of(2, 3).t()
        self.inner.register_buffer("made", noise_of(4), persistent=False)
        self.first = None
        return self


def test_buffers_that_a_block_made_as_it_ran_are_put_back_as_they_were():
    one, two = Changing().run(), Changing()
    state = {name: tensor.clone() for name, tensor in block_state(one).items()}
    assert set(passing_buffers(one)) == {"cos", "sin", "later", "inner.made"}
    restore_block(two, state, passing=passing_buffers(one))
    assert state_digest(two) == state_digest(one)
    assert two.first is None
    assert two.later.stride() == one.later.stride()
    assert two.cos.data_ptr() != state["cos"].data_ptr()
    assert two.state_dict().keys() == Changing().state_dict().keys()
    restore_block(one, state)  # of its own it knows which they are
    with pytest.raises(zgstore.Refused, match="nothing for 'later'"):
        restore_block(Changing(), state)


def test_a_buffer_of_the_state_dict_that_changed_is_refused_and_the_remedy_is_said():
    grown = Block()
    grown.seen = torch.zeros(3)
    for state in (block_state(grown), {**block_state(Block()), "seen": torch.zeros(2).double()}):
        with pytest.raises(zgstore.Refused, match="'seen'") as caught:
            restore_block(Block(), state, passing=passing_buffers(grown))
        assert "persistent=False" in caught.value.hint


def test_a_tensor_whose_memory_is_not_its_elements_is_put_back_as_a_plain_one_under_each_of_its_names():
    class Expanded(nn.Module):
        def __init__(self, fill):
            super().__init__()
            self.register_buffer("ones", torch.full((1, 1), fill).expand(3, 4))
            self.inner = nn.Linear(2, 2)
            self.inner.register_buffer("same", self.ones)
            self.register_buffer("turn", torch.full((3,), fill + 1j).conj())
            self.register_buffer("minus", torch.full((3,), fill + 1j).conj().imag)
            self.scale = nn.Parameter(torch.tensor(fill).expand(2), requires_grad=False)

    one, two = Expanded(2.0), Expanded(1.0)
    restore_block(two, block_state(one))
    assert state_digest(two) == state_digest(one)
    assert two.inner.same is two.ones
    assert two.scale.tolist() == [2.0, 2.0]
    assert two.ones.is_contiguous()  # as a file of weights wants it
    assert (two.turn.is_conj(), two.minus.is_neg()) == (False, False)


def test_another_blocks_state_is_refused_by_name():
    with pytest.raises(zgstore.Refused, match=r"linear\.weight"):
        restore_block(Block(5), block_state(Block()))
    with pytest.raises(zgstore.Refused, match="'more'"):
        restore_block(Block(), {**block_state(Block()), "more": torch.zeros(1)})


def test_the_digest_sees_one_bit_dtypes_and_names():
    def digest(tensor, name="weight"):
        module = nn.Module()
        module.register_buffer(name, tensor)
        return state_digest(module)

    zeros = torch.zeros(4)
    negative = zeros.clone()
    negative[2] = -0.0
    digests = [digest(zeros), digest(negative), digest(zeros.half()), digest(zeros.reshape(2, 2)), digest(zeros, "w")]
    assert len(set(digests)) == len(digests)
    assert digest(zeros.reshape(2, 2).t().contiguous().t()) == digest(zeros.reshape(2, 2))
    turned = torch.view_as_complex(noise_of(3, 2))
    assert digest(turned.conj()) == digest(turned.conj().resolve_conj()) != digest(turned)
    assert digest(turned.conj().imag) == digest(-turned.imag)  # which has the bit of a negative


def drawn():
    return random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002 — what blocks may use


def test_every_generator_is_put_back(tmp_path):
    seed_all(11)
    drawn()
    save(tmp_path / "c.pt", {"rng": capture_rng()})
    expected = [drawn(), drawn()]
    seed_all(0)
    restore_rng(load(tmp_path / "c.pt")["rng"])
    assert [drawn(), drawn()] == expected
    restore_rng(load(tmp_path / "c.pt")["rng"])
    with rng_kept():
        drawn()
    assert drawn() == expected[0]
