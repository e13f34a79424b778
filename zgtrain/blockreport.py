"""What became of a block, as a value: all of it counted or measured in the run."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from zgtrain.checkpoint import state_digest
from zgtrain.independence import live_parameters, peak_memory_bytes
from zgtrain.ledger import Ledger


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


def report_of(
    ledger: Ledger,
    who: Mapping[str, Any],
    block: nn.Module,
    *,
    optimizer: torch.optim.Optimizer,
    interface: nn.Module | None,
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
        resumed_from=ledger.resumed_from,
        deterministic=deterministic or device.type == "cpu",
        environment={
            "python": platform.python_version(), "torch": str(torch.__version__), "machine": platform.machine(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "threads": torch.get_num_threads(),
        },
    )  # fmt: skip
