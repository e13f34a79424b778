"""The report of a training that is over: what its ledger counted, and what is counted at its end."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from zgtrain.blockreport import BlockReport
from zgtrain.checkpoint import state_digest
from zgtrain.independence import live_parameters, peak_memory_bytes
from zgtrain.ledger import Ledger


def make_report(
    ledger: Ledger,
    who: Mapping[str, Any],
    block: nn.Module,
    *,
    optimizer: torch.optim.Optimizer,
    interface: nn.Module | None,
    device: torch.device,
    deterministic: bool,
) -> BlockReport:
    """The report of a training that is over.

    Args:
        ledger: What it counted.
        who: What its checkpoint is of.
        block: As it is now.
        optimizer: Its parameters belong to the block.
        interface: So do its; None if there is none.
        device: Where it was trained.
        deterministic: Whether that was asked for.
    """
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
