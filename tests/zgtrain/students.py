"""Small real jobs: a teacher, its data, a recipe, a student and a job file in a folder of their own."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import torch

import zgstore
from zgtrain.jobfile import load_job

_numbers = itertools.count()

CODE = """
import torch
from torch import nn

VOCABULARY = 37


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


class Plain(nn.Module):
    def __init__(self, width=16, layers=4):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def teacher(kind="plain", dtype="float32", **_):
    torch.manual_seed(1)
    if kind == "plain":
        model = Plain()
    else:
        import transformers

        sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4,
                 "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32}
        if kind == "llama":
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
        elif kind == "qwen2":
            model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes))
        else:
            config = transformers.GPT2Config(vocab_size=VOCABULARY, n_positions=32, n_embd=16, n_layer=4, n_head=2)
            model = transformers.GPT2LMHeadModel(config)
    return model.to(getattr(torch, dtype)).eval()


def batches(rows=10, batch_size=4, length=6, ragged=False, **_):
    generator = torch.Generator().manual_seed(2)
    for at in range(0, rows, batch_size):
        count = min(batch_size, rows - at)
        ids = torch.randint(1, VOCABULARY, (count, length), generator=generator)
        mask = torch.ones(count, length, dtype=torch.int64)
        if ragged:
            for row in range(count):
                gone = (at + row) % 4
                mask[row, :gone] = 0
        positions = (mask.cumsum(1) - 1).clamp_min(0)
        labels = torch.where(mask == 1, ids, -100)
        yield {"input_ids": ids * mask, "attention_mask": mask, "position_ids": positions, "labels": labels}


class Block(nn.Module):
    def __init__(self, width=16, dropout=0.1):
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.frozen = nn.Parameter(torch.zeros(width), requires_grad=False)
        self.register_buffer("calls", torch.zeros(1, dtype=torch.int64), persistent=False)

    def forward(self, x):
        self.calls += self.training
        return x + self.down(torch.relu(self.up(self.dropout(x)))) + self.frozen


def block(number, dropout=0.1, **_):
    return Block(dropout=dropout)


def forward(block, source, context):
    assert context["mask"].shape == source.shape[:2] == context["positions"].shape
    return block(source)


def interface(**args):
    model = teacher(**args)
    return nn.Sequential(model.norm, model.head)


def absolute(prediction, target, context):
    return (prediction - target).abs().mean(-1)


def assemble(blocks, **_):
    return nn.Sequential(*blocks)
"""

POINTS = {
    "plain": ["layers.0:in", "layers.2:in", "norm:in"],
    "llama": ["model.layers.0:in", "model.layers.2:in", "model.norm:in"],
    "qwen2": ["model.layers.0:in", "model.layers.2:in", "model.norm:in"],
    "gpt2": ["transformer.h.0:in", "transformer.h.2:in", "transformer.ln_f:in"],
}


def make_job(
    folder: Path, *, kind: str = "plain", ragged: bool = False, rows: int = 10, storage: str = "", train: str = "",
    student: str = "", more: str = "", dtype: str = "float32", batch_size: int = 4, args: str = "",
    boundaries: list[str] | None = None, code: str = CODE,
) -> Path:  # fmt: skip
    """``toyN.py``, ``cache.toml`` and ``job.toml`` in a folder; the path of the job. Nothing is built."""
    folder.mkdir(parents=True, exist_ok=True)
    module = f"toy_student_{next(_numbers)}"
    (folder / f"{module}.py").write_text(code, encoding="utf-8")
    points = boundaries or POINTS[kind]
    lengths = 'lengths = "attention_mask"\nsequence = ["input_ids", "position_ids", "labels"]' if ragged else ""
    (folder / "cache.toml").write_text(
        f"""
[teacher]
factory = "{module}:teacher"
args = {{ kind = "{kind}", dtype = "{dtype}" }}
id = "toy/{kind}"
revision = "1"
[data]
factory = "{module}:batches"
args = {{ rows = {rows}, batch_size = {batch_size}, ragged = {str(ragged).lower()} }}
id = "toy/data"
revision = "1"
[capture]
boundaries = {json.dumps(points)}
context = ["input_ids", "attention_mask", "position_ids", "labels"]
{lengths}
[storage]
batches_per_shard = 1
{storage}
""",
        encoding="utf-8",
    )
    forward = f'forward = "{module}:forward"' if ragged else ""
    job = folder / "job.toml"
    job.write_text(
        f"""
output = "out"
[snapshot]
store = "store"
rev = "cache"
recipe = "cache.toml"
[student]
block = "{module}:block"
assemble = "{module}:assemble"
args = {{ kind = "{kind}"{args} }}
{student.replace("MODULE", module)}
[train]
{"" if "steps =" in train else "steps = 7"}
batch_size = 4
{"" if "optimizer" in train else 'optimizer = { name = "adamw", lr = 1e-2, betas = [0.9, 0.95], weight_decay = 0.01 }'}
{forward}
{train.replace("MODULE", module)}
[log]
every = 1
{more}
""",
        encoding="utf-8",
    )
    return job


def built(path: Path, **build):
    """The job, its store and its snapshot."""
    job = load_job(path)
    store = zgstore.Store.init(job.snapshot.store)
    report = zgstore.build(store, job.snapshot.recipe, **build)
    return job, store, str(report.snapshot)


def noise_of(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def written(folder: Path, *, rows=10, positions=5, width=8, cut=2, ragged=False, seed=0):
    """A store with a snapshot ``main`` of two boundaries, ``h.0`` and ``h.1``, from no teacher at all."""
    store = zgstore.Store.init(folder / "store")
    pins = zgstore.Pins(
        teacher={"id": "t", "revision": "1", "measured": bytes(32)},
        data={"id": "d", "revision": "1", "pins": {"seed": seed}},
        capture={},
    )
    with zgstore.writer(store, pins, cut=cut) as writer:
        for at in range(0, rows, 2):
            x = noise_of(min(2, rows - at), positions, width, seed=100 * seed + at)
            y = x + torch.tanh(x.flip(-1))
            labels = torch.arange(x.shape[0] * positions).reshape(-1, positions) % 7
            row = torch.arange(at, at + len(x))
            if ragged:
                lengths = torch.tensor([1 + (at + row) % positions for row in range(len(x))])
                mask = torch.arange(positions) < lengths[:, None]
                sample = zgstore.SampleBatch(
                    columns={"h.0": x[mask], "h.1": y[mask]}, context={"labels": labels[mask], "row": row},
                    lengths=lengths, starts=torch.zeros_like(lengths),
                    packed=frozenset({"h.0", "h.1", "labels"}),
                )  # fmt: skip
            else:
                sample = zgstore.SampleBatch(columns={"h.0": x, "h.1": y}, context={"labels": labels, "row": row})
            writer.add(sample)
        writer.commit(ref="main", expect=None)
    return store
