"""Gradients from forward queries: probes, estimates and their known errors, and boxes that nobody looks into."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import zgstore
from zgtrain.gradient.blackbox import Asking
from zgtrain.gradient.cores import PhysicalCore, asking
from zgtrain.gradient.estimate import estimate
from zgtrain.gradient.layers import softmax
from zgtrain.gradient.philox import philox
from zgtrain.gradient.probes import KINDS, Rows, draw, key_of
from zgtrain.gradient.zeroth_order import ZerothOrder
from zgtrain.job import GradientSpec

torch.set_num_threads(1)

DRAWS = 6000
KEY = key_of(0, 0, 0)
CPU = torch.device("cpu")


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def spec(probes=8, **rest):
    return GradientSpec("zeroth-order", probes, **rest)


class Counted:
    """Queries of a function of rows, counted one by one."""

    def __init__(self, function):
        self.function, self.queries = function, 0

    def __call__(self, rows):
        self.queries += len(rows)
        return self.function(rows)


# ---- probes ----


def test_philox_gives_the_published_words():
    published = {
        ((0, 0, 0, 0), (0, 0)): (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2): (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)): (
            0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    }  # fmt: skip
    for (counter, key), words in published.items():
        assert tuple(int(each) for each in philox([torch.tensor(word) for word in counter], key)) == words


@pytest.mark.parametrize("kind", KINDS)
def test_probes_are_white_and_nothing_but_functions_of_their_numbers(kind):
    rows = Rows(DRAWS, 6, CPU, torch.float64)
    probes = draw(kind, range(4), KEY, rows)
    again = torch.cat([draw(kind, [3], KEY, rows), draw(kind, [0, 1], KEY, rows)])
    assert torch.equal(again, probes[[3, 0, 1]])
    fewer = Rows(7, 6, CPU, torch.float64)
    assert torch.equal(draw(kind, range(4), KEY, fewer), probes[:, :7])
    covariance = torch.einsum("krd,kre->de", probes, probes) / (4 * DRAWS)
    assert (covariance - torch.eye(6)).abs().max() < 0.05
    assert probes.mean((0, 1)).abs().max() < 0.05
    assert not torch.equal(draw(kind, range(4), key_of(0, 0, 1), rows), probes)


def test_probes_are_nothing_where_a_row_is_not_active_and_as_long_as_what_is_left():
    active = torch.arange(8) <= torch.arange(8).unsqueeze(-1)
    for kind in KINDS:
        probes = draw(kind, range(3), KEY, Rows(8, 8, CPU, torch.float64, active))
        assert not probes[:, ~active].any()
        if kind != "gaussian":
            assert torch.allclose(probes[0].square().sum(-1).cumsum(0)[-1], torch.tensor(36.0).double(), rtol=0.2)
    frames = draw("orthogonal", range(5), KEY, Rows(8, 8, CPU, torch.float64, active))[:, 4]
    assert torch.allclose(frames @ frames.T, 5 * torch.eye(5).double())  # the row with five, and five of its probes


# ---- the table of errors ----


def linear(d, probes, kind, *, rows=DRAWS, **rest):
    """Estimates for a linear map of width d, and what they should be: each row draws probes of its own."""
    matrix, x, cotangent = normal(d, d, seed=1), normal(rows, d, seed=2), normal(rows, d, seed=3)
    query = Counted(lambda each: each @ matrix.T)
    found = estimate(query, x, cotangent, spec(probes, probe=kind, **rest), KEY, chunk=4)
    return found, cotangent @ matrix, query.queries


def noise_to_signal(found, exact):
    return float(((found - exact).square().sum(-1) / exact.square().sum(-1)).mean())


ERRORS = {
    "gaussian": lambda d, n: (d + 1) / n, "rademacher": lambda d, n: (d - 1) / n, "sphere": lambda d, n: (d - 1) / n,
    "orthogonal": lambda d, n: d / n - 1,
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("d", "n"), [(16, 4), (12, 2)])
def test_the_noise_is_that_of_the_table(kind, d, n):
    found, exact, _ = linear(d, n, kind)
    assert noise_to_signal(found, exact) == pytest.approx(ERRORS[kind](d, n), rel=0.05)
    assert (found - exact).mean(0).norm() < 0.05 * exact.norm(dim=-1).mean()  # and its mean is nothing


@pytest.mark.parametrize("differences", ["central", "forward"])
def test_as_many_orthogonal_probes_as_dimensions_are_exact_on_a_linear_map(differences):
    for d in (1, 5, 16):
        found, exact, _ = linear(d, d, "orthogonal", rows=9, differences=differences)
        assert torch.allclose(found, exact, rtol=1e-8, atol=1e-8)
        twice, _, _ = linear(d, 2 * d, "orthogonal", rows=9, differences=differences)  # two bases
        assert torch.allclose(twice, exact, rtol=1e-8, atol=1e-8)


def test_the_squared_cosine_of_orthogonal_probes_is_their_share_of_the_dimensions():
    for d, n in [(16, 4), (12, 6)]:
        found, exact, _ = linear(d, n, "orthogonal")
        assert float(functional.cosine_similarity(found, exact).square().mean()) == pytest.approx(n / d, rel=0.05)


def test_the_noise_falls_as_one_over_the_probes():
    constants = [noise_to_signal(*linear(16, n, "rademacher")[:2]) * n / 16 for n in (2, 4, 8, 16)]
    assert constants == pytest.approx([15 / 16] * 4, rel=0.05)


def test_the_noise_of_a_token_does_not_grow_with_the_number_of_tokens():
    matrix = normal(8, 8, seed=1)
    for tokens in (1, 4, 16):
        x = normal(DRAWS // tokens, tokens, 8, seed=2).requires_grad_()
        cotangent = normal(*x.shape, seed=3)
        core = PhysicalCore(lambda each: each @ matrix.T)
        with asking(Asking(spec(4), (0,))):
            core(x).backward(cotangent)
        assert noise_to_signal(x.grad, cotangent @ matrix) == pytest.approx(7 / 4, rel=0.05)


@pytest.mark.parametrize(("differences", "factor"), [("central", 4.0), ("forward", 2.0)])
def test_the_bias_falls_with_the_step(differences, factor):
    x, cotangent = normal(5, 8, seed=2), normal(5, 8, seed=3)
    exact = cotangent * (1 - torch.tanh(x).square())
    bias = [
        (estimate(torch.tanh, x, cotangent, spec(8, probe="orthogonal", differences=differences, epsilon=epsilon), KEY,
                  chunk=8) - exact).norm()
        for epsilon in (0.04, 0.02, 0.01)
    ]  # fmt: skip
    assert float(bias[0] / bias[1]) == pytest.approx(factor, rel=0.05)
    assert float(bias[1] / bias[2]) == pytest.approx(factor, rel=0.05)


def test_queries_are_two_for_each_probe_or_one_and_one_more():
    assert linear(8, 6, "rademacher", rows=3)[2] == 12
    assert linear(8, 6, "rademacher", rows=3, differences="forward")[2] == 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_how_many_are_asked_at_a_time_changes_no_bit(kind, dtype):
    scores, active = normal(2, 3, 7, 7, seed=2, dtype=dtype), torch.ones(7, 7, dtype=torch.bool).tril()
    cotangent = normal(2, 3, 7, 7, seed=3, dtype=dtype)
    found = []
    for chunk in (1, 3, 10, 64):
        x = scores.clone().requires_grad_()
        with asking(Asking(spec(10, probe=kind, score_chunk=chunk), (0, 1))):
            PhysicalCore(softmax, scores=True)(x, active=active).backward(cotangent)
        found.append(x.grad)
    assert all(torch.equal(each, found[0]) for each in found)
    assert not found[0][..., ~active].any()


def test_sums_are_fp32_under_bf16_and_a_probe_is_not_lost_in_its_rounding():
    x, cotangent = normal(64, 8, seed=2).bfloat16(), normal(64, 8, seed=3).bfloat16()
    with torch.autocast("cpu", torch.bfloat16), asking(Asking(spec(8, probe="orthogonal"), (0,))):
        leaf = x.clone().requires_grad_()
        answer = PhysicalCore(torch.tanh)(leaf)
        assert answer.dtype == torch.bfloat16
        answer.backward(cotangent)
    exact = cotangent.double() * (1 - torch.tanh(x.double()).square())
    assert leaf.grad.dtype == torch.bfloat16
    assert (leaf.grad.double() - exact).norm() < 0.01 * exact.norm()
    found = estimate(torch.tanh, x, cotangent, spec(8, probe="orthogonal"), KEY, chunk=8)
    assert found.dtype == torch.float32
    assert (found.double() - exact).norm() < 1e-4 * exact.norm()


# ---- boxes ----


class Small(nn.Module):
    """A block that mixes tokens, and drops out: of neither does a black box know."""

    def __init__(self, width=4):
        super().__init__()
        torch.manual_seed(3)
        self.mix, self.up = nn.Linear(3, 3), nn.Linear(width, width)
        self.drop = nn.Dropout(0.3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls += 1
        return x + self.drop(torch.tanh(self.up(self.mix(x.transpose(1, 2)).transpose(1, 2))))


def plain(block, source, _context):
    return block(source)


def of_whole(block, x, cotangent, **options):
    """Gradients of the parameters and of x, the queries, and the prediction."""
    block.zero_grad()
    leaf = x.clone().requires_grad_(options.pop("source", False))
    method = ZerothOrder(spec(**options), block, forward=plain)
    torch.manual_seed(9)
    prediction = method.forward(leaf, {}, (0, 0))
    queries = method.backward((prediction * cotangent).sum())
    return [each.grad.clone() for each in block.parameters()], leaf.grad, queries, prediction.detach()


def test_a_whole_block_is_probed_in_its_parameters_and_leaves_no_trace():
    block, x, cotangent = Small().double(), normal(2, 3, 4, seed=1), normal(2, 3, 4, seed=2)
    torch.manual_seed(9)
    answer = block(x)
    (answer * cotangent).sum().backward()
    exact = [each.grad.clone() for each in block.parameters()]
    after = torch.rand(3)
    calls = int(block.calls)
    d = sum(each.numel() for each in block.parameters())
    found, source, queries, prediction = of_whole(block, x, cotangent, probes=d, probe="orthogonal", epsilon=1e-4)
    assert torch.equal(prediction, answer.detach())
    assert torch.equal(torch.rand(3), after)  # dropout drew once, and the queries drew that again
    assert int(block.calls) == calls + 1
    assert (queries, source) == (2 * d, None)  # nobody asked for the source's, and so it was not probed
    for each, right in zip(found, exact, strict=True):
        assert torch.allclose(each, right, rtol=1e-5, atol=1e-6)


def test_the_queries_leave_a_buffer_alone_that_the_first_pass_made():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(4, 4)

        def forward(self, x):
            if not hasattr(self, "calls"):
                self.register_buffer("calls", torch.zeros(()), persistent=False)
            self.calls += 1
            return self.up(x) * self.calls

    block, x = Counting().double(), normal(2, 3, 4)
    found, _, _, _ = of_whole(block, x, x, probes=20, probe="orthogonal")
    assert float(block.calls) == 1
    block.calls.zero_()
    again, _, _, _ = of_whole(block, x, x, probes=20, probe="orthogonal")
    assert all(map(torch.equal, found, again))


COMPUTED = [
    (torch.float64, False, 1e-4), (torch.float32, False, 1e-3), (torch.float16, False, 0.03),
    (torch.bfloat16, False, 0.1), (torch.float32, True, 0.1),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "autocast", "error"), COMPUTED)
def test_a_probe_goes_as_far_as_the_dtype_needs_that_the_block_computes_in(dtype, autocast, error):
    block, x, cotangent = Small().to(dtype).eval(), normal(2, 3, 4, seed=1), normal(2, 3, 4, seed=2)
    same = copy.deepcopy(block).double()
    exact = torch.autograd.grad((same(x) * cotangent).sum(), [*same.parameters()])
    d = sum(each.numel() for each in block.parameters())
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found, _, _, _ = of_whole(block, x.to(dtype), cotangent.to(dtype), probes=2 * d, probe="orthogonal")
    off, size = (torch.cat([(a - b).flatten() for a, b in zip(exact, other, strict=True)]).norm()
                 for other in (found, [torch.zeros_like(each) for each in exact]))  # fmt: skip
    assert off < error * size


@pytest.mark.parametrize(
    ("dtype", "autocast", "epsilon", "least"),
    [
        (torch.float32, False, 1e-30, "4.8e-07, or leave it out for 0.001"),
        (torch.float16, False, 1e-3, "0.004, or leave it out for 0.015625"),
        (torch.bfloat16, False, 1e-3, "0.032, or leave it out for 0.125"),
        (torch.float32, True, 1e-3, "0.032, or leave it out for 0.125"),
    ],
)
def test_a_probe_that_rounding_would_lose_is_refused_with_the_least_that_it_would_not(dtype, autocast, epsilon, least):
    block, x = Small().to(dtype), normal(2, 3, 4, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), pytest.raises(zgstore.Invalid) as caught:
        of_whole(block, x, x, epsilon=epsilon)
    assert caught.value.fields["key"] == "train.gradient.epsilon"
    assert least in caught.value.hint
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        of_whole(block, x, x, epsilon=float(least.partition(",")[0]))


def test_what_is_complex_is_not_probed():
    block = Small()
    block.phase = nn.Parameter(torch.zeros(4, dtype=torch.complex64))
    with pytest.raises(zgstore.Invalid, match="'phase' is complex") as caught:
        ZerothOrder(spec(), block, forward=plain)
    assert "real and its imaginary part" in caught.value.hint
    block.phase.requires_grad_(requires_grad=False)
    ZerothOrder(spec(), block, forward=plain)
    with asking(Asking(spec(), (0,))), pytest.raises(zgstore.Invalid, match="a physical core is complex"):
        PhysicalCore(torch.tanh)(torch.zeros(2, 4, dtype=torch.complex64))


def test_source_and_parameters_are_probed_apart():
    block, x, cotangent = Small().double().eval(), normal(2, 3, 4, seed=1), normal(2, 3, 4, seed=2)
    leaf = x.clone().requires_grad_()
    (block(leaf) * cotangent).sum().backward()
    options = {"probes": 12, "probe": "orthogonal", "differences": "forward", "epsilon": 1e-5}
    found, source, queries, _ = of_whole(block, x, cotangent, source=True, **options)
    assert queries == 2 * 13
    assert torch.allclose(source, leaf.grad, rtol=1e-3, atol=1e-3)  # d is that of a row of three tokens
    alone, _, _, _ = of_whole(block, x, cotangent, **options)
    assert all(torch.equal(each, other) for each, other in zip(found, alone, strict=True))


def test_a_sharded_block_is_no_one_black_box():
    block = Small()
    block.up.weight.full_tensor = lambda: block.up.weight  # as FSDP's parameters are known
    with pytest.raises(zgstore.Invalid, match="cannot be one black box") as caught:
        ZerothOrder(spec(), block, forward=plain)
    assert "PhysicalCore" in caught.value.hint


def test_a_block_with_cores_is_digital_but_for_them():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(4)
            self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)
            self.core = PhysicalCore(torch.tanh)

        def forward(self, x):
            return self.down(self.core(self.up(x)))

    block, x, cotangent = Mixed().double(), normal(2, 3, 4, seed=1), normal(2, 3, 4, seed=2)
    (block(x) * cotangent).sum().backward()
    exact = [each.grad.clone() for each in block.parameters()]
    found, _, queries, _ = of_whole(block, x, cotangent, probes=6, probe="orthogonal", epsilon=1e-4)
    assert queries == 12
    assert all(torch.allclose(each, right, rtol=1e-5, atol=1e-7) for each, right in zip(found, exact, strict=True))
    noisy, _, _, _ = of_whole(block, x, cotangent, probes=2)
    up, down = noisy[:2], noisy[2:]
    assert not torch.allclose(up[0], exact[0], rtol=0.1)
    assert all(torch.allclose(each, right) for each, right in zip(down, exact[2:], strict=True))  # behind the core


def test_autograd_does_not_go_through_a_black_box():
    x = normal(3, 4).requires_grad_()
    with asking(Asking(spec(4), (0,))):
        answer = PhysicalCore(torch.tanh)(x)
    with pytest.raises(zgstore.Invalid, match="forward queries only") as caught:
        torch.autograd.grad(answer.sum(), x, create_graph=True)
    assert "backprop" in caught.value.hint
    core = answer.grad_fn.box
    with pytest.raises(zgstore.Invalid, match="forward queries only"):
        core.answer(x)
    with torch.no_grad():
        assert torch.equal(core.answer(x), torch.tanh(x))
