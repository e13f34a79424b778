"""The ladder: sizes, the ways to have a gradient, and one run of both as a value that names its own folder."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

from zgtrain.job import GradientSpec

VOCABULARY = 50304  # GPT-2's 50,257, and so many more that a power of two divides it well


@dataclass(frozen=True)
class Size:
    """A decoder and how long it trains.

    Args:
        width: D.
        layers: L.
        heads: Of width D / heads.
        hidden: Width of the feed-forward part.
        length: Tokens of a row, T.
        rows: Of a step, over all processes and micro-batches.
        steps: Of the optimiser.
        lr: The highest, after ``warmup`` steps of rising to it.
        warmup: Steps.
    """

    width: int
    layers: int
    heads: int
    hidden: int
    length: int
    rows: int
    steps: int
    lr: float
    warmup: int

    @property
    def parameters(self) -> int:
        """Of embedding and head, which are untied, of positions, layers and norms."""
        layer = 4 * self.width**2 + 3 * self.width * self.hidden + 4 * self.width
        return (2 * VOCABULARY + self.length + 1) * self.width + self.layers * layer

    @property
    def tokens(self) -> int:
        """That all steps together see."""
        return self.steps * self.rows * self.length


SIZES = {
    "mini": Size(width=64, layers=4, heads=4, hidden=176, length=64, rows=8, steps=160, lr=4e-3, warmup=16),
    "60m": Size(width=384, layers=12, heads=6, hidden=1024, length=1024, rows=256, steps=4600, lr=1e-3, warmup=200),
    "124m": Size(width=576, layers=16, heads=9, hidden=1536, length=1024, rows=256, steps=9400, lr=6e-4, warmup=200),
    "350m": Size(width=1024, layers=20, heads=16, hidden=2752, length=1024, rows=512, steps=13500, lr=4e-4, warmup=300),
    "1b": Size(width=2048, layers=16, heads=32, hidden=5504, length=1024, rows=1024, steps=19400, lr=3e-4, warmup=500),
}
ARMS = {"backprop": 0, "n=4": 4, "n=16": 16, "n=64": 64}  # probes


@dataclass(frozen=True)
class Run:
    """One arm at one size: all that its result depends on, so its digest names the result.

    Processes, micro-batches and devices are not here: a step has the same rows whoever computes them.

    Args:
        size: Name of the size.
        shape: The size itself.
        probes: Of each estimate; 0: backprop.
        probe: Distribution of the probes.
        differences: ``central`` or ``forward``.
        seed: Of initial weights, order of rows, and probes.
        precision: ``fp32`` or ``bf16``.
        data: Digest of the token shards.
        heldout_rows: The last rows of the data: never trained on, and what the loss is told on.
        look_every: Steps between looks at the held-out rows and at the gradient.
    """

    size: str
    shape: Size
    probes: int
    data: str
    probe: str = "rademacher"
    differences: str = "central"
    seed: int = 0
    precision: str = "fp32"
    heldout_rows: int = 32
    look_every: int = 40

    @property
    def arm(self) -> str:
        return f"n={self.probes}" if self.probes else "backprop"

    @property
    def gradient(self) -> GradientSpec:
        """How an estimate asks; of no use to backprop."""
        return GradientSpec(
            "zeroth-order", probes=self.probes, probe=self.probe, differences=self.differences, seed=self.seed
        )

    @property
    def digest(self) -> str:
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def name(self) -> str:
        """Of its folder: what people look for, then the digest that decides."""
        return f"{self.size}-{self.arm.replace('=', '')}-seed{self.seed}-{self.digest[:12]}"

    @classmethod
    def from_value(cls, value):
        return cls(**{**value, "shape": Size(**value["shape"])})
