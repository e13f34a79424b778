"""The teacher: a small language model of sixteen narrow layers, trained from nothing and saved like any other."""

from __future__ import annotations

import math
import time
from pathlib import Path
from pydoc_data.topics import topics

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from zgtrain.causal_lm import text_batches

VOCABULARY, LENGTH, BATCH, RATE = 1024, 128, 4, 4e-3
END = "<|end|>"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte pairs of the very text, so few that the model need not spend its two minutes on their embedding."""
    pairs = Tokenizer(models.BPE())
    pairs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pairs.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    pairs.train_from_iterator([topics[name] for name in sorted(topics)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=pairs, eos_token=END, pad_token=END)


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=64, intermediate_size=176, num_hidden_layers=16, num_attention_heads=4,
            max_position_embeddings=512, tie_word_embeddings=True, initializer_range=0.1, bos_token_id=None,
            eos_token_id=0, pad_token_id=0,
        )
    )  # fmt: skip


def train(folder: Path, *, rows: int, steps: int) -> float:
    """Train on the first rows of the text, and save model and tokenizer in a folder; how many seconds it took."""
    began = time.perf_counter()
    model = make_model().train()
    model.config.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    batches = text_batches(["python:topics"], tokenizer=str(folder), batch_size=rows, length=LENGTH, rows=rows)
    ids = next(iter(batches))["input_ids"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1, (step + 1) / 50) * math.cos(math.pi / 2 * step / steps) ** 2
        chosen = ids[torch.randint(rows, (BATCH,))]
        model(input_ids=chosen, labels=chosen).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    return time.perf_counter() - began
