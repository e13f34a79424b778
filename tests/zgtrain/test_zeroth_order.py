"""Jobs whose gradients are asked for: real blocks, stopped and resumed, with every query counted."""

from __future__ import annotations

import pytest
import torch
from pruned import make_pruned
from students import CODE, built, make_job, noise_of

import zgstore
from zgtrain import load_job, plan, run
from zgtrain.gradient.zeroth_order import ZerothOrder
from zgtrain.job import GradientSpec

torch.set_num_threads(1)

ASKED = 'gradient = { name = "zeroth-order", probes = 3 }'


def stopped_at(step):
    seen = []

    def look(line):
        seen.append(line["step"])

    return {"progress": look, "stop": lambda: bool(seen) and seen[-1] >= step}


def test_a_whole_block_stopped_anywhere_and_resumed_ends_as_if_never_stopped(tmp_path):
    path = make_job(tmp_path, train=f"{ASKED}\naccumulate = 2", rows=16)
    job, _, _ = built(path)
    assert {each.cores for each in plan(job).blocks} == {0}
    whole = run(job, block=1)
    assert whole.gradient_queries == 7 * 2 * 2 * 3
    assert whole.inter_block_gradient_bytes == 0
    for step in (1, 3, 6):
        other = load_job(path, [f"output=stopped-{step}"])
        with pytest.raises(zgstore.Interrupted):
            run(other, block=1, **stopped_at(step))
        again = run(other, block=1)
        assert again.resumed_from == step
        assert again.state_digest == whole.state_digest
        assert again.gradient_queries == whole.gradient_queries
    assert run(load_job(path, ["output=seed", "train.gradient.seed=1"]), block=1).state_digest != whole.state_digest


PART = """

class Part(Block):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(16, 16)
        self.again = self.mix

    def forward(self, x):
        return super().forward(x) + torch.tanh(self.again(self.mix(x)))


def block(number, **_):
    return Part()
"""


def test_a_block_with_a_module_under_two_names_resumes_to_the_same_bits(tmp_path):
    path = make_job(tmp_path, train=ASKED, code=CODE + PART)
    job, _, _ = built(path)
    whole = run(job, block=0)
    assert whole.trained_parameters == 2 * 16 * 32 + 32 + 16 + 16 * 16 + 16  # of up, down and mix, each once
    for step in (1, 4):
        with pytest.raises(zgstore.Interrupted):
            run(load_job(path, ["output=stopped"]), block=0, **stopped_at(step))
    again = run(load_job(path, ["output=stopped"]), block=0)
    assert again.resumed_from == 4
    assert again.state_digest == whole.state_digest != whole.initial_digest


@pytest.fixture(scope="module")
def pruned(tmp_path_factory):
    pytest.importorskip("transformers")
    return make_pruned(tmp_path_factory.mktemp("pruned"), module="asked_rows")


def asked(path, name, *more):
    sets = [
        f"output={name}",
        "log.every=1",
        "train.steps=4",
        "train.gradient.name=zeroth-order",
        "train.gradient.probes=3",
        *more,
    ]
    return load_job(path, sets)


def test_a_block_of_decoder_layers_is_asked_at_its_cores_and_resumes_to_the_same_bits(pruned):
    whole = run(asked(pruned, "whole"), block=1)
    cores = 2 * 2  # two layers
    assert plan(asked(pruned, "whole")).blocks[1].cores == cores
    assert whole.gradient_queries == 4 * cores * 2 * 3
    stopped = asked(pruned, "stopped", "train.gradient.probe_chunk=2", "train.gradient.score_chunk=3")
    with pytest.raises(zgstore.Interrupted):
        run(stopped, block=1, **stopped_at(2))
    again = run(stopped, block=1)
    assert (again.resumed_from, again.gradient_queries) == (2, whole.gradient_queries)
    assert again.state_digest == whole.state_digest
    forward = run(asked(pruned, "forward", "train.gradient.differences=forward"), block=1)
    assert forward.gradient_queries == 4 * cores * (3 + 1)


# ---- decoder layers as black boxes ----


def block_of(kind, **more):
    transformers = pytest.importorskip("transformers")
    from zgtrain.decoder import cut_block, partition  # noqa: PLC0415 — what it needs is optional

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 13, "hidden_size": 8, "intermediate_size": 6, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 4, "max_position_embeddings": 16, **more,
    }  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(**sizes)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return cut_block(model, partition(2, [[0, 2]]), 0)[0]


def called(block, source, context):
    return block(source, context["mask"], None)


MASK = torch.tensor([[True, True, True, True], [True, True, True, False]])


def gradients(method, block, source, *, context=None, dtype=None):
    """Flat, of all parameters; and the prediction."""
    block.zero_grad()
    weights = noise_of(*source.shape, seed=5)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None):
        prediction = method(source, {"mask": MASK} if context is None else context)
    weighted = (prediction.float() * weights.masked_fill(~MASK.unsqueeze(-1), 0.0)).sum()
    weighted.backward()
    return torch.cat([each.grad.flatten() for each in block.parameters()]), prediction.detach()


@pytest.mark.parametrize(
    ("kind", "more"),
    [("Llama", {}), ("Qwen3", {}), ("Gemma2", {"query_pre_attn_scalar": 4, "attn_logit_softcapping": 2.0,
                                               "sliding_window": 2})],
)  # fmt: skip
def test_with_as_many_orthogonal_probes_as_every_row_has_the_gradient_is_that_of_autograd(kind, more):
    block, source = block_of(kind, **more), noise_of(2, 4, 8)
    exact, right = gradients(lambda x, context: called(block, x, context), block, source)
    # Queries of 1, 2, 3 and 4 keys, and gate and up of 6 each: 12 probes are whole bases for all of them.
    method = ZerothOrder(GradientSpec("zeroth-order", 12, "orthogonal", epsilon=1e-2), block, forward=called)
    found, prediction = gradients(lambda x, context: method.forward(x, context, (0, 0)), block, source)
    assert torch.allclose(prediction, right, atol=1e-5)
    assert (found - exact).norm() < 2e-3 * exact.norm()
    again, _ = gradients(lambda x, context: called(block, x, context), block, source)
    assert torch.equal(again, exact)  # it is left as it was
    assert not [module for module in block.modules() if "forward" in vars(module)]


def test_under_bf16_the_estimate_is_as_good_as_bf16_is():
    block, source = block_of("Llama"), noise_of(2, 4, 8)
    exact, _ = gradients(lambda x, context: called(block, x, context), block, source)
    rounded, _ = gradients(lambda x, context: called(block, x, context), block, source, dtype=torch.bfloat16)
    method = ZerothOrder(GradientSpec("zeroth-order", 12, "orthogonal", epsilon=1e-2), block, forward=called)
    found, _ = gradients(lambda x, context: method.forward(x, context, (0, 0)), block, source, dtype=torch.bfloat16)
    assert (found - exact).norm() < 2 * (rounded - exact).norm()


def test_replicas_steps_and_micro_batches_have_probes_of_their_own():
    block, source = block_of("Llama"), noise_of(2, 4, 8)
    found = []
    for replica, at in [(0, (0, 0)), (1, (0, 0)), (0, (1, 0)), (0, (0, 1)), (0, (0, 0))]:
        method = ZerothOrder(GradientSpec("zeroth-order", 2), block, forward=called, replica=replica)
        found.append(gradients(lambda x, context, m=method, at=at: m.forward(x, context, at), block, source)[0])
    assert torch.equal(found[0], found[4])
    assert not any(torch.equal(found[one], found[two]) for one in range(4) for two in range(one))


def test_a_decoder_without_gated_products_is_one_black_box():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=13, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    block = transformers.GPT2Model(config).h[0]
    method = ZerothOrder(GradientSpec("zeroth-order", 5), block, forward=lambda block, x, _: block(x))
    prediction = method.forward(noise_of(2, 4, 8), {}, (0, 0))
    assert method.backward(prediction.square().sum()) == 10
    assert all(parameter.grad is not None for parameter in block.parameters())


class Shared(torch.nn.Module):
    """One module under two names, a parameter of two modules, and a source that is written over."""

    def __init__(self, dtype):
        super().__init__()
        self.mix = torch.nn.Linear(3, 3, dtype=dtype)
        self.again = self.mix
        self.other = torch.nn.Linear(3, 3, bias=False, dtype=dtype)
        self.other.weight = self.mix.weight
        self.register_buffer("scale", torch.tensor(1.1, dtype=dtype))

    def forward(self, x):
        return self.other(self.again(x.mul_(self.scale)))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-3), (torch.bfloat16, 0.2)])
def test_a_block_with_shared_parts_that_writes_over_its_source_is_asked_as_it_is(dtype, tolerance):
    torch.manual_seed(0)
    block, source = Shared(dtype), noise_of(2, 4, 3).to(dtype)
    before, kept = dict(block.named_parameters()), source.clone()
    cotangent = noise_of(2, 4, 3, seed=5).to(dtype)
    block(source.clone()).backward(cotangent)
    exact = torch.cat([each.grad.float().flatten() for each in block.parameters()])
    block.zero_grad()
    spec = GradientSpec("zeroth-order", 12, "orthogonal", epsilon=1e-2 if dtype is torch.float32 else 0.25)
    method = ZerothOrder(spec, block, forward=lambda block, x, _context: block(x))
    method.forward(source, {}, (0, 0)).backward(cotangent)
    found = torch.cat([each.grad.float().flatten() for each in block.parameters()])
    assert (found - exact).norm() < tolerance * exact.norm()
    assert torch.equal(source, kept)
    assert {name: id(each) for name, each in block.named_parameters()} == {n: id(each) for n, each in before.items()}
    assert all(each.requires_grad for each in block.parameters())
