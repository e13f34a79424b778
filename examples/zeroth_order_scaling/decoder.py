"""A decoder as OLMo 2 has it: RMSNorm after attention and feed-forward, and on queries and keys; SwiGLU; no biases.

Embedding and head are untied, positions are learned. N rows, T tokens, D width, H heads, L layers.

Two things begin otherwise, for the sake of estimated gradients. An estimate's noise is carried back through every
layer before it, and grows there by 1 + ρ² · NSR, where ρ is how much of a gradient goes through a layer's branch. So
states begin at a root mean square of 1, for a normed branch's ρ is about its own size over theirs; and what a branch
adds begins at 1 / 2L of that.

What is linear is digital: its weights' gradient is an outer product of what is stored and the cotangent. The two cores
that are not, the softmax over scores and the gated product, are physical: within ``asking`` they are black boxes that
only answer forward queries, elsewhere they are what they are.
"""

from __future__ import annotations

import torch
from sizes import VOCABULARY
from torch import nn
from torch.nn import functional

from zgtrain.gradient.cores import PhysicalCore


class Attention(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.heads = size.heads
        self.softmax = PhysicalCore(softmax, scores=True)
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=False)
        self.query_norm, self.key_norm = nn.RMSNorm(size.width), nn.RMSNorm(size.width)
        self.out = nn.Linear(size.width, size.width, bias=False)

    def forward(self, x):
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        query, key, value = map(self._by_head, (self.query_norm(query), self.key_norm(key), value))
        scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        weights = self.softmax(scores, active=seen).to(value.dtype)
        return self.out((weights @ value).transpose(1, 2).flatten(-2))

    def _by_head(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class FeedForward(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.swiglu = PhysicalCore(swiglu)
        self.gate_up = nn.Linear(size.width, 2 * size.hidden, bias=False)
        self.down = nn.Linear(size.hidden, size.width, bias=False)

    def forward(self, x):
        return self.down(self.swiglu(*self.gate_up(x).chunk(2, dim=-1)))


class Layer(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.attention, self.feed_forward = Attention(size), FeedForward(size)
        self.attention_norm, self.feed_forward_norm = nn.RMSNorm(size.width), nn.RMSNorm(size.width)

    def forward(self, x):
        x = x + self.attention_norm(self.attention(x))
        return x + self.feed_forward_norm(self.feed_forward(x))


class Decoder(nn.Module):
    """Ids [N, T] → logits [N, T, V]; ``states`` keeps the L + 1 states [N, T, D] of the last call, for diagnostics."""

    def __init__(self, size):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, size.width)
        self.positions = nn.Embedding(size.length, size.width)
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width)
        self.head = nn.Linear(size.width, VOCABULARY, bias=False)
        self.states = []
        for weight in self.parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=0.02)
        for each in (self.embedding, self.positions):
            nn.init.normal_(each.weight, std=0.5**0.5)
        for layer in self.layers:
            for norm in (layer.attention_norm, layer.feed_forward_norm):
                nn.init.constant_(norm.weight, 1 / (2 * size.layers))

    def forward(self, ids):
        x = self.embedding(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        self.states = [x]
        for layer in self.layers:
            x = layer(x)
            self.states.append(x)
        return self.head(self.norm(x))


def softmax(scores, seen):
    """Over the keys that each query sees: [..., T, T], 0 elsewhere."""
    return scores.masked_fill(~seen, -torch.inf).softmax(-1, dtype=torch.float32)


def swiglu(gate, up):
    """Token by token."""
    return functional.silu(gate) * up
