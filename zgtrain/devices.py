"""Where a block computes, and how exactly."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import zgstore


def device_of(device: torch.device | str | None) -> torch.device:
    """The device that is named; by default a GPU if there is one.

    Raises:
        zgstore.Invalid: if this machine has no such device.
    """
    try:
        place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError) as error:
        why = str(error).partition("\n")[0]
        hint = "name one that this machine has, as torch does: cpu, cuda:0"
        raise zgstore.Invalid(f"{str(device)!r} is no device here: {why}", hint=hint) from error
    return place


@contextlib.contextmanager
def arithmetic(device: torch.device, *, deterministic: bool) -> Iterator[None]:
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
