"""The physical cores in Hugging Face's decoder layers: attention's softmax and the gated product of the feed-forward.

N rows, H heads, T queries, S keys. Scores q kᵀ and the product with the values are digital; what stands between them, a
softmax over the unmasked keys of each query, is physical. So is act(gate) · up, token by token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

import zgstore
from zgtrain.gradient.blackbox import Asking
from zgtrain.gradient.cores import asking, physical
from zgtrain.ranks import is_sharded

NAME: Final = "zgtrain-physical"  # of the attention, in transformers' registry
_KERNEL: Final = "_attn_implementation"  # what a config calls it, and `set_attn_implementation` of a whole model sets
_UNKNOWN: Final = ("s_aux", "position_bias")  # sinks and biases would change the softmax


class Layers:
    """The attention and the gated products of a block's decoder layers.

    Args:
        attention: Modules that look their kernel up in transformers' registry.
        gated: Modules down(act(gate(x)) · up(x)).
        configs: Where the kernel's name is.
    """

    def __init__(self, attention: Sequence[nn.Module], gated: Sequence[nn.Module], configs: Sequence[Any]) -> None:
        self._attention, self._gated, self._configs = attention, gated, configs
        _register()

    @property
    def count(self) -> int:
        """How many cores they are."""
        return len(self._attention) + len(self._gated)

    @contextmanager
    def asking(self, now: Asking) -> Iterator[None]:
        """Within it, they are black boxes.

        Raises:
            zgstore.Invalid: if one of them was not met.
        """
        before = [getattr(config, _KERNEL) for config in self._configs]
        try:
            for config in self._configs:
                setattr(config, _KERNEL, NAME)
            for module in self._gated:
                module.forward = partial(_gated_product, module)
            with asking(now):
                yield
        finally:
            for config, name in zip(self._configs, before, strict=True):
                setattr(config, _KERNEL, name)
            for module in self._gated:
                del module.forward
        if now.nodes != self.count:
            raise zgstore.Invalid(
                f"{now.nodes} of {self.count} physical cores were met in the block's forward",
                hint="write a block of your own, with zgtrain.gradient.cores.PhysicalCore where its cores are",
            )


def find(block: nn.Module) -> Layers | None:
    """The decoder layers of a block, if each of its attentions has a gated product beside it; else None."""
    if not any(getattr(module, "_supports_attention_backend", False) for module in block.modules()):
        return None
    configs = {id(config): config for module in block.modules() if (config := _config(module)) is not None}
    attention = [each for each in block.modules() if _config(each) is not None and hasattr(each, "scaling")]
    gated = [each for each in block.modules() if _is_gated(each)]
    return Layers(attention, gated, [*configs.values()]) if 0 < len(attention) == len(gated) else None


def _config(module: nn.Module) -> Any:
    config = getattr(module, "config", None)
    return config if hasattr(config, _KERNEL) else None


@torch.no_grad()
def _is_gated(module: Any) -> bool:
    """Whether it has the parts, and their product's bits; of a sharded one, which cannot be run here, the parts."""
    parts = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    if not all(isinstance(part, nn.Linear) for part in parts) or not callable(getattr(module, "act_fn", None)):
        return False
    weight: Tensor = module.gate_proj.weight
    if is_sharded(weight):
        return True
    x = torch.linspace(-1.0, 1.0, weight.shape[1], device=weight.device).to(weight.dtype).view(1, 1, -1)
    return torch.equal(module(x), _gated_product(module, x))


def _gated_product(module: Any, x: Tensor) -> Tensor:
    product = partial(_gate, module.act_fn)
    found: Tensor = module.down_proj(physical(product, module.gate_proj(x), module.up_proj(x)))
    return found


def _gate(act: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
    return act(gate) * up


# ---- attention ----


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface  # noqa: PLC0415 — heavy, and optional

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)


def _mask(*args: Any, **options: Any) -> Tensor:
    """The mask as bool ``[N, 1, T, S]``, always there."""
    from transformers.masking_utils import sdpa_mask  # noqa: PLC0415 — heavy, and optional

    skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    found: Tensor = sdpa_mask(*args, **{**options, **skips})
    return found


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, *, scaling: float,
    dropout: float = 0.0, softcap: float | None = None, **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """As transformers calls it: ``[N, H, T, D]`` and fewer heads of keys and values → ``[N, T, H, D]``."""
    if given := [name for name in _UNKNOWN if options.get(name) is not None]:
        raise zgstore.Invalid(
            f"the attention of {type(module).__name__} has {given[0]}, which its physical core would not know",
            hint="write a block of your own, with zgtrain.gradient.cores.PhysicalCore where its cores are",
        )
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    scores = query @ key.transpose(-1, -2) * scaling
    weights = physical(partial(softmax, softcap=softcap), scores, active=attention_mask, scores=True)
    weights = functional.dropout(weights, dropout, module.training)
    return (weights.to(value.dtype) @ value).transpose(1, 2).contiguous(), None


def softmax(scores: Tensor, active: Tensor, *, softcap: float | None = None) -> Tensor:
    """Over the active keys: ``[…, T, S]`` → the same, 0 where a key is masked; even where all are.

    Args:
        scores: q kᵀ, scaled.
        active: bool, broadcasting to them.
        softcap: Of models that bound their scores: c tanh(s / c).
    """
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return scores.masked_fill(~active, torch.finfo(scores.dtype).min).softmax(-1)
