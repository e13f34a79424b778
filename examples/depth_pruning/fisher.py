"""A boundary loss that weighs an error by what the teacher would make of it: the Fisher information of its output.

An error δ in h_b moves the teacher's next-token distributions by KL ≈ ½ δᵀ F δ with F = E[g gᵀ], g the gradient of the
log-likelihood of tokens drawn from the teacher itself. F is taken once, from some rows, before any block is trained, so
that a block needs neither teacher nor neighbour for it: 1.3 MB a boundary. Directions that nothing reads weigh little.

N rows, T tokens, D width. States differ by orders of magnitude from token to token, and the layers read them through a
norm, so both δ and g are taken relative to each state's rms.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

FILE = Path(__file__).resolve().parent.parent.parent / ".pruning" / "fisher.safetensors"
FLOOR = 0.5  # the part of the loss that is plain relative-mse: errors are too large for F alone to describe them


def near(prediction: Tensor, target: Tensor, context) -> Tensor:
    """[N, T, D] twice → each token's δᵀ M δ, where M is the boundary's F mixed with the identity, of trace 1."""
    error = (prediction - target).float() / rms(target)
    return (error @ metric(context["boundary"]).to(error.device) * error).sum(-1)


@cache
def metric(boundary: str) -> Tensor:
    information = load_file(FILE)[boundary]
    width = len(information)
    return (1 - FLOOR) * information / information.trace() + FLOOR * torch.eye(width) / width


def rms(states: Tensor) -> Tensor:
    return states.float().square().mean(-1, keepdim=True).sqrt().clamp_min(1e-12)


def measure(teacher: nn.Module, boundaries: list[str], rows, *, seed: int = 0) -> dict[str, Tensor]:
    """F [D, D] at each boundary but the first, which is no block's target; `boundaries` are names like ``x.y:in``."""
    teacher.requires_grad_(requires_grad=False)
    generator = torch.Generator().manual_seed(seed)
    states: dict[str, Tensor] = {}
    total: dict[str, Tensor] = {}

    def hook(name):
        def see(_module, args, keywords):
            hidden = args[0] if args else keywords["hidden_states"]
            if not states:
                hidden = hidden.detach().requires_grad_()  # the gradient need not go deeper
            hidden.retain_grad()
            states[name] = hidden
            return ((hidden, *args[1:]), keywords) if args else (args, {**keywords, "hidden_states": hidden})

        return see

    hooks = [
        teacher.get_submodule(name.removesuffix(":in")).register_forward_pre_hook(hook(name), with_kwargs=True)
        for name in boundaries[1:]
    ]
    try:
        for batch in rows:
            states.clear()
            logits = teacher(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
            log_p = logits.float().log_softmax(-1)
            drawn = torch.multinomial(log_p.detach().exp().flatten(0, 1), 1, generator=generator)
            log_p.flatten(0, 1).gather(1, drawn).sum().backward()
            for name, hidden in states.items():
                g = (hidden.grad * rms(hidden.detach()))[batch["attention_mask"] == 1]
                total[name] = total.get(name, 0) + g.T @ g
    finally:
        for each in hooks:
            each.remove()
    return total


def write(teacher: nn.Module, boundaries: list[str], rows) -> None:
    save_file(measure(teacher, boundaries, rows), FILE)
