"""A gradient estimated from forward queries alone, each row by itself.

R rows, d their width, e the width of an answer, c probes of a chunk; f a function of rows, g the cotangent of its
answer, J its Jacobian. For probes v_k with E[v vᵀ] = I and steps h:

s_k = ⟨g, f(x + h v_k) − f(x − h v_k)⟩ / 2h,    ĝ = (1/n) Σ s_k v_k ≈ Jᵀ g

with one h, s_k and v_k for each row. It is unbiased but for the third derivative's share, which falls with h².
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from decimal import ROUND_CEILING, Context

import torch
from torch import Tensor

import zgstore
from zgtrain.gradient.philox import Key
from zgtrain.gradient.probes import Rows, draw
from zgtrain.job import EPSILON, GradientSpec

Query = Callable[[Tensor], Tensor]

# Of ε, in the distance between 1 and the next number of what the queries compute in. With the least, rounding costs
# about as much as the estimate is worth; with the usual, a tenth of it or less (docs/explanation/zeroth-order.md).
_LEAST, _USUAL = 4, 16


def reach(spec: GradientSpec, dtype: torch.dtype) -> float:
    """ε: how far a probe goes, in units of the root mean square of what it moves.

    Args:
        spec: Which says it, or leaves it to the dtype.
        dtype: What the queries compute in.

    Raises:
        zgstore.Invalid: for one that is lost in that dtype's rounding.
    """
    unit = torch.finfo(dtype).eps
    least, usual = _LEAST * unit, max(EPSILON, _USUAL * unit)
    if spec.epsilon is not None and spec.epsilon < least:
        raise zgstore.Invalid(
            f"train.gradient.epsilon is {spec.epsilon:g}: so small a probe is lost in the rounding of {dtype}",
            hint=f"give at least {_rounded_up(least):g}, or leave it out for {usual:g}",
            key="train.gradient.epsilon",
        )
    return usual if spec.epsilon is None else spec.epsilon


def _rounded_up(number: float) -> float:
    """To two digits, and never below the number."""
    return float(Context(prec=2, rounding=ROUND_CEILING).create_decimal(number))


def estimate(
    query: Query, x: Tensor, cotangent: Tensor, spec: GradientSpec, key: Key, *, chunk: int,
    active: Tensor | None = None, computed: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Jᵀ g from 2n queries, or from n + 1 where differences are forward.

    Accumulated in fp32 at least, probe by probe in their order: how many are queried at a time changes nothing.

    Args:
        query: ``[c, R, d]`` → ``[c, R, e]``: c queries.
        x: ``[R, d]``.
        cotangent: g, ``[R, e]``.
        spec: How many probes, of what kind, and how long; ε is in units of the row's root mean square; see `reach`.
        key: Of the probes.
        chunk: The most of c.
        active: bool ``[R, d]``: what x depends on; the rest of the estimate is 0.
        computed: The coarsest dtype that a query computes in; default that of x, fp32 at least.

    Returns:
        ``[R, d]``, fp32 at least.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    x, cotangent = x.to(dtype), cotangent.to(dtype)
    rows = Rows(x.shape[0], x.shape[1], x.device, dtype, active)
    step = reach(spec, computed or dtype) * _size(x, rows)
    central = spec.differences == "central"
    base = None if central else query(x.unsqueeze(0)).to(dtype)
    total = torch.zeros_like(x)
    for numbers in _chunks(spec.probes, chunk):
        probes = draw(spec.probe, numbers, key, rows)
        moved = query(torch.addcmul(x, step, probes)).to(dtype)
        other = query(torch.addcmul(x, step, probes, value=-1.0)).to(dtype) if base is None else base
        slopes = ((moved - other) * cotangent).sum(-1, keepdim=True) / (2.0 * step if central else step)
        for slope, probe in zip(slopes, probes, strict=True):
            total.addcmul_(slope, probe)
    return total / spec.probes


def _size(x: Tensor, rows: Rows) -> Tensor:
    """Root mean square of each row over what is active, ``[R, 1]``; 1 where that is nothing."""
    squares = x.square() if rows.active is None else x.square().masked_fill(~rows.active, 0.0)
    size = (squares.sum(-1, keepdim=True) / rows.dimension).sqrt()
    return torch.where(size > 0, size, torch.ones_like(size))


def _chunks(count: int, size: int) -> Iterator[range]:
    for first in range(0, count, size):
        yield range(first, min(first + size, count))
