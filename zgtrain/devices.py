"""Where a block computes, and how exactly."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import zgstore


def parse_device(name: str) -> torch.device:
    """The device of that name, whether or not this machine has it; nothing is started on it.

    Raises:
        zgstore.Invalid: if it is the name of none.
    """
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise _none(name, error) from error


def device_of(device: torch.device | str | None) -> torch.device:
    """The device that is named; by default a GPU if there is one.

    Raises:
        zgstore.Invalid: if this machine has no such device.
    """
    place = parse_device(str(device or ("cuda" if torch.cuda.is_available() else "cpu")))
    try:
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError) as error:
        raise _none(str(device), error) from error
    return place


def _none(name: str, error: Exception) -> zgstore.Invalid:
    why = str(error).partition("\n")[0]
    return zgstore.Invalid(
        f"{name!r} is no device here: {why}", hint="name one that this machine has, as torch does: cpu, cuda:0"
    )


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
