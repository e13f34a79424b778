"""A real job in small: a Llama of four layers, pruned to three, cached, trained block by block."""

from __future__ import annotations

from pathlib import Path

import torch

import zgstore
from zgtrain import load_job, run

CODE = """
import torch


def rows(count, seed, vocabulary=37):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        ids = torch.randint(3, vocabulary, (4, 10), generator=generator)
        mask = torch.ones_like(ids)
        mask[0, 7:] = 0
        positions = (mask.cumsum(1) - 1).clamp_min(0)
        labels = torch.where(mask == 1, ids, -100)
        yield {"input_ids": ids * mask, "attention_mask": mask, "position_ids": positions, "labels": labels}


def batches(**_):
    return rows(6, 1)


def heldout(**_):
    return rows(2, 2)


def prompts(**_):
    generator = torch.Generator().manual_seed(3)
    return [{"input_ids": torch.randint(3, 37, (6,), generator=generator), "text": f"prompt {n}"} for n in range(4)]
"""


def make_pruned(folder: Path, *, module: str = "pruned_rows") -> Path:
    """Model, recipe and job file in a folder, the snapshot built; the path of the job."""
    import transformers  # noqa: PLC0415

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=37, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, bos_token_id=1, eos_token_id=2, pad_token_id=0, max_position_embeddings=128,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder / "teacher")
    (folder / f"{module}.py").write_text(CODE, encoding="utf-8")
    (folder / "cache.toml").write_text(
        f"""
[teacher]
factory = "zgtrain.causal_lm:teacher"
args = {{ path = "{folder}/teacher" }}
id = "toy/llama"
revision = "1"
[data]
factory = "{module}:batches"
id = "toy/rows"
revision = "1"
[capture]
boundaries = ["model.layers.0:in", "model.layers.2:in", "model.norm:in"]
context = ["input_ids", "attention_mask", "position_ids", "labels"]
""",
        encoding="utf-8",
    )
    (folder / "student.toml").write_text(
        f"""
output = "out"
[snapshot]
store = "store"
rev = "cache"
recipe = "cache.toml"
[student]
block = "zgtrain.causal_lm:block"
assemble = "zgtrain.causal_lm:assemble"
teacher = "zgtrain.causal_lm:teacher"
interface = "zgtrain.causal_lm:interface"
args = {{ path = "{folder}/teacher", layers = [[0, 2], [2, 4]], keep = [[1], [2, 3]] }}
[train]
steps = 72
optimizer = {{ name = "adamw", lr = 3e-3 }}
forward = "zgtrain.causal_lm:forward"
[evaluate]
data = "{module}:heldout"
prompts = "{module}:prompts"
sweep_rows = 4
""",
        encoding="utf-8",
    )
    store = zgstore.Store.init(folder / "store")
    zgstore.build(store, folder / "cache.toml", ref="cache")
    return folder / "student.toml"


def trained(path: Path, *, source: str = "cached", overrides: tuple[str, ...] = ()):
    """The job, both of its blocks trained."""
    job = load_job(path, overrides)
    for block in range(2):
        run(job, block=block, device="cpu", source=source)
    return job
