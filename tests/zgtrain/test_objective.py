"""Losses by hand, masks that mask, and counts of the whole global batch."""

from __future__ import annotations

import pytest
import torch
from students import noise_of
from torch import nn
from torch.nn import functional

import zgstore
from zgtrain.job import LossSpec, OptimizerSpec, ScheduleSpec
from zgtrain.objective import (
    anchor_,
    cosine,
    make_objective,
    masked_sum,
    mse,
    relative_mse,
    residual_error,
    smooth_l1,
    token_ce,
    token_kl,
)
from zgtrain.optimizing import make_optimizer, rate, set_rate
from zgtrain.source import Batch

N, T, D, V = 3, 5, 8, 11


def test_boundary_losses_are_each_tokens_mean_over_the_width():
    p, t = noise_of(N, T, D), noise_of(N, T, D, seed=1)
    torch.testing.assert_close(mse(p, t), ((p - t) ** 2).mean(-1))
    torch.testing.assert_close(relative_mse(p, t), ((p - t) ** 2).sum(-1) / (t**2).sum(-1))
    torch.testing.assert_close(smooth_l1(p, t).mean(), functional.smooth_l1_loss(p, t))
    torch.testing.assert_close(cosine(p, 3 * p), torch.zeros(N, T), atol=1e-6, rtol=0)
    for loss in (mse, relative_mse, smooth_l1, cosine):
        assert loss(p, t).shape == (N, T)
        assert loss(p[:, 0], t[:, 0]).shape == (N,)
        assert loss(p.bfloat16(), t.bfloat16()).dtype == torch.float32


def test_a_token_of_enormous_norm_does_not_drown_the_others():
    t = noise_of(N, T, D)
    t[0, 0] *= 1e4
    assert float(relative_mse(0.9 * t, t).max()) == pytest.approx(0.01, rel=1e-4)
    assert bool(torch.isfinite(relative_mse(t, torch.zeros_like(t))).all())


def test_a_masked_token_does_not_enter_whatever_it_holds():
    values, mask = torch.ones(2, 3), torch.tensor([[True, True, False], [True, False, False]])
    values[0, 2] = float("nan")
    assert float(masked_sum(values, mask)) == 3.0
    assert float(masked_sum(torch.ones(4), None)) == 4.0


def test_token_cross_entropy_is_that_of_transformers():
    logits, labels = noise_of(N, T, V), torch.arange(N * T).reshape(N, T) % V
    labels[0, 1] = labels[2, 4] = -100
    expected = functional.cross_entropy(logits[:, :-1].reshape(-1, V), labels[:, 1:].reshape(-1), reduction="sum")
    torch.testing.assert_close(token_ce(logits, labels).sum(), expected)
    assert token_ce(logits, labels).shape == (N, T - 1)
    assert float(token_ce(logits, labels)[0, 0]) == 0.0


def test_the_divergence_is_the_teachers_from_the_students():
    student, teacher = noise_of(N, T, V), noise_of(N, T, V, seed=1)
    expected = functional.kl_div(student.log_softmax(-1), teacher.softmax(-1), reduction="none").sum(-1)
    torch.testing.assert_close(token_kl(student, teacher), expected)
    torch.testing.assert_close(token_kl(teacher, teacher), torch.zeros(N, T))


def test_to_copy_the_residual_has_an_error_of_one():
    h, t = noise_of(N, T, D), noise_of(N, T, D, seed=1)
    mask = torch.ones(N, T, dtype=torch.bool)
    mask[0, 3:] = False
    error, moved = residual_error(h, h, t, mask)
    torch.testing.assert_close(error, moved)
    assert float(residual_error(t, h, t, mask)[0]) == 0.0


def batch_of(rows, *, labels=True, seed=0):
    mask = torch.arange(T) < torch.tensor([1 + (row % T) for row in rows])[:, None]
    context = {"mask": mask}
    if labels:
        context["labels"] = (torch.arange(len(rows) * T).reshape(-1, T) % V).masked_fill(~mask, -100)
    return Batch(noise_of(len(rows), T, D, seed=seed), noise_of(len(rows), T, D, seed=seed + 1), context)


def test_sums_over_counts_of_micro_batches_add_up_to_the_whole_batch():
    head = nn.Linear(D, V)
    objective = make_objective(LossSpec(boundary_weight=1.25, token_ce=0.1, token_kl=0.3), head)
    whole = batch_of(range(6))
    prediction = noise_of(6, T, D, seed=9)

    def cut(rows):
        return Batch(whole.source[rows], whole.target[rows], {name: v[rows] for name, v in whole.context.items()})

    pieces = [slice(0, 1), slice(1, 4), slice(4, 6)]
    counts = objective.counts([cut(rows) for rows in pieces])
    assert counts == objective.counts([whole])
    assert counts["boundary"] == int(whole.context["mask"].sum())
    assert counts["token_ce"] == int((whole.context["labels"][:, 1:] != -100).sum())
    parts = []
    for rows in pieces:
        piece = cut(rows)
        parts.append(objective.total(objective.sums(prediction[rows], piece.target, piece.context), counts))
    whole_loss = objective.total(objective.sums(prediction, whole.target, whole.context), counts)
    torch.testing.assert_close(sum(parts), whole_loss)
    assert not any(parameter.requires_grad for parameter in head.parameters())


def test_what_an_objective_lacks_is_named():
    with pytest.raises(zgstore.Invalid, match=r"loss\.name is 'mae'"):
        make_objective("mae")
    with pytest.raises(zgstore.Invalid, match="interface"):
        make_objective(LossSpec(token_ce=1.0))
    with pytest.raises(zgstore.Invalid, match="so is all else"):
        make_objective(LossSpec(boundary_weight=0.0))
    objective = make_objective(LossSpec(token_ce=1.0), nn.Linear(D, V))
    with pytest.raises(zgstore.Invalid, match="labels"):
        objective.counts([batch_of([0], labels=False)])


def test_the_anchor_is_a_decoupled_pull():
    parameter, start = torch.full((2,), 3.0), torch.ones(2)
    anchor_([parameter], [start], lr=0.1, anchor=0.5)
    torch.testing.assert_close(parameter, torch.full((2,), 3.0 - 0.1 * 0.5 * 2.0))


@pytest.mark.parametrize(
    ("schedule", "fractions"),
    [
        (ScheduleSpec(), [1.0, 1.0, 1.0, 1.0]),
        (ScheduleSpec("constant", warmup=2), [0.5, 1.0, 1.0, 1.0]),
        (ScheduleSpec("linear"), [1.0, 0.75, 0.5, 0.25]),
        (ScheduleSpec("linear", final=0.5), [1.0, 0.875, 0.75, 0.625]),
        (ScheduleSpec("cosine", warmup=1), [1.0, 1.0, 0.75, 0.25]),
    ],
)
def test_the_rate_is_a_function_of_the_step(schedule, fractions):
    assert [rate(schedule, step, 4) for step in range(4)] == pytest.approx(fractions)


def test_optimizers_are_made_by_name_and_refuse_what_they_do_not_take():
    parameter = nn.Parameter(torch.zeros(2))
    adamw = make_optimizer(OptimizerSpec("adamw", {"lr": 0.1, "betas": [0.9, 0.95]}), [parameter])
    assert isinstance(adamw, torch.optim.AdamW)
    assert [set_rate(adamw, fraction) for fraction in (1.0, 0.5, 0.5, 1.0)] == [0.1, 0.05, 0.05, 0.1]
    assert isinstance(make_optimizer(OptimizerSpec("sgd", {"lr": 0.1, "momentum": 0.9}), [parameter]), torch.optim.SGD)
    for options in ({"momentum": 0.9}, {"betas": [0.9]}, {"betas": "x"}, {"eps": float("nan")}):
        with pytest.raises(zgstore.Invalid, match="refuses") as caught:
            make_optimizer(OptimizerSpec("adamw", {"lr": 0.1, **options}), [parameter])
        assert caught.value.fields["key"] == "train.optimizer"
    with pytest.raises(zgstore.Invalid, match="no parameter to train"):
        make_optimizer(OptimizerSpec("adamw", {"lr": 0.1}), [])
