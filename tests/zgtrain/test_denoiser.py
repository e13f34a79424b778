"""Blocks of a real decoder that are shown noisy targets: trained, apart from each other, assembled without and with."""

from __future__ import annotations

import sys

import pytest
import torch
from pruned import make_pruned

import zgstore
from zgtrain import assemble, causal_lm, evaluate, load_job, plan, relay, run
from zgtrain.assembler import load_block
from zgtrain.blocks import make_block, open_source, train
from zgtrain.checkpoint import block_state, state_digest
from zgtrain.denoiser import Denoiser
from zgtrain.independence import live_parameters
from zgtrain.noise import LEVEL, NOISY, SIGMA, Diffusion, denoising, level_of

transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)

NOISED = {"student.block": "zgtrain.causal_lm:noised_block", "train.steps": 6, "train.noise": 0.1}
DOWN = {
    **NOISED, "output": "down", "student.assemble": "zgtrain.causal_lm:denoiser", "train.loss": {"name": "mse"},
    "train.noise": {"name": "diffusion", "overlap": 0.1},
}  # fmt: skip
WHOLE = {"layers": [[0, 2], [2, 4]]}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_pruned(tmp_path_factory.mktemp("noised"), module="noised_rows")


@pytest.fixture(scope="module")
def model(path):
    return str(path.parent / "teacher")


def shown(seed=0, sigma=0.1):
    """A source and a context with a noisy target, of width 16."""
    generator = torch.Generator().manual_seed(seed)
    source, noisy = (torch.randn(2, 5, 16, generator=generator) for _ in range(2))
    sigmas = torch.full((2,), sigma)
    return source, {NOISY: noisy, SIGMA: sigmas, LEVEL: level_of(sigmas)}


def stirred(block, seed=1):
    """A block whose adapter has learned something."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in block.adapter.parameters():
            parameter.normal_(std=0.1)
    return block.eval()


# ---- one block ----


@torch.no_grad()
def test_an_untrained_block_is_the_teacher_s_bit_for_bit_whatever_it_is_shown(model):
    source, context = shown()
    for b in range(2):
        plain, noised = (make(b, model, **WHOLE).eval() for make in (causal_lm.block, causal_lm.noised_block))
        expected = causal_lm.forward(plain, source, {})
        assert torch.equal(causal_lm.forward(noised, source, context), expected)
        assert torch.equal(causal_lm.forward(plain, source, context), expected)  # it looks at no noise


@torch.no_grad()
def test_at_sigma_0_a_trained_adapter_adds_nothing_row_by_row(model):
    source, context = shown()
    block = stirred(causal_lm.noised_block(0, model, **WHOLE))
    clean, noisy = causal_lm.forward(block, source, {}), causal_lm.forward(block, source, context)
    assert not torch.equal(clean, noisy)
    sigmas = torch.tensor([0.0, 0.1])
    mixed = causal_lm.forward(block, source, {**context, SIGMA: sigmas, LEVEL: level_of(sigmas)})
    assert torch.equal(mixed[0], clean[0])
    assert torch.allclose(mixed[1], noisy[1])


def test_the_adapter_sees_the_target_and_how_noisy_it_is(model):
    source, context = shown()
    block = stirred(causal_lm.noised_block(0, model, **WHOLE))
    louder = torch.full((2,), 0.05)
    causal_lm.forward(block, source, context).sum().backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in block.adapter.parameters())
    with torch.no_grad():
        said = [
            causal_lm.forward(block, source, {**context, **other})
            for other in ({}, {NOISY: -context[NOISY]}, {SIGMA: louder, LEVEL: level_of(louder)})
        ]
    assert not torch.equal(said[0], said[1])
    assert not torch.equal(said[0], said[2])


# ---- assembled at σ = 0 ----


@torch.no_grad()
def test_assembled_without_noise_the_student_is_the_original_model_bit_for_bit(model):
    teacher = causal_lm.teacher(model)
    blocks = [stirred(causal_lm.noised_block(b, model, **WHOLE)) for b in range(2)]
    student = causal_lm.assemble(blocks, model, **WHOLE)
    ids = torch.arange(3, 27).reshape(2, 12)
    assert torch.equal(student(input_ids=ids).logits, teacher(input_ids=ids).logits)
    assert {name for name, _ in student.named_parameters()} == {name for name, _ in teacher.named_parameters()}


def trained(job):
    """The job and its blocks' reports; while each was trained, nothing of a teacher or a neighbour was alive."""
    others = live_parameters()  # of tests before this one, in the same process
    reports = [run(job, block=block, device="cpu") for block in range(2)]
    assert [report.live_teacher_parameters for report in reports] == [others, others]
    return job, reports


@pytest.fixture(scope="module")
def noised(path):
    """The job with log-uniform noise, its blocks trained on stored targets."""
    return trained(load_job(path, NOISED))


def test_stored_and_live_targets_under_the_same_noise_end_in_the_same_bits(path, noised):
    _, reports = noised
    job = load_job(path, {**NOISED, "output": "live"})
    for cached in reports:
        live = run(job, block=cached.block, device="cpu", source="live")
        assert live.targets == "live"
        assert live.state_digest == cached.state_digest != cached.initial_digest
        assert live.last_window_mean_loss == cached.last_window_mean_loss


def test_each_block_trains_alone_and_says_so(noised):
    job, reports = noised
    for report in reports:
        assert report.inter_block_gradient_bytes == 0
        before = make_block(job, report.block)
        assert report.initial_digest == state_digest(before)


def test_a_teacher_that_runs_beside_a_block_is_left_as_it_was(path, tmp_path):
    job = load_job(path, {**NOISED, "output": str(tmp_path / "beside")})
    with open_source(job, zgstore.Store.open(job.snapshot.store), 0, kind="live") as data:
        before = state_digest(data.teacher)
        other = make_block(job, 1)
        theirs = block_state(other)
        train(job, data, make_block(job, 0), block=0, blocks=2, folder=tmp_path, device="cpu")
        assert state_digest(data.teacher) == before
        assert all(parameter.grad is None for parameter in [*data.teacher.parameters(), *other.parameters()])
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in block_state(other).items())


def test_the_student_of_such_blocks_is_an_ordinary_model_and_is_judged_like_any(noised):
    job, reports = noised
    student = assemble(job).student
    assert isinstance(student, transformers.LlamaForCausalLM)
    judged = evaluate(job, device="cpu")
    assert len(judged.gates) == 6
    assert len(judged.boundaries) == 2
    assert [*judged.blocks] == [report.state_digest for report in reports]


@torch.no_grad()
def said_without_a_target(job, report):
    """Which tokens of the first two rows are real, and what the first block says of them: ``[tokens, D]``."""
    data = zgstore.read(zgstore.Store.open(job.snapshot.store), job.snapshot.rev, [report.source, "attention_mask"])
    with data as reader:
        batch = reader.batch([0, 1])
    mask = batch["attention_mask"] != 0
    return mask, load_block(job, 0, report).eval()(batch[report.source], mask)[mask]


def test_such_blocks_are_relayed_on_what_they_say_without_a_target(noised):
    job, reports = noised
    relayed = relay(job, device="cpu")
    assert [report.targets for report in relayed] == ["cached", "relay"]
    assert [report.state_digest == other.state_digest for report, other in zip(relayed, reports, strict=True)] == [
        True, False,
    ]  # fmt: skip
    store = zgstore.Store.open(job.snapshot.store)
    prefix = f"relay/{zgstore.Digest.parse(relayed[0].job).short}/1"
    with zgstore.read(store, prefix, [reports[0].target]) as reader:
        handed = reader.batch([0, 1])[reports[0].target]
    mask, said = said_without_a_target(job, reports[0])
    assert torch.allclose(handed[mask], said, atol=1e-6)


ASKING = """

def asking(block, source, context):
    return block(source + 0 * context["noisy"], context["mask"], context["positions"])
"""


def test_a_forward_that_cannot_do_without_a_target_is_named_where_there_is_none(path, monkeypatch):
    with (path.parent / "noised_rows.py").open("a") as file:
        file.write(ASKING)
    monkeypatch.delitem(sys.modules, "noised_rows", raising=False)
    job = load_job(path, {**NOISED, "output": "asking", "train.steps": 1, "train.forward": "noised_rows:asking"})
    trained(job)
    for use in (evaluate, relay):
        with pytest.raises(zgstore.Invalid, match=r"asks for context\['noisy'\]") as caught:
            use(job, device="cpu")
        assert "stay as they are" in caught.value.hint
    monkeypatch.setattr(sys.modules["noised_rows"], "asking", causal_lm.forward)  # as the hint says
    assert [report.block for report in relay(job, device="cpu")] == [0, 1]


# ---- down the grid ----


@pytest.fixture(scope="module")
def down(path):
    return trained(load_job(path, DOWN))


def test_every_block_of_diffusion_learns_the_last_boundary_from_the_first(down):
    job, reports = down
    assert {(each.source, each.target) for each in reports} == {("model.layers.0:in", "model.norm:in")}
    assert {(each.source, each.target) for each in plan(job).blocks} == {("model.layers.0:in", "model.norm:in")}
    assert all(each.inter_block_gradient_bytes == 0 for each in reports)


@torch.no_grad()
def test_the_student_goes_down_the_grid_the_same_way_each_time_and_does_not_look_ahead(down):
    job, _ = down
    student = assemble(job).student
    assert isinstance(student, Denoiser)
    ids = torch.arange(3, 23).reshape(2, 10)
    whole = student(ids)
    assert whole.shape == (2, 10, 37)
    assert torch.equal(student(ids), whole)
    assert torch.allclose(student(ids[:, :6]), whole[:, :6], atol=1e-4)
    assert not torch.allclose(student(ids.flip(1)), whole, atol=1e-2)


@torch.no_grad()
def test_at_sigma_0_blocks_of_diffusion_hand_the_teacher_s_last_boundary_on_bit_for_bit(model):
    teacher, ids, last = causal_lm.teacher(model), torch.arange(3, 13)[None], []
    teacher.model.norm.register_forward_hook(lambda _module, given, _said: last.append(given[0]))
    expected = teacher(input_ids=ids).logits
    state, source = last[0], causal_lm.embedding(model)(ids)
    for b in range(2):
        block, answer = stirred(causal_lm.noised_block(b, model, **WHOLE)), Diffusion(2).noise(b)
        state = denoising(causal_lm.forward, answer)(block, source, {NOISY: state, SIGMA: torch.zeros(1)})
    assert torch.equal(causal_lm.interface(model)(state), expected)


def test_it_is_written_and_judged_with_every_gate_and_without_boundaries_in_between(down, tmp_path):
    job, _ = down
    done = assemble(job, tmp_path / "student")
    assert (done.output / "model.safetensors").is_file()
    judged = evaluate(job, device="cpu")
    assert len(judged.gates) == 6
    assert [*judged.boundaries] == [*judged.sweep] == []
    assert judged.student["ce"] is not None


def test_a_relay_of_diffusion_is_refused(down):
    with pytest.raises(zgstore.Invalid, match="none in between"):
        relay(down[0])
