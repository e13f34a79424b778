"""Small teachers for the tests of capture and measurement."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

VOCABULARY = 61


def llama(seed=0, **changes):
    torch.manual_seed(seed)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
             "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **changes}))


def qwen2(seed=0, **changes):
    torch.manual_seed(seed)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
             "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip
    return Qwen2ForCausalLM(Qwen2Config(**{**sizes, **changes}))


def gpt2(seed=0):
    torch.manual_seed(seed)
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=3, n_head=4))


def tokens(rows=3, positions=7, *, left=(), right=()):
    """A batch; ``left`` and ``right``: (row, positions of padding)."""
    generator = torch.Generator().manual_seed(5)
    mask = torch.ones(rows, positions, dtype=torch.int64)
    for row, count in left:
        mask[row, :count] = 0
    for row, count in right:
        mask[row, positions - count :] = 0
    ids = torch.randint(1, VOCABULARY, (rows, positions), generator=generator) * mask
    return {"input_ids": ids, "attention_mask": mask}


class Power(nn.Module):
    """A layer that adds 10^i, in place or not."""

    def __init__(self, number, *, in_place=False):
        super().__init__()
        self.number = number
        self.in_place = in_place

    def forward(self, x):
        if self.in_place:
            x += 10.0**self.number
            return x
        return x + 10.0**self.number


class Powers(nn.Module):
    """A teacher whose layer i adds 10^i."""

    def __init__(self, layers=4, *, in_place=False):
        super().__init__()
        self.layers = nn.ModuleList([Power(at, in_place=in_place) for at in range(layers)])
        self.runs = 0

    def forward(self, x):
        x = x.clone()
        for layer in self.layers:
            x = layer(x)
        self.runs += 1
        return x


@dataclass
class Result:
    hidden: torch.Tensor
    extra: int = 0


class Shapes(nn.Module):
    """One child for each way of giving a result."""

    def __init__(self):
        super().__init__()
        self.tensor, self.tuple, self.list = nn.Identity(), Wrap("tuple"), Wrap("list")
        self.dict, self.dataclass, self.nested = Wrap("dict"), Wrap("dataclass"), Wrap("nested")
        self.text = Wrap("text")
        self.keyword = Keyword()

    def forward(self, x):
        for name in ("tensor", "tuple", "list", "dict", "dataclass", "nested", "text"):
            getattr(self, name)(x)
        return self.keyword(scale=torch.ones(len(x)), hidden=x)


class Wrap(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how = how

    def forward(self, x):
        return {
            "tuple": (None, x + 1), "list": [x + 1, x], "dict": {"n": 3, "h": x + 1}, "dataclass": Result(x + 1),
            "nested": ((3, None), {"a": [x + 1]}), "text": "hello",
        }[self.how]  # fmt: skip


class Keyword(nn.Module):
    def forward(self, hidden, scale):
        return hidden * scale[:, None]


class Guarded(nn.Module):
    """A teacher that takes every Exception for a fault of its own."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Power(0), Power(1)
        self.swallowed = 0

    def forward(self, x):
        try:
            x = self.first(x)
            return self.second(x)
        except Exception:  # noqa: BLE001
            self.swallowed += 1
            return x


class Twice(nn.Module):
    """One module is called twice, and one never."""

    def __init__(self):
        super().__init__()
        self.shared, self.unused, self.last = Power(0), Power(1), Power(2)

    def forward(self, x):
        return self.last(self.shared(self.shared(x)))


class Shorter(nn.Module):
    """A teacher that gives T − 1 states."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.cut = Cut()

    def forward(self, input_ids):
        return self.cut(self.embedding(input_ids))


class Cut(nn.Module):
    def forward(self, x):
        return x[:, 1:]


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3))


def cnn():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3), nn.Flatten())
