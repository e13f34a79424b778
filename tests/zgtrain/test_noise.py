"""Noise on targets: intervals, draws, preconditioning and the way down, against the published numbers and formulas."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from students import noise_of, written
from torch import nn

import zgstore
from zgtrain.independence import live_parameters
from zgtrain.leakage import leakage
from zgtrain.noise import (
    LEVEL,
    LOOKED_AT,
    NOISY,
    SIGMA,
    WEIGHT,
    Diffusion,
    Noise,
    coefficients,
    denoising,
    down_the_grid,
    heun,
    make_noise,
    noised,
    refuse_names,
    standard,
    weight,
    without_target,
)
from zgtrain.objective import make_objective, mse
from zgtrain.source import cached
from zgtrain.trainer import train_block, validate

torch.set_num_threads(1)

WIDE = {"sigma_min": 0.2, "sigma_max": 10.0, "p_mean": -0.5, "p_std": 1.2}
PLAIN = Noise(0.005, 0.10)


# ---- intervals ----


@pytest.mark.parametrize(
    ("grid", "edges"),
    [
        (Diffusion(4), (0.002, 0.134076, 0.301200, 0.676649, 80)),
        (Diffusion(4, **WIDE), (0.2, 0.421401, 0.782178, 1.577127, 10)),
        (Diffusion(1), (0.002, 80)),
    ],
)
def test_the_edges_are_the_published_ones(grid, edges):
    assert grid.edges == pytest.approx(edges, abs=5e-7)
    assert (grid.edges[0], grid.edges[-1]) == (edges[0], edges[-1])  # the ends are exact


@pytest.mark.parametrize("grid", [Diffusion(1), Diffusion(3), Diffusion(8), Diffusion(8, **WIDE)])
def test_each_interval_is_as_probable_as_every_other(grid):
    law = torch.distributions.Normal(grid.p_mean, grid.p_std)
    below = law.cdf(torch.tensor(grid.edges, dtype=torch.float64).log())
    assert torch.allclose(below.diff(), (below[-1] - below[0]).expand(grid.blocks) / grid.blocks, rtol=1e-6)


def test_the_first_block_in_depth_has_the_highest_noise():
    grid = Diffusion(4)
    ends = [grid.interval(block) for block in range(4)]
    assert ends[0][1] == 80
    assert ends[3][0] == 0.002
    assert all(lower[1] == higher[0] for higher, lower in pairwise(ends))


def test_overlap_widens_by_its_share_of_the_logarithm_on_both_sides_and_not_beyond_the_whole():
    plain, wide = Diffusion(4), Diffusion(4, overlap=0.1)
    for block in range(4):
        low, high = plain.interval(block)
        step = 0.1 * math.log(high / low)
        noise = wide.noise(block)
        assert noise.low == pytest.approx(max(0.002, low * math.exp(-step)))
        assert noise.high == pytest.approx(min(80, high * math.exp(step)))
        assert wide.interval(block) == (low, high)  # where it is run does not change
    assert wide.noise(0).high == 80
    assert wide.noise(3).low == 0.002


# ---- draws ----


def test_sigma_is_log_uniform_between_its_ends():
    shares = [0.0, 0.25, 0.5, 1.0]
    expected = [0.005 * 20**share for share in shares]
    assert [PLAIN.sigma(share) for share in shares] == pytest.approx(expected)
    many = noised(PLAIN, torch.zeros(4000, 1), rows=range(4000), lengths=None, seed=1, step=2, block=3)
    where = (many[SIGMA].double() / 0.005).log() / math.log(20)
    assert where.min() >= 0
    assert where.max() <= 1
    assert where.mean() == pytest.approx(0.5, abs=4 * math.sqrt(1 / 12 / 4000))


def test_sigma_of_an_interval_is_the_normal_cut_to_it():
    noise = Diffusion(4, overlap=0.05).noise(2)
    drawn = noised(noise, torch.zeros(4000, 1), rows=range(4000), lengths=None, seed=1, step=2, block=3)[SIGMA]
    assert drawn.min() >= noise.low
    assert drawn.max() <= noise.high
    law = torch.distributions.Normal(*noise.normal)
    ends = [float(law.cdf(torch.tensor(math.log(end)))) for end in (noise.low, noise.high)]
    shares = (law.cdf(drawn.log()) - ends[0]) / (ends[1] - ends[0])
    for quarter in (0.25, 0.5, 0.75):
        assert float((shares < quarter).float().mean()) == pytest.approx(quarter, abs=0.03)


def test_the_noise_is_normal_and_as_large_as_sigma_says():
    y = noise_of(200, 16)
    shown = noised(PLAIN, y, rows=range(200), lengths=None, seed=0, step=0, block=0)
    ratio = ((shown[NOISY] - y) / shown[SIGMA][:, None]).flatten().double()
    assert ratio.mean() == pytest.approx(0, abs=0.08)
    assert ratio.square().mean() == pytest.approx(1, abs=0.1)
    assert ratio.pow(4).mean() == pytest.approx(3, abs=0.6)


def test_a_row_draws_the_same_whatever_is_beside_it_and_however_long_its_padding_is():
    y = noise_of(3, 5, 4)
    one = noised(PLAIN, y[1:2, :3], rows=[7], lengths=[2], seed=5, step=9, block=1)
    three = noised(PLAIN, y, rows=[4, 7, 6], lengths=[5, 2, 3], seed=5, step=9, block=1)
    assert torch.equal(one[SIGMA][0], three[SIGMA][1])
    assert torch.equal(one[NOISY][0, :2], three[NOISY][1, :2])
    assert torch.equal(three[NOISY][1, 2:], y[1, 2:])  # padding is left alone
    assert three[NOISY].dtype == torch.float32


@pytest.mark.parametrize("other", [{"seed": 6}, {"step": 8}, {"block": 2}, {"rows": [8]}])
def test_another_seed_step_block_or_row_draws_other_noise(other):
    where = {"rows": [7], "seed": 5, "step": 9, "block": 1}
    y = torch.zeros(1, 4)
    one, two = (noised(PLAIN, y, lengths=None, **{**where, **each}) for each in ({}, other))
    assert not torch.equal(one[SIGMA], two[SIGMA])
    assert not torch.equal(one[NOISY] / one[SIGMA], two[NOISY] / two[SIGMA])


def test_where_generation_begins_does_not_depend_on_what_comes_after():
    assert torch.equal(standard((9, 4), seed=1)[:5], standard((5, 4), seed=1))
    assert not torch.equal(standard((5, 4), seed=1), standard((5, 4), seed=2))


# ---- preconditioning ----


def test_the_coefficients_are_the_published_ones():
    sigma, data = torch.tensor([0.002, 0.5, 1.7, 80.0], dtype=torch.float64), 0.5
    by = coefficients(sigma, data)
    whole = sigma**2 + data**2
    assert torch.allclose(by.skip, data**2 / whole)
    assert torch.allclose(by.out, sigma * data / whole.sqrt())
    assert torch.allclose(by.into, 1 / whole.sqrt())
    assert torch.allclose(by.level, sigma.log() / 4)
    weights = torch.tensor([weight(each, data) for each in sigma.tolist()], dtype=torch.float64)
    assert torch.allclose(weights, whole / (sigma * data) ** 2)
    assert torch.allclose(weights * by.out**2, torch.ones(4, dtype=torch.float64))  # every σ weighs alike


def test_what_goes_in_and_what_is_to_come_out_have_unit_size_at_every_sigma():
    data, sigma = 0.5, torch.tensor([0.01, 0.5, 30.0], dtype=torch.float64)
    by = coefficients(sigma, data)
    # z = y + σε: E[(c_in z)²] and E[((y − c_skip z) / c_out)²], of E[y²] = σd².
    assert torch.allclose(by.into**2 * (data**2 + sigma**2), torch.ones(3, dtype=torch.float64))
    left = (1 - by.skip) ** 2 * data**2 + by.skip**2 * sigma**2
    assert torch.allclose(left / by.out**2, torch.ones(3, dtype=torch.float64))


def call(block, source, context):
    return block(source, context)


class Seen(nn.Module):
    """A block that says what it was shown."""

    def forward(self, source, context):
        self.seen = context
        return source * 3


def test_without_preconditioning_a_block_is_shown_the_target_as_it_is_and_answers_itself():
    block, source, noisy = Seen(), noise_of(2, 3, 4), noise_of(2, 3, 4, seed=1)
    sigma = torch.tensor([0.01, 0.1])
    said = denoising(call, PLAIN)(block, source, {NOISY: noisy, SIGMA: sigma, "mask": None})
    assert torch.equal(said, source * 3)
    assert torch.equal(block.seen[NOISY], noisy)
    assert torch.allclose(block.seen[LEVEL], sigma.log() / 4)


def test_with_preconditioning_the_answer_is_the_noisy_target_at_sigma_0_and_the_block_s_own_in_pure_noise():
    noise = Diffusion(4).noise(0)
    block, source, noisy = Seen(), noise_of(3, 2, 4), noise_of(3, 2, 4, seed=1)
    said = denoising(call, noise)(block, source, {NOISY: noisy, SIGMA: torch.tensor([0.0, 1e6, 0.7])})
    assert torch.equal(said[0], noisy[0])
    assert torch.allclose(said[1], source[1] * 3, rtol=1e-4, atol=1e-4)
    root = math.sqrt(0.7**2 + 0.25)
    assert torch.allclose(block.seen[NOISY][2], noisy[2] / root)
    assert torch.allclose(said[2], 0.25 / root**2 * noisy[2] + 0.7 / root * source[2] * 3)


@pytest.mark.parametrize("noise", [PLAIN, Diffusion(4).noise(0)])
def test_a_block_is_shown_the_target_as_it_computes_and_what_is_made_of_it_stays_as_it_was_drawn(noise):
    block, noisy = Seen(), noise_of(2, 3, 4, seed=1)
    context = {NOISY: noisy, SIGMA: torch.tensor([0.0, 0.1])}
    for dtype in (torch.bfloat16, torch.float64):
        said = denoising(call, noise)(block, noise_of(2, 3, 4).to(dtype), context)
        assert block.seen[NOISY].dtype == dtype
        assert noise.sigma_data is None or torch.equal(said[0].float(), noisy[0])
    denoising(call, noise)(block, torch.ones(2, 3, 4, dtype=torch.int64), context)
    assert block.seen[NOISY].dtype == torch.float32


# ---- the way down ----


def gaussian(state, sigma, data=0.5):
    """The best denoiser of normal data, E[y | z]."""
    return state * data**2 / (data**2 + sigma**2)


def test_heun_follows_the_exact_path_with_an_error_that_falls_as_the_square_of_the_step():
    start = torch.tensor([40.0], dtype=torch.float64)
    exact = start * math.sqrt((0.1**2 + 0.25) / (10**2 + 0.25))

    def error(steps):
        sigmas = torch.linspace(10.0, 0.1, steps + 1, dtype=torch.float64).tolist()
        return float((heun(gaussian, start, sigmas) - exact).abs())

    assert 3.5 < error(200) / error(400) < 4.5
    assert error(400) < 1e-3 * float(exact)


def test_the_last_step_to_sigma_0_gives_what_the_denoiser_says_and_no_step_gives_the_state_itself():
    state = noise_of(2, 3)
    assert torch.allclose(heun(gaussian, state, [0.3, 0.0]), gaussian(state, 0.3))
    assert heun(gaussian, state, [0.3]) is state
    assert heun(gaussian, state, []) is state


def test_blocks_go_down_each_over_its_own_interval_and_are_asked_nowhere_else():
    grid, asked = Diffusion(3), []

    def perfect(block, source, context):
        asked.append((block, float(context[SIGMA][0])))
        by = coefficients(context[SIGMA], grid.sigma_data)
        whole = context[NOISY] / by.into[:, None]
        return (source - by.skip[:, None] * whole) / by.out[:, None] * grid.sigma_data

    y = noise_of(2, 4)
    blocks = [nn.Identity() for _ in range(3)]
    end = down_the_grid(blocks, perfect, grid, source=y, context={}, start=noise_of(2, 4, seed=3))
    assert torch.allclose(end, y, atol=1e-4)
    edges = grid.edges[::-1]
    expected = [(b, edges[b + end]) for b in range(3) for end in (0, 1)] + [(2, edges[3])]  # the last one to σ = 0
    assert [blocks.index(block) for block, _ in asked] == [b for b, _ in expected]
    assert [sigma for _, sigma in asked] == pytest.approx([sigma for _, sigma in expected])


# ---- in a training ----


class Shown(nn.Module):
    """A block that looks at its source and at what it is shown."""

    def __init__(self, width=8, dropout=0.2):
        super().__init__()
        self.up = nn.Linear(width, width)
        self.shown = nn.Linear(width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, source, noisy, level):
        shape = [-1, *[1] * (source.dim() - 1)]
        return source + torch.tanh(self.up(self.drop(source))) + self.shown(noisy) * (1 + level.view(shape))


def forward(block, source, context):
    return block(source, context[NOISY], context[LEVEL])


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return written(tmp_path_factory.mktemp("noised"), ragged=True)


def block_of(**args):
    torch.manual_seed(3)
    return Shown(**args)


def train(store, *, steps=7, dropout=0.2, **options):
    block = block_of(dropout=dropout)
    options = {"batch_size": 4, "seed": 5, "log_every": 1, "noise": PLAIN, "forward": forward, **options}
    with zgstore.read(store, "main") as reader:
        return train_block(block, reader, source="h.0", target="h.1", steps=steps, **options)


@pytest.mark.parametrize("noise", [PLAIN, Diffusion(2).noise(1)])
def test_stopped_and_resumed_it_ends_as_if_never_stopped_whoever_reads(store, tmp_path, noise):
    whole = train(store, noise=noise)
    seen, path = [], tmp_path / "c.pt"
    for step, workers in ((2, 0), (5, 3)):
        stop = {
            "log": lambda line: seen.append(line["step"]),
            "stop": lambda step=step: bool(seen) and seen[-1] >= step,
        }
        with pytest.raises(zgstore.Interrupted):
            train(store, noise=noise, checkpoint=path, workers=workers, **stop)
    again = train(store, noise=noise, checkpoint=path)
    assert again.resumed_from == 5
    assert again.state_digest == whole.state_digest
    assert again.last_window_mean_loss == whole.last_window_mean_loss


def test_a_step_in_micro_batches_learns_what_it_learns_whole(store):
    losses = []
    for parts in (1, 2, 4):
        lines = []
        train(store, batch_size=4 // parts, accumulate=parts, dropout=0.0, log=lines.append)
        losses.append([line["loss"] for line in lines])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[2] == pytest.approx(losses[0], rel=1e-4)


def test_the_noise_matters_and_is_part_of_what_a_checkpoint_is_of(store, tmp_path):
    kinds = [PLAIN, Noise(0.5, 5.0), Diffusion(2).noise(0)]
    assert len({train(store, noise=noise, steps=2).state_digest for noise in kinds}) == 3
    train(store, steps=2, checkpoint=tmp_path / "c.pt")
    with pytest.raises(zgstore.Refused, match="of job"):
        train(store, steps=2, noise=Noise(0.5, 5.0), checkpoint=tmp_path / "c.pt")


def test_no_gradient_leaves_a_block_that_is_shown_its_target_and_nothing_else_is_alive(store):
    others = live_parameters()  # of tests before this one, in the same process
    for noise in (PLAIN, Diffusion(2).noise(0)):
        report = train(store, noise=noise)
        assert report.inter_block_gradient_bytes == 0
        assert report.live_teacher_parameters == others


def test_the_loss_of_each_row_has_its_weight_with_preconditioning_and_none_without(store):
    block, device = block_of().eval(), torch.device("cpu")
    with zgstore.read(store, "main") as reader, cached(reader, "h.0", "h.1") as data:
        batch = data.batch(range(4))
        for noise in (PLAIN, Diffusion(2).noise(1)):
            weighted = noise.sigma_data is not None
            shown = noised(
                noise, batch.target, rows=range(4), lengths=batch.context["lengths"].tolist(), seed=5, step=LOOKED_AT,
                block=2,
            )  # fmt: skip
            assert (WEIGHT in shown) == weighted
            said = denoising(forward, noise)(block, batch.source, {**batch.context, **shown})
            each = mse(said, batch.target) * shown.get(WEIGHT, torch.ones(4))[:, None]
            loss = validate(
                block, data, make_objective("mse", weighted=weighted), rows=4, batch_size=3, forward=forward,
                device=device, noise=noise, seed=5, block_id=2,
            )  # fmt: skip
            assert loss == pytest.approx(float(each[batch.context["mask"]].mean().detach()))


def test_a_block_in_bf16_is_trained_on_its_source_and_the_noisy_target_together(store):
    def added(block, source, context):
        return block(source + context[NOISY])

    with zgstore.read(store, "main") as reader:
        report = train_block(
            nn.Linear(8, 8, dtype=torch.bfloat16), reader, source="h.0", target="h.1", steps=2, forward=added,
            noise=PLAIN, validate_every=2, validate_rows=2,
        )  # fmt: skip
    assert report.validation_loss > 0


def test_rows_held_out_meet_the_same_noise_at_every_look(store):
    lines = []
    frozen = block_of()
    with zgstore.read(store, "main") as reader:
        train_block(
            frozen, reader, source="h.0", target="h.1", steps=4, forward=forward, noise=PLAIN, validate_every=2,
            validate_rows=2, log=lines.append, optimizer=torch.optim.SGD(frozen.parameters(), lr=0.0),
        )  # fmt: skip
    first, second = [line["validation_loss"] for line in lines if "validation_loss" in line]
    assert first == second


def test_a_forward_that_would_not_see_the_noise_is_refused(tmp_path):
    with pytest.raises(zgstore.Invalid, match="no noisy target"):
        train(written(tmp_path), forward=None)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Noise, {"low": 0.0}), (Noise, {"low": math.nan}), (Noise, {"high": math.inf}), (Noise, {"low": 0.2}),
        (Noise, {"sigma_data": 0.0}), (Diffusion, {"blocks": 0}), (Diffusion, {"sigma_min": 90.0}),
        (Diffusion, {"sigma_max": math.inf}), (Diffusion, {"p_std": 0.0}), (Diffusion, {"sigma_data": math.nan}),
    ],
)  # fmt: skip
def test_what_is_no_noise_is_refused_as_it_is_made(kind, said):
    whole = {"low": 0.005, "high": 0.1} if kind is Noise else {"blocks": 4}
    with pytest.raises(zgstore.Invalid, match=r"is no noise|has no intervals"):
        kind(**{**whole, **said})


def test_where_there_is_no_target_a_forward_that_asks_for_one_is_named_and_all_else_is_as_it_was():
    context = {"mask": torch.ones(1, 2, dtype=torch.bool)}
    seen = without_target(lambda block, source, found: block(source) if NOISY not in found else None)
    assert torch.equal(seen(nn.Identity(), torch.ones(2), context), torch.ones(2))
    assert torch.equal(without_target(None)(nn.Identity(), torch.ones(2), context), torch.ones(2))
    for name in (NOISY, SIGMA, LEVEL):
        with pytest.raises(zgstore.Invalid, match=f"asks for context.'{name}'"):
            without_target(lambda _block, _source, found, name=name: found[name])(nn.Identity(), torch.ones(2), context)
    with pytest.raises(KeyError, match="labels"):
        without_target(lambda _block, _source, found: found["labels"])(nn.Identity(), torch.ones(2), context)


def test_a_context_column_under_a_name_of_ours_is_refused():
    with pytest.raises(zgstore.Invalid, match="'sigma'"):
        refuse_names({"labels": None, "sigma": None})


def test_a_job_s_words_make_the_noise_of_each_block():
    plain = {"name": "log-uniform", "low": 0.005, "high": 0.1}
    assert make_noise(plain, block=1, blocks=4) == PLAIN
    whole = {"name": "diffusion", "overlap": 0.1, "sigma_data": 0.5, **WIDE}
    assert make_noise(whole, block=1, blocks=4) == Diffusion(4, overlap=0.1, **WIDE).noise(1)


# ---- where an answer comes from ----


class Fixed(nn.Module):
    """Answers by a part of what it is given; its one parameter is not used."""

    def __init__(self, takes):
        super().__init__()
        self.takes, self.unused = takes, nn.Parameter(torch.zeros(1))


def fixed(block, source, context):
    return source if block.takes == "source" else context[NOISY]


def test_another_s_source_costs_a_block_that_reads_it_and_nothing_one_that_reads_the_target(tmp_path):
    with zgstore.read(written(tmp_path), "main") as reader, cached(reader, "h.0", "h.1") as data:
        seen = {
            takes: leakage(
                Fixed(takes), data, make_objective("mse"), rows=4, forward=fixed, device="cpu", noise=PLAIN, seed=5
            )
            for takes in ("source", "target")
        }
        assert seen["target"].worth == 0
        assert 0 < seen["target"].own < 0.1**2
        batch = data.batch(range(4))
        assert seen["source"].own == pytest.approx(float((batch.source - batch.target).square().mean()))
        assert seen["source"].other == pytest.approx(float((batch.source.roll(1, 0) - batch.target).square().mean()))
        with pytest.raises(zgstore.Invalid, match="no other"):
            leakage(Fixed("source"), data, make_objective("mse"), rows=1, forward=fixed, device="cpu")
