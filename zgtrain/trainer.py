"""The one training loop: a block against its two boundaries, with no teacher and no neighbour in memory.

B blocks; b a block, which maps boundary h_b to h_{b+1}; N rows of a micro-batch, T tokens of a row, D width. A step has
``batch_size × accumulate`` rows, and its loss is a mean over all of their real tokens.
"""

from __future__ import annotations

import contextlib
import json
import platform
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import zgstore
from zgtrain.checkpoint import (
    block_state,
    capture_rng,
    load,
    restore_block,
    restore_rng,
    rng_kept,
    save,
    seed_all,
    state_digest,
)
from zgtrain.gradient import backprop
from zgtrain.independence import leaving_gradient_bytes, live_parameters, peak_memory_bytes
from zgtrain.job import OptimizerSpec, ScheduleSpec
from zgtrain.ledger import Ledger, Log
from zgtrain.objective import BOUNDARY, Objective, anchor_, make_objective, residual_error
from zgtrain.optimizing import make_optimizer, rate, set_rate
from zgtrain.source import FOLLOWING, LIVE, Batch, Source, Trained, cached, micro_batches

METHODS: Final = {"backprop": backprop.backward}
EVERYTHING: Final = 1 << 62  # rows

Forward = Callable[[nn.Module, Tensor, Mapping[str, Any]], Tensor]


@dataclass(frozen=True, slots=True)
class BlockReport:
    """What became of a block. Sums go over all runs of it, from the checkpoint that each resumed.

    Args:
        snapshot: Full digest.
        pins: Digest of its pins.
        job: The job's identity.
        block: b; None outside of a job.
        source: Column of boundary b.
        target: Column of boundary b + 1.
        targets: ``cached``, ``following`` or ``live``.
        steps: Optimiser steps taken.
        first_window_mean_loss: Over the first 32 steps.
        last_window_mean_loss: Over the last 32 steps.
        validation_loss: Of the rows held out, at the end; None if there are none.
        residual_error: Σ‖error‖² over Σ‖h_{b+1} − h_b‖² in the last window; None where the shapes differ.
        seconds: ``data`` (waited for batches), ``compute``, ``checkpoint``, ``total``.
        bytes_read: Bytes of rows that were read.
        peak_memory_bytes: Of the device; on a CPU of the whole process.
        inter_block_gradient_bytes: Most gradient that left the block in a step, counted in the backward graph.
        live_teacher_parameters: Parameters alive that belong to neither block, optimiser nor interface, counted.
        frozen_interface_parameters: Of norm, head, embedding that the token losses go through.
        trained_parameters: Of the block.
        gradient_queries: Forward queries that gradients took.
        initial_digest: The block before its first step.
        state_digest: The block now.
        resumed_from: The step that this run began at; None if it began at none.
        deterministic: Whether resuming is bitwise: asked for, or on a CPU.
        environment: Versions, device, threads.
    """

    snapshot: str
    pins: str
    job: str
    block: int | None
    source: str
    target: str
    targets: str
    steps: int
    first_window_mean_loss: float
    last_window_mean_loss: float
    validation_loss: float | None
    residual_error: float | None
    seconds: Mapping[str, float]
    bytes_read: int
    peak_memory_bytes: int
    inter_block_gradient_bytes: int
    live_teacher_parameters: int
    frozen_interface_parameters: int
    trained_parameters: int
    gradient_queries: int
    initial_digest: str
    state_digest: str
    resumed_from: int | None
    deterministic: bool
    environment: Mapping[str, Any]

    def as_value(self) -> dict[str, Any]:
        """The JSON object."""
        return asdict(self)


def train_block(
    block: nn.Module,
    reader: zgstore.Reader | Source,
    *,
    source: str = "",
    target: str = "",
    optimizer: torch.optim.Optimizer | None = None,
    steps: int,
    forward: Forward | None = None,
    loss: Any = None,
    seed: int = 0,
    batch_size: int = 4,
    order: str = "shuffled",
    schedule: ScheduleSpec | str = "constant",
    max_grad_norm: float | None = 1.0,
    precision: str = "fp32",
    accumulate: int = 1,
    deterministic: bool = False,
    anchor: float = 0.0,
    gradient: str = "backprop",
    validate_every: int = 0,
    validate_rows: int = 0,
    checkpoint: Path | str | None = None,
    checkpoint_every: int = 256,
    workers: int = 1,
    log: Log | None = None,
    log_every: int = 16,
    stop: Callable[[], bool] = lambda: False,
    device: torch.device | str | None = None,
    interface: nn.Module | None = None,
    block_id: int | None = None,
    job: str = "",
) -> BlockReport:
    """Train a block on stored boundaries; it is changed in place.

    Args:
        block: The student's block; parameters without ``requires_grad`` are left alone.
        reader: A reader with both columns, or a `Source`.
        source: Column of boundary b; not needed with a `Source`.
        target: Column of boundary b + 1.
        optimizer: Over the block's parameters; default AdamW with a learning rate of 1e-4.
        steps: Optimiser steps, those of a resumed checkpoint among them.
        forward: ``(block, source, context) -> prediction``; default ``block(source)``, which knows no mask.
        loss: A name, a ``LossSpec``, or ``(prediction, target, context) -> each token's loss``.
        seed: Of the order, and of every generator.
        batch_size: Rows of a micro-batch.
        order: ``shuffled``, ``sequential``, ``sequential-first``.
        schedule: Of the learning rate.
        max_grad_norm: None: no clipping.
        precision: ``fp32``, or ``bf16`` for autocast.
        accumulate: Micro-batches of a step.
        deterministic: Deterministic kernels, so that resuming is bitwise on GPUs too.
        anchor: Decoupled pull towards the initial parameters.
        gradient: How it is had; ``backprop``.
        validate_every: Steps between looks at the rows held out; 0: never.
        validate_rows: The first rows are kept out of the training.
        checkpoint: A file that is resumed from and saved to.
        checkpoint_every: Steps between saves.
        workers: Threads that read ahead.
        log: Called with each step's numbers, a burst every ``log_every`` steps.
        log_every: Steps between looks at the device.
        stop: Asked before each step whether to save and end.
        device: Where; default CUDA if there is one.
        interface: The last boundary → logits, for token losses; frozen.
        block_id: b, for the report.
        job: The job's identity; default: a digest of these arguments.

    Returns:
        What was done, and counted.

    Raises:
        zgstore.Interrupted: if asked to stop; the state is saved.
        zgstore.Corrupt: if a damaged shard is met; the state of the step before is saved.
        zgstore.Refused: for a padded mask without ``forward``, or a checkpoint of something else.
        zgstore.NonFinite: if the loss is not finite; the last checkpoint stays.
    """
    data = reader if isinstance(reader, Source) else cached(reader, source, target)
    place = _device(device)
    schedule = ScheduleSpec(schedule) if isinstance(schedule, str) else schedule
    forward = forward or _without_mask
    block.to(place).train()
    objective = make_objective(loss, None if interface is None else interface.to(place))
    parameters = _trained(block)
    optimizer = optimizer or make_optimizer(OptimizerSpec(), parameters)
    backward = METHODS[gradient]
    settings = [seed, batch_size, accumulate, order, precision, max_grad_norm, anchor, gradient, validate_rows,
                str(loss), asdict(schedule), None if schedule.name == "constant" else steps]  # fmt: skip
    who = _identity(data, block_id, job or str(zgstore.digest_of(None, json.dumps(settings).encode())))
    trained = Trained(data.reader, held_out=validate_rows, stop=stop)
    sampler = zgstore.Sampler(trained, seed=seed, batch_size=batch_size * accumulate, order=order)  # type: ignore[arg-type]
    path = None if checkpoint is None else Path(checkpoint)
    ledger, initial = _begin(path, who, block, optimizer, sampler, seed=seed, anchor=anchor)
    resumed_from = ledger.step or None
    keep = _keeper(path, who, ledger, data=data, block=block, optimizer=optimizer, initial=initial, log=log)
    plan = _Plan(sampler, batch_size, first=validate_rows, steps=steps - ledger.step)

    with _arithmetic(place, deterministic=deterministic):
        for batches in _arriving(data.ahead(plan, workers=workers, stop=stop), ledger, keep, forward):
            counts = objective.counts(batches)
            for each in batches:
                batch = each.to(place, dtype=_dtype(block))
                with torch.autocast(place.type, torch.bfloat16, enabled=precision == "bf16"):
                    prediction = _like(forward(block, batch.source, batch.context), batch.target)
                    sums = objective.sums(prediction, batch.target, batch.context)
                part = objective.total(sums, counts)
                ledger.add(part, *_beside(sums, counts, prediction, batch))
                if ledger.step % log_every == 0:
                    ledger.leaving_bytes = max(ledger.leaving_bytes, leaving_gradient_bytes(part, block))
                ledger.queries += backward(part, block)
            norm = 0.0 if max_grad_norm is None else nn.utils.clip_grad_norm_(parameters, max_grad_norm)
            lr = set_rate(optimizer, rate(schedule, ledger.step, steps))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if anchor:
                _pull(optimizer, block, initial, anchor)
            ledger.end_step(plan.taken(), norm=norm, lr=lr, tokens=max(counts.values()))
            if ledger.step % log_every == 0:
                ledger.look(log)
            if validate_every and ledger.step % validate_every == 0:
                ledger.look(log)
                ledger.validation = validate(block, data, objective, rows=validate_rows, batch_size=batch_size,
                                             forward=forward, device=place, precision=precision)  # fmt: skip
                if log is not None:
                    log({"step": ledger.step, "validation_loss": ledger.validation})
            if ledger.step % checkpoint_every == 0:
                keep()
    keep()
    if data.kind == FOLLOWING and not trained.done:
        trained.wait(EVERYTHING)  # a block is done only when what it learned from has a name
        keep()
    return _report(
        ledger, who, block, optimizer=optimizer, interface=interface, resumed_from=resumed_from, device=place,
        deterministic=deterministic,
    )  # fmt: skip


# ---- what the loop is made of ----


class _Plan:
    """The rows of the steps to come, epoch after epoch, and the order's state behind each that was taken."""

    def __init__(self, sampler: zgstore.Sampler, size: int, *, first: int, steps: int) -> None:
        self._sampler, self._size, self._first, self._steps = sampler, size, first, steps
        self._states: deque[Mapping[str, Any]] = deque()

    def __iter__(self) -> Iterator[list[list[int]]]:
        left = self._steps
        while left > 0:
            for rows in self._sampler:  # one pass is one epoch
                self._states.append(self._sampler.state_dict())
                yield micro_batches(rows, self._size, first=self._first)
                left -= 1
                if left <= 0:
                    return

    def taken(self) -> Mapping[str, Any]:
        """The state behind the next step: reading runs ahead, and a checkpoint must not."""
        return self._states.popleft()


def _arriving(
    coming: Iterator[list[Batch]], ledger: Ledger, keep: Callable[[], None], forward: Forward
) -> Iterator[list[Batch]]:
    """The batches; where they fail, or somebody asks to stop, the state behind the step before is saved first."""
    ledger.begin()
    try:
        while True:
            began = time.perf_counter()
            batches = next(coming, None)
            ledger.seconds["data"] += time.perf_counter() - began
            if batches is None:
                return
            for batch in batches:
                _refuse_padding(batch, forward)
            yield batches
    except zgstore.ZgError:
        keep()
        raise
    finally:
        close: Any = getattr(coming, "close", None)
        if close is not None:
            close()


def _keeper(
    path: Path | None,
    who: dict[str, Any],
    ledger: Ledger,
    *,
    data: Source,
    block: nn.Module,
    optimizer: torch.optim.Optimizer,
    initial: Mapping[str, Tensor],
    log: Log | None,
) -> Callable[[], None]:  # fmt: skip
    """What saves everything, so that a job that ends there goes on as if it had not."""
    read, kept = data.bytes_read, [-1, ""]

    def keep() -> None:
        nonlocal read, kept
        ledger.look(log)
        ledger.bytes_read += data.bytes_read - read
        read = data.bytes_read
        who.update(_place(data))
        if path is None or kept == [ledger.step, data.snapshot]:
            return
        began = time.perf_counter()
        state = {
            **who, "ledger": ledger.as_state(), "block_state": block_state(block), "initial": dict(initial),
            "optimizer": optimizer.state_dict(), "rng": capture_rng(),
        }  # fmt: skip
        save(path, state)
        kept = [ledger.step, data.snapshot]
        ledger.seconds["checkpoint"] += time.perf_counter() - began

    return keep


def _begin(
    path: Path | None, who: Mapping[str, Any], block: nn.Module, optimizer: torch.optim.Optimizer,
    sampler: zgstore.Sampler, *, seed: int, anchor: float,
) -> tuple[Ledger, Mapping[str, Tensor]]:  # fmt: skip
    """The ledger, and the parameters that an anchor pulls to: of the checkpoint if there is one, else new."""
    state = None if path is None else load(path)
    if path is None or state is None:
        seed_all(seed)
        initial = {name: tensor.clone() for name, tensor in block_state(block).items()} if anchor else {}
        return Ledger(initial_digest=state_digest(block)), initial
    _refuse_others(path, state, who)
    restore_block(block, state["block_state"])
    optimizer.load_state_dict(state["optimizer"])
    ledger = Ledger.of(state["ledger"])
    if ledger.order is not None:
        sampler.load_state_dict(ledger.order)
    restore_rng(state["rng"])
    device = next(iter(block.parameters())).device
    return ledger, {name: tensor.to(device) for name, tensor in state["initial"].items()}


def _identity(data: Source, block: int | None, job: str) -> dict[str, Any]:
    """What a checkpoint is of."""
    mine = {"job": job, "block": block, "source": data.source, "target": data.target, "targets": data.kind}
    return {**mine, "data": data.reader.data_digest, "pins": data.pins, **_place(data)}


def _place(data: Source) -> dict[str, Any]:
    return {"snapshot": data.snapshot, "build": data.reader.build, "shards": data.reader.shards}


def _refuse_others(path: Path, state: Mapping[str, Any], who: Mapping[str, Any]) -> None:
    """See that a checkpoint is of this job, block and snapshot; a build that was followed is known by its pins."""
    for name in ("job", "block", "source", "target", "data", "snapshot", "pins", "targets"):
        theirs, mine = state.get(name), who[name]
        if name == "targets":
            theirs, mine = theirs == LIVE, mine == LIVE
        if theirs != mine and not (name in {"snapshot", "pins"} and "" in {theirs, mine}):
            raise zgstore.Refused(
                f"the checkpoint {path} is of {name} {state.get(name)!r}, and this is {who[name]!r}",
                hint="train into another output folder, or begin anew with --fresh",
                field=name,
                expected=who[name],
                actual=state.get(name),
            )


def _report(
    ledger: Ledger,
    who: Mapping[str, Any],
    block: nn.Module,
    *,
    optimizer: torch.optim.Optimizer,
    interface: nn.Module | None,
    resumed_from: int | None,
    device: torch.device,
    deterministic: bool,
) -> BlockReport:  # fmt: skip
    first, last, residual = ledger.windows()
    frozen = [] if interface is None else list(interface.parameters())
    optimized = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    spent = ledger.seconds
    beside = spent["data"] + spent["validation"] + spent["checkpoint"]
    return BlockReport(
        **{name: who[name] for name in ("snapshot", "pins", "job", "block", "source", "target", "targets")},
        steps=ledger.step,
        first_window_mean_loss=first,
        last_window_mean_loss=last,
        validation_loss=ledger.validation,
        residual_error=residual,
        seconds={**spent, "compute": max(0.0, spent["total"] - beside)},
        bytes_read=ledger.bytes_read,
        peak_memory_bytes=peak_memory_bytes(device),
        inter_block_gradient_bytes=ledger.leaving_bytes,
        live_teacher_parameters=live_parameters(block.parameters(), optimized, frozen),
        frozen_interface_parameters=sum(parameter.numel() for parameter in frozen),
        trained_parameters=sum(parameter.numel() for parameter in block.parameters() if parameter.requires_grad),
        gradient_queries=ledger.queries,
        initial_digest=ledger.initial_digest,
        state_digest=state_digest(block),
        resumed_from=resumed_from,
        deterministic=deterministic or device.type == "cpu",
        environment={
            "python": platform.python_version(), "torch": str(torch.__version__), "machine": platform.machine(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "threads": torch.get_num_threads(),
        },
    )  # fmt: skip


@torch.no_grad()
def validate(
    block: nn.Module, data: Source, objective: Objective, *, rows: int, batch_size: int, forward: Forward | None = None,
    device: torch.device, precision: str = "fp32",
) -> float:  # fmt: skip
    """The loss over the first rows, in eval mode; generators and mode are left as they were."""
    forward, training = forward or _without_mask, block.training
    totals: dict[str, float] = {}
    counts: dict[str, int] = {}
    with rng_kept():
        block.eval()
        for piece in micro_batches(range(rows), batch_size):
            host = data.batch(piece)
            batch = host.to(device, dtype=_dtype(block))
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
                prediction = _like(forward(block, batch.source, batch.context), batch.target)
                sums = objective.sums(prediction, batch.target, batch.context)
            for name, value in objective.counts([host]).items():
                counts[name] = counts.get(name, 0) + value
                totals[name] = totals.get(name, 0.0) + float(sums[name])
        block.train(training)
    return sum(objective.weights[name] * totals[name] / max(1, counts[name]) for name in totals)


def _without_mask(block: nn.Module, source: Tensor, _context: Mapping[str, Any]) -> Tensor:
    prediction: Tensor = block(source)
    return prediction


def _refuse_padding(batch: Batch, forward: Forward) -> None:
    mask = batch.context.get("mask")
    if forward is _without_mask and isinstance(mask, Tensor) and not bool(mask.all()):
        raise zgstore.Refused(
            "the batch is padded, and block(source) would not see its mask",
            hint='give a forward that takes it: (block, source, context) -> prediction, context["mask"] true where a '
            'token is real; or forward = "zgtrain.causal_lm:forward" for its blocks',
        )


def _like(prediction: Any, target: Tensor) -> Tensor:
    if isinstance(prediction, Tensor) and prediction.shape == target.shape:
        return prediction
    said = list(prediction.shape) if isinstance(prediction, Tensor) else f"a {type(prediction).__name__}"
    raise zgstore.Invalid(
        f"the block gave {said}, and its target is {list(target.shape)}",
        hint="return one tensor like the target: the state after the block's last layer",
    )


def _beside(
    sums: Mapping[str, Tensor], counts: Mapping[str, int], prediction: Tensor, batch: Batch
) -> tuple[Tensor, Tensor, Tensor]:
    """The boundary loss without its weight, and what the residual error is made of; 0 where there is none."""
    nothing = prediction.new_zeros((), dtype=torch.float32)
    boundary = sums[BOUNDARY].detach() / max(1, counts[BOUNDARY]) if BOUNDARY in sums else nothing
    if batch.source.shape != batch.target.shape or not batch.source.is_floating_point():
        return boundary, nothing, nothing
    with torch.no_grad():
        return boundary, *residual_error(prediction, batch.source, batch.target, batch.context.get("mask"))


def _pull(optimizer: torch.optim.Optimizer, block: nn.Module, initial: Mapping[str, Tensor], anchor: float) -> None:
    start = {id(parameter): initial[name] for name, parameter in block.named_parameters()}
    for group in optimizer.param_groups:
        own = [parameter for parameter in group["params"] if id(parameter) in start]
        anchor_(own, [start[id(parameter)] for parameter in own], lr=group["lr"], anchor=anchor)


def _trained(block: nn.Module) -> list[nn.Parameter]:
    parameters = [parameter for parameter in block.parameters() if parameter.requires_grad]
    if not parameters:
        raise zgstore.Invalid("the block has no parameter to train", hint="leave requires_grad set on some of them")
    return parameters


def _dtype(block: nn.Module) -> torch.dtype:
    """What the block computes in: the dtype of its first floating parameter."""
    return next((p.dtype for p in block.parameters() if p.is_floating_point()), torch.float32)


def _device(device: torch.device | str | None) -> torch.device:
    return torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))


@contextlib.contextmanager
def _arithmetic(device: torch.device, *, deterministic: bool) -> Iterator[None]:
    """Deterministic kernels, if they are asked for; as it was afterwards."""
    if not deterministic:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()
    torch.use_deterministic_algorithms(mode=True)
    torch.set_float32_matmul_precision("highest")
    attention = sdpa_kernel(SDPBackend.MATH) if device.type == "cuda" else contextlib.nullcontext()
    try:
        with attention:
            yield
    finally:
        torch.use_deterministic_algorithms(mode=before[0])
        torch.set_float32_matmul_precision(before[1])
