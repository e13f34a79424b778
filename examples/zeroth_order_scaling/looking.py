"""Looks at a run between its steps: the loss on rows held out, and what its gradient is worth.

λ is the loss's gradient at a layer's output, J the Jacobian of what the layer adds to its input, a the gradient of all
weights by backprop, ĝ the same with the cores as black boxes of n probes and d inputs each.
"""

from __future__ import annotations

import contextlib
import itertools

import torch
from torch.nn import functional

from zgtrain.gradient.cores import asking


def look(training):
    """Numbers of the step that comes next, beside its training."""
    rows = [*training.rows.heldout]
    told = {"heldout_loss": _heldout_loss(training, rows)}
    exact, gains = _gradient(training, rows[: training.micro_rows], exactly=True)
    told["branch_gain"] = gains
    if training.run.probes:
        estimate, _ = _gradient(training, rows[: training.micro_rows], exactly=False)
        noise = (estimate - exact).square().sum() / exact.square().sum()
        told["noise_to_signal"] = noise.item()
        told["cosine"] = functional.cosine_similarity(estimate, exact, dim=0).item()
    return told


@torch.no_grad()
def _heldout_loss(training, rows):
    """Mean over all their tokens, in nats."""
    total = 0.0
    for start in range(0, len(rows), training.micro_rows):
        ids, targets = _batch(training, rows[start : start + training.micro_rows])
        with training.autocast():
            logits = training.model(ids)
        total += functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum").item()
    return total / (len(rows) * training.run.shape.length)


def _gradient(training, rows, *, exactly):
    """The gradient of all weights as one vector in host memory, and each layer's branch gain ‖Jᵀ λ‖ / ‖λ‖."""
    ids, targets = _batch(training, rows)
    now = training.pass_of(training.run.shape.rows)  # with other probes than the step's own
    with contextlib.nullcontext() if exactly else asking(now), training.autocast():
        logits = training.model(ids)
    states = training.model.states
    for state in states:
        state.retain_grad()
    functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()).backward()
    vector = torch.cat([each.grad.flatten().float().cpu() for each in training.model.parameters()])
    training.model.zero_grad()
    grads = [state.grad.float() for state in states]
    pairs = itertools.pairwise(grads)
    return vector, [((before - after).norm() / after.norm()).item() for before, after in pairs]


def _batch(training, rows):
    return tuple(each.to(training.world.device) for each in training.rows.read(rows))
