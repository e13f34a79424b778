"""Memory for captured tensors, used again; and the heap kept from growing."""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from zgstore.building.statistics import Seen, fill
from zgstore.format.tensorfile import dtype_name

_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have none


class Pool:
    """Memory that is used again: a new large tensor costs a page fault for every 4 KiB.

    ``take`` gives a tensor, ``give`` takes it back once its bytes are on their way; both from any thread.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[int, bool], list[Tensor]] = defaultdict(list)
        self._lock = threading.Lock()

    def take(self, shape: Sequence[int], dtype: torch.dtype, *, pinned: bool = False) -> Tensor:
        """A CPU tensor with whatever values it has; ``pinned`` for copies from a device."""
        wanted = math.prod(shape) * dtype.itemsize
        room = _room(wanted)
        with self._lock:
            free = self._free[room, pinned]
            memory = free.pop() if free else None
        # Not an inference tensor, which could neither be written elsewhere nor enter autograd.
        with torch.inference_mode(mode=False):
            if memory is None:
                memory = (
                    torch.empty(room, dtype=torch.uint8, pin_memory=True, device="cpu") if pinned else _mapped(room)
                )
            return memory[:wanted].view(dtype).view(tuple(shape))

    def give(self, tensor: Tensor) -> None:
        """Take back what `take` gave. Nothing may look at it any more."""
        storage = tensor.untyped_storage()
        with torch.inference_mode(mode=False):
            memory = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
        with self._lock:
            self._free[storage.nbytes(), memory.is_pinned()].append(memory)


def _mapped(size: int) -> Tensor:
    """Memory of its own from the system: on the heap it would leave holes between a teacher's activations."""
    return torch.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)


def trim() -> None:
    """Have the heap give back what it has free.

    glibc before 2.38 does not find an aligned block again once something small lies behind it, so that a teacher's
    activations take new memory with every batch.
    """
    if _malloc_trim is not None:
        _malloc_trim(0)


def _room(size: int) -> int:
    """Bytes for ``size``: at most an eighth more, so that lengths that differ from batch to batch share few sizes."""
    step = max(4096, 1 << max(size.bit_length() - 4, 0))
    return -(-max(size, 1) // step) * step


def copied(
    tensor: Tensor, pieces: list[Tensor] | None, dtype: torch.dtype, pool: Pool, point: str
) -> tuple[Tensor, Seen | None]:
    """A copy of the tensor, or of its pieces joined, in pooled memory, and what was seen of it.

    From a device it is under way, and nothing has been seen yet.
    """
    dtype_name(tensor, what=repr(point))
    if tensor.device.type == "cpu":
        if pieces is None:
            copy = pool.take(tensor.shape, dtype)
            return copy, fill(copy, tensor)
        copy, seen, at = pool.take((sum(map(len, pieces)), *tensor.shape[2:]), dtype), Seen(), 0
        for piece in pieces:
            seen += fill(copy[at : at + len(piece)], piece)
            at += len(piece)
        return copy, seen
    # Cast and joined on the device, then one copy on its own stream: what comes after it there cannot overtake it.
    whole = tensor if pieces is None else torch.cat(pieces)
    whole = whole.to(dtype)
    pinned = tensor.device.type == "cuda"
    return pool.take(whole.shape, dtype, pinned=pinned).copy_(whole, non_blocking=pinned), None
