"""What a language model is measured by: cross entropy, the worth of its context, what it generates.

N rows, T tokens, V vocabulary. Losses are sums in nats beside counts of tokens.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

import zgstore
from zgtrain.objective import token_ce
from zgtrain.source import IGNORED_LABEL

NOT_AN_INPUT: Final = ("labels", "id", "content")

Batch = Mapping[str, Any]


def logits_of(model: nn.Module, batch: Batch) -> Tensor:
    """A model's logits ``[N, T, V]``: called with what its forward names.

    Raises:
        zgstore.Invalid: if it gives none.
    """
    named = inspect.signature(model.forward).parameters
    given = {name: value for name, value in batch.items() if name in named and name not in NOT_AN_INPUT}
    if "use_cache" in named:
        given["use_cache"] = False
    said = model(**given) if given else model(batch["input_ids"])
    logits = getattr(said, "logits", said[0] if isinstance(said, tuple) else said)
    if not isinstance(logits, Tensor) or logits.dim() != 3:
        raise zgstore.Invalid(
            f"{type(model).__name__} gave a {type(logits).__name__} where logits [N, T, V] are needed",
            hint="let teacher and assembled student return logits, or an object that has them",
        )
    return logits


def labels_of(batch: Batch) -> Tensor:
    """int64 ``[N, T]``, −100 where nothing is scored: the batch's own, else every real token."""
    labels: Tensor = batch["labels"] if "labels" in batch else batch["input_ids"]
    mask = batch.get("attention_mask")
    return labels if mask is None else labels.masked_fill(mask == 0, IGNORED_LABEL)


@dataclass(slots=True)
class Scored:
    """Sums over scored tokens.

    Args:
        ce_sum: Of their cross entropies.
        right: How many a greedy choice would have met.
        tokens: How many.
        not_finite: At how many the logits have a NaN or an Inf.
    """

    ce_sum: float = 0.0
    right: int = 0
    tokens: int = 0
    not_finite: int = 0

    @torch.no_grad()
    def add(self, logits: Tensor, *labels: Tensor, also: Sequence[Scored] = ()) -> None:
        """Score logits ``[N, T, V]`` by labels ``[N, T]``, aligned with the input; −100 is left out.

        Args:
            logits: Looked at once, however many labels there are.
            labels: Own first; then for each of ``also`` a part of these.
            also: Others to score by their part.
        """
        first = labels[0][:, 1:]
        each = token_ce(logits, labels[0]).double()
        right = logits[:, :-1].argmax(-1) == first
        sound = torch.isfinite(logits[:, :-1].sum(-1, dtype=torch.float32))
        for scored, part in zip((self, *also), labels, strict=True):
            wanted = part[:, 1:] != IGNORED_LABEL
            scored.ce_sum += float(each[wanted].sum())
            scored.right += int((right & wanted).sum())
            scored.tokens += int(wanted.sum())
            scored.not_finite += int((~sound & wanted).sum())

    def include(self, other: Scored) -> None:
        """Count another's tokens too."""
        self.ce_sum += other.ce_sum
        self.right += other.right
        self.tokens += other.tokens
        self.not_finite += other.not_finite

    @property
    def ce(self) -> float:
        """Nats per token; NaN if nothing was scored."""
        return self.ce_sum / self.tokens if self.tokens else math.nan

    def as_value(self) -> dict[str, float | None]:
        """The JSON object."""
        ce = self.ce
        known = self.tokens > 0 and math.isfinite(ce)
        perplexity = math.exp(ce) if known and ce < 700 else None
        return {
            "ce": ce if known else None, "perplexity": perplexity,
            "accuracy": self.right / self.tokens if self.tokens else None,
        }  # fmt: skip


# ---- the worth of a context ----


@dataclass(frozen=True, slots=True)
class Swapped:
    """A batch whose prompts hold another sample's content.

    Args:
        batch: The same positions, masks and continuations.
        labels: Of the continuations alone: both batches are scored by these.
        last: Content of the last row, for a batch of one row that comes after.
    """

    batch: Batch
    labels: Tensor
    last: Tensor


def swapped(batch: Batch, before: Tensor | None = None) -> Swapped:
    """Replace the content of each row's prompt by the next row's, token for token at the same positions.

    A row's prompt is what comes before its first label; of a row that is labelled throughout, its first half. Where
    the other has fewer tokens of content they are taken again from their start. Tokens that are not content stay.

    Args:
        batch: ``input_ids``; perhaps ``attention_mask``, ``labels`` and ``content`` (bool, what may be replaced;
            default every real token).
        before: For a batch of one row: content of another.
    """
    ids, labels = batch["input_ids"], labels_of(batch)
    mask = batch.get("attention_mask")
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask != 0
    prompt = _prompts(real, labels)
    content = batch.get("content", real).bool() & real & prompt
    held = [row[where] for row, where in zip(ids, content, strict=True)]
    others = [*held[1:], held[0]] if len(held) > 1 else [held[0] if before is None else before]
    changed = ids.clone()
    for row, (where, other) in enumerate(zip(content, others, strict=True)):
        count = int(where.sum())
        if count and len(other):
            changed[row, where] = other.repeat(-(-count // len(other)))[:count]
    return Swapped({**batch, "input_ids": changed}, labels.masked_fill(prompt, IGNORED_LABEL), held[-1])


def _prompts(real: Tensor, labels: Tensor) -> Tensor:
    """Bool ``[N, T]``: where a row's prompt is."""
    place = torch.arange(real.shape[1], device=real.device).expand_as(real)
    begin = torch.where(real, place, real.shape[1]).amin(1)
    first = torch.where(labels != IGNORED_LABEL, place, real.shape[1]).amin(1)
    half = begin + real.sum(1) // 2
    return real & (place < torch.where(first > begin, first, half)[:, None])


# ---- generation ----


@torch.inference_mode()
def greedy(model: nn.Module, prompts: Sequence[Tensor], *, tokens: int) -> list[list[int]]:
    """The most likely continuation of each prompt: always so many tokens, an end of text is never chosen.

    Args:
        model: With ``generate`` of transformers, which gets all prompts at once; else called for each, once a token.
        prompts: int64 ``[T]`` each.
        tokens: How many.
    """
    device = next(model.parameters()).device
    generate: Callable[..., Tensor] | None = getattr(model, "generate", None)
    if generate is None:
        return [_one_by_one(model, ids.to(device), tokens=tokens) for ids in prompts]
    from transformers import GenerationConfig  # noqa: PLC0415 — heavy, and optional

    known: Any = model.generation_config
    padding = known.pad_token_id if known.pad_token_id is not None else 0
    longest = max(len(ids) for ids in prompts)
    batch = torch.full((len(prompts), longest), padding, dtype=torch.int64, device=device)
    mask = torch.zeros_like(batch)
    for row, ids in enumerate(prompts):
        batch[row, longest - len(ids) :] = ids
        mask[row, longest - len(ids) :] = 1
    config = GenerationConfig(
        do_sample=False, max_new_tokens=tokens, min_new_tokens=tokens, eos_token_id=known.eos_token_id,
        pad_token_id=padding, use_cache=True,
    )  # fmt: skip
    said = generate(input_ids=batch, attention_mask=mask, generation_config=config)
    return [[int(each) for each in row] for row in said[:, longest:]]


def _one_by_one(model: nn.Module, ids: Tensor, *, tokens: int) -> list[int]:
    row = ids[None]
    for _ in range(tokens):
        said = logits_of(model, {"input_ids": row, "attention_mask": torch.ones_like(row)})
        row = torch.cat([row, said[:, -1:].argmax(-1)], dim=1)
    return [int(each) for each in row[0, len(ids) :]]


@torch.inference_mode()
def continuation_ce(model: nn.Module, prompt: Tensor, continuation: Sequence[int] | Tensor) -> Scored:
    """How likely a model finds a continuation of a prompt: int64 ``[T]`` each."""
    device = next(model.parameters()).device
    tail = torch.as_tensor(continuation, dtype=torch.int64)
    ids = torch.cat([prompt.to("cpu"), tail.to("cpu")])[None].to(device)
    labels = ids.clone()
    labels[:, : len(prompt)] = IGNORED_LABEL
    scored = Scored()
    scored.add(logits_of(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}), labels)
    return scored
