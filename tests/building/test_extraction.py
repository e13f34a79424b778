"""Extractors give trajectories, and rows that they leave out keep their reasons."""

from __future__ import annotations

import pytest
import teachers
import torch

from zgstore.building.capture import Extraction, Trajectory, topk_logits
from zgstore.errors import Invalid

torch.set_num_threads(1)


def layers(teacher, batch, *, names=("h.0", "h.1"), skip=()):
    assert torch.is_inference_mode_enabled()
    states = teacher(batch["input_ids"], batch["attention_mask"], output_hidden_states=True).hidden_states
    kept = [row for row in range(len(states[0])) if row not in skip]
    return Trajectory(
        boundaries={name: states[at][kept] for at, name in enumerate(names)},
        left_out=dict.fromkeys(skip, "too long"),
    )


def test_an_extractors_boundaries_keep_their_order_and_arguments():
    extraction = Extraction(teachers.llama(), layers, {"names": ("b", "a")}, dtype=torch.bfloat16)
    found = extraction(teachers.tokens())
    assert list(found.columns) == ["b", "a"]
    assert {tensor.dtype for tensor in found.columns.values()} == {torch.bfloat16}
    assert found.rows is None
    assert not found.left_out


def test_rows_that_are_left_out_keep_their_reason_and_the_others_their_ids():
    batch = teachers.tokens(rows=4, left=[(1, 2)], right=[(3, 3)]) | {"id": torch.tensor([70, 71, 72, 73])}
    extraction = Extraction(
        teachers.llama(), layers, {"skip": (1,)}, context=["input_ids"], lengths="attention_mask",
        sequence=["input_ids"],
    )  # fmt: skip
    found = extraction(batch)
    assert found.rows == (0, 2, 3)
    assert found.left_out == {1: "too long"}
    assert found.ids.tolist() == [70, 72, 73]
    assert found.lengths.tolist() == [7, 7, 4]
    assert found.columns["h.0"].shape == (18, 32)
    assert len(found) == 3
    kept = [0, 2, 3]
    assert torch.equal(found.context["input_ids"], batch["input_ids"][kept][batch["attention_mask"][kept].bool()])


def test_rows_without_ids_are_numbered_by_the_stream():
    found = Extraction(teachers.llama(), layers, {"skip": (0,)})(teachers.tokens(), first=100)
    assert found.ids.tolist() == [101, 102]


@pytest.mark.parametrize(
    ("give", "why"),
    [
        (lambda x: {"h": x}, "returned a dict of 1"),
        (lambda x: x, "returned a Tensor"),
        (lambda x: Trajectory({"h": [1]}), "'h' is a list of 1"),
        (lambda x: Trajectory({"h": x[:1]}), "batch of 3 rows"),
        (lambda x: Trajectory({"h": x[:2]}, rows=[1, 0]), "kept the rows"),
        (lambda x: Trajectory({"h": x[:1]}, rows=[3]), "batch of 3"),
        (lambda x: Trajectory({"h": x[:2]}, left_out={5: "?"}), "batch of 3"),
        (lambda x: Trajectory({"h": x}, rows=[0, 1, 2], left_out={0: "?"}), "both kept and left out row 0"),
    ],
)
def test_what_is_no_trajectory_of_the_batch_is_refused(give, why):
    extraction = Extraction(teachers.Powers(), lambda _teacher, batch: give(batch["x"]))
    with pytest.raises(Invalid, match=why):
        extraction({"x": torch.zeros(3, 2)})


def test_rows_alone_say_who_was_left_out():
    extraction = Extraction(teachers.Powers(), lambda _t, batch: Trajectory({"h": batch["x"][1:]}, rows=[1, 2]))
    found = extraction({"x": torch.zeros(3, 2)})
    assert found.left_out == {0: "left out by the extractor"}


def test_a_trajectorys_states_may_not_lack_a_position():
    extraction = Extraction(
        teachers.llama(), lambda t, b: Trajectory({"h": t.model.embed_tokens(b["input_ids"])[:, 1:]})
    )
    with pytest.raises(Invalid, match="lengths must agree"):
        extraction(teachers.tokens())


def test_context_outputs_and_constants_of_a_trajectory_are_kept():
    def extract(_teacher, batch):
        return Trajectory(
            boundaries={"h": batch["x"]},
            outputs={"y": batch["x"] * 2},
            context={"flag": torch.ones(3, dtype=torch.bool), "x": batch["x"] + 1},
            constants={"w": torch.zeros(7)},
        )

    found = Extraction(teachers.Powers(), extract, context=["x"], constants=["v"])(
        {"x": torch.zeros(3, 2), "v": torch.ones(5)}
    )
    assert found.outputs["y"].shape == (3, 2)
    assert list(found.context) == ["x", "flag"]
    assert found.context["x"][0, 0] == 1
    assert {name: len(tensor) for name, tensor in found.constants.items()} == {"v": 5, "w": 7}


def test_what_an_extractor_gave_may_be_overwritten_by_it():
    scratch = torch.zeros(2, 2)

    def extract(_teacher, batch):
        scratch.copy_(batch["x"])
        return Trajectory({"h": scratch}, outputs={"y": scratch}, context={"c": scratch}, constants={"k": scratch})

    extraction = Extraction(teachers.Powers(), extract)
    one = extraction({"x": torch.ones(2, 2)})
    extraction({"x": torch.zeros(2, 2)})
    for given in (one.columns["h"], one.outputs["y"], one.context["c"], one.constants["k"]):
        assert bool((given == 1).all())


def test_top_k_logits_are_log_probabilities_less_one_number():
    logits = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(0))
    found = topk_logits(4)(logits)
    assert {name: (tuple(t.shape), t.dtype) for name, t in found.items()} == {
        "topk_values": ((2, 3, 4), torch.float32),
        "topk_ids": ((2, 3, 4), torch.int32),
        "logsumexp": ((2, 3, 1), torch.float32),
    }
    log_p = torch.log_softmax(logits, -1).gather(-1, found["topk_ids"].long())
    assert torch.allclose(found["topk_values"] - found["logsumexp"], log_p, atol=1e-5)
    assert bool((found["topk_values"].diff(dim=-1) <= 0).all())
    with pytest.raises(Invalid, match="top 51"):
        topk_logits(51)(logits)


@pytest.mark.parametrize(
    ("give", "why"),
    [
        (lambda x: Trajectory({}), "no boundary and no output"),
        (lambda x: Trajectory({"h": x}, outputs={"h": x}), "'h' is more than one column"),
        (lambda x: Trajectory({"h": x}, context={"h": x}), "'h' is more than one column"),
        (lambda x: Trajectory({"input_ids": x}), "'input_ids' is more than one column"),
        (lambda x: Trajectory({"id": x}), "column 'id'"),
        (lambda x: Trajectory({"h": x}, context={"start": x}), "column 'start'"),
    ],
)
def test_the_columns_of_a_trajectory_have_names_of_their_own(give, why):
    extraction = Extraction(
        torch.nn.Identity(), lambda _, batch: give(batch["input_ids"].float()), context=["input_ids"]
    )
    with pytest.raises(Invalid, match=why):
        extraction({"input_ids": torch.ones(2, 3, dtype=torch.int64)})
