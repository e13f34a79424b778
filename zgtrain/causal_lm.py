"""Hugging Face decoder models: the teacher, its skeleton, and batches of text and chats.

Models and tokenizers are named by where they lie, never by a hub's name: a folder as ``save_pretrained`` writes it, a
``.gguf`` file, or ``package:NAME``, the data of an installed package.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import nn

import zgstore
from zgtrain.pretrained import dequantised, find_model, load_config, loading
from zgtrain.texts import chat_batches, text_batches

__all__ = ["chat_batches", "round_linear_weights", "skeleton", "teacher", "text_batches"]

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def teacher(
    path: str,
    *,
    dtype: str = "float32",
    attn_implementation: str = "sdpa",
    round_weights_bits: int | None = None,
) -> nn.Module:
    """A causal language model with its weights, in eval mode.

    Args:
        path: A folder with ``config.json``, a ``.gguf`` file (dequantised as it is read), or ``package:NAME``.
        dtype: What it computes in: ``float32``, ``bfloat16`` or ``float16``.
        attn_implementation: ``sdpa`` or ``eager``; other kernels give other bits.
        round_weights_bits: Round each linear map inside the layers to that many bits (symmetric, a scale for each
            output row): a cheap stand-in for a teacher that was changed. The embedding and the head stay.

    Raises:
        zgstore.Invalid: if there is no model at ``path``, or an argument is out of range.
    """
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 — heavy, and optional

    place = find_model(path)
    with loading():
        model: nn.Module = AutoModelForCausalLM.from_pretrained(
            place.folder,
            config=load_config(place),
            dtype=_dtype(dtype),
            attn_implementation=attn_implementation,
            local_files_only=True,
            **place.gguf,
            **dequantised(place),
        )
    if round_weights_bits is not None:
        round_linear_weights(model, bits=round_weights_bits)
    return model.eval()


def skeleton(
    path: str,
    *,
    dtype: str = "float32",
    attn_implementation: str = "sdpa",
    round_weights_bits: int | None = None,  # noqa: ARG001 — a skeleton takes what its teacher takes
) -> nn.Module:
    """The same module without its weights: shapes and names alone, for ``points`` and ``estimate``.

    Call it under ``torch._subclasses.FakeTensorMode`` as zgstore does, or every parameter is allocated.

    Args:
        path: As for ``teacher``; no weight is read.
        dtype: As for ``teacher``.
        attn_implementation: As for ``teacher``.
        round_weights_bits: Taken and not used.
    """
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 — heavy, and optional

    config = load_config(find_model(path))
    model: nn.Module = AutoModelForCausalLM.from_config(
        config, dtype=_dtype(dtype), attn_implementation=attn_implementation
    )
    return model.eval()


def round_linear_weights(model: nn.Module, *, bits: int) -> None:
    """Round the weight of every linear map but the head to ``bits`` bits, in place.

    w ← s · round(w / s) with s = max|w| / (2**(bits − 1) − 1) for each output row, half to even.
    """
    if not 2 <= bits <= 16:
        raise zgstore.Invalid(f"weights cannot be rounded to {bits} bits", hint="give 2 to 16")
    find_head = getattr(model, "get_output_embeddings", None)
    head = find_head() if find_head is not None else None
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear) and module is not head:
                weight = module.weight.float()
                scale = weight.abs().amax(dim=1, keepdim=True) / (2 ** (bits - 1) - 1)
                steps = torch.where(scale > 0, weight / scale, torch.zeros_like(weight)).round()
                module.weight.copy_(steps * scale)


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise zgstore.Invalid(f"a teacher cannot compute in {name!r}", hint=f"one of {', '.join(DTYPES)}")
    return DTYPES[name]
