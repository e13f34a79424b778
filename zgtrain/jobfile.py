"""A job file, or what a call says in its place, read into the values of `zgtrain.job`: every key, and what it may be.

Nothing here loads torch or opens a store.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any, Final

import zgstore
from zgstore import Section, Target
from zgtrain.job import (
    DIFFUSION,
    EPSILON,
    LEAST_OF_MOST,
    LOG_UNIFORM,
    LOSSES,
    PROBES,
    Arguments,
    BlockLaunch,
    EvaluateSpec,
    GradientSpec,
    Job,
    LaunchSpec,
    LogSpec,
    LossSpec,
    OptimizerSpec,
    ScheduleSpec,
    SnapshotSpec,
    StudentSpec,
    TrainSpec,
    ValidateSpec,
)

ORDERS: Final = ("shuffled", "sequential", "sequential-first")
SCHEDULES: Final = ("constant", "cosine", "linear")
PRECISIONS: Final = ("fp32", "bf16")
OPTIMIZERS: Final = ("adamw", "sgd")
GRADIENTS: Final = ("backprop", "zeroth-order")
DIFFERENCES: Final = ("central", "forward")
_NAMED: Final = ("optimizer", "schedule", "loss", "noise", "gradient")  # tables that their name alone may stand for

# What a number may be. Beyond, fp32 cannot hold what is made of it, or nothing is trained and nobody hears of it.
_SIGMA: Final = 1e-6, 1e6  # in the boundary's unit, whose states are of size 0.01 to 1,000
_SCALE: Final = 1e-9, 1e9  # of a loss or a gradient
_RATE: Final = 1e-12, 1e3
_POSITIVE: Final = 0.0, sys.float_info.max
_FRACTION: Final = 0.0, 1.0
_DECAY: Final = 0.0, 0.999999  # a mean over a million steps
_MOST_SEED: Final = (1 << 63) - 1
_MOST_AT_ONCE: Final = 1024  # threads, or processes, of one machine
_LEAST_SHARE: Final = 1e-3  # of the normal's draws

_BLOCK: Final = re.compile(r"0|[1-9][0-9]{0,5}")


def load_job(path: str | Path, overrides: Mapping[str, Any] | Sequence[str] = ()) -> Job:
    """Read a job file.

    Args:
        path: The TOML file.
        overrides: ``"train.steps=64"``, values as TOML writes them, quotes of a single word may be left out; or a
            mapping of dotted keys to values. ``train.lr`` stands for ``train.optimizer.lr``.

    Raises:
        zgstore.Invalid: if the file is not there, is not TOML, or says something a job may not; the message names the
            key, and for an unknown one the nearest.
    """
    path = Path(path).absolute()
    value = zgstore.Section.read(path, kind="job", hint="write one; docs/tutorial has an example")
    if isinstance(overrides, Mapping):
        overrides = [f"{key}={_toml(replacement)}" for key, replacement in overrides.items()]
    for key, replacement in map(_assignment, overrides):
        place = "train.optimizer.lr" if key == "train.lr" else key
        _spell_out(value, place)
        zgstore.Section.override(value, place, replacement)
    return replace(parse_job(value, path=path), overrides=tuple(overrides))


def parse_job(value: Mapping[str, Any], *, path: Path) -> Job:
    """Read a job that is already a mapping, as ``tomllib`` returns it.

    Raises:
        zgstore.Invalid: for anything a job may not say; the message names the key.
    """
    top = Section(value, "", path, kind="job")
    job = Job(
        path=path,
        output=path.parent / top.text("output"),
        snapshot=_snapshot(top.section("snapshot")),
        student=_student(top.section("student")),
        train=_train(top.section("train")),
        log=_log(top.section("log", optional=True)),
        validate=_validate(top.section("validate", optional=True)),
        launch=_launch(top.section("launch", optional=True)),
        evaluate=_evaluate(top.section("evaluate", optional=True)),
    )
    top.done()
    if (job.train.loss.token_ce or job.train.loss.token_kl) and job.student.interface is None:
        top.fail(
            "student.interface", "is missing, and the loss has token_ce or token_kl",
            'name what makes logits of the last boundary: interface = "module:function"',
        )  # fmt: skip
    return job


# ---- what a caller of the library says, read as a job file is ----


def schedule_of(said: ScheduleSpec | Arguments | str) -> ScheduleSpec:
    """A schedule by its name, as a job file's table, or ready made.

    Raises:
        zgstore.Invalid: for what a job file may not say; so do those below.
    """
    return _schedule(_call(schedule=said))


def optimizer_of(said: OptimizerSpec | Arguments | str) -> OptimizerSpec:
    """The same of an optimiser."""
    if not isinstance(said, OptimizerSpec):
        return _optimizer(_call(optimizer=said))
    return replace(_optimizer(_call(optimizer={"name": said.name, **said.options})), function=said.function)


def gradient_of(said: GradientSpec | Arguments | str) -> GradientSpec:
    """The same of how a gradient is had."""
    return _gradient(_call(gradient=said))


def loss_of(said: LossSpec | Arguments | str) -> LossSpec:
    """The same of a loss, whose functions are looked for from the current folder on."""
    found = _loss(_call(loss=said))
    return replace(found, function=said.function) if isinstance(said, LossSpec) else found


def noise_table_of(said: Arguments | float) -> Arguments:
    """The same of noise: the greatest σ, or a table; all of its numbers."""
    return _noise(_call(noise=said))


def refuse_settings(*, rate: float, **said: Any) -> None:
    """See that the single settings of a call are what a job file may say.

    Args:
        rate: The learning rate, of which the anchor is a multiple.
        said: As ``[train]`` names them, and how often a call looks at what it does.
    """
    section = _call(**said)
    _settings(section)
    refuse_overshoot(section, "anchor", rate)
    every, rows = section.whole("validate_every", default=0), section.whole("validate_rows", default=0)
    if every and not rows:
        section.fail("validate_rows", "is 0", "say how many rows validate_every is to look at: 32")
    for key, least in (("log_every", 1), ("replicas", 1), ("block_id", 0)):
        section.whole(key, default=least, least=least)
    section.done()


def refuse_overshoot(section: Section, key: str, rate: float) -> None:
    """See that what a step takes of a parameter, or of its way back to where it began, is no more than all of it.

    Args:
        section: Where the key is.
        key: ``anchor``, or ``weight_decay``.
        rate: The learning rate, of which it is a multiple.
    """
    pull = section.number(key, default=0.0, within=_POSITIVE)
    if pull * rate > 1:
        section.fail(key, f"is {pull:g}, and with a learning rate of {rate:g} a step goes beyond its end",
                     f"at most 1 / lr = {1 / rate:g}")  # fmt: skip


def _call(**said: Any) -> Section:
    """What a call says, as the table that a file has; what is None is not said."""
    value = {key: _plain(each) for key, each in said.items() if each is not None}
    return Section(value, "", Path("train_block"), kind="call")


def _plain(said: Any) -> Any:
    """As TOML has it: a spec as its table, a number of NumPy's as one of Python's."""
    if isinstance(said, ScheduleSpec | GradientSpec | LossSpec):
        return {key: each for key, each in asdict(said).items() if each is not None and key != "function"}
    if isinstance(said, Mapping):
        return {key: _plain(each) for key, each in said.items()}
    if isinstance(said, tuple):  # of betas
        return list(said)
    return said.item() if hasattr(said, "item") else said


def _toml(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{json.dumps(key)} = {_toml(each)}" for key, each in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def _spell_out(value: dict[str, Any], place: str) -> None:
    """Put its table where a name alone, or the greatest σ, stands for a table that the dotted key goes into."""
    train = value.get("train")
    key, goes_in, _ = place.removeprefix("train.").partition(".")
    if not place.startswith("train.") or not goes_in or not isinstance(train, dict):
        return
    said = train.get(key)
    if key in _NAMED and isinstance(said, str):
        train[key] = {"name": said}
    elif key == "noise" and type(said) in {int, float}:
        train[key] = {"high": said}


def _assignment(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise zgstore.Invalid(f"{text!r:.80} sets nothing", hint="write KEY=VALUE, as in train.steps=64")
    return key.strip(), zgstore.Section.literal(value)


# ---- sections ----


def _optional(section: Section, key: str) -> Target | None:
    return section.target(key) if section.has(key) else None


def _snapshot(section: Section) -> SnapshotSpec:
    directory = section.path.parent
    recipe = directory / section.text("recipe") if section.has("recipe") else None
    spec = SnapshotSpec(directory / section.text("store"), section.text("rev"), recipe)
    section.done()
    return spec


def _student(section: Section) -> StudentSpec:
    spec = StudentSpec(
        block=section.target("block"),
        assemble=_optional(section, "assemble"),
        teacher=_optional(section, "teacher"),
        interface=_optional(section, "interface"),
        args=section.arguments(),
        boundaries=section.texts("boundaries"),
    )
    section.done()
    if len(spec.boundaries) == 1 or len(set(spec.boundaries)) != len(spec.boundaries):
        section.fail("boundaries", f"is {list(spec.boundaries)}", "list at least two columns, each once")
    return spec


def _train(section: Section) -> TrainSpec:
    if not section.has("steps"):
        section.fail("steps", "is missing", "give the number of optimiser steps")
    spec = TrainSpec(
        **_settings(section),
        optimizer=_optimizer(section),
        schedule=_schedule(section),
        forward=_optional(section, "forward"),
        loss=_loss(section),
        noise=_noise(section),
        gradient=_gradient(section),
    )
    section.done()
    if spec.noise and spec.forward is None:
        section.fail("forward", "is missing, and block(source) would see no noisy target",
                     'give one that hands context["noisy"] on, as "zgtrain.causal_lm:forward" does')  # fmt: skip
    rate = spec.optimizer.options["lr"]
    if type(rate) in {int, float}:  # a function's own options are its own
        refuse_overshoot(section, "anchor", rate)
    return spec


def _settings(section: Section) -> dict[str, Any]:
    """The keys of ``[train]`` that are a number or a word, by their names in `TrainSpec`."""
    known = TrainSpec(steps=1)
    return {
        "steps": section.whole("steps", default=known.steps, least=1),
        "batch_size": section.whole("batch_size", default=known.batch_size, least=1),
        "seed": section.whole("seed", default=known.seed, most=_MOST_SEED),
        "order": section.one_of("order", ORDERS, default=known.order),
        "max_grad_norm": section.number("max_grad_norm", default=1.0, within=_SCALE, off=True) or None,
        "precision": section.one_of("precision", PRECISIONS, default=known.precision),
        "accumulate": section.whole("accumulate", default=known.accumulate, least=1),
        "deterministic": section.take("deterministic", bool, default=known.deterministic),
        "anchor": section.number("anchor", default=known.anchor, within=_POSITIVE),
        "checkpoint_every": section.whole("checkpoint_every", default=known.checkpoint_every, least=1),
        "workers": section.whole("workers", default=known.workers, most=_MOST_AT_ONCE),
    }


def _named(section: Section, key: str) -> Section:
    """A table, or its name alone."""
    if isinstance(section.value.get(key), str):
        section.value[key] = {"name": section.value[key]}
    return section.section(key, optional=True)


def _optimizer(train: Section) -> OptimizerSpec:
    section = _named(train, "optimizer")
    options = {"lr": 1e-4, **train.plain("optimizer", section.value)}
    name = options.pop("name", "adamw")
    if isinstance(name, str) and ":" in name:
        return OptimizerSpec(name, options, section.target("name"))
    section.one_of("name", OPTIMIZERS, default="adamw")
    rate = section.number("lr", default=1e-4, within=_RATE, off=True)
    refuse_overshoot(section, "weight_decay", rate)
    if name == "adamw":
        options.update(_betas(section))
        section.number("eps", default=1e-8, within=(1e-30, 1.0))
    else:
        _see_sgd(section)
    section.done()
    return OptimizerSpec(str(name), options)


def _betas(section: Section) -> dict[str, list[float]]:
    if not section.has("betas"):
        return {}
    betas = section.take("betas", list, default=[0.9, 0.999])
    if len(betas) != 2 or not all(type(beta) in {int, float} and _DECAY[0] <= beta <= _DECAY[1] for beta in betas):
        section.fail("betas", f"is {betas!r:.80}", f"give two numbers, each at least 0 and at most {_DECAY[1]}")
    return {"betas": [float(beta) for beta in betas]}  # torch takes no whole numbers


def _see_sgd(section: Section) -> None:
    momentum = section.number("momentum", default=0.0, within=_DECAY)
    dampening = section.number("dampening", default=0.0, within=_FRACTION)
    if section.take("nesterov", bool, default=False) and (dampening or not momentum):
        section.fail("nesterov", "is true", "give momentum too, and leave dampening out")


def _schedule(train: Section) -> ScheduleSpec:
    section = _named(train, "schedule")
    spec = ScheduleSpec(
        section.one_of("name", SCHEDULES, default="constant"),
        section.whole("warmup", default=0),
        section.number("final", default=0.0, within=_FRACTION),
    )
    section.done()
    return spec


def _loss(train: Section) -> LossSpec:
    section = _named(train, "loss")
    function = None
    name = section.take("name", str, default="relative-mse")
    if ":" in name:
        function = section.target("name")
    else:
        section.one_of("name", LOSSES, default="relative-mse")
    spec = LossSpec(
        name,
        section.number("boundary_weight", default=1.0, within=_SCALE, off=True),
        section.number("token_ce", default=0.0, within=_SCALE, off=True),
        section.number("token_kl", default=0.0, within=_SCALE, off=True),
        function,
    )
    section.done()
    if not (spec.boundary_weight or spec.token_ce or spec.token_kl):
        section.fail("boundary_weight", "is 0, and so is all else", "give boundary_weight, token_ce or token_kl")
    return spec


def _noise(train: Section) -> Arguments:
    """A table, or the greatest σ alone; 0 is none."""
    if type(train.value.get("noise", 0.0)) in {int, float}:
        least, most = _SIGMA
        high = train.number("noise", default=0.0, within=(least / LEAST_OF_MOST, most), off=True)
        return {"name": LOG_UNIFORM, "low": high * LEAST_OF_MOST, "high": high} if high else {}
    section = _named(train, "noise")
    name = section.one_of("name", (LOG_UNIFORM, DIFFUSION), default=LOG_UNIFORM)
    if name == LOG_UNIFORM:
        high = section.number("high", default=0.10, within=_SIGMA)
        numbers = {"low": section.number("low", default=high * LEAST_OF_MOST, within=_SIGMA), "high": high}
        _see_ends(section, numbers, "low", "high")
    else:
        sizes = {"sigma_min": 0.002, "sigma_max": 80.0, "sigma_data": 0.5}
        numbers = {key: section.number(key, default=number, within=_SIGMA) for key, number in sizes.items()}
        numbers["p_mean"] = section.number("p_mean", default=-1.2, within=(-30.0, 30.0))
        numbers["p_std"] = section.number("p_std", default=1.2, within=(0.01, 100.0))
        numbers["overlap"] = section.number("overlap", default=0.0, within=(0.0, 10.0))
        _see_ends(section, numbers, "sigma_min", "sigma_max")
        law = NormalDist(numbers["p_mean"], numbers["p_std"])
        below, within = (law.cdf(math.log(numbers[key])) for key in ("sigma_min", "sigma_max"))
        if within - below < _LEAST_SHARE:
            section.fail("p_mean", f"is {numbers['p_mean']:g}, with p_std = {numbers['p_std']:g}: hardly one σ of a "
                         "thousand lies between sigma_min and sigma_max",
                         "it is the mean of ln σ: let it lie between their logarithms")  # fmt: skip
    section.done()
    return {"name": name, **numbers}


def _see_ends(section: Section, numbers: Mapping[str, float], low: str, high: str) -> None:
    if not numbers[low] < numbers[high]:
        section.fail(low, f"is {numbers[low]:g}, and {high} is {numbers[high]:g}", f"let {low} be the lesser")


def _gradient(train: Section) -> GradientSpec:
    section, known = _named(train, "gradient"), GradientSpec()
    # Units of fp64 are the finest; which of them the block's own dtype can tell apart is seen where that is known.
    epsilon = section.number("epsilon", default=EPSILON, within=(1e-12, 1.0)) if section.has("epsilon") else None
    spec = GradientSpec(
        section.one_of("name", GRADIENTS, default=known.name),
        section.whole("probes", default=known.probes, least=1),
        section.one_of("probe", PROBES, default=known.probe),
        section.one_of("differences", DIFFERENCES, default=known.differences),
        epsilon,
        section.whole("probe_chunk", default=known.probe_chunk, least=1),
        section.whole("score_chunk", default=known.score_chunk, least=1),
        section.whole("seed", default=known.seed, most=_MOST_SEED),
    )
    section.done()
    return spec


def _log(section: Section) -> LogSpec:
    wandb = section.take("wandb", dict, default=None)
    spec = LogSpec(section.whole("every", default=16, least=1), section.take("tensorboard", bool, default=False), wandb)
    section.done()
    return spec


def _validate(section: Section) -> ValidateSpec:
    spec = ValidateSpec(section.whole("every", default=0), section.whole("rows", default=0))
    section.done()
    if bool(spec.every) != bool(spec.rows):
        section.fail("rows" if spec.every else "every", "is missing", "give both: every = 256, rows = 32")
    return spec


def _launch(section: Section) -> LaunchSpec:
    table = section.section("blocks", optional=True)
    blocks: dict[int, BlockLaunch] = {}
    for key in list(table.value):
        if not _BLOCK.fullmatch(key):
            table.fail(key, "is no block", "blocks count from 0: [launch.blocks.0]")
        one = table.section(key)
        blocks[int(key)] = BlockLaunch(
            one.whole("processes", default=1, least=1, most=_MOST_AT_ONCE),
            one.whole("data_parallel", default=1, least=1, most=_MOST_AT_ONCE),
        )
        if blocks[int(key)].processes % blocks[int(key)].data_parallel:
            one.fail("data_parallel", "does not divide processes", "give a divisor of processes")
        one.done()
    spec = LaunchSpec(
        section.whole("parallel", default=1, least=1), section.texts("devices"),
        section.whole("retries", default=2), blocks,
    )  # fmt: skip
    section.done()
    return spec


def _evaluate(section: Section) -> EvaluateSpec:
    spec = EvaluateSpec(
        _optional(section, "data"), _optional(section, "prompts"), section.arguments(),
        section.whole("sweep_rows", default=16, least=1),
    )  # fmt: skip
    section.done()
    return spec
