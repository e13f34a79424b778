"""What a student is judged on: content is marked, and never what a template or a special token is."""

from __future__ import annotations

import pytest
import torch
from test_causal_lm import SENTENCE, WORDS, save_tokenizer

import zgstore
from zgtrain.heldout import heldout, prompts

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = tmp_path_factory.mktemp("tokenizer")
    transformers.LlamaConfig(vocab_size=len(WORDS)).save_pretrained(where)
    save_tokenizer(where)
    return str(where)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text(" ".join(SENTENCE), encoding="utf-8")
    return str(path)


def words(ids):
    return [WORDS[token] for token in ids]


def test_special_tokens_of_held_out_rows_are_no_content(folder, text):
    (batch,) = heldout([text, text], tokenizer=folder, batch_size=9, length=8)
    closing = batch["input_ids"] == WORDS.index("</s>")
    assert closing.any()
    assert torch.equal(batch["content"], ~closing)
    assert batch["content"].shape == (3, 8)


def test_held_out_rows_are_those_behind_the_trained_ones(folder, text):
    everything = next(iter(heldout([text], tokenizer=folder, length=3)))["input_ids"]
    rows = heldout([text], tokenizer=folder, length=3, skip=2, texts=["unused"])
    assert torch.equal(next(iter(rows))["input_ids"], everything[2:])
    assert rows.pins["skip"] == 2
    assert rows.decode(everything[0]) == "the cat sat"


def test_of_a_prompt_only_what_the_user_says_is_content(folder):
    (one,) = prompts(["the dog sat"], tokenizer=folder, files=["unused"])
    assert words(one["input_ids"]) == ["<user>", "the", "dog", "sat", "</s>", "<assistant>"]
    assert words(one["input_ids"][one["content"]]) == ["the", "dog", "sat"]
    assert one["decode"](one["input_ids"][1:4]) == "the dog sat"


def test_a_system_prompt_is_part_of_the_template(folder):
    (one,) = prompts(["the dog"], tokenizer=folder, system="a mat")
    assert words(one["input_ids"][one["content"]]) == ["the", "dog"]
    assert "mat" in words(one["input_ids"])


def test_an_empty_prompt_is_refused(folder):
    with pytest.raises(zgstore.Invalid, match="not in what the chat template"):
        prompts([""], tokenizer=folder)
