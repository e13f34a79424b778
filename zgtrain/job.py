"""A job as frozen values; the digest of what it learns by is its identity.

A job describes a whole student of B blocks; block b, from 0 to B − 1, maps boundary b to boundary b + 1 and is trained
alone. Nothing here loads torch or opens a store.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import zgstore
from zgstore import Target

LOSSES: Final = ("relative-mse", "mse", "smooth-l1", "cosine")
LOG_UNIFORM, DIFFUSION = "log-uniform", "diffusion"
LEAST_OF_MOST: Final = 1 / 20  # σ of a job that says the greatest alone: published as 0.005 and 0.10
PROBES: Final = ("rademacher", "gaussian", "sphere", "orthogonal")
EPSILON: Final = 1e-3  # of zeroth-order, where fp32 computes

Arguments = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SnapshotSpec:
    """Section ``[snapshot]``; paths are absolute."""

    store: Path
    rev: str
    recipe: Path | None = None


@dataclass(frozen=True, slots=True)
class StudentSpec:
    """Section ``[student]``.

    Args:
        block: ``(block_id, **args) -> nn.Module``.
        assemble: ``(list of blocks, **args) -> nn.Module``.
        teacher: ``(**args) -> nn.Module``: only for evaluation.
        interface: ``(**args) -> nn.Module``: the last boundary → logits; its parameters are frozen.
        args: For all of them.
        boundaries: Columns in depth order; empty: all boundary columns of the snapshot.
    """

    block: Target
    assemble: Target | None = None
    teacher: Target | None = None
    interface: Target | None = None
    args: Arguments = field(default_factory=dict)
    boundaries: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """``adamw``, ``sgd``, or a function ``(parameters, **options) -> Optimizer``.

    Args:
        name: As written.
        options: ``lr``, ``betas``, ``weight_decay``, ``momentum``, …
        function: Where the name is one.
    """

    name: str = "adamw"
    options: Arguments = field(default_factory=lambda: {"lr": 1e-4})
    function: Target | None = None


@dataclass(frozen=True, slots=True)
class ScheduleSpec:
    """The learning rate over the steps.

    Args:
        name: ``constant``, ``cosine`` or ``linear``.
        warmup: Steps of linear rise.
        final: What is left at the last step, as a fraction.
    """

    name: str = "constant"
    warmup: int = 0
    final: float = 0.0


@dataclass(frozen=True, slots=True)
class LossSpec:
    """The objective: a boundary loss, and at the last block perhaps token losses.

    Args:
        name: One of ``LOSSES``, or a function ``(prediction, target, context) -> each token's loss``.
        boundary_weight: Of the boundary loss.
        token_ce: Weight of the cross entropy with the data's labels.
        token_kl: Weight of the divergence from the teacher's own distribution.
        function: Where the name is one.
    """

    name: str = "relative-mse"
    boundary_weight: float = 1.0
    token_ce: float = 0.0
    token_kl: float = 0.0
    function: Target | None = None


@dataclass(frozen=True, slots=True)
class GradientSpec:
    """How a block's gradient is had; all but the name is of ``zeroth-order``.

    Args:
        name: ``backprop``, or ``zeroth-order``: from forward queries.
        probes: n, of each estimate.
        probe: Their distribution, one of ``PROBES``.
        differences: ``central``, 2n queries, or ``forward``, n + 1.
        epsilon: How far a probe goes, in units of the root mean square of what it moves; None: as far as the dtype
            that is computed in needs, ``EPSILON`` in fp32.
        probe_chunk: Probes that are queried at a time: memory, and no result.
        score_chunk: The same where attention's scores are probed, whose rows are as long as the sequence.
        seed: Of the probes.
    """

    name: str = "backprop"
    probes: int = 16
    probe: str = "rademacher"
    differences: str = "central"
    epsilon: float | None = None
    probe_chunk: int = 4
    score_chunk: int = 1
    seed: int = 0

    def identity(self) -> dict[str, Any]:
        """What of it decides what is learned."""
        if self.name == "backprop":
            return {"name": self.name}
        names = ("name", "probes", "probe", "differences", "seed")
        return {**{name: getattr(self, name) for name in names}, "epsilon": self.epsilon or EPSILON}


@dataclass(frozen=True, slots=True)
class TrainSpec:
    """Section ``[train]``.

    Args:
        steps: Optimiser steps.
        batch_size: Rows of a micro-batch.
        accumulate: Micro-batches of a step: a step has ``batch_size × accumulate`` rows.
        noise: Experimental: empty, or its ``name`` and all of its numbers.
        workers: Threads that read ahead; 0 reads in between the steps.
    """

    steps: int
    batch_size: int = 4
    seed: int = 0
    order: str = "shuffled"
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    schedule: ScheduleSpec = field(default_factory=ScheduleSpec)
    max_grad_norm: float | None = 1.0
    precision: str = "fp32"
    accumulate: int = 1
    deterministic: bool = False
    forward: Target | None = None
    loss: LossSpec = field(default_factory=LossSpec)
    anchor: float = 0.0
    noise: Arguments = field(default_factory=dict)
    gradient: GradientSpec = field(default_factory=GradientSpec)
    checkpoint_every: int = 256
    workers: int = 1

    @property
    def diffusion(self) -> bool:
        """Whether each block takes its part of the noise from one and the same target, the last boundary."""
        return self.noise.get("name") == DIFFUSION


@dataclass(frozen=True, slots=True)
class LogSpec:
    """Section ``[log]``: JSON lines always; ``every`` is how many steps pass between looks at the device."""

    every: int = 16
    tensorboard: bool = False
    wandb: Arguments | None = None


@dataclass(frozen=True, slots=True)
class ValidateSpec:
    """Section ``[validate]``: the first ``rows`` rows are kept out of the training and looked at ``every`` steps."""

    every: int = 0
    rows: int = 0


@dataclass(frozen=True, slots=True)
class BlockLaunch:
    """Section ``[launch.blocks.B]``: processes of one block, under torchrun."""

    processes: int = 1
    data_parallel: int = 1


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """Section ``[launch]``."""

    parallel: int = 1
    devices: tuple[str, ...] = ()
    retries: int = 2
    blocks: Mapping[int, BlockLaunch] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EvaluateSpec:
    """Section ``[evaluate]``.

    Args:
        data: ``(**args) -> iterable of batches``, held out of the training.
        prompts: ``(**args) -> prompts`` to generate from.
        args: For both; without any they are called with the student's.
        sweep_rows: How many of the rows boundaries and the α sweep are measured on.
    """

    data: Target | None = None
    prompts: Target | None = None
    args: Arguments = field(default_factory=dict)
    sweep_rows: int = 16


@dataclass(frozen=True, slots=True)
class Job:
    """A whole job file.

    Args:
        path: The file; paths in it are relative to its directory, which is first on the import path.
        output: Where blocks, reports and the student go.
        overrides: What was set over the file, as ``KEY=VALUE``: another process makes the same job of them.
        relay: Whether its blocks are trained on the student's own states; see `zgtrain.prefixes.relayed`.
    """

    path: Path
    output: Path
    snapshot: SnapshotSpec
    student: StudentSpec
    train: TrainSpec
    log: LogSpec = field(default_factory=LogSpec)
    validate: ValidateSpec = field(default_factory=ValidateSpec)
    launch: LaunchSpec = field(default_factory=LaunchSpec)
    evaluate: EvaluateSpec = field(default_factory=EvaluateSpec)
    overrides: tuple[str, ...] = ()
    relay: bool = False

    @property
    def directory(self) -> Path:
        """Where its relative paths start, and its functions run."""
        return self.path.parent

    def folder(self, block: int) -> Path:
        """Where a block's checkpoint, log and report lie."""
        return self.output / f"block-{block:03d}"

    def identity(self) -> str:
        """The digest of all that decides what is learned, as text.

        Left out are output, logging, launch, evaluation, worker threads, chunks of probes, the checkpoint and
        validation intervals, and ``steps`` where the schedule is constant, so that such a job can be made longer. The
        snapshot is not in it either: checkpoints and reports carry its digest beside the job's.
        """
        said = json.dumps(self.said(), sort_keys=True).encode()
        return str(zgstore.digest_of(None, b"zgtrain 1 job\0", said))

    def said(self) -> dict[str, Any]:
        """What the identity is the digest of, as JSON has it."""
        train, student = self.train, self.student
        return {
            "student": {
                "block": student.block.text,
                "interface": _text(student.interface),
                "args": student.args,
                "boundaries": student.boundaries,
            },
            "train": {
                "steps": None if train.schedule.name == "constant" else train.steps,
                "batch_size": train.batch_size,
                "seed": train.seed,
                "order": train.order,
                "optimizer": [train.optimizer.name, train.optimizer.options],
                "schedule": [train.schedule.name, train.schedule.warmup, train.schedule.final],
                "max_grad_norm": train.max_grad_norm,
                "precision": train.precision,
                "accumulate": train.accumulate,
                "deterministic": train.deterministic,
                "forward": _text(train.forward),
                "loss": [train.loss.name, train.loss.boundary_weight, train.loss.token_ce, train.loss.token_kl],
                "anchor": train.anchor,
                "noise": train.noise or 0.0,
                "gradient": train.gradient.identity(),
            },
            "held_out_rows": self.validate.rows,
            **({"relay": True} if self.relay else {}),
        }


def _text(target: Target | None) -> str | None:
    return None if target is None else target.text
