"""Whether a block reads its answer off a noisy target: its loss with its own source, and with another sample's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import zgstore
from zgtrain.noise import Noise
from zgtrain.objective import Objective
from zgtrain.source import Source
from zgtrain.trainer import Forward, validate


@dataclass(frozen=True, slots=True)
class Leakage:
    """The same rows under the same noise, twice.

    Args:
        own: The loss with each row's own source.
        other: The loss with the source of the row before.
    """

    own: float
    other: float

    @property
    def worth(self) -> float:
        """What the own source is worth; near 0, the answer comes from elsewhere: from the target that was shown."""
        return self.other - self.own


def leakage(
    block: nn.Module, data: Source, objective: Objective, *, rows: int, forward: Forward, device: torch.device | str,
    noise: Noise | None = None, seed: int = 0, block_id: int | None = None,
) -> Leakage:  # fmt: skip
    """Look whether a block needs its source.

    Args:
        block: Trained.
        data: Its source and target.
        objective: What its answers are held against.
        rows: So many first rows, taken together; where they are ragged, the other's source ends where it ends.
        forward: As it was trained with.
        device: Where.
        noise: As it was trained with.
        seed: Of the noise.
        block_id: b.

    Raises:
        zgstore.Invalid: of a single row: there is no other.
    """
    if rows < 2:
        raise zgstore.Invalid(f"{rows} row has no other", hint="look at two rows or more")

    def with_others(block: nn.Module, source: Tensor, context: Mapping[str, Any]) -> Tensor:
        return forward(block, source.roll(1, dims=0), context)

    own, other = (
        validate(
            block, data, objective, rows=rows, batch_size=rows, forward=each, device=torch.device(device), noise=noise,
            seed=seed, block_id=block_id,
        )
        for each in (forward, with_others)
    )  # fmt: skip
    return Leakage(own, other)
