"""Pages whose Python is written against a real model run on a small one that has its layers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import zgstore
import zgtrain

HOW_TO = Path(__file__).resolve().parent.parent.parent / "docs" / "how-to"
BOUNDARIES = ["model.layers.8:in", "model.layers.15:in", "model.norm:in"]
CUT = [[0, 8], [8, 15], [15, 30]]
RECIPE = f"""
[teacher]
factory = "zgtrain.causal_lm:teacher"
args = {{ path = "teacher" }}
id = "toy/llama"
revision = "1"
[data]
factory = "rows_of_the_pages:batches"
id = "toy/rows"
revision = "1"
[capture]
boundaries = {BOUNDARIES}
context = ["input_ids", "attention_mask", "position_ids", "labels"]
"""
ROWS = """
import torch


def batches():
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        ids = torch.randint(3, 37, (4, 10), generator=generator)
        ones = torch.ones_like(ids)
        yield {"input_ids": ids, "attention_mask": ones, "position_ids": ones.cumsum(1) - 1, "labels": ids}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the pages' snippets are typed: the model in ``teacher``, its states in ``.zgstore`` as ``main``."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("pages")
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=37, hidden_size=16, intermediate_size=24, num_hidden_layers=30, num_attention_heads=2,
            num_key_value_heads=1, bos_token_id=1, eos_token_id=2, pad_token_id=0, max_position_embeddings=32,
        )
    ).save_pretrained(folder / "teacher")  # fmt: skip
    (folder / "rows_of_the_pages.py").write_text(ROWS, encoding="utf-8")
    (folder / "cache.toml").write_text(RECIPE, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        zgstore.build(zgstore.Store.init(".zgstore"), folder / "cache.toml", ref="main")
    return folder


@pytest.fixture
def run(folder, monkeypatch):
    """The Python of a page, executed; what it has defined."""
    monkeypatch.chdir(folder)

    def executed(page):
        named = {"__name__": "__main__"}
        for body in re.findall(r"^```python\n(.*?)^```$", (HOW_TO / page).read_text("utf-8"), re.DOTALL | re.MULTILINE):
            exec(compile(body, page, "exec"), named)
        return named

    return executed


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than this machine has cores
def test_a_block_is_trained_without_zgtrain(run):
    assert set(run("distil-block-by-block.md")["batch"]) >= {"model.layers.8:in", "model.layers.15:in", "mask"}


def test_a_sparse_autoencoder_is_trained_on_single_tokens(run, capsys):
    run("train-sparse-autoencoder.md")
    assert capsys.readouterr().out.startswith("epoch 0: 80 tokens, loss ")


def test_a_draft_is_trained_on_last_states_and_tokens(run, capsys):
    named = run("train-draft-model.md")
    assert "the target would accept" in capsys.readouterr().out
    assert not any(parameter.requires_grad for parameter in named["head"].parameters())


def test_a_loss_and_a_forward_of_ones_own_train_a_block(run):
    named = run("custom-loss-and-forward.md")
    block = zgtrain.causal_lm.block(1, "teacher", layers=CUT)
    with zgstore.read(zgstore.Store.open(".zgstore"), "main") as reader:
        report = zgtrain.train_block(
            block, reader, source=BOUNDARIES[0], target=BOUNDARIES[1], steps=2,
            forward=named["forward"], loss=named["loss"],
        )  # fmt: skip
    assert report.steps == 2
    assert report.initial_digest != report.state_digest


def test_a_block_that_shards_itself_is_whole_in_one_process(run):
    made = run("shard-a-block.md")["block"](1, path="teacher", layers=CUT)
    assert len(made.decoder.layers) == 7
    assert all(type(parameter) is torch.nn.Parameter for parameter in made.parameters())
