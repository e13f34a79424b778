"""The boundary captured is the one that was named, as the teacher computed it."""

from __future__ import annotations

import pytest
import teachers
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from zgstore.building.capture import Capture, Pool, points, run
from zgstore.errors import Invalid

torch.set_num_threads(1)


def hidden_states(model, batch):
    with torch.inference_mode():
        return model.eval()(**batch, output_hidden_states=True)


@pytest.mark.parametrize(
    ("make", "layers", "norm"),
    [
        (teachers.llama, "model.layers", "model.norm"),
        (teachers.qwen2, "model.layers", "model.norm"),
        (teachers.gpt2, "transformer.h", "transformer.ln_f"),
    ],
)
def test_a_language_models_states_are_the_ones_named(make, layers, norm):
    model, batch = make(), teachers.tokens(right=[(1, 2)])
    names = [f"{layers}.0:in", f"{layers}.0:out", f"{layers}.1:in", f"{layers}.2:out", f"{norm}:in", f"{norm}:out"]
    columns = run(model, batch, names).columns
    assert list(columns) == names
    theirs = hidden_states(model, batch)
    assert torch.equal(columns[f"{layers}.0:in"], theirs.hidden_states[0])
    assert torch.equal(columns[f"{layers}.0:out"], theirs.hidden_states[1])
    assert torch.equal(columns[f"{layers}.0:out"], columns[f"{layers}.1:in"])
    assert torch.equal(columns[f"{layers}.2:out"], columns[f"{norm}:in"])
    assert torch.equal(columns[f"{norm}:out"], theirs.hidden_states[-1])
    assert not torch.equal(columns[f"{norm}:in"], columns[f"{norm}:out"])


def test_norm_and_head_on_the_last_boundary_give_the_teachers_logits():
    model, batch = teachers.llama(), teachers.tokens()
    columns = run(model, batch, ["model.norm:in", "model.norm:out"]).columns
    logits = hidden_states(model, batch).logits
    with torch.no_grad():
        assert torch.equal(model.lm_head(model.model.norm(columns["model.norm:in"])), logits)
        assert torch.equal(model.lm_head(columns["model.norm:out"]), logits)


@pytest.mark.parametrize("in_place", [False, True])
def test_layer_i_adds_ten_to_the_i(in_place):
    teacher = teachers.Powers(4, in_place=in_place)
    names = [f"layers.{at}:{side}" for at in range(4) for side in ("in", "out")]
    capture = Capture(teacher, names)
    for _ in range(3):
        columns = capture({"x": torch.zeros(2, 3)}).columns
        for at in range(4):
            before, after = columns[f"layers.{at}:in"], columns[f"layers.{at}:out"]
            assert torch.equal(before, torch.full((2, 3), float("1" * at or "0")))
            assert torch.equal(after, torch.full((2, 3), float("1" * (at + 1))))
            if at:
                assert torch.equal(before, columns[f"layers.{at - 1}:out"])


@pytest.mark.parametrize(("make", "shape"), [(teachers.mlp, (5, 6)), (teachers.cnn, (5, 3, 8, 8))])
def test_teachers_without_a_sequence_are_teachers(make, shape):
    model = make()
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    columns = run(model, {"pixels": x}, [f"{at}:{side}" for at in range(5) for side in ("in", "out")]).columns
    assert torch.equal(columns["0:in"], x)
    for at in range(4):
        assert torch.equal(columns[f"{at}:out"], columns[f"{at + 1}:in"])
    with torch.no_grad():
        assert torch.equal(columns["4:out"], model.eval()(x))


def test_the_teacher_is_in_eval_mode_whatever_its_factory_left():
    model = nn.Sequential(nn.Dropout(0.5), nn.Identity()).train()
    capture = Capture(model, ["0:out"])
    x = torch.ones(4, 50)
    assert torch.equal(capture({"x": x}).columns["0:out"], x)
    model.train()
    assert torch.equal(capture({"x": x}).columns["0:out"], x)


def test_padding_is_stripped_on_either_side():
    model = teachers.llama()
    batch = teachers.tokens(rows=3, positions=7, left=[(0, 2)], right=[(2, 3)])
    names = ["model.layers.1:in", "model.norm:in"]
    padded = run(model, batch, names, context=["input_ids"])
    bare = run(
        model, batch, names, context=["input_ids", "attention_mask"], lengths="attention_mask", sequence=["input_ids"]
    )
    real = batch["attention_mask"].bool()
    for name in names:
        assert padded.columns[name].shape == (3, 7, 32)
        assert torch.equal(bare.columns[name], padded.columns[name][real])
    assert bare.lengths.tolist() == [5, 7, 4]
    assert bare.starts.tolist() == [2, 0, 0]
    assert torch.equal(bare.context["input_ids"], batch["input_ids"][real])
    assert bare.packed == {*names, "input_ids", "attention_mask"}
    assert padded.packed == frozenset()
    assert len(bare) == len(padded) == 3


def test_later_batches_end_at_the_deepest_point():
    teacher = teachers.Powers(4)
    capture = Capture(teacher, ["layers.0:in", "layers.1:out"])
    for _ in range(3):
        capture({"x": torch.zeros(1, 1)})
    assert teacher.runs == 1


def test_a_teacher_that_swallows_every_exception_does_not_swallow_the_end():
    teacher = teachers.Guarded()
    capture = Capture(teacher, ["first:out"])
    for _ in range(3):
        assert capture({"x": torch.zeros(1, 2)}).columns["first:out"].tolist() == [[1.0, 1.0]]
    assert teacher.swallowed == 0


def test_a_teacher_that_swallows_every_exception_does_not_swallow_a_refusal():
    with pytest.raises(Invalid, match="batch of 2 rows"):
        run(nn.Sequential(Halved()), {"x": torch.zeros(2, 2)}, ["0.inner:out"])


class Halved(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, x):
        try:
            return self.inner(x[:1])
        except Exception:  # noqa: BLE001
            return x


def test_a_module_that_is_called_twice_is_refused():
    with pytest.raises(Invalid, match="'shared:in' is met twice"):
        run(teachers.Twice(), {"x": torch.zeros(1, 1)}, ["shared:in"])


def test_a_module_that_is_never_called_is_refused():
    with pytest.raises(Invalid, match="'unused:out' is never met"):
        run(teachers.Twice(), {"x": torch.zeros(1, 1)}, ["last:in", "unused:out"])


@pytest.mark.parametrize(
    "point", ["model.layer.1:in", "model.layers.1:inn", "model.layers.1", "model.layers.9:in", ":in"]
)
def test_a_point_the_teacher_lacks_is_refused_with_the_nearest(point):
    with pytest.raises(Invalid, match="no point") as caught:
        Capture(teachers.llama(), [point])
    if point != ":in":
        assert "model.layers.1" in caught.value.hint or "model.layers" in caught.value.hint


def test_a_point_that_is_listed_twice_is_refused():
    with pytest.raises(Invalid, match="listed twice"):
        Capture(teachers.Powers(), ["layers.0:in"], outputs=["layers.0:in"])


@pytest.mark.parametrize("name", ["tensor", "tuple", "list", "dict", "dataclass", "nested"])
def test_results_of_any_common_form_are_looked_through(name):
    x = torch.arange(4.0).view(2, 2)
    found = run(teachers.Shapes(), {"x": x}, [f"{name}:out"]).columns[f"{name}:out"]
    assert torch.equal(found, x if name == "tensor" else x + 1)


def test_a_result_without_a_tensor_is_refused_saying_what_it_is():
    with pytest.raises(Invalid, match="'text:out' holds no tensor: it is a str"):
        run(teachers.Shapes(), {"x": torch.zeros(2, 2)}, ["text:out"])


def test_keyword_inputs_are_taken_in_the_forwards_order():
    x = torch.arange(4.0).view(2, 2)
    assert torch.equal(run(teachers.Shapes(), {"x": x}, ["keyword:in"]).columns["keyword:in"], x)


def test_labels_and_ids_are_never_passed_to_the_teacher():
    seen = {}

    class Teacher(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Identity()

        def forward(self, x, labels=None, id=None, extra=None):
            seen.update(labels=labels, id=id, extra=extra)
            return self.inner(x)

    batch = {"x": torch.zeros(2, 1), "labels": torch.zeros(2), "id": torch.arange(2), "extra": torch.ones(2)}
    found = run(Teacher(), batch, ["inner:in"])
    assert seen["labels"] is None
    assert seen["id"] is None
    assert seen["extra"] is batch["extra"]
    assert found.ids.tolist() == [0, 1]
    Capture(Teacher(), ["inner:in"], inputs=["x", "labels"])(batch)
    assert seen["labels"] is batch["labels"]


def test_a_batch_the_teacher_cannot_be_called_with_is_refused_with_both_lists():
    with pytest.raises(Invalid, match="takes x, and the batch has a, b"):
        run(teachers.Powers(), {"a": torch.zeros(1), "b": torch.zeros(1)}, ["layers.0:in"])
    with pytest.raises(Invalid, match="no 'x' for the teacher"):
        Capture(teachers.Powers(), ["layers.0:in"], inputs=["x"])({"a": torch.zeros(1)})


def test_states_that_lack_a_position_are_refused_saying_shapes():
    batch = teachers.tokens(rows=2, positions=5)
    for lengths in (None, "attention_mask"):
        with pytest.raises(Invalid, match=r"\[2, 4, 8\].*5 positions: lengths must agree"):
            run(teachers.Shorter(), batch, ["cut:out"], lengths=lengths)


def test_positions_may_lie_on_any_axis_of_what_keeps_its_padding():
    class Convolved(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.conv = nn.Embedding(61, 8), nn.Conv1d(8, 4, 3, padding=1)

        def forward(self, input_ids):
            return self.conv(self.embedding(input_ids).transpose(1, 2))

    batch = teachers.tokens(rows=2, positions=5)
    assert run(Convolved(), batch, ["conv:out"]).columns["conv:out"].shape == (2, 4, 5)
    with pytest.raises(Invalid, match="lengths must agree"):
        run(Convolved(), batch, ["conv:out"], lengths="attention_mask")


def test_tensors_without_the_batchs_rows_are_refused_saying_shapes():
    with pytest.raises(Invalid, match=r"\[1, 7, 8\] for a batch of 3 rows"):
        run(teachers.llama(), teachers.tokens(), ["model.rotary_emb:out"])


def test_what_is_no_batch_is_refused_before_the_teacher_runs():
    teacher = teachers.Powers()
    for wrong in ([torch.zeros(1)], {"x": [1.0]}, {"x": torch.zeros(0, 2)}):
        with pytest.raises(Invalid):
            run(teacher, wrong, ["layers.0:in"])
    assert teacher.runs == 0


def test_only_floating_boundaries_are_cast():
    model, batch = teachers.llama(), teachers.tokens()
    capture = Capture(
        model, ["model.embed_tokens:in", "model.layers.1:in"], outputs=["model.norm:out"], dtype=torch.bfloat16
    )
    found = capture(batch)
    plain = run(model, batch, ["model.layers.1:in"]).columns["model.layers.1:in"]
    assert found.columns["model.embed_tokens:in"].dtype == torch.int64
    assert torch.equal(found.columns["model.layers.1:in"], plain.bfloat16())
    assert found.outputs["model.norm:out"].dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_states_are_kept_in_the_dtype_that_the_teacher_computes(dtype):
    model = teachers.llama().to(dtype)
    assert run(model, teachers.tokens(), ["model.layers.1:in"]).columns["model.layers.1:in"].dtype == dtype


def test_outputs_of_the_sequence_lose_their_padding_and_others_do_not():
    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.pool, self.score = nn.Embedding(61, 4), Mean(), Mean(axis=2)

        def forward(self, input_ids):
            x = self.embedding(input_ids)
            return self.pool(x), self.score(x)

    batch = teachers.tokens(rows=2, positions=4, right=[(0, 1)])
    capture = Capture(
        Pooled(), ["pool:in"], outputs=["embedding:out", "pool:out", "score:out"], lengths="attention_mask",
        sequence=["score:out"],
    )  # fmt: skip
    found = capture(batch)
    assert found.outputs["embedding:out"].shape == (7, 4)
    assert found.outputs["pool:out"].shape == (2, 4)
    assert found.outputs["score:out"].shape == (7,)
    assert found.packed == {"pool:in", "embedding:out", "score:out"}


class Mean(nn.Module):
    def __init__(self, axis=1):
        super().__init__()
        self.axis = axis

    def forward(self, x):
        return x.mean(self.axis)


def test_context_that_the_batch_lacks_is_refused():
    with pytest.raises(Invalid, match="no 'position_ids'"):
        run(teachers.llama(), teachers.tokens(), ["model.norm:in"], context=["position_ids"])


def test_hooks_are_gone_when_the_capture_is_closed():
    teacher = teachers.Powers()
    with Capture(teacher, ["layers.0:in", "layers.1:out"]) as capture:
        capture({"x": torch.zeros(1, 1)})
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in teacher.layers)
    assert teacher(torch.zeros(1, 1)).item() == 1111


def test_others_may_call_the_teacher_between_batches():
    teacher = teachers.Powers()
    with Capture(teacher, ["layers.0:in"]) as capture:
        capture({"x": torch.zeros(1, 1)})
        assert teacher(torch.zeros(1, 1)).item() == 1111
        assert capture({"x": torch.ones(1, 1)}).columns["layers.0:in"].item() == 1


def test_a_fault_of_the_teachers_own_comes_through_and_leaves_it_usable():
    model = teachers.llama()
    capture = Capture(model, ["model.norm:in"])
    with pytest.raises(IndexError):
        capture({"input_ids": torch.full((1, 3), 1000)})
    assert capture(teachers.tokens()).columns["model.norm:in"].shape == (3, 7, 32)


def test_captured_tensors_may_enter_autograd_and_are_the_callers():
    teacher = teachers.Powers()
    one = run(teacher, {"x": torch.zeros(2, 2)}, ["layers.0:out"]).columns["layers.0:out"]
    other = run(teacher, {"x": torch.ones(2, 2)}, ["layers.0:out"]).columns["layers.0:out"]
    assert (one[0, 0].item(), other[0, 0].item()) == (1.0, 2.0)
    assert not one.is_inference()
    one.requires_grad_().sum().backward()
    assert one.grad is not None


def test_memory_that_is_given_back_is_used_again():
    pool = Pool()
    capture = Capture(teachers.Powers(), ["layers.0:out"], pool=pool)
    first = capture({"x": torch.zeros(8, 600)}).columns["layers.0:out"]
    at = first.untyped_storage().data_ptr()
    pool.give(first)
    del first
    again = capture({"x": torch.ones(8, 599)}).columns["layers.0:out"]
    assert again.untyped_storage().data_ptr() == at
    assert again.is_contiguous()
    assert bool((again == 2).all())
    third = capture({"x": torch.ones(8, 600)}).columns["layers.0:out"]
    assert third.untyped_storage().data_ptr() != at


@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (7, 13), (3, 0)])
def test_a_pool_gives_tensors_of_any_shape(shape):
    pool = Pool()
    for dtype in (torch.float64, torch.bfloat16, torch.bool, torch.float8_e4m3fn):
        tensor = pool.take(shape, dtype)
        assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype)
        pool.give(tensor)


def test_points_are_listed_in_the_order_in_which_they_are_met():
    found = points(teachers.Twice(), {"x": torch.zeros(2, 3)})
    assert [(point.name, point.calls) for point in found] == [
        ("shared:in", 2), ("shared:out", 2), ("last:in", 1), ("last:out", 1),
    ]  # fmt: skip
    assert {(point.shape, point.dtype) for point in found} == {((2, 3), "F32")}


def test_points_of_a_skeleton_need_no_weights():
    with FakeTensorMode():
        model = teachers.llama()
        batch = {key: torch.zeros(value.shape, dtype=value.dtype) for key, value in teachers.tokens().items()}
        found = {point.name: point for point in points(model, batch)}
    assert found["model.layers.2:in"].shape == (3, 7, 32)
    real = {point.name: point for point in points(teachers.llama(), teachers.tokens())}
    assert found == real
