"""The job file: strictly read, with one identity for all that decides what is learned."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

import zgstore
from zgtrain.job import BlockLaunch, GradientSpec
from zgtrain.jobfile import load_job
from zgtrain.optimizing import make_optimizer

JOB = """
output = "runs/student"
[snapshot]
store = "cache"
rev = "lock:main"
recipe = "cache.toml"
[student]
block = "my.zero:block"
interface = "my.zero:interface"
args = { path = "models/x" }
[train]
steps = 64
optimizer = { name = "adamw", lr = 2e-5, betas = [0.9, 0.95], weight_decay = 0.0 }
"""


@pytest.fixture
def read(tmp_path):
    def reader(text=JOB, *overrides, name="job.toml", folder=tmp_path):
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(text)
        return load_job(folder / name, overrides)

    return reader


def test_paths_are_the_files_own_and_defaults_are_filled_in(read, tmp_path):
    job = read()
    assert job.output == tmp_path / "runs/student"
    assert job.folder(3) == tmp_path / "runs/student/block-003"
    assert job.snapshot.store == tmp_path / "cache"
    assert job.snapshot.recipe == tmp_path / "cache.toml"
    assert (job.train.order, job.train.precision, job.train.max_grad_norm) == ("shuffled", "fp32", 1.0)
    assert (job.train.loss.name, job.train.gradient) == ("relative-mse", GradientSpec())
    assert job.student.block.directory == tmp_path


@pytest.mark.parametrize(
    ("line", "named", "hint"),
    [
        ("[train]\nsed = 1", "train.sed", "seed"),
        ("[train]\nstepz = 1", "train.stepz", "steps"),
        ('[train]\nloss = { nam = "mse" }', "train.loss.nam", "name"),
        ("[train]\noptimizer = { lrr = 1.0 }", "train.optimizer.lrr", "lr"),
        ("[validation]\nrows = 3", "validation", "validate"),
        ('[train]\norder = "shufled"', "train.order", "shuffled"),
        ('[train]\nloss = "relative_mse"', "train.loss.name", "relative-mse"),
        ('[train]\nprecision = "fp16"', "train.precision", "bf16"),
        ("[train]\nsteps = 0", "train.steps", "at least 1"),
        ('[train]\nsteps = "many"', "train.steps", "whole number"),
        ("[train]\noptimizer = { lr = -1.0 }", "train.optimizer.lr", "finite"),
        ('[train]\nforward = "nothing"', "train.forward", "module:function"),
        ("[train]\nnoise = -0.1", "train.noise", "or 0 for none"),
        ("[train]\nnoise = 0.1", "train.forward", "noisy"),
        ('[train]\nnoise = { name = "difusion" }', "train.noise.name", "diffusion"),
        ("[train]\nnoise = { low = 0.2, high = 0.1 }", "train.noise.low", "lesser"),
        ("[train]\nnoise = { sigma_min = 0.1 }", "train.noise.sigma_min", "not a key"),
        ('[train]\nnoise = { name = "diffusion", sigma_data = 0.0 }', "train.noise.sigma_data", "at least 1e-06"),
        ('[train]\ngradient = { name = "zeroth" }', "train.gradient.name", "zeroth-order"),
        ('[train]\ngradient = { probe = "rademaker" }', "train.gradient.probe", "rademacher"),
        ("[train]\ngradient = { probes = 0 }", "train.gradient.probes", "at least 1"),
        ("[train]\ngradient = { epsilon = 0.0 }", "train.gradient.epsilon", "at least 1e-12"),
        ("[validate]\nevery = 4", "validate.rows", "both"),
        ("[launch.blocks.x]\nprocesses = 2", "launch.blocks.x", "count from 0"),
        ("[launch.blocks.1]\nprocesses = 3\ndata_parallel = 2", "launch.blocks.1.data_parallel", "divisor"),
        ('[student]\nboundaries = ["a"]', "student.boundaries", "at least two"),
    ],
)
def test_what_a_job_may_not_say_is_named_with_what_it_may(read, line, named, hint):
    section = line.split("\n")[0]
    text = JOB.replace(section, line) if section in JOB else f"{JOB}\n{line}"
    for key in ("optimizer", "steps"):
        if section == "[train]" and f"{key} =" in line:
            text = "\n".join(each for each in text.split("\n") if not each.startswith(f"{key} =") or each in line)
    with pytest.raises(zgstore.Invalid) as caught:
        read(text)
    assert caught.value.fields["key"] == named
    assert hint in caught.value.message + caught.value.hint


@pytest.mark.parametrize(
    ("said", "named", "hint"),
    [
        ("train.noise=5e-324", "train.noise", "at least 2e-05 and at most 1e+06; or 0"),
        ("train.noise=1e308", "train.noise", "at most 1e+06"),
        ("train.noise=nan", "train.noise", "finite"),
        ("train.noise={high=1e-6}", "train.noise.low", "at least 1e-06"),
        ('train.noise={name="diffusion",overlap=1000}', "train.noise.overlap", "at most 10"),
        ('train.noise={name="diffusion",sigma_data=1e-200}', "train.noise.sigma_data", "at least 1e-06"),
        ('train.noise={name="diffusion",sigma_max=1e200}', "train.noise.sigma_max", "at most 1e+06"),
        ('train.noise={name="diffusion",sigma_min=1e-320}', "train.noise.sigma_min", "at least 1e-06"),
        ('train.noise={name="diffusion",p_mean=1e308}', "train.noise.p_mean", "at most 30"),
        ('train.noise={name="diffusion",p_mean=12.0}', "train.noise.p_mean", "between their logarithms"),
        ('train.noise={name="diffusion",p_std=1e-300}', "train.noise.p_std", "at least 0.01"),
        ("train.anchor=1e308", "train.anchor", "at most 1 / lr = 50000"),
        ("train.anchor=inf", "train.anchor", "finite"),
        ("train.lr=1e300", "train.optimizer.lr", "at most 1000; or 0"),
        ("train.lr=1e-300", "train.optimizer.lr", "at least 1e-12"),
        ("train.lr=nan", "train.optimizer.lr", "finite"),
        ("train.optimizer.betas=[0.9]", "train.optimizer.betas", "two numbers"),
        ("train.optimizer.betas=[nan, 0.9]", "train.optimizer.betas", "at most 0.999999"),
        ("train.optimizer.betas=x", "train.optimizer.betas", "an array"),
        ("train.optimizer.eps=0.0", "train.optimizer.eps", "at least 1e-30"),
        ("train.optimizer.eps=1e9", "train.optimizer.eps", "at most 1"),
        ("train.optimizer.eps=a", "train.optimizer.eps", "a number"),
        ("train.optimizer.weight_decay=1e300", "train.optimizer.weight_decay", "at most 1 / lr"),
        ('train.optimizer={name="sgd",momentum=1.0}', "train.optimizer.momentum", "at most 0.999999"),
        ('train.optimizer={name="sgd",dampening=-1.0}', "train.optimizer.dampening", "at least 0"),
        ('train.optimizer={name="sgd",nesterov=true}', "train.optimizer.nesterov", "momentum"),
        ('train.optimizer={name="sgd",nesterov=1}', "train.optimizer.nesterov", "true or false"),
        ('train.schedule={name="cosine",final=5.0}', "train.schedule.final", "at most 1"),
        ("train.schedule={warmup=1000000000000}", "train.schedule.warmup", "at most 1000000000"),
        ("train.max_grad_norm=1e-300", "train.max_grad_norm", "at least 1e-09"),
        ("train.max_grad_norm=inf", "train.max_grad_norm", "or 0 for none"),
        ('train.loss={boundary_weight=1e308}', "train.loss.boundary_weight", "at most 1e+09"),
        ('train.loss={boundary_weight=0}', "train.loss.boundary_weight", "token_ce"),
        ('train.loss={token_kl=1e-300}', "train.loss.token_kl", "at least 1e-09"),
        ("train.gradient={epsilon=1e-300}", "train.gradient.epsilon", "at least 1e-12"),
        ("train.gradient={epsilon=1e300}", "train.gradient.epsilon", "at most 1"),
        ("train.steps=1000000000000", "train.steps", "at most 1000000000"),
        ("train.workers=100000", "train.workers", "at most 1024"),
        ("train.seed=-1", "train.seed", "at least 0"),
        ("launch.blocks.0.processes=1000000", "launch.blocks.0.processes", "at most 1024"),
        ("validate.rows=9223372036854775807", "validate.rows", "at most 1000000000"),
    ],
)  # fmt: skip
def test_a_number_out_of_its_bounds_is_named_with_them(read, said, named, hint):
    with pytest.raises(zgstore.Invalid) as caught:
        read(JOB, 'train.forward="my.zero:forward"', said)
    assert caught.value.fields["key"] == named
    assert hint in caught.value.hint


def test_what_people_set_is_within_the_bounds(read):
    for said in (
        "train.lr=0", "train.lr=10.0", "train.optimizer.eps=1e-15", "train.optimizer.betas=[0, 0.9999]",
        "train.optimizer.weight_decay=10", "train.anchor=50000", "train.max_grad_norm=0", "train.max_grad_norm=1e6",
        'train.optimizer={name="sgd",lr=0.1,momentum=0.99,nesterov=true}', "train.loss={boundary_weight=0,token_kl=1}",
        'train.noise={name="diffusion",sigma_min=0.2,sigma_max=10,p_mean=-0.5,sigma_data=90}', "train.noise=20",
        "train.gradient={epsilon=1e-5}", "train.gradient={epsilon=1}", "train.seed=9223372036854775807",
        'train.schedule={name="cosine",final=1}', "launch.retries=0", "train.workers=0",
    ):  # fmt: skip
        job = read(JOB, 'train.forward="my.zero:forward"', said)
        make_optimizer(job.train.optimizer, [nn.Parameter(torch.zeros(1))])  # torch takes it too


def test_a_name_alone_stands_for_its_table(read):
    for key, name in (("loss", "mse"), ("schedule", "cosine"), ("gradient", "zeroth-order"), ("optimizer", "sgd"),
                      ("noise", "diffusion")):  # fmt: skip
        alone, table = (read(JOB, 'train.forward="my.zero:forward"', f"train.{key}={said}")
                        for said in (name, f'{{ name = "{name}" }}'))  # fmt: skip
        assert alone.identity() == table.identity()


def test_what_must_be_said_is_asked_for(read, tmp_path):
    for line in ("steps = 64", 'rev = "lock:main"', 'output = "runs/student"', 'block = "my.zero:block"'):
        with pytest.raises(zgstore.Invalid, match="is missing"):
            read(JOB.replace(line, ""))
    with pytest.raises(zgstore.Invalid, match="there is no job"):
        load_job(tmp_path / "none.toml")
    with pytest.raises(zgstore.Invalid, match="not TOML"):
        read("a = ")


def test_token_losses_need_an_interface(read):
    text = JOB + "loss = { token_kl = 0.5 }"
    assert read(text).train.loss.token_kl == 0.5
    with pytest.raises(zgstore.Invalid, match=r"student\.interface"):
        read(text.replace('interface = "my.zero:interface"', ""))


def test_overrides_are_dotted_keys_and_values_as_toml_writes_them(read):
    job = read(JOB, "train.lr=1e-4", "train.steps=8", "train.order=sequential", 'log.wandb={ project = "p" }')
    assert job.train.optimizer.options["lr"] == 1e-4
    assert job.train.optimizer.options["betas"] == [0.9, 0.95]
    assert (job.train.steps, job.train.order, job.log.wandb) == (8, "sequential", {"project": "p"})
    with pytest.raises(zgstore.Invalid, match="sets nothing"):
        read(JOB, "train.steps")
    with pytest.raises(zgstore.Invalid, match=r"train\.stps"):
        read(JOB, "train.stps=8")


@pytest.mark.parametrize(
    ("short", "override", "whole"),
    [
        ('optimizer = "sgd"', "train.lr=1e-3", 'optimizer = { name = "sgd", lr = 1e-3 }'),
        ('schedule = "cosine"', "train.schedule.warmup=3", 'schedule = { name = "cosine", warmup = 3 }'),
        ('loss = "mse"', "train.loss.token_ce=0.1", 'loss = { name = "mse", token_ce = 0.1 }'),
        ('gradient = "zeroth-order"', "train.gradient.probes=4", 'gradient = { name = "zeroth-order", probes = 4 }'),
        ('noise = "diffusion"', "train.noise.overlap=0.1", 'noise = { name = "diffusion", overlap = 0.1 }'),
        ("noise = 0.1", "train.noise.low=0.01", "noise = { low = 0.01, high = 0.1 }"),
    ],
)
def test_an_override_goes_into_what_the_file_has_by_its_name_alone(read, short, override, whole):
    known = "\n".join(line for line in JOB.splitlines() if not line.startswith("optimizer"))
    known += '\nforward = "my.zero:forward"\n'
    assert read(known + short, override).train == read(known + whole).train
    assert read(known, f"train.{short}", override).train == read(known + whole).train


def test_blocks_can_have_processes_of_their_own(read):
    job = read(JOB + "[launch.blocks.3]\nprocesses = 4\ndata_parallel = 2")
    assert job.launch.blocks == {3: BlockLaunch(4, 2)}


SAME = [
    "output=elsewhere", "log.every=1", "log.tensorboard=true", "launch.parallel=4", "train.checkpoint_every=1",
    "train.steps=128", "train.workers=3", "snapshot.rev=other", "train.gradient.probe_chunk=9",
    "train.gradient.score_chunk=9", "train.gradient.probes=9",
]  # fmt: skip
OTHER = [
    "train.lr=1e-3", "train.seed=1", "train.batch_size=8", "train.accumulate=2", "train.order=sequential",
    "train.max_grad_norm=2.0", "train.precision=bf16", "train.deterministic=true", "train.anchor=0.1",
    "train.loss=mse", "train.loss.token_ce=0.1", 'student.args={ path = "models/y" }', "student.block=my.zero:other",
    'student.boundaries=["a", "b"]', "train.forward=my.zero:forward", "train.schedule.warmup=3",
    "train.schedule={ name = \"cosine\" }", "train.gradient.name=zeroth-order",
]  # fmt: skip


def test_the_identity_is_of_what_is_learned_and_of_nothing_else(read, tmp_path):
    whole = read().identity()
    assert whole.startswith("blake3:")
    assert {read(JOB, each).identity() for each in SAME} == {whole}
    assert read(folder=tmp_path / "moved").identity() == whole
    others = {read(JOB, each).identity() for each in OTHER}
    assert len(others) == len(OTHER)
    assert whole not in others
    held_out = read(JOB, "validate.every=2", "validate.rows=3")
    assert held_out.identity() != whole
    assert held_out.identity() == read(JOB, "validate.every=9", "validate.rows=3").identity()


def test_noise_is_said_by_the_greatest_sigma_or_in_full_and_belongs_to_it(read):
    seen = JOB + 'forward = "my.zero:forward"\n'
    published = {"name": "log-uniform", "low": 0.005, "high": 0.1}
    for said in ("0.1", "{ high = 0.1 }", '{ name = "log-uniform", low = 0.005 }'):
        assert read(f"{seen}noise = {said}").train.noise == pytest.approx(published)
    down = read(seen + 'noise = { name = "diffusion", overlap = 0.1 }')
    numbers = {"sigma_min": 0.002, "sigma_max": 80.0, "p_mean": -1.2, "p_std": 1.2, "sigma_data": 0.5, "overlap": 0.1}
    assert down.train.noise == {"name": "diffusion", **numbers}
    assert down.train.diffusion
    jobs = [read(seen), read(seen + "noise = 0.1"), read(seen + "noise = 0.2"), down]
    assert len({job.identity() for job in jobs}) == 4
    assert read(seen + "noise = 0.0").identity() == jobs[0].identity()


def test_the_probes_belong_to_it_where_the_gradient_is_asked_for_by_them(read):
    asked = JOB + 'gradient = { name = "zeroth-order" }'
    whole = read(asked).identity()
    assert {read(asked, f"train.gradient.{key}_chunk=9").identity() for key in ("probe", "score")} == {whole}
    settings = ("probes=4", "probe=sphere", "differences=forward", "epsilon=0.1", "seed=1", "name=backprop")
    assert len({whole, *(read(asked, f"train.gradient.{each}").identity() for each in settings)}) == 7
    assert read(asked, "train.gradient.name=backprop").identity() == read().identity()
    assert read(asked, "train.gradient.epsilon=1e-3").identity() == whole  # what fp32 takes where it is not said


def test_the_steps_belong_to_it_where_the_rate_depends_on_them(read):
    cosine = JOB + 'schedule = { name = "cosine" }'
    assert read(cosine).identity() != read(cosine, "train.steps=65").identity()


def test_a_job_is_read_without_torch():
    code = "import sys, zgtrain.job, zgtrain; zgtrain.load_job; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
