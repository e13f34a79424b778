"""A teacher, its data, and what `cache.toml` asks for: all that a recipe needs, without any model library."""

from __future__ import annotations

import torch
from torch import nn


def teacher(width: int, layers: int, scale: float = 1.0) -> nn.Module:
    torch.manual_seed(0)  # stands for reading weights from a file
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)))
    for parameter in model.parameters():
        parameter.data *= scale
    return model


def batches(rows: int, batch_size: int, width: int):
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(rows, width, generator=generator)
    return [{"input": batch} for batch in data.split(batch_size)]
