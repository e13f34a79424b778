"""Hugging Face decoder models: teacher, batches, a student's blocks by explicit layer ranges, and their assembly.

Models and tokenizers are named by where they lie, never by a hub's name: a folder as ``save_pretrained`` writes it, a
``.gguf`` file, or ``package:NAME``, the data of an installed package. One ``[student] args`` serves `teacher`, `block`,
`assemble`, `interface` and `embedding`: each takes what the others need.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import zgstore
from zgtrain.decoder import (
    Block,
    Embedding,
    Interface,
    Partition,
    bare_model,
    cut_block,
    cut_embedding,
    cut_interface,
    dtype_of,
    fill,
    join,
    partition,
    thinned,
    whole_model,
)
from zgtrain.denoiser import Denoiser, NoisedBlock
from zgtrain.heldout import heldout, prompts
from zgtrain.noise import LEVEL, NOISY, SIGMA, Diffusion
from zgtrain.pretrained import ModelPlace, find_model, load_config, loading, save_tokenizer, share
from zgtrain.texts import chat_batches, text_batches

__all__ = [
    "assemble", "block", "chat_batches", "denoiser", "embedding", "forward", "heldout", "interface", "noised_block",
    "prompts", "round_linear_weights", "skeleton", "teacher", "text_batches", "unpack",
]  # fmt: skip

Ranges = Sequence[Sequence[int]]
Piece = TypeVar("Piece", Interface, Embedding)


# ---- the teacher ----


def teacher(
    path: str,
    *,
    dtype: str = "float32",
    attn_implementation: str = "sdpa",
    round_weights_bits: int | None = None,
    layers: Ranges | None = None,  # noqa: ARG001 — of the student, whose arguments these are too
    keep: Ranges | None = None,  # noqa: ARG001
) -> nn.Module:
    """A causal language model with its weights, in eval mode.

    Args:
        path: A folder with ``config.json``, a ``.gguf`` file (dequantised as it is read), or ``package:NAME``.
        dtype: What it computes in: ``float32``, ``bfloat16`` or ``float16``.
        attn_implementation: ``sdpa`` or ``eager``; other kernels give other bits.
        round_weights_bits: Round each linear map inside the layers to that many bits (symmetric, a scale for each
            output row): a cheap stand-in for a teacher that was changed. The embedding and the head stay.
        layers: Taken and not used.
        keep: Taken and not used.

    Raises:
        zgstore.Invalid: if there is no model at ``path``, or an argument is out of range.
    """
    model: nn.Module = whole_model(find_model(path), dtype=dtype_of(dtype), attn_implementation=attn_implementation)
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
        config, dtype=dtype_of(dtype), attn_implementation=attn_implementation
    )
    return model.eval()


def unpack(path: str, folder: str | Path) -> None:
    """Write a model and its tokenizer as a folder of safetensors, of which a block loads its own tensors alone.

    Of a GGUF file every block unpacks the whole model and lets the rest go, which takes longer and more memory.

    Args:
        path: As for `teacher`; a GGUF file becomes float32.
        folder: Where to; left alone if there is a model already.
    """
    folder = Path(folder)
    if (folder / "config.json").is_file():
        return
    model: Any = teacher(path)
    model.config.use_cache = model.generation_config.use_cache = True
    with loading():
        save_tokenizer(path, folder)
        model.save_pretrained(folder)
    share(folder)


# ---- the student ----


def block(
    block_id: int,
    path: str,
    *,
    layers: Ranges,
    keep: Ranges | None = None,
    dtype: str = "float32",
    attn_implementation: str = "sdpa",
    round_weights_bits: int | None = None,
) -> Block:
    """A block of the student: chosen layers of the teacher, copied, with their own rotary embedding and masks.

    Of a folder of safetensors only the block's own tensors are read; a GGUF file is unpacked whole, and what the block
    does not need is let go (see `unpack`).

    Args:
        block_id: b.
        path: The teacher, as for `teacher`.
        layers: For each block the teacher's layers ``[start, stop)`` that it stands for.
        keep: For each block the layers of them that it is made of; default all.
        dtype: Of its parameters.
        attn_implementation: As the teacher's.
        round_weights_bits: As the teacher's.

    Raises:
        zgstore.Invalid: if the ranges leave a gap, or the class cannot be cut.
    """
    place, config, kept = _student(path, layers, keep)
    if not 0 <= block_id < len(kept.kept):
        raise zgstore.Invalid(f"there is no block {block_id} of {len(kept.kept)}", hint="blocks count from 0")
    bare = bare_model(config, dtype=dtype_of(dtype), attn_implementation=attn_implementation)
    made, named = cut_block(bare, kept, block_id)
    fill(made, named, place, dtype=dtype_of(dtype), attn=attn_implementation)
    if round_weights_bits is not None:
        round_linear_weights(made, bits=round_weights_bits)
    return made


def noised_block(block_id: int, path: str, **args: Any) -> NoisedBlock:
    """A `block` that can be shown a noisy target (experimental); until it is trained it does what the block does.

    Args:
        block_id: b.
        path: As for `block`.
        args: As for `block`.
    """
    made = block(block_id, path, **args)
    return NoisedBlock(made.decoder, width=load_config(find_model(path)).hidden_size)


def forward(block: nn.Module, source: Tensor, context: Mapping[str, Any]) -> Tensor:
    """How a job calls a block: ``[train] forward = "zgtrain.causal_lm:forward"``.

    Args:
        block: Of `block`.
        source: ``[N, T, D]``.
        context: ``mask`` and ``positions`` are used; of a `noised_block` also ``noisy``, ``sigma`` and ``level``.
    """
    shown = (
        {name: context[name] for name in (NOISY, SIGMA, LEVEL)}
        if isinstance(block, NoisedBlock) and NOISY in context
        else {}
    )
    prediction: Tensor = block(source, context.get("mask"), context.get("positions"), **shown)
    return prediction


def interface(
    path: str,
    *,
    dtype: str = "float32",
    attn_implementation: str = "sdpa",
    round_weights_bits: int | None = None,  # noqa: ARG001 — the head is never rounded
    layers: Ranges | None = None,  # noqa: ARG001 — of the student, whose arguments these are too
    keep: Ranges | None = None,  # noqa: ARG001
) -> Interface:
    """The teacher's final norm and head, frozen: the last boundary → logits.

    Args:
        path: As for `teacher`.
        dtype: As for `teacher`.
        attn_implementation: As for `teacher`.
        round_weights_bits: Taken and not used.
        layers: Taken and not used.
        keep: Taken and not used.
    """
    return _frozen(cut_interface, path, dtype=dtype, attn_implementation=attn_implementation)


def embedding(
    path: str,
    *,
    dtype: str = "float32",
    attn_implementation: str = "sdpa",
    round_weights_bits: int | None = None,  # noqa: ARG001 — the embedding is never rounded
    layers: Ranges | None = None,  # noqa: ARG001 — of the student, whose arguments these are too
    keep: Ranges | None = None,  # noqa: ARG001
) -> Embedding:
    """The teacher's embedding, frozen: ids and positions → boundary 0.

    Args:
        path: As for `teacher`.
        dtype: As for `teacher`.
        attn_implementation: As for `teacher`.
        round_weights_bits: Taken and not used.
        layers: Taken and not used.
        keep: Taken and not used.
    """
    return _frozen(cut_embedding, path, dtype=dtype, attn_implementation=attn_implementation)


def _frozen(
    cut: Callable[[Any], tuple[Piece, dict[str, str]]], path: str, *, dtype: str, attn_implementation: str
) -> Piece:
    """A part of the teacher that is cut out without its layers, with its weights."""
    place = find_model(path)
    bare = bare_model(load_config(place), dtype=dtype_of(dtype), attn_implementation=attn_implementation)
    made, named = cut(bare)
    fill(made, named, place, dtype=dtype_of(dtype), attn=attn_implementation)
    return made.eval()


def assemble(
    blocks: Sequence[nn.Module],
    path: str,
    *,
    layers: Ranges,
    keep: Ranges | None = None,
    dtype: str = "float32",
    attn_implementation: str = "sdpa",
    round_weights_bits: int | None = None,  # noqa: ARG001 — the blocks are what they are
) -> nn.Module:
    """The whole student: an ordinary ``PreTrainedModel`` in eval mode, which ``save_pretrained`` saves.

    It shares the blocks' memory; embedding, norm and head are the teacher's. Its ``save_beside(folder)`` saves the
    teacher's tokenizer, so that `zgtrain assemble` leaves a folder that needs no other.

    Args:
        blocks: All of them, in depth order.
        path: As for `block`.
        layers: As for `block`.
        keep: As for `block`.
        dtype: Of embedding, norm and head; the blocks keep theirs.
        attn_implementation: As the teacher's.
        round_weights_bits: Taken and not used.

    Raises:
        zgstore.Invalid: if the blocks are not those of the partition.
    """
    place, config, kept = _student(path, layers, keep)
    model = bare_model(config, dtype=dtype_of(dtype), attn_implementation=attn_implementation)
    left = join(model, blocks, kept)
    fill(model, {name: name for name in left}, place, dtype=dtype_of(dtype), attn=attn_implementation)
    model.tie_weights()
    model.config.use_cache = True
    model.generation_config = _generation(place, model)
    model.save_beside = partial(save_tokenizer, path)
    whole: nn.Module = model.requires_grad_(requires_grad=True).eval()
    return whole


def denoiser(blocks: Sequence[nn.Module], path: str, *, noise: Diffusion, **args: Any) -> Denoiser:
    """The whole student of a job whose noise is ``diffusion`` (experimental): `noised_block`s go down the grid.

    Args:
        blocks: All of them, in depth order.
        path: As for `block`.
        noise: The grid; the job gives it.
        args: As for `assemble`.
    """
    known = {key: value for key, value in args.items() if key in {"dtype", "attn_implementation"}}
    return Denoiser(blocks, forward, noise, embedding=embedding(path, **known), interface=interface(path, **known))


def _student(path: str, layers: Ranges, keep: Ranges | None) -> tuple[ModelPlace, Any, Partition]:
    place = find_model(path)
    config = load_config(place)
    kept = partition(config.num_hidden_layers, layers, keep)
    return place, thinned(config, kept.layers), kept


def _generation(place: ModelPlace, model: Any) -> Any:
    from transformers import GenerationConfig  # noqa: PLC0415 — heavy, and optional

    if (place.folder / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(place.folder, local_files_only=True)
    return GenerationConfig.from_model_config(model.config)


# ---- a teacher that was changed ----


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
