"""Blocks of a decoder that are shown a noisy target, and the student that makes a last boundary out of noise.

Experimental. N rows, T tokens, D width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from zgtrain.decoder import Block
from zgtrain.noise import Call, Diffusion, down_the_grid, standard

TURNS: Final = (0.25, 0.5, 1.0, 2.0)  # of a wave over one unit of c_noise, which spans less than three


class Adapter(nn.Module):
    """What a noisy target adds to a block's source: a linear map of it, and one of waves of c_noise.

    Both begin as 0, and nothing is added at σ = 0: there a block does what it does without.

    Args:
        width: D.
        dtype: Of its parameters.
    """

    turns: Tensor

    def __init__(self, width: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.shown = nn.Parameter(torch.zeros(width, width, dtype=dtype))
        self.told = nn.Parameter(torch.zeros(width, 2 * len(TURNS), dtype=dtype))
        self.register_buffer("turns", torch.tensor(TURNS), persistent=False)

    def forward(self, source: Tensor, noisy: Tensor, sigma: Tensor, level: Tensor) -> Tensor:
        """``[N, T, D]``, ``[N, T, D]``, ``[N]``, ``[N]`` → ``[N, T, D]``."""
        angles = 2 * math.pi * level[:, None] * self.turns
        waves = torch.cat([angles.cos(), angles.sin()], dim=1).to(source.dtype)
        added = nn.functional.linear(noisy.to(source.dtype), self.shown)
        added = added + nn.functional.linear(waves, self.told)[:, None]
        return torch.where(sigma[:, None, None] > 0, source + added, source)


class NoisedBlock(Block):
    """A block of a decoder with an `Adapter` before its layers; assembly takes the layers and leaves the adapter.

    Args:
        decoder: As for `Block`, with its weights.
        width: D.
    """

    def __init__(self, decoder: Any, *, width: int) -> None:
        super().__init__(decoder)
        self.adapter = Adapter(width, dtype=next(decoder.parameters()).dtype)

    def forward(
        self, hidden: Tensor, mask: Tensor | None = None, positions: Tensor | None = None, *,
        noisy: Tensor | None = None, sigma: Tensor | None = None, level: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Boundary b → boundary b + 1, perhaps shown a noisy one.

        Args:
            hidden: ``[N, T, D]``.
            mask: As for `Block`.
            positions: As for `Block`.
            noisy: ``[N, T, D]``; None: none is shown.
            sigma: ``[N]``; not None with ``noisy``.
            level: ``[N]``, c_noise; likewise.
        """
        if noisy is not None:
            hidden = self.adapter(hidden, noisy, sigma, level)
        return super().forward(hidden, mask, positions)


class Denoiser(nn.Module):
    """A student whose blocks go down from noise to the last boundary, each over its own interval of σ.

    Generation begins at the same noise every time, and a token's does not depend on what comes after it: so with
    blocks that look back only, the student does not look ahead.

    Args:
        blocks: B, in depth order.
        call: As they were trained with.
        grid: Their intervals.
        embedding: Ids and positions → boundary 0, which every block is given.
        interface: Boundary B → logits.
        seed: Of the noise that it begins at.
    """

    def __init__(
        self, blocks: Sequence[nn.Module], call: Call, grid: Diffusion, *, embedding: nn.Module, interface: nn.Module,
        seed: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.embedding, self.interface = embedding, interface
        self._call, self._grid, self._seed = call, grid, seed

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        """int64 ``[N, T]`` → ``[N, T, V]``."""
        source: Tensor = self.embedding(input_ids, position_ids)
        context = {"mask": None if attention_mask is None else attention_mask != 0, "positions": position_ids}
        start = standard(source.shape[1:], seed=self._seed).to(source.device).expand(source.shape)
        state = down_the_grid(list(self.blocks), self._call, self._grid, source=source, context=context, start=start)
        logits: Tensor = self.interface(state.to(source.dtype))
        return logits
