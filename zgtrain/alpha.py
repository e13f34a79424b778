"""Blocks in a row: how well each fits the teacher's states, and what becomes of the errors of those before it.

B blocks; h_b the teacher's boundary b, ĥ_b the student's: ĥ_0 = h_0, ĥ_{b+1} = F_b(ĥ_b). N rows, T tokens, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

from zgtrain.measures import Scored
from zgtrain.objective import cosine, masked_sum, mse, relative_mse, residual_error

ALPHAS: Final = (1.0, 0.75, 0.5, 0.25, 0.0)

Call = Callable[[nn.Module, Tensor, Mapping[str, Any]], Tensor]


@dataclass(slots=True)
class Errors:
    """Errors of a boundary, summed over real tokens."""

    tokens: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    error: float = 0.0
    moved: float = 0.0

    def add(self, prediction: Tensor, target: Tensor, mask: Tensor | None, source: Tensor | None = None) -> None:
        """Compare ``[N, T, D]`` with ``[N, T, D]``; with the source, what its residual is worth too."""
        size = target.float().norm(dim=-1)
        each = {
            "mse": mse(prediction, target),
            "relative_mse": relative_mse(prediction, target),
            "cosine": 1.0 - cosine(prediction, target),
            "norm_error": (prediction.float().norm(dim=-1) - size).abs() / size.clamp_min(1e-12),
        }
        for name, values in each.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(masked_sum(values, mask))
        self.tokens += int(mask.sum()) if mask is not None else target[..., 0].numel()
        if source is not None and source.shape == target.shape:
            error, moved = residual_error(prediction, source, target, mask)
            self.error += float(error)
            self.moved += float(moved)

    def as_value(self) -> dict[str, float | None]:
        """Means over tokens: ``mse``, ``relative_mse``, ``cosine``, ``norm_error``; ``residual_error`` if known."""
        means: dict[str, float | None] = {name: total / max(1, self.tokens) for name, total in self.sums.items()}
        return {**means, "residual_error": self.error / self.moved if self.moved else None}


@dataclass(slots=True)
class Boundaries:
    """What is measured of blocks in a row, over the batches that were added.

    Args:
        blocks: In depth order.
        call: ``(block, source, context) -> prediction``.
        interface: Boundary B → logits; None: the sweep has no final CE.
        fits: Block b fed the teacher's h_b against h_{b+1}.
        assembled: ĥ_b against h_b, for b = 0 … B.
        sweep: (block, α) → errors of the block's output, and the final CE.
    """

    blocks: Sequence[nn.Module]
    call: Call
    interface: nn.Module | None = None
    fits: list[Errors] = field(default_factory=list)
    assembled: list[Errors] = field(default_factory=list)
    sweep: dict[tuple[int, float], tuple[Errors, Scored]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        count = len(self.blocks)
        self.fits = [Errors() for _ in range(count)]
        self.assembled = [Errors() for _ in range(count + 1)]
        self.sweep = {(b, alpha): (Errors(), Scored()) for b in range(count) for alpha in ALPHAS}

    @torch.inference_mode()
    def add(self, truths: Sequence[Tensor], context: Mapping[str, Any], labels: Tensor) -> None:
        """Measure one batch.

        Args:
            truths: h_0 … h_B, ``[N, T, D]`` each.
            context: What ``call`` takes; its ``mask`` says which tokens count.
            labels: int64 ``[N, T]``.
        """
        mask, count = context.get("mask"), len(self.blocks)
        hats = [truths[0], *self._onward(0, truths[0], context)]
        for b, (hat, truth) in enumerate(zip(hats, truths, strict=True)):
            self.assembled[b].add(hat, truth, mask)
        whole = self._scored(hats[-1], labels)
        for b in range(count):
            for alpha in ALPHAS:
                fed = mixed(truths[b], hats[b], alpha)
                # What the block is fed in the student has been run already: block 0 at every α, every block at α = 0.
                outs, ce = (hats[b + 1 :], whole) if fed is hats[b] else (self._onward(b, fed, context), None)
                errors, scored = self.sweep[b, alpha]
                errors.add(outs[0], truths[b + 1], mask, truths[b])
                scored.include(ce or self._scored(outs[-1], labels))
                if alpha == 1.0:
                    self.fits[b].add(outs[0], truths[b + 1], mask, truths[b])

    def _scored(self, last: Tensor, labels: Tensor) -> Scored:
        scored = Scored()
        if self.interface is not None:
            scored.add(self.interface(last), labels)
        return scored

    def _onward(self, first: int, state: Tensor, context: Mapping[str, Any]) -> list[Tensor]:
        """The outputs of the blocks from ``first`` on."""
        outputs = []
        for block in self.blocks[first:]:
            state = self.call(block, state, context)
            outputs.append(state)
        return outputs

    def boundary_values(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """For each block: its fit, the error that it is fed in the assembled student, and the one it leaves."""
        return [
            {
                "block": b, "source": names[b], "target": names[b + 1],
                "teacher_input_fit": self.fits[b].as_value(),
                "assembled_predecessor_error": self.assembled[b].as_value(),
                "assembled_output_error": self.assembled[b + 1].as_value(),
            }
            for b in range(len(self.blocks))
        ]  # fmt: skip

    def sweep_values(self) -> list[dict[str, Any]]:
        """A row for each block and α."""
        return [
            {"block": b, "alpha": alpha, **errors.as_value(), "ce": scored.as_value()["ce"]}
            for (b, alpha), (errors, scored) in self.sweep.items()
        ]


def mixed(truth: Tensor, hat: Tensor, alpha: float) -> Tensor:
    """α h + (1 − α) ĥ; exactly h at 1, exactly ĥ at 0 and wherever the two are equal."""
    if truth is hat or alpha in {0.0, 1.0}:
        return truth if alpha else hat
    return hat + alpha * (truth - hat)
