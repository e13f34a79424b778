"""The loss of the depth pruning example that weighs an error by what the teacher makes of it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from zgtrain.objective import relative_mse

transformers = pytest.importorskip("transformers")
FILE = Path(__file__).resolve().parent.parent.parent / "examples" / "depth_pruning" / "fisher.py"
BOUNDARIES = ["model.layers.0:in", "model.layers.1:in", "model.norm:in"]


@pytest.fixture
def fisher():
    spec = importlib.util.spec_from_file_location("fisher_of_the_example", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def teacher():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=6, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8)
    return model


def batch_of(ids):
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def test_the_information_at_the_last_boundary_is_that_of_its_softmax(fisher, teacher):
    ids = torch.randint(0, 6, (3, 5), generator=torch.Generator().manual_seed(1))
    drawn = fisher.measure(teacher, BOUNDARIES, [batch_of(ids.repeat(400, 1))] * 4)
    seen = []
    hook = teacher.model.norm.register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    teacher(ids)
    hook.remove()
    expected = torch.zeros(8, 8)
    for state in seen[0].flatten(0, 1).detach():
        logits = lambda h: teacher.lm_head(teacher.model.norm(h))  # noqa: E731
        p = logits(state).softmax(-1)
        jacobian = torch.autograd.functional.jacobian(logits, state) * fisher.rms(state)
        expected += jacobian.T @ (p.diag() - p.outer(p)) @ jacobian
    assert set(drawn) == set(BOUNDARIES[1:])
    assert torch.allclose(drawn[BOUNDARIES[2]] / 1600, expected, atol=0.03 * float(expected.abs().max()))


def test_an_error_costs_what_it_does_to_the_predictions(fisher, teacher, tmp_path, monkeypatch):
    """Of errors of one size, the one that F says weighs most moves the predictions most."""
    ids = torch.randint(0, 6, (16, 12), generator=torch.Generator().manual_seed(2))
    information = fisher.measure(teacher, BOUNDARIES, [batch_of(ids)] * 8)[BOUNDARIES[1]]
    directions = torch.linalg.eigh(information).eigenvectors

    def moved(direction):
        def shift(_module, args, keywords):
            hidden = args[0] if args else keywords["hidden_states"]
            shifted = hidden + 0.02 * fisher.rms(hidden) * direction
            return ((shifted, *args[1:]), keywords) if args else (args, {**keywords, "hidden_states": shifted})

        hook = teacher.model.layers[1].register_forward_pre_hook(shift, with_kwargs=True)
        try:
            log_q = teacher(ids).logits.log_softmax(-1)
        finally:
            hook.remove()
        log_p = teacher(ids).logits.log_softmax(-1)
        return float((log_p.exp() * (log_p - log_q)).sum(-1).mean())

    assert moved(directions[:, -1]) > 10 * moved(directions[:, 0])
    save_file({BOUNDARIES[1]: information}, tmp_path / "f.safetensors")
    monkeypatch.setattr(fisher, "FILE", tmp_path / "f.safetensors")
    target = torch.randn(2, 3, 8)
    most, least = (
        fisher.near(target + 0.1 * directions[:, at], target, {"boundary": BOUNDARIES[1]}).mean() for at in (-1, 0)
    )
    assert most > 2 * least


def test_without_information_it_is_the_relative_error(fisher, tmp_path, monkeypatch):
    save_file({"x": torch.eye(8)}, tmp_path / "f.safetensors")
    monkeypatch.setattr(fisher, "FILE", tmp_path / "f.safetensors")
    prediction, target = torch.randn(2, 3, 8), torch.randn(2, 3, 8) * torch.tensor([1.0, 90.0, 0.1])[:, None]
    assert torch.allclose(
        fisher.near(prediction, target, {"boundary": "x"}), relative_mse(prediction, target), rtol=1e-4
    )
