"""The loop: resumed anywhere it ends where it would have ended, and what it reports was counted."""

from __future__ import annotations

import gc
import itertools
import math

import numpy as np
import pytest
import torch
from students import noise_of, written
from torch import nn

import zgstore
import zgtrain
from zgtrain import GradientSpec, LossSpec, Noise, OptimizerSpec, ScheduleSpec
from zgtrain.checkpoint import load, state_digest
from zgtrain.job import LEAST_OF_MOST
from zgtrain.trainer import train_block

torch.set_num_threads(1)


class Block(nn.Module):
    def __init__(self, width=8, dropout=0.2):
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.drop = nn.Dropout(dropout)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(self.drop(torch.tanh(self.up(x))))


def block_of(seed=3, **args):
    torch.manual_seed(seed)
    return Block(**args)


def masked(block, source, context):
    return block(source)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return written(tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="module")
def ragged(tmp_path_factory):
    return written(tmp_path_factory.mktemp("ragged"), ragged=True)


def train(store, block=None, *, steps=7, lr=1e-2, make=torch.optim.AdamW, **options):
    block = block or block_of()
    optimizer = make([p for p in block.parameters() if p.requires_grad], lr=lr)
    options = {"batch_size": 4, "seed": 5, "log_every": 3, **options}
    with zgstore.read(store, "main") as reader:
        return train_block(block, reader, source="h.0", target="h.1", optimizer=optimizer, steps=steps, **options)


def stopped_at(step):
    """A log and a stop that end the training before step ``step + 1``."""
    seen = []

    def log(line):
        seen.append(line["step"])

    return {"log": log, "log_every": 1, "stop": lambda: bool(seen) and seen[-1] >= step}


# ---- resuming ----


@pytest.mark.parametrize(
    ("order", "workers"),
    [("shuffled", 0), ("shuffled", 1), ("shuffled", 3), ("sequential", 1), ("sequential-first", 3)],
)
def test_stopped_after_any_step_and_resumed_it_ends_as_if_never_stopped(store, tmp_path, order, workers):
    whole = train(store, order=order)
    for step in range(1, 7):  # three steps an epoch: 3 and 6 are the last batches of one
        path = tmp_path / f"{step}.pt"
        with pytest.raises(zgstore.Interrupted):
            train(store, order=order, workers=workers, checkpoint=path, **stopped_at(step))
        assert load(path)["ledger"]["step"] == step
        again = train(store, order=order, workers=workers, checkpoint=path)
        assert again.state_digest == whole.state_digest
        assert again.resumed_from == step
        assert (again.first_window_mean_loss, again.last_window_mean_loss) == (
            whole.first_window_mean_loss, whole.last_window_mean_loss)  # fmt: skip


class Grown(Block):
    """A block with a table that it makes longer, as rotary ones are, and one that it makes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("cos", torch.ones(2), persistent=False)

    def forward(self, x):
        if len(self.cos) < x.shape[1]:
            self.register_buffer("cos", torch.linspace(1, 2, x.shape[1]), persistent=False)
            self.up.register_buffer("calls", torch.zeros(()), persistent=False)
        self.up.calls += 1
        return super().forward(x) * self.cos[:, None] + 1e-3 * self.up.calls


class Expanded(Block):
    """A block with buffers that nothing can be written into, or whose bytes are not their values."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.tensor([[0.5]]).expand(5, 8))
        self.register_buffer("turns", torch.ones(3, dtype=torch.complex64).conj())

    def forward(self, x):
        return super().forward(x) * self.mask


@pytest.mark.parametrize("gradient", ["backprop", "zeroth-order"])
@pytest.mark.parametrize("make", [Grown, Expanded])
def test_a_block_whose_buffers_are_no_plain_ones_goes_on_as_if_never_stopped(store, tmp_path, make, gradient):
    def one():
        torch.manual_seed(3)
        return make()

    options = {"gradient": {"name": gradient, "probes": 2}, "steps": 4}
    whole = train(store, one(), **options)
    for step in (1, 3):
        with pytest.raises(zgstore.Interrupted):
            train(store, one(), checkpoint=tmp_path / "c.pt", **options | stopped_at(step))
    again = train(store, one(), checkpoint=tmp_path / "c.pt", **options)
    assert again.resumed_from == 3
    assert again.state_digest == whole.state_digest
    assert again.last_window_mean_loss == whole.last_window_mean_loss


def test_stopped_twice_in_an_epoch_with_schedule_anchor_validation_and_accumulation(ragged, tmp_path):
    options = {
        "schedule": ScheduleSpec("cosine", warmup=2), "anchor": 0.5, "accumulate": 2, "batch_size": 2,
        "validate_every": 2, "validate_rows": 2, "forward": masked, "checkpoint_every": 2, "loss": "smooth-l1",
    }  # fmt: skip
    whole = train(ragged, **options)
    path = tmp_path / "c.pt"
    for step in (1, 2, 4):
        with pytest.raises(zgstore.Interrupted):
            train(ragged, checkpoint=path, **options | stopped_at(step))
    again = train(ragged, checkpoint=path, **options)
    assert again.state_digest == whole.state_digest
    assert again.validation_loss == whole.validation_loss
    assert again.last_window_mean_loss == whole.last_window_mean_loss


def test_what_is_lost_after_the_last_checkpoint_is_done_again(store, tmp_path):
    whole, path = train(store), tmp_path / "c.pt"

    def fall(line):
        if line["step"] == 5:
            raise RuntimeError("pulled the plug")

    with pytest.raises(RuntimeError):
        train(store, checkpoint=path, checkpoint_every=2, log=fall, log_every=1)
    assert load(path)["ledger"]["step"] == 4
    assert train(store, checkpoint=path).state_digest == whole.state_digest


def test_steps_can_be_extended_where_the_rate_is_constant_and_only_there(store, tmp_path):
    train(store, steps=4, checkpoint=tmp_path / "a.pt")
    longer = train(store, steps=7, checkpoint=tmp_path / "a.pt")
    assert longer.resumed_from == 4
    assert longer.state_digest == train(store, steps=7).state_digest
    train(store, steps=4, checkpoint=tmp_path / "b.pt", schedule="linear")
    with pytest.raises(zgstore.Refused, match="job"):
        train(store, steps=7, checkpoint=tmp_path / "b.pt", schedule="linear")


def test_a_checkpoint_of_something_else_is_refused_by_name(store, ragged, tmp_path):
    path = tmp_path / "c.pt"
    train(store, checkpoint=path, block_id=0, job="one")
    for changes, named in (({"job": "two"}, "job"), ({"block_id": 1}, "block")):
        with pytest.raises(zgstore.Refused, match=f"is of {named}") as caught:
            train(store, checkpoint=path, **{"block_id": 0, "job": "one"} | changes)
        assert caught.value.exit_code == 25
    with pytest.raises(zgstore.Refused, match="is of data"):
        train(ragged, checkpoint=path, forward=masked, block_id=0, job="one")
    with pytest.raises(zgstore.Refused, match=r"up\.weight"):
        train(store, wide(), checkpoint=path, block_id=0, job="one")


def wide():
    block = block_of()
    block.up, block.down = nn.Linear(8, 24), nn.Linear(24, 8)
    return block


def test_the_generators_go_on_where_they_were(store, tmp_path):
    drawn = []

    def forward(block, source, context):
        drawn.append(float(torch.rand(())))
        return block(source)

    train(store, forward=forward)
    whole = list(drawn)
    drawn.clear()
    with pytest.raises(zgstore.Interrupted):
        train(store, forward=forward, checkpoint=tmp_path / "c.pt", **stopped_at(3))
    train(store, forward=forward, checkpoint=tmp_path / "c.pt")
    assert drawn == whole


def test_a_damaged_shard_ends_it_by_name_and_the_step_before_is_kept(tmp_path):
    store = written(tmp_path, rows=10, cut=1)
    plan = store.read_plan("main", ["h.1"])
    blob = plan.columns[0].blobs[3]
    path = tmp_path / "store" / "objects" / blob.name[:2] / f"{blob.name}.safetensors"
    whole = path.read_bytes()
    path.chmod(0o600)
    path.write_bytes(whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:])
    with pytest.raises(zgstore.Corrupt) as caught:
        train(store, order="sequential", batch_size=2, checkpoint=tmp_path / "c.pt")
    assert blob.name in caught.value.path
    assert "zgstore verify" in caught.value.hint
    assert load(tmp_path / "c.pt")["ledger"]["step"] == 3
    path.write_bytes(whole)
    again = train(store, order="sequential", batch_size=2, checkpoint=tmp_path / "c.pt")
    assert again.state_digest == train(store, order="sequential", batch_size=2).state_digest


# ---- what is minimised ----


def test_accumulation_over_ragged_rows_equals_one_batch(ragged):
    once = train(ragged, steps=5, batch_size=4, forward=masked, block=block_of(dropout=0.0), make=torch.optim.SGD)
    block = block_of(dropout=0.0)
    pieces = train(ragged, steps=5, batch_size=1, accumulate=4, forward=masked, block=block, make=torch.optim.SGD)
    assert pieces.last_window_mean_loss == pytest.approx(once.last_window_mean_loss, rel=1e-5)
    reference = block_of(dropout=0.0)
    train(ragged, steps=5, batch_size=4, forward=masked, block=reference, make=torch.optim.SGD)
    for mine, theirs in zip(block.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_what_lies_in_the_padding_changes_nothing(ragged):
    def poisoned(block, source, context):
        return block(source).masked_fill(~context["mask"][..., None], 1e4)

    assert train(ragged, forward=poisoned).state_digest == train(ragged, forward=masked).state_digest


def test_a_padded_batch_without_a_forward_is_refused_with_a_hint(ragged):
    with pytest.raises(zgstore.Refused, match="padded") as caught:
        train(ragged)
    assert "forward" in caught.value.hint


def test_frozen_parameters_are_left_alone(store):
    block = block_of()
    block.up.requires_grad_(requires_grad=False)
    before, down = block.up.weight.clone(), block.down.weight.clone()
    train(store, block, anchor=0.1)
    assert torch.equal(block.up.weight, before)
    assert not torch.equal(block.down.weight, down)
    block.requires_grad_(requires_grad=False)
    with pytest.raises(zgstore.Invalid, match="no parameter"):
        train_block(block, zgstore.read(store, "main"), source="h.0", target="h.1", steps=1)


def test_an_anchor_keeps_the_block_nearer_to_where_it_began(store):
    def moved(anchor):
        block = block_of()
        start = [parameter.detach().clone() for parameter in block.parameters()]
        train(store, block, anchor=anchor, steps=20)
        return sum(float((p.detach() - s).norm()) for p, s in zip(block.parameters(), start, strict=True))

    assert moved(20.0) < moved(0.0)


def test_one_step_of_sgd_is_the_step_by_hand(store):
    block, twin = block_of(dropout=0.0), block_of(dropout=0.0)
    train(store, block, steps=1, make=torch.optim.SGD, order="sequential", max_grad_norm=0.1, schedule=ScheduleSpec(
        "constant", warmup=2))  # fmt: skip
    with zgstore.read(store, "main") as reader:
        batch = reader.batch([0, 1, 2, 3])
    error = (twin(batch["h.0"]) - batch["h.1"]).square().mean(-1) / batch["h.1"].square().mean(-1)
    error.mean().backward()
    nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.sub_(0.5 * 1e-2 * parameter.grad)
    for mine, theirs in zip(block.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_autocast_computes_in_bf16_and_keeps_the_state_in_fp32(store):
    dtypes = set()

    def forward(block, source, context):
        inner = block.up(source)
        dtypes.add(inner.dtype)
        return source + block.down(inner)

    block = block_of()
    train(store, block, forward=forward, precision="bf16")
    assert dtypes == {torch.bfloat16}
    assert {parameter.dtype for parameter in block.parameters()} == {torch.float32}


def test_token_losses_go_through_the_frozen_interface(store):
    torch.manual_seed(0)
    head = nn.Linear(8, 7)
    before = state_digest(head)
    loss = LossSpec(token_ce=0.1, token_kl=0.2)
    report = train(store, loss=loss, interface=head, steps=40)
    assert report.frozen_interface_parameters == 8 * 7 + 7
    assert report.last_window_mean_loss < report.first_window_mean_loss
    assert state_digest(head) == before
    with pytest.raises(zgstore.Invalid, match="interface"):
        train(store, loss=loss)


def test_a_loss_of_ones_own_is_each_tokens(store):
    def absolute(prediction, target, context):
        return (prediction - target).abs().mean(-1)

    assert train(store, loss=absolute, steps=3).steps == 3
    with pytest.raises(zgstore.Invalid, match=r"gave \[\]") as caught:
        train(store, loss=lambda p, t, c: (p - t).square().mean())
    assert "each token" in caught.value.hint


def test_a_loss_that_is_not_finite_ends_it_and_keeps_the_last_checkpoint(store, tmp_path):
    calls = itertools.count()

    def forward(block, source, context):
        return block(source) * (float("nan") if next(calls) == 4 else 1.0)

    with pytest.raises(zgstore.NonFinite, match="step 5"):
        train(store, forward=forward, checkpoint=tmp_path / "c.pt", checkpoint_every=2)
    assert load(tmp_path / "c.pt")["ledger"]["step"] == 4


@pytest.mark.parametrize("max_grad_norm", [1.0, None], ids=["clipped", "unclipped"])
@pytest.mark.parametrize("steps", [7, 5], ids=["on the way", "at the last step"])
def test_a_gradient_that_is_not_finite_ends_it_before_anything_is_saved(store, tmp_path, max_grad_norm, steps):
    calls = itertools.count()

    def loss(prediction, target, context):
        error = (prediction - target).square().mean(-1)
        return error + (prediction[..., 0] * 0).sqrt() if next(calls) == 4 else error  # adds 0, whose slope is NaN

    with pytest.raises(zgstore.NonFinite, match="gradient's norm of step 5 is nan"):
        train(store, loss=loss, steps=steps, max_grad_norm=max_grad_norm, checkpoint=tmp_path / "c.pt",
              checkpoint_every=1, log_every=100)  # fmt: skip
    kept = load(tmp_path / "c.pt")
    assert kept["ledger"]["step"] == 4
    assert all(tensor.isfinite().all() for tensor in kept["block_state"].values())


def test_a_rate_that_drives_parameters_out_of_the_numbers_is_not_done(store, tmp_path):
    with pytest.raises(zgstore.NonFinite, match=r"parameter up\.weight.* of step 1 is not finite"):
        train(store, lr=float("inf"), steps=1, checkpoint=tmp_path / "c.pt")
    assert not (tmp_path / "c.pt").exists()


@pytest.mark.parametrize(
    ("said", "key", "hint"),
    [
        ({"gradient": "Backprop"}, "gradient.name", "backprop"),
        ({"gradient": "zeroth"}, "gradient.name", "zeroth-order"),
        ({"gradient": GradientSpec("back-prop")}, "gradient.name", "backprop"),
        ({"gradient": {"name": "zeroth-order", "probe": 3}}, "gradient.probe", "string"),
        ({"schedule": "cosin"}, "schedule.name", "cosine"),
        ({"schedule": {"name": "cosine", "warm": 1}}, "schedule.warm", "warmup"),
        ({"loss": {"name": "relative"}}, "loss.name", "relative-mse"),
        ({"precision": "fp16"}, "precision", "bf16"),
        ({"order": "shufled"}, "order", "shuffled"),
        ({"batch_size": 0}, "batch_size", "at least 1"),
        ({"workers": -1}, "workers", "at least 0"),
        ({"checkpoint_every": 1.5}, "checkpoint_every", "whole number"),
        ({"log_every": 0}, "log_every", "at least 1"),
        ({"block_id": -1}, "block_id", "at least 0"),
        ({"validate_every": 1}, "validate_rows", "how many rows"),
        ({"max_grad_norm": math.nan}, "max_grad_norm", "or 0 for none"),
        ({"anchor": math.inf}, "anchor", "finite"),
        ({"anchor": 1000.0}, "anchor", "at most 1 / lr = 100"),
        ({"loss": LossSpec("mse", boundary_weight=1e308)}, "loss.boundary_weight", "at most 1e+09"),
        ({"gradient": GradientSpec("zeroth-order", epsilon=1e300)}, "gradient.epsilon", "at most 1"),
        ({"noise": 1e308}, "noise", "at most 1e+06"),
        ({"noise": {"hgh": 0.1}}, "noise.hgh", "high"),
        ({"noise": "diffusion"}, "noise", "Diffusion(blocks=4).noise(0)"),
    ],
)
def test_a_call_may_say_what_a_job_file_may_and_no_more(store, said, key, hint):
    with pytest.raises(zgstore.Invalid) as caught:
        train(store, steps=1, **said)
    assert caught.value.fields["key"] == key
    assert hint in caught.value.hint


def test_a_call_may_say_it_as_a_job_file_does(store):
    as_specs = train(store, schedule=ScheduleSpec("cosine", warmup=2), loss=LossSpec("mse"),
                     gradient=GradientSpec("zeroth-order", probes=2))  # fmt: skip
    as_tables = train(store, schedule={"name": "cosine", "warmup": 2}, loss={"name": "mse"},
                      gradient={"name": "zeroth-order", "probes": 2})  # fmt: skip
    assert as_tables.state_digest == as_specs.state_digest


def test_a_call_may_say_its_optimizer_as_a_job_file_does(store):
    def trained(optimizer):
        with zgstore.read(store, "main") as reader:
            return train_block(block_of(), reader, source="h.0", target="h.1", optimizer=optimizer, steps=3, seed=5)

    made = train(store, steps=3, lr=1e-3, batch_size=4).state_digest
    as_spec = OptimizerSpec("adamw", {"lr": 1e-3, "betas": (0.9, 0.999)})
    for said in ({"name": "adamw", "lr": 1e-3}, {"lr": np.float64(1e-3)}, as_spec):
        assert trained(said).state_digest == made
    assert trained("adamw").state_digest == trained(None).state_digest != made
    for wrong, named in (({"name": "adam"}, "adam"), ({"lr": -1.0}, "lr"), (torch.optim.AdamW, "optimizer")):
        with pytest.raises(zgstore.Invalid, match=named):
            trained(wrong)


def test_a_call_may_say_its_noise_as_a_job_file_does_and_its_checkpoint_as_text(store, tmp_path):
    said = [Noise(0.2 * LEAST_OF_MOST, 0.2), 0.2, {"high": 0.2}, {"name": "log-uniform", "high": np.float64(0.2)}]
    path = tmp_path / "c.pt"
    made = [train(store, forward=masked, noise=each, checkpoint=str(path)) for each in said]
    assert path.exists()
    assert [each.resumed_from for each in made] == [None, 7, 7, 7]  # it is the same training all the time
    train(store, steps=1, forward=masked, noise=zgtrain.Diffusion(blocks=4).noise(0))


class Cut(Block):
    """Its answer does not come from its parameters, as far as autograd sees; or is no state."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def forward(self, x):
        with torch.set_grad_enabled(self.how != "no_grad"):
            y = super().forward(x)
        answers = {"detached": y.detach(), "whole numbers": y.long(), "complex": y + 0j, "its source": x}
        return answers.get(self.how, y)


@pytest.mark.parametrize(
    ("how", "gradient", "said"),
    [
        ("detached", "backprop", "does not depend on any parameter"),
        ("no_grad", "backprop", "does not depend on any parameter"),
        ("its source", "backprop", "does not depend on any parameter"),
        ("its source", "zeroth-order", "none of 16 probes of its parameters changed"),
        ("whole numbers", "backprop", "of torch.int64"),
        ("whole numbers", "zeroth-order", "of torch.int64"),
        ("complex", "backprop", "of torch.complex64"),
        ("complex", "zeroth-order", "of torch.complex64"),
    ],
)
def test_an_answer_that_nothing_can_be_learned_from_is_refused(store, how, gradient, said):
    with pytest.raises(zgstore.Invalid, match=said) as caught:
        train(store, Cut(how), steps=1, gradient=gradient)
    assert caught.value.hint


def test_an_answer_cut_from_autograd_is_learned_from_by_queries(store):
    torch.manual_seed(3)
    asked = GradientSpec("zeroth-order", probes=2)
    cut, whole = (train(store, block, steps=2, gradient=asked) for block in (Cut("detached"), block_of()))
    assert cut.state_digest == whole.state_digest != whole.initial_digest


def test_an_optimizer_of_another_blocks_parameters_is_refused(store):
    with zgstore.read(store, "main") as reader, pytest.raises(zgstore.Invalid, match="nothing would be trained"):
        train_block(block_of(), reader, source="h.0", target="h.1", steps=1,
                    optimizer=torch.optim.SGD(block_of().parameters(), lr=0.1))  # fmt: skip


def test_an_optimizer_of_a_part_is_refused_by_what_it_leaves_out_until_that_is_frozen(store):
    def over_down(block):
        with zgstore.read(store, "main") as reader:
            return train_block(block, reader, source="h.0", target="h.1", steps=2,
                               optimizer=torch.optim.SGD(block.down.parameters(), lr=0.1))  # fmt: skip

    block = block_of()
    with pytest.raises(zgstore.Invalid, match=r"'up\.weight', 'up\.bias' would get a gradient") as caught:
        over_down(block)
    assert "requires_grad_(False)" in caught.value.hint
    block.up.requires_grad_(False)
    assert over_down(block).trained_parameters == sum(each.numel() for each in block.down.parameters())


def test_a_prediction_of_another_shape_is_refused(store):
    with pytest.raises(zgstore.Invalid, match="its target is"):
        train(store, forward=lambda block, source, context: (block(source),))


def test_a_forward_that_takes_something_else_is_named(store):
    with pytest.raises(zgstore.Invalid, match="cannot be called: too many positional") as caught:
        train(store, forward=lambda block, source: block(source))
    assert "(block, source, context)" in caught.value.hint


def test_deterministic_mode_is_left_as_it_was(store):
    seen = []

    def forward(block, source, context):
        seen.append(torch.are_deterministic_algorithms_enabled())
        return block(source)

    assert train(store, forward=forward, deterministic=True).deterministic
    assert seen[0] is True
    assert not torch.are_deterministic_algorithms_enabled()


# ---- what is reported ----


def test_the_report_counts_and_carries_the_whole_snapshot_digest(store, tmp_path):
    lines = []
    report = train(store, steps=40, checkpoint=tmp_path / "c.pt", log=lines.append)
    value = report.as_value()
    assert value["snapshot"] == str(store.resolve("main"))
    assert value["pins"] == str(store.snapshot(store.resolve("main")).pins.digest())
    assert load(tmp_path / "c.pt")["snapshot"] == value["snapshot"]
    assert (value["source"], value["target"], value["targets"], value["steps"]) == ("h.0", "h.1", "cached", 40)
    assert [line["step"] for line in lines] == list(range(1, 41))
    first = [line["loss"] for line in lines[:32]]
    assert value["first_window_mean_loss"] == pytest.approx(sum(first) / 32)
    assert value["last_window_mean_loss"] == pytest.approx(sum(line["loss"] for line in lines[-32:]) / 32)
    assert value["last_window_mean_loss"] < value["first_window_mean_loss"]
    row = 2 * 5 * 8 * 4  # two boundaries of a row; context comes on top
    assert value["bytes_read"] >= 13 * 10 * row + 4 * row
    assert value["peak_memory_bytes"] > 1 << 20
    assert value["seconds"]["total"] >= value["seconds"]["compute"] > 0
    assert value["inter_block_gradient_bytes"] == 0
    assert value["gradient_queries"] == 0
    assert value["initial_digest"] == state_digest(block_of())
    assert value["residual_error"] > 0


def test_gradient_that_leaves_the_block_is_counted(store):
    def asks(block, source, context):
        return block(source.requires_grad_())

    assert train(store, forward=asks, steps=1).inter_block_gradient_bytes == 4 * 5 * 8 * 4
    neighbour = nn.Linear(8, 8)
    through = train(store, forward=lambda block, source, context: block(neighbour(source)), steps=1)
    assert through.inter_block_gradient_bytes == (8 * 8 + 8) * 4


def test_parameters_that_should_not_be_alive_are_counted(store):
    gc.collect()
    before = train(store, steps=1).live_teacher_parameters
    teacher = nn.Linear(30, 30)
    assert train(store, steps=1).live_teacher_parameters - before == 30 * 31
    del teacher
    assert train(store, steps=1).live_teacher_parameters == before


def test_validation_looks_at_rows_that_are_never_trained_on(store):
    seen, lines = [], []

    def forward(block, source, context):
        if block.training:
            seen.extend(context["row"].tolist())
        return block(source)

    report = train(store, forward=forward, validate_every=3, validate_rows=4, steps=9, log=lines.append)
    assert set(seen) == {4, 5, 6, 7, 8, 9}
    looked = [line for line in lines if "validation_loss" in line]
    assert [line["step"] for line in looked] == [3, 6, 9]
    assert report.validation_loss == looked[-1]["validation_loss"]
    assert report.state_digest == train(store, forward=forward, validate_every=9, validate_rows=4, steps=9).state_digest


def test_samples_without_a_sequence_axis_train_too(tmp_path):
    flat = zgstore.Store.init(tmp_path / "flat")
    pins = zgstore.Pins(teacher={"id": "t", "revision": "1", "measured": bytes(32)},
                        data={"id": "d", "revision": "1", "pins": {}}, capture={})  # fmt: skip
    with zgstore.writer(flat, pins, cut=1) as writer:
        x = noise_of(10, 8)
        writer.add(zgstore.SampleBatch(columns={"h.0": x, "h.1": x + 1}, context={"row": torch.arange(10)}))
        writer.commit(ref="main", expect=None)
    report = train(flat, steps=30)
    assert report.last_window_mean_loss < report.first_window_mean_loss * 1.01
