"""Noise on what a block is to give (experimental): its draws, intervals and preconditioning, and the way back down.

y a target, z = y + σε what a block is shown of it, D(z, σ) its answer, F its own output. N rows of a batch, T tokens,
D width. σ is in the boundary's own unit. Everything here is a pure function: of what is given, and of nothing else.

Formulas: Karras et al., "Elucidating the Design Space of Diffusion-Based Generative Models" (2022), called EDM, for
preconditioning, weight and Heun steps; Shing et al., "DiffusionBlocks" (2025) for a network's depth cut into intervals
of equal probability.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import zgstore

NOISY, SIGMA, LEVEL, WEIGHT = "noisy", "sigma", "level", "weight"  # what a block's context has beside the snapshot's
LOOKED_AT: Final = 1 << 63  # the step that a validation draws for: the same noise every time

Call = Callable[[nn.Module, Tensor, Mapping[str, Any]], Tensor]


@dataclass(frozen=True, slots=True)
class Noise:
    """How noisy a block's targets are, and how its answer is read.

    Args:
        low: The least σ.
        high: The greatest σ.
        normal: Mean and deviation of ln σ, which is normal between the two; None: ln σ is uniform.
        sigma_data: σd, the root mean square of the targets; None: no preconditioning, D = F, and no weight.
    """

    low: float
    high: float
    normal: tuple[float, float] | None = None
    sigma_data: float | None = None

    def __post_init__(self) -> None:
        sizes = (self.low, self.high) if self.sigma_data is None else (self.low, self.high, self.sigma_data)
        if not all(0 < size < math.inf for size in sizes) or self.low > self.high:
            raise zgstore.Invalid(
                f"{self} is no noise", hint="let low, high and sigma_data be finite and above 0, and low not above high"
            )

    def sigma(self, share: float) -> float:
        """The σ below which that share of the draws lies: the inverse of their distribution."""
        if self.normal is None:
            return _between(self.low, self.high, math.exp(_mixed(math.log(self.low), math.log(self.high), share)))
        law = NormalDist(*self.normal)
        probability = _mixed(law.cdf(math.log(self.low)), law.cdf(math.log(self.high)), share)
        return _between(self.low, self.high, _quantile(law, probability))


@dataclass(frozen=True, slots=True)
class Diffusion:
    """The depth of a student as a way down from noise: each of B blocks has an interval of σ.

    Args:
        blocks: B.
        sigma_min: Where the last block ends.
        sigma_max: Where the first one begins.
        p_mean: Pm, the mean of ln σ.
        p_std: Ps, its deviation.
        sigma_data: σd, the root mean square of the targets.
        overlap: γ: each interval learns γ · ln(high / low) beyond both of its ends, but not beyond the whole.
    """

    blocks: int
    sigma_min: float = 0.002
    sigma_max: float = 80.0
    p_mean: float = -1.2
    p_std: float = 1.2
    sigma_data: float = 0.5
    overlap: float = 0.0

    def __post_init__(self) -> None:
        sizes = self.sigma_min, self.sigma_max, self.sigma_data, self.p_std
        if self.blocks < 1 or not all(0 < size < math.inf for size in sizes) or not self.sigma_min < self.sigma_max:
            raise zgstore.Invalid(
                f"{self} has no intervals",
                hint="let blocks be at least 1, every σ and p_std finite and above 0, and sigma_min below sigma_max",
            )

    @property
    def edges(self) -> tuple[float, ...]:
        """B + 1 ascending σ that part the draws into intervals of equal probability.

        s_i = exp(Pm + Ps · Φ⁻¹(p_i)), p_i evenly spaced between the values of Φ at ln σmin and ln σmax.
        """
        law = NormalDist(self.p_mean, self.p_std)
        ends = law.cdf(math.log(self.sigma_min)), law.cdf(math.log(self.sigma_max))
        inner = (_quantile(law, _mixed(*ends, at / self.blocks)) for at in range(1, self.blocks))
        return (self.sigma_min, *inner, self.sigma_max)

    def interval(self, block: int) -> tuple[float, float]:
        """Low and high σ of a block without overlap: the first block in depth has the highest."""
        edges = self.edges
        return edges[self.blocks - 1 - block], edges[self.blocks - block]

    def noise(self, block: int) -> Noise:
        """What a block learns from: its interval, widened by the overlap."""
        low, high = self.interval(block)
        beyond = (high / low) ** self.overlap
        low, high = max(self.sigma_min, low / beyond), min(self.sigma_max, high * beyond)
        return Noise(low, high, (self.p_mean, self.p_std), self.sigma_data)


def make_noise(said: Mapping[str, Any], *, block: int, blocks: int) -> Noise:
    """The noise of a block, as a job says it.

    Args:
        said: ``name`` and its numbers, all of them.
        block: b.
        blocks: B.
    """
    if "sigma_data" in said:
        return diffusion(said, blocks=blocks).noise(block)
    return Noise(said["low"], said["high"])


def diffusion(said: Mapping[str, Any], *, blocks: int) -> Diffusion:
    """The intervals of all blocks, as a job says it."""
    return Diffusion(blocks, **{name: value for name, value in said.items() if name != "name"})


def _mixed(low: float, high: float, share: float) -> float:
    return low + (high - low) * share


def _between(low: float, high: float, value: float) -> float:
    return min(max(value, low), high)


def _quantile(law: NormalDist, probability: float) -> float:
    return math.exp(law.inv_cdf(_between(sys.float_info.min, 1 - sys.float_info.epsilon / 2, probability)))


# ---- the draws ----


def noised(
    noise: Noise, target: Tensor, *, rows: Sequence[int], lengths: Sequence[int] | None, seed: int, step: int,
    block: int,
) -> dict[str, Tensor]:  # fmt: skip
    """What a block is shown of its target: ``noisy`` ``[N, T, D]``, ``sigma`` ``[N]``, and ``weight`` ``[N]`` or not.

    A row's draws are a function of (seed, block, step, row) alone, by a counter-based generator (Philox): not of its
    padding, nor of what is beside it in the batch, nor of where the targets come from or who reads them.

    Args:
        noise: The block's.
        target: ``[N, T, D]`` or ``[N, D]``, in host memory.
        rows: Which rows of the snapshot they are.
        lengths: Tokens of each; None: all of them.
        seed: Of the training.
        step: From 0; `LOOKED_AT` for rows that are not trained on.
        block: b.
    """
    noisy = target.float().clone()
    sigmas = []
    for at, row in enumerate(rows):
        draw = _generator(seed, block, step, row)
        sigmas.append(noise.sigma(draw.random()))
        real = noisy[at] if lengths is None else noisy[at, : lengths[at]]
        real += sigmas[-1] * torch.from_numpy(draw.standard_normal(tuple(real.shape), dtype=np.float32))
    found = {NOISY: noisy, SIGMA: torch.tensor(sigmas, dtype=torch.float32)}
    if noise.sigma_data is not None:
        found[WEIGHT] = torch.tensor([weight(each, noise.sigma_data) for each in sigmas], dtype=torch.float32)
    return found


def standard(shape: Sequence[int], *, seed: int) -> Tensor:
    """Where generation begins: normal numbers ``[T, D]``, those of a token whatever comes after it."""
    return torch.from_numpy(_generator(seed, 0, LOOKED_AT, 0).standard_normal(tuple(shape), dtype=np.float32))


def _generator(seed: int, block: int, step: int, row: int) -> np.random.Generator:
    """Numbers of a place: the key is (seed, block), and the counter counts up from (step, row), far from any other."""
    key, counter = np.array([seed, block], np.uint64), np.array([0, 0, step, row], np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


# ---- preconditioning ----


class Coefficients(NamedTuple):
    """D = skip · z + out · F(into · z, level)."""

    skip: Tensor
    out: Tensor
    into: Tensor
    level: Tensor


def coefficients(sigma: Tensor, sigma_data: float) -> Coefficients:
    """EDM's, for F of mean square 1: c_skip, c_out, c_in and c_noise = ¼ ln σ, of the shape of ``sigma``."""
    whole = sigma.square() + sigma_data**2
    return Coefficients(sigma_data**2 / whole, sigma * sigma_data / whole.sqrt(), whole.rsqrt(), level_of(sigma))


def level_of(sigma: Tensor) -> Tensor:
    """c_noise = ¼ ln σ, what a block is told of σ; finite where σ is 0."""
    return sigma.clamp_min(torch.finfo(torch.float32).tiny).log() / 4


def weight(sigma: float, sigma_data: float) -> float:
    """EDM's λ = (σ² + σd²) / (σσd)² = 1 / c_out²: every σ weighs alike in what F is to learn."""
    return (sigma**2 + sigma_data**2) / (sigma * sigma_data) ** 2


def denoising(call: Call, noise: Noise) -> Call:
    """D_b of a block: called as its forward is, with ``noisy`` and ``sigma`` in the context.

    The forward finds there ``noisy`` (with preconditioning c_in · z) in its source's dtype, ``sigma`` and ``level``.
    Its answer is a state in the boundary's unit, σd times F: D = c_skip · z + (c_out / σd) · answer. So a block that is
    all noise (σ ≫ σd) answers as it would without, and at σ = 0 D is z.

    Args:
        call: ``(block, source, context) -> state``.
        noise: The block's.
    """

    def answer(block: nn.Module, source: Tensor, context: Mapping[str, Any]) -> Tensor:
        noisy, sigma = context[NOISY], context[SIGMA]
        if noise.sigma_data is None:
            return call(block, source, {**context, NOISY: _like(noisy, source), LEVEL: level_of(sigma)})
        by = coefficients(sigma, noise.sigma_data)
        skip, out, into = (each.view(-1, *[1] * (noisy.dim() - 1)) for each in by[:3])
        state = call(block, source, {**context, NOISY: _like(into * noisy, source), LEVEL: by.level})
        answered: Tensor = skip * noisy + out / noise.sigma_data * state
        return answered

    return answer


def _like(noisy: Tensor, source: Tensor) -> Tensor:
    """As a block takes it that computes in its source's dtype; what D itself is made of stays as it was drawn."""
    return noisy.to(source.dtype) if source.is_floating_point() else noisy


class _Targetless(dict[str, Any]):
    """A context without a target, which says so to whoever asks for one."""

    def __missing__(self, key: str) -> Any:
        if key not in {NOISY, SIGMA, LEVEL}:
            raise KeyError(key)
        raise zgstore.Invalid(
            f"the forward asks for context[{key!r}], and where a student runs there is no target to be shown",
            hint=f"let it do without where {NOISY!r} is not in the context, as zgtrain.causal_lm:forward does; blocks "
            "that are trained stay as they are",
        )


def without_target(call: Call | None) -> Call:
    """How a student's block is called where it runs: by its forward, in a context that has no noise.

    No target is known there, and nothing stands in for it that would be fair to claim: at σ = 0 it is the answer
    itself. So a block that was shown one has to do without, and one that cannot ends by name.

    Args:
        call: ``(block, source, context) -> state``; None: ``block(source)``.
    """

    def answer(block: nn.Module, source: Tensor, context: Mapping[str, Any]) -> Tensor:
        state: Tensor = block(source) if call is None else call(block, source, _Targetless(context))
        return state

    return answer


# ---- the way down ----


def heun(denoise: Callable[[Tensor, float], Tensor], state: Tensor, sigmas: Sequence[float]) -> Tensor:
    """Follow dz/dσ = (z − D(z, σ)) / σ from σ to σ by Heun's steps, the last one to 0 by Euler's, which gives D.

    EDM's algorithm 1 without churn.

    Args:
        denoise: ``(z, σ) -> D``; never called with σ = 0.
        state: z at the first σ.
        sigmas: Descending.

    Returns:
        z at the last σ; ``state`` itself if there is no step.
    """
    for now, then in pairwise(sigmas):
        slope = (state - denoise(state, now)) / now
        guess = state + (then - now) * slope
        if then:
            after = (guess - denoise(guess, then)) / then
            guess = state + (then - now) * (slope + after) / 2
        state = guess
    return state


def down_the_grid(
    blocks: Sequence[nn.Module], call: Call, grid: Diffusion, *, source: Tensor, context: Mapping[str, Any],
    start: Tensor,
) -> Tensor:  # fmt: skip
    """What the blocks of a student make of noise: each takes its own interval away, the first in depth the highest.

    Args:
        blocks: B, in depth order.
        call: As trained with.
        grid: Their intervals.
        source: ``[N, T, D]``: what every block is given beside.
        context: What ``call`` takes.
        start: ``[N, T, D]``, of mean square 1.

    Returns:
        fp32 ``[N, T, D]``: the last boundary.
    """
    state = grid.sigma_max * start.float()
    for at, block in enumerate(blocks):
        answer = denoising(call, grid.noise(at))

        def denoise(state: Tensor, sigma: float, block: nn.Module = block, answer: Call = answer) -> Tensor:
            shown = {NOISY: state, SIGMA: torch.full((len(state),), sigma, device=state.device)}
            return answer(block, source, {**context, **shown}).float()

        low, high = grid.interval(at)
        state = heun(denoise, state, [high, low] if at < len(blocks) - 1 else [high, low, 0.0])
    return state


def refuse_names(context: Mapping[str, Any]) -> None:
    """See that the snapshot has no context column under a name that noise has.

    Raises:
        zgstore.Invalid: naming it.
    """
    taken = [name for name in (NOISY, SIGMA, LEVEL, WEIGHT) if name in context]
    if taken:
        raise zgstore.Invalid(
            f"the snapshot has a context column {taken[0]!r}, which noise puts there",
            hint="capture it under another name, or leave noise out",
        )
