"""What a student is judged on: rows that nobody trained on, and prompts; what they say marked off from their template.

``content`` is true where a token says something: it is what the context gate replaces. Special tokens and what a chat
template adds are never content.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import zgstore
from zgtrain.pretrained import load_tokenizer
from zgtrain.texts import TokenBatches, text_batches


class HeldOut:
    """Batches of text with ``content`` beside what `TokenBatches` have: bool ``[N, T]``.

    Args:
        batches: The rows.
        special: Ids that are never content.
    """

    def __init__(self, batches: TokenBatches, special: Sequence[int]) -> None:
        self.pins = batches.pins
        self._batches = batches
        self._special = torch.tensor(sorted(special), dtype=torch.int64)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for batch in self._batches:
            content = (batch["attention_mask"] == 1) & ~torch.isin(batch["input_ids"], self._special)
            yield {**batch, "content": content}

    def decode(self, ids: Tensor | Sequence[int]) -> str:
        """The text of one row's ids."""
        return self._batches.decode(ids)


def heldout(
    files: Sequence[str],
    *,
    tokenizer: str,
    batch_size: int = 4,
    length: int = 128,
    rows: int | None = None,
    skip: int = 0,
    texts: Sequence[str] = (),  # noqa: ARG001 — of the prompts, whose arguments these are too
    system: str = "",  # noqa: ARG001
) -> HeldOut:
    """Rows of text to judge on, cut as `text_batches` cuts them.

    Args:
        files: As for `text_batches`.
        tokenizer: Where it lies, as for `teacher`.
        batch_size: Rows of a batch.
        length: Tokens of a row, T.
        rows: How many; None: all that are left.
        skip: Rows left out at the start: at least those that the student is trained on.
        texts: Taken and not used: one ``[evaluate] args`` serves `heldout` and `prompts`.
        system: Taken and not used.
    """
    batches = text_batches(files, tokenizer=tokenizer, batch_size=batch_size, length=length, rows=rows, skip=skip)
    return HeldOut(batches, load_tokenizer(tokenizer).all_special_ids)


def prompts(
    texts: Sequence[str],
    *,
    tokenizer: str,
    system: str = "",
    files: Sequence[str] = (),  # noqa: ARG001 — of the held-out rows, whose arguments these are too
    batch_size: int = 4,  # noqa: ARG001
    length: int = 128,  # noqa: ARG001
    rows: int | None = None,  # noqa: ARG001
    skip: int = 0,  # noqa: ARG001
) -> list[Mapping[str, Any]]:
    """Prompts to generate from, through the tokenizer's chat template if it has one.

    Args:
        texts: What the user says; in each prompt this alone is content.
        tokenizer: Where it lies, as for `teacher`.
        system: What the template is told first; empty: what it says by itself.
        files: Taken and not used: one ``[evaluate] args`` serves `heldout` and `prompts`.
        batch_size: Taken and not used.
        length: Taken and not used.
        rows: Taken and not used.
        skip: Taken and not used.

    Returns:
        For each ``text``, ``input_ids`` (int64 ``[T]``), ``content`` (bool ``[T]``), and ``decode``, ids → text.
    """
    tokens = load_tokenizer(tokenizer)
    return [_prompt(tokens, text, system) for text in texts]


def _prompt(tokens: Any, text: str, system: str) -> Mapping[str, Any]:
    said = text
    if tokens.chat_template:
        turns = [{"role": "system", "content": system}] if system else []
        turns.append({"role": "user", "content": text})
        said = str(tokens.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
    start = said.rfind(text)
    if not text or start < 0:
        raise zgstore.Invalid(f"the prompt {text!r} is not in what the chat template makes of it", hint="reword it")
    encoded = tokens(said, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    content = [
        start <= first and last <= start + len(text) and first < last for first, last in encoded["offset_mapping"]
    ]
    return {
        "text": text,
        "input_ids": torch.tensor(encoded["input_ids"], dtype=torch.int64),
        "content": torch.tensor(content, dtype=torch.bool),
        "decode": lambda ids: str(tokens.decode([int(each) for each in ids])),
    }
