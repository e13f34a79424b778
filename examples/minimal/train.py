"""Train one block of four against stored boundaries; the teacher is not there."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

import zgstore

HERE = Path(__file__).resolve().parent


def main(store_path: str) -> float:
    store = zgstore.Store.init(store_path)
    report = zgstore.build(store, zgstore.load_recipe(HERE / "cache.toml"), ref="main")
    print(f"snapshot {report.snapshot}: {report.samples} samples")

    reader = zgstore.read(store, "main", columns=["1:in", "2:in"])
    block = nn.Sequential(nn.Linear(32, 32), nn.GELU())
    optimizer = torch.optim.AdamW(block.parameters(), lr=1e-2)
    for rows in zgstore.Sampler(reader, seed=0, batch_size=16):
        batch = reader.batch(rows)
        loss = nn.functional.mse_loss(block(batch["1:in"]), batch["2:in"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"loss after one epoch: {loss.item():.4f}")
    return loss.item()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else ".zgstore")
