"""Texts and chats as batches of token rows, the same every time they are read.

Shapes: B rows of a batch, T tokens of a row.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

import zgstore
from zgtrain.pretrained import load_tokenizer

IGNORED: Final = -100  # the label that no loss counts
PYTHON_TOPICS: Final = "python:topics"


class TokenBatches:
    """Batches of token rows: iterable as often as wanted, tokenised once.

    Iterating yields dicts of ``input_ids``, ``attention_mask``, ``position_ids`` and ``labels``, each int64 [B, T],
    padded on the right to the longest row of the batch; labels are −100 where no loss counts.

    Args:
        rows: Called once for the stream of (ids, labels) rows.
        tokenizer: What made the ids.
        batch_size: Rows of a batch; the last may be smaller.
        pins: What the rows depend on beside the texts.
    """

    def __init__(
        self,
        rows: Callable[[], Iterator[tuple[Sequence[int], Sequence[int]]]],
        *,
        tokenizer: Any,
        batch_size: int,
        pins: Mapping[str, Any],
    ) -> None:
        _see_whole(1, batch_size=batch_size)
        self.pins = dict(pins)
        self._tokenizer = tokenizer
        self._batch_size = batch_size
        self._coming = rows()
        self._rows: list[tuple[array[int], array[int]]] = []

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        at = 0
        while rows := self._upto(at, at + self._batch_size):
            yield self._batch(rows)
            at += len(rows)

    def decode(self, ids: Tensor | Sequence[int]) -> str:
        """The text of one row's ids."""
        return str(self._tokenizer.decode([int(each) for each in ids]))

    def _upto(self, start: int, stop: int) -> list[tuple[array[int], array[int]]]:
        while len(self._rows) < stop and (row := next(self._coming, None)) is not None:
            self._rows.append((array("q", row[0]), array("q", row[1])))
        return self._rows[start:stop]

    def _batch(self, rows: Sequence[tuple[array[int], array[int]]]) -> dict[str, Tensor]:
        size = (len(rows), max(len(ids) for ids, _ in rows))
        padding = self._tokenizer.pad_token_id
        input_ids = torch.full(size, 0 if padding is None else int(padding), dtype=torch.int64)
        attention_mask = torch.zeros(size, dtype=torch.int64)
        labels = torch.full(size, IGNORED, dtype=torch.int64)
        for at, (ids, wanted) in enumerate(rows):
            input_ids[at, : len(ids)] = torch.tensor(ids)
            attention_mask[at, : len(ids)] = 1
            labels[at, : len(ids)] = torch.tensor(wanted)
        position_ids = (attention_mask.cumsum(1) - 1).clamp_(min=0)
        return {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "labels": labels,
        }


def text_batches(
    files: Sequence[str],
    *,
    tokenizer: str,
    batch_size: int,
    length: int,
    rows: int | None = None,
    skip: int = 0,
) -> TokenBatches:
    """Texts joined, an end-of-text token after each, and cut into rows of equal length.

    Args:
        files: Text files, one document each; ``.jsonl`` files with a ``text`` a line; ``python:topics``, the language
            documentation that ships with the running Python.
        tokenizer: Where it lies, as for ``teacher``.
        batch_size: Rows of a batch.
        length: Tokens of a row, T. What is left over at the end is not used.
        rows: How many rows; None: all.
        skip: Rows left out at the start, as for a held-out part.

    Raises:
        zgstore.Invalid: if a file cannot be read as said, or the texts hold fewer rows than asked for.
    """
    _see_whole(1, length=length, rows=rows)
    _see_whole(0, skip=skip)
    tokens = load_tokenizer(tokenizer)
    places = _places(files)

    def stream() -> Iterator[tuple[Sequence[int], Sequence[int]]]:
        left: list[int] = []
        count = 0
        for text in _documents(places):
            left += tokens(text, add_special_tokens=False, verbose=False)["input_ids"]
            left += [] if tokens.eos_token_id is None else [tokens.eos_token_id]
            whole = len(left) // length
            for start in range(0, whole * length, length):
                if rows is not None and count == skip + rows:
                    return
                count += 1
                if count > skip:
                    yield left[start : start + length], left[start : start + length]
            left = left[whole * length :]
        if rows is not None and count < skip + rows:
            raise zgstore.Invalid(
                f"the texts hold {count} rows of {length} tokens, and {skip + rows} are asked for",
                hint="ask for fewer rows, or give more text",
            )

    pins = {"tokenizer": tokenizer_digest(tokens), "length": length, "skip": skip}
    return TokenBatches(stream, tokenizer=tokens, batch_size=batch_size, pins=pins)


def chat_batches(
    files: Sequence[str],
    *,
    tokenizer: str,
    batch_size: int,
    max_length: int,
    assistant_only: bool = True,
    rows: int | None = None,
) -> TokenBatches:
    """Conversations through the tokenizer's chat template, one a row.

    Args:
        files: ``.jsonl`` files, a line ``{"messages": [{"role": …, "content": …}, …]}``.
        tokenizer: Where it lies, as for ``teacher``.
        batch_size: Rows of a batch.
        max_length: Longer rows are cut at the end, in tokens.
        assistant_only: Label what the assistant says and its closing token alone; else every token.
        rows: How many rows; None: all.

    Raises:
        zgstore.Invalid: if a line is no conversation, or the tokenizer has no chat template.
    """
    _see_whole(1, max_length=max_length, rows=rows)
    tokens = load_tokenizer(tokenizer)
    if not tokens.chat_template:
        raise zgstore.Invalid(f"the tokenizer of {tokenizer!r} has no chat template", hint="use text_batches")
    places = _places(files)

    def stream() -> Iterator[tuple[Sequence[int], Sequence[int]]]:
        for count, (where, line) in enumerate(_lines(places, "messages")):
            if count == rows:
                return
            ids, labels = _conversation(tokens, line, where=where, assistant_only=assistant_only)
            yield ids[:max_length], labels[:max_length]

    pins = {
        "tokenizer": tokenizer_digest(tokens),
        "chat_template": _sha256(str(tokens.chat_template)),
        "max_length": max_length,
        "assistant_only": assistant_only,
    }
    return TokenBatches(stream, tokenizer=tokens, batch_size=batch_size, pins=pins)


def _see_whole(least: int, **numbers: int | None) -> None:
    """See that what counts something is a whole number, and not too small; None is not said. Raises Invalid."""
    for name, number in numbers.items():
        if number is not None and (type(number) is not int or number < least):
            raise zgstore.Invalid(f"{name} is {number!r:.80}", hint=f"give a whole number, at least {least}")


def tokenizer_digest(tokenizer: Any) -> str:
    """``sha256:…`` of everything that decides the ids: vocabulary, merges, normalisation, added tokens."""
    return _sha256(tokenizer.backend_tokenizer.to_str())


def _conversation(
    tokenizer: Any, messages: Any, *, where: str, assistant_only: bool
) -> tuple[Sequence[int], Sequence[int]]:
    """Ids and labels of one conversation; what the assistant said is found by rendering the turns before it."""
    if not isinstance(messages, list) or not all(isinstance(m, dict) and {"role", "content"} <= {*m} for m in messages):
        raise zgstore.Invalid(f"{where} is no conversation", hint='write {"messages": [{"role": …, "content": …}, …]}')

    def render(turns: Sequence[Any], *, prompt: bool) -> str:
        return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=prompt))

    text = render(messages, prompt=False)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids: list[int] = encoded["input_ids"]
    if not assistant_only:
        return ids, ids
    said = []
    for at, message in enumerate(messages):
        if message["role"] == "assistant":
            before, after = render(messages[:at], prompt=True), render(messages[: at + 1], prompt=False)
            if not (after.startswith(before) and text.startswith(after)):
                raise zgstore.Invalid(
                    f"the chat template renders {where} differently when the conversation goes on",
                    hint="assistant_only needs a template that only appends; set assistant_only = false",
                )
            said.append((len(before), len(after)))
    spans = encoded["offset_mapping"]
    counted = [any(start <= first and last <= end for start, end in said) for first, last in spans]
    return ids, [token if count else IGNORED for token, count in zip(ids, counted, strict=True)]


def _places(files: Sequence[str]) -> list[str | Path]:
    """Absolute paths, looked up now: the directory a recipe is read in is not the one its batches are made in."""
    places: list[str | Path] = [PYTHON_TOPICS if each == PYTHON_TOPICS else Path(each).absolute() for each in files]
    for place in places:
        if isinstance(place, Path) and not place.is_file():
            raise zgstore.Invalid(f"there is no file {place}", hint="paths are relative to the recipe")
    return places


def _documents(places: Sequence[str | Path]) -> Iterator[str]:
    for place in places:
        if isinstance(place, str):
            from pydoc_data.topics import topics  # noqa: PLC0415 — 700 kB of text that few need

            yield from (topics[name] for name in sorted(topics))
        elif place.suffix == ".jsonl":
            yield from (str(text) for _, text in _lines([place], "text"))
        else:
            yield place.read_text(encoding="utf-8")


def _lines(places: Sequence[str | Path], key: str) -> Iterator[tuple[str, Any]]:
    """(where, value of ``key``) of each line of the files."""
    for place in places:
        with Path(place).open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    value = json.loads(line)[key]
                except (ValueError, TypeError, KeyError) as error:
                    raise zgstore.Invalid(
                        f"{place}:{number} is no JSON object with {key!r}", hint="write one object a line"
                    ) from error
                yield f"{place}:{number}", value


def _sha256(text: str) -> str:
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
