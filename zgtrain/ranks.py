"""Several processes that train one block together: which rows each takes, and what they agree on.

W processes, R replicas of the block, R dividing W: processes of one replica take the same rows and shard the block
between them (FSDP2); replicas share out the rows of a step. Everything is a mean or a sum over all W, so that a block
learns what it would learn in one process.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import zgstore


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among those of its block.

    Args:
        rank: From 0.
        world: W.
        replicas: R.
    """

    rank: int = 0
    world: int = 1
    replicas: int = 1

    @classmethod
    def here(cls, *, replicas: int = 1) -> Ranks:
        """As torch.distributed was set up; one process if it was not.

        Raises:
            zgstore.Invalid: if R does not divide W.
        """
        if not (dist.is_available() and dist.is_initialized()):
            return cls()
        world = dist.get_world_size()
        if world % replicas:
            raise zgstore.Invalid(
                f"{replicas} replicas of {world} processes", hint="let data_parallel divide processes"
            )
        return cls(dist.get_rank(), world, replicas)

    def share(self, rows: Sequence[int]) -> Sequence[int]:
        """This replica's part of a step's rows.

        Where they cannot be shared out evenly, each takes all of them: counts add up as sums do, and so nothing but
        time is lost.
        """
        if len(rows) % self.replicas:
            return rows
        size = len(rows) // self.replicas
        replica = self.rank % self.replicas
        return rows[replica * size : (replica + 1) * size]

    def sum(self, numbers: Tensor) -> Tensor:
        """The sum over replicas."""
        if self.replicas == 1:
            return numbers
        total = numbers.clone()
        dist.all_reduce(total)
        return total * (self.replicas / self.world)

    def sum_counts(self, counts: dict[str, int]) -> dict[str, int]:
        """The sum over replicas of whole numbers."""
        if self.replicas == 1:
            return counts
        total = self.sum(torch.tensor([*counts.values()], dtype=torch.float64))
        return dict(zip(counts, (round(each) for each in total.tolist()), strict=True))

    def any(self, flag: bool) -> bool:  # noqa: FBT001 — one question, one answer
        """Whether any process says so: the same answer in all of them."""
        if self.world == 1:
            return flag
        told = torch.tensor([int(flag)])
        dist.all_reduce(told, dist.ReduceOp.MAX)
        return bool(told.item())

    def mean_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Average the gradients of parameters that are not sharded; FSDP averages those that are."""
        if self.world == 1:
            return
        for parameter in parameters:
            if parameter.grad is not None and not is_sharded(parameter):
                dist.all_reduce(parameter.grad)
                parameter.grad /= self.world

    def barrier(self) -> None:
        """Wait for all."""
        if self.world > 1:
            dist.barrier()


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor."""
    return hasattr(tensor, "full_tensor")


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor gathered, on every process; any other as it is."""
    found: Any = tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return found  # type: ignore[no-any-return]


def own_part(tensor: Tensor) -> Tensor:
    """Of a sharded tensor what this process holds; any other as it is."""
    found: Any = tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return found  # type: ignore[no-any-return]
