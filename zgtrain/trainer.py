"""The one training loop: a block against its two boundaries, with no teacher and no neighbour in memory.

B blocks; b a block, which maps boundary h_b to h_{b+1}; N rows of a micro-batch, T tokens of a row, D width. A step has
``batch_size × accumulate`` rows, and its loss is a mean over all of their real tokens.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

import zgstore
from zgtrain.blockreport import BlockReport
from zgtrain.checkpoint import rng_kept
from zgtrain.devices import arithmetic, device_of
from zgtrain.gradient.method import make_method
from zgtrain.independence import leaving_gradient_bytes
from zgtrain.job import GradientSpec, LossSpec, OptimizerSpec, ScheduleSpec
from zgtrain.jobfile import noise_table_of, optimizer_of, refuse_settings, schedule_of
from zgtrain.ledger import Log
from zgtrain.noise import LOOKED_AT, Noise, denoising, make_noise, noised, refuse_names
from zgtrain.objective import BOUNDARY, Objective, anchor_, make_objective, residual_error
from zgtrain.optimizing import make_optimizer, rate, refuse_nothing, set_rate
from zgtrain.ranks import Ranks
from zgtrain.reporting import make_report
from zgtrain.resuming import begin, identity_of, keeper
from zgtrain.source import FOLLOWING, Batch, Source, Trained, cached, micro_batches
from zgtrain.stepping import Plan, arriving

EVERYTHING: Final = 1 << 62  # rows

Forward = Callable[[nn.Module, Tensor, Mapping[str, Any]], Tensor]


def train_block(
    block: nn.Module,
    reader: zgstore.Reader | Source,
    *,
    source: str = "",
    target: str = "",
    optimizer: torch.optim.Optimizer | OptimizerSpec | Mapping[str, Any] | str | None = None,
    steps: int,
    forward: Forward | None = None,
    loss: Any = None,
    seed: int = 0,
    batch_size: int = 4,
    order: str = "shuffled",
    schedule: ScheduleSpec | Mapping[str, Any] | str = "constant",
    max_grad_norm: float | None = 1.0,
    precision: str = "fp32",
    accumulate: int = 1,
    deterministic: bool = False,
    anchor: float = 0.0,
    noise: Noise | Mapping[str, Any] | float | None = None,
    gradient: GradientSpec | Mapping[str, Any] | str = "backprop",
    validate_every: int = 0,
    validate_rows: int = 0,
    checkpoint: Path | str | None = None,
    checkpoint_every: int = 256,
    workers: int = 1,
    log: Log = lambda _line: None,
    log_every: int = 16,
    stop: Callable[[], bool] = lambda: False,
    device: torch.device | str | None = None,
    interface: nn.Module | None = None,
    block_id: int | None = None,
    job: str = "",
    replicas: int = 1,
) -> BlockReport:
    """Train a block on stored boundaries; it is changed in place.

    Args:
        block: The student's block; parameters without ``requires_grad`` are left alone.
        reader: A reader with both columns, or a `Source`.
        source: Column of boundary b; not needed with a `Source`.
        target: Column of boundary b + 1.
        optimizer: Over all of the block's parameters that require a gradient; or a name, an ``OptimizerSpec``, or the
            job file's table; default AdamW with a learning rate of 1e-4.
        steps: Optimiser steps, those of a resumed checkpoint among them.
        forward: ``(block, source, context) -> prediction``; default ``block(source)``, which knows no mask.
        loss: A name, a ``LossSpec``, the job file's table, or ``(prediction, target, context) -> each token's loss``.
        seed: Of the order, and of every generator.
        batch_size: Rows of a micro-batch.
        order: ``shuffled``, ``sequential``, ``sequential-first``.
        schedule: Of the learning rate: a name, a ``ScheduleSpec``, or the job file's table.
        max_grad_norm: None, or 0: no clipping.
        precision: ``fp32``, or ``bf16`` for autocast.
        accumulate: Micro-batches of a step.
        deterministic: Deterministic kernels, so that resuming is bitwise on GPUs too.
        anchor: Decoupled pull towards the initial parameters.
        noise: Experimental: on the target, which ``forward`` is shown; a ``Noise``, the greatest σ, or the job file's
            table. Of ``diffusion`` a ``Noise`` alone, since a table does not say how many blocks share the depth.
        gradient: How it is had; ``backprop``, ``zeroth-order``, a ``GradientSpec``, or the job file's table.
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
        replicas: Under torchrun: among how many the rows of a step are shared out; the other processes shard.

    Returns:
        What was done, and counted.

    Raises:
        zgstore.Invalid: for what a job file may not say, or an optimizer of other parameters, or of some of them.
        zgstore.Interrupted: if asked to stop; the state is saved.
        zgstore.Corrupt: if a damaged shard is met; the state of the step before is saved.
        zgstore.Refused: for a padded mask without ``forward``, or a checkpoint of something else.
        zgstore.NonFinite: if the loss, the gradient or a parameter is not finite; the last checkpoint stays.
    """
    data, place = reader if isinstance(reader, Source) else cached(reader, source, target), device_of(device)
    schedule, noise = schedule_of(schedule), _noise_of_one(noise)
    checkpoint = None if checkpoint is None else Path(checkpoint)
    forward = forward or _without_mask
    block.to(place).train()
    objective = make_objective(loss, None if interface is None else interface.to(place), boundary=data.target,
                               weighted=noise is not None and noise.sigma_data is not None)  # fmt: skip
    parameters = _trained(block)
    optimizer = _over(optimizer, block, parameters)
    refuse_settings(
        steps=steps, seed=seed, batch_size=batch_size, order=order, max_grad_norm=max_grad_norm, precision=precision,
        accumulate=accumulate, deterministic=deterministic, anchor=anchor, validate_every=validate_every,
        validate_rows=validate_rows, checkpoint_every=checkpoint_every, workers=workers, log_every=log_every,
        block_id=block_id, replicas=replicas, rate=max(float(group["lr"]) for group in optimizer.param_groups),
    )  # fmt: skip
    ranks = Ranks.here(replicas=replicas)
    method = make_method(
        gradient, block, forward=_answer(forward, noise), number=block_id or 0, replica=ranks.rank % ranks.replicas
    )
    settings = [seed, batch_size, accumulate, order, precision, max_grad_norm, anchor, validate_rows,
                method.spec.identity(), asdict(schedule), None if schedule.name == "constant" else steps,
                *([] if noise is None else [asdict(noise)])]  # fmt: skip
    who = identity_of(data, block_id, job or _own_identity(settings, loss, forward, optimizer))
    alone = stop if ranks.world == 1 else _never  # several processes only stop together, between two steps
    trained = Trained(data.reader, held_out=validate_rows, stop=alone)
    sampler = zgstore.Sampler(trained, seed=seed, batch_size=batch_size * accumulate, order=order)  # type: ignore[arg-type]
    ledger, initial = begin(checkpoint, who, block, optimizer, sampler, seed=seed, anchor=anchor, ranks=ranks)
    keep = keeper(
        checkpoint, who, ledger, data=data, block=block, optimizer=optimizer, initial=initial, log=log, ranks=ranks
    )
    plan = Plan(sampler, batch_size, first=validate_rows, steps=steps - ledger.step, ranks=ranks)

    with arithmetic(place, deterministic=deterministic):
        for batches in arriving(
            data.ahead(plan, workers=workers, stop=alone),
            ledger,
            keep=keep,
            check=partial(_refuse_padding, forward),
            stop=stop,
            ranks=ranks,
        ):
            counts = ranks.sum_counts(objective.counts(batches))
            for number, each in enumerate(batches):
                batch = _shown(noise, each, seed=seed, step=ledger.step, block=block_id).to(place, dtype=_dtype(block))
                with torch.autocast(place.type, torch.bfloat16, enabled=precision == "bf16"):
                    prediction = _like(method.forward(batch.source, batch.context, (ledger.step, number)), batch.target)
                    sums = objective.sums(prediction, batch.target, batch.context)
                part = _reached(objective.total(sums, counts))
                ledger.add(part, *_beside(sums, counts, prediction, batch))
                if ledger.step % log_every == 0:
                    ledger.leaving_bytes = max(ledger.leaving_bytes, leaving_gradient_bytes(part, block))
                ledger.queries += method.backward(part * ranks.replicas if ranks.replicas > 1 else part)
            ranks.mean_gradients(parameters)
            norm = _clipped(parameters, max_grad_norm)
            lr = set_rate(optimizer, rate(schedule, ledger.step, steps))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            _pull(optimizer, block, initial, anchor)
            ledger.end_step(plan.taken(), norm=norm, lr=lr, tokens=max(counts.values()))
            if ledger.step % log_every == 0:
                ledger.look(log, ranks)
            if validate_every and ledger.step % validate_every == 0:
                ledger.look(log, ranks)
                ledger.validation = validate(block, data, objective, rows=validate_rows, batch_size=batch_size,
                                             forward=forward, device=place, precision=precision, noise=noise,
                                             seed=seed, block_id=block_id)  # fmt: skip
                log({"step": ledger.step, "validation_loss": ledger.validation})
            if ledger.step % checkpoint_every == 0:
                keep()
    keep()
    if data.kind == FOLLOWING and not trained.done:
        trained.wait(EVERYTHING)  # a block is done only when what it learned from has a name
        keep()
    return make_report(
        ledger, who, block, optimizer=optimizer, interface=interface, device=place,
        deterministic=deterministic,
    )  # fmt: skip


# ---- what the loop is made of ----


def _never() -> bool:
    return False


def _own_identity(settings: list[Any], loss: Any, forward: Forward, optimizer: torch.optim.Optimizer) -> str:
    """The identity of a training that belongs to no job: its settings, and its functions by name."""
    names = [getattr(each, "__qualname__", type(each).__name__) for each in (forward, optimizer)]
    said = str(loss) if isinstance(loss, str | LossSpec | None) else getattr(loss, "__qualname__", type(loss).__name__)
    text = json.dumps([*settings, *names, said, optimizer.defaults], default=str, sort_keys=True)
    return str(zgstore.digest_of(None, b"zgtrain 1 training\0", text.encode()))


@torch.no_grad()
def validate(
    block: nn.Module, data: Source, objective: Objective, *, rows: int, batch_size: int, forward: Forward | None = None,
    device: torch.device, precision: str = "fp32", noise: Noise | None = None, seed: int = 0,
    block_id: int | None = None,
) -> float:  # fmt: skip
    """The loss over the first rows, in eval mode, under the same noise each time; generators and mode are left."""
    answer, training = _answer(forward or _without_mask, noise), block.training
    totals: dict[str, float] = {}
    counts: dict[str, int] = {}
    with rng_kept():
        block.eval()
        for piece in micro_batches(range(rows), batch_size):
            host = data.batch(piece)
            shown = _shown(noise, host, seed=seed, step=LOOKED_AT, block=block_id)
            batch = shown.to(device, dtype=_dtype(block))
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
                prediction = _like(answer(block, batch.source, batch.context), batch.target)
                sums = objective.sums(prediction, batch.target, batch.context)
            for name, value in objective.counts([host]).items():
                counts[name] = counts.get(name, 0) + value
                totals[name] = totals.get(name, 0.0) + float(sums[name])
        block.train(training)
    return sum(objective.weights[name] * totals[name] / max(1, counts[name]) for name in totals)


def _without_mask(block: nn.Module, source: Tensor, _context: Mapping[str, Any]) -> Tensor:
    prediction: Tensor = block(source)
    return prediction


def _noise_of_one(said: Noise | Mapping[str, Any] | float | None) -> Noise | None:
    if said is None or isinstance(said, Noise):
        return said
    numbers = noise_table_of(said)
    if "sigma_data" in numbers:
        raise zgstore.Invalid(
            "a table of diffusion does not say how many blocks share the depth",
            hint="give one block's part: noise=zgtrain.Diffusion(blocks=4).noise(0)",
            key="noise",
        )
    return make_noise(numbers, block=0, blocks=1) if numbers else None


def _answer(forward: Forward, noise: Noise | None) -> Forward:
    """What is held against the target: the forward's own word, or with noise its part in it."""
    _see_takes(forward)
    if noise is None:
        return forward
    if forward is _without_mask:
        raise zgstore.Invalid(
            "block(source) would see no noisy target", hint='give a forward that hands context["noisy"] on'
        )
    return denoising(forward, noise)


def _see_takes(forward: Forward) -> None:
    with suppress(ValueError):  # what has no signature is found out when it is called
        try:
            inspect.signature(forward).bind("block", "source", "context")
        except TypeError as error:
            raise zgstore.Invalid(
                f"the forward {getattr(forward, '__qualname__', forward)} cannot be called: {error}",
                hint="let it take (block, source, context), and give a prediction",
            ) from error


def _shown(noise: Noise | None, batch: Batch, *, seed: int, step: int, block: int | None) -> Batch:
    """A batch in host memory as a block gets it: with noise, its noisy target is in the context too."""
    if noise is None:
        return batch
    refuse_names(batch.context)
    lengths = batch.context.get("lengths")
    seen = noised(
        noise, batch.target, rows=batch.rows, lengths=None if lengths is None else lengths.tolist(), seed=seed,
        step=step, block=block or 0,
    )  # fmt: skip
    return replace(batch, context={**batch.context, **seen})


def _refuse_padding(forward: Forward, batch: Batch) -> None:
    mask = batch.context.get("mask")
    if forward is _without_mask and isinstance(mask, Tensor) and not bool(mask.all()):
        raise zgstore.Refused(
            "the batch is padded, and block(source) would not see its mask",
            hint='give a forward that takes it: (block, source, context) -> prediction, context["mask"] true where a '
            'token is real; or forward = "zgtrain.causal_lm:forward" for its blocks',
        )


def _like(prediction: Any, target: Tensor) -> Tensor:
    if isinstance(prediction, Tensor):
        if prediction.shape == target.shape and prediction.is_floating_point():
            return prediction
        said = f"{list(prediction.shape)} of {prediction.dtype}"
    else:
        said = f"a {type(prediction).__name__}"
    raise zgstore.Invalid(
        f"the block gave {said}, and its target is {list(target.shape)} of {target.dtype}",
        hint="return one tensor like the target: the state after the block's last layer",
    )


def _reached(loss: Tensor) -> Tensor:
    """The loss, seen to have a gradient at all."""
    if loss.requires_grad:
        return loss
    raise zgstore.Invalid(
        "the loss does not depend on any parameter that is trained, as far as autograd can see",
        hint="look for detach(), no_grad() or another dtype between the parameters and what the block, or a loss of "
        'your own, returns; what cannot be differentiated is trained by gradient = "zeroth-order"',
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


def _clipped(parameters: list[nn.Parameter], most: float | None) -> Tensor:
    """The gradient's norm before clipping; without any it is had too, as it shows what is not finite."""
    if most:
        return nn.utils.clip_grad_norm_(parameters, most)
    norms = [torch.linalg.vector_norm(each.grad) for each in parameters if each.grad is not None]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms or [parameters[0].new_zeros(())]))
    return norm


def _pull(optimizer: torch.optim.Optimizer, block: nn.Module, initial: Mapping[str, Tensor], anchor: float) -> None:
    if not anchor:
        return
    start = {id(parameter): initial[name] for name, parameter in block.named_parameters()}
    for group in optimizer.param_groups:
        own = [parameter for parameter in group["params"] if id(parameter) in start]
        anchor_(own, [start[id(parameter)] for parameter in own], lr=group["lr"], anchor=anchor)


def _trained(block: nn.Module) -> list[nn.Parameter]:
    parameters = [parameter for parameter in block.parameters() if parameter.requires_grad]
    refuse_nothing(parameters)
    return parameters


def _over(
    said: torch.optim.Optimizer | OptimizerSpec | Mapping[str, Any] | str | None, block: nn.Module,
    parameters: list[nn.Parameter],
) -> torch.optim.Optimizer:  # fmt: skip
    """The optimizer, seen to step all that gets a gradient: else that would count in the norm, and be clipped for."""
    if isinstance(said, torch.optim.Optimizer):
        optimizer = said
    else:
        optimizer = make_optimizer(optimizer_of("adamw" if said is None else said), parameters)
    held = {id(each) for group in optimizer.param_groups for each in group["params"]}
    trained = {name: each for name, each in block.named_parameters() if each.requires_grad}
    left = [name for name, each in trained.items() if id(each) not in held]
    if len(left) == len(trained):
        raise zgstore.Invalid(
            "the optimizer holds none of the block's parameters: nothing would be trained",
            hint="make it over block.parameters() of the block that is given, after whatever replaces them",
        )
    if left:
        more = f" and {len(left) - 3} more" if len(left) > 3 else ""
        raise zgstore.Invalid(
            f"the block's {', '.join(map(repr, left[:3]))}{more} would get a gradient, and the optimizer has no step "
            "for it",
            hint="freeze what is not to be trained, by requires_grad_(False), or give it to the optimizer too",
        )
    return optimizer


def _dtype(block: nn.Module) -> torch.dtype:
    """What the block computes in: the dtype of its first floating parameter."""
    return next((p.dtype for p in block.parameters() if p.is_floating_point()), torch.float32)
