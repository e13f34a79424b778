"""What a training counts from step to step, and carries from run to run; the device is looked at only now and then."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

import torch
from torch import Tensor

import zgstore
from zgtrain.ranks import Ranks, whole

WINDOW: Final = 32  # steps of the first and of the last window

Log = Callable[[Mapping[str, Any]], None]


def not_finite(what: str, *, step: int) -> zgstore.NonFinite:
    """What ends a training that has left the numbers; it is raised before anything is saved."""
    return zgstore.NonFinite(
        what, hint="lower the learning rate, or clip; the last checkpoint, from before, is kept", step=step
    )


@dataclass(slots=True)
class Ledger:
    """The counts of one block. All but the pending numbers is in its checkpoint, so that sums go over all runs.

    Args:
        step: Steps taken.
        order: The sampler's state behind them.
        initial_digest: The block before its first step.
        first: Losses of the first window.
        last: Loss, Σ‖error‖², Σ‖h_{b+1} − h_b‖² of each step of the last window.
        validation: The last loss over the rows held out.
        seconds: By what they were spent on.
        bytes_read: Bytes of rows.
        queries: Forward queries that gradients took.
        leaving_bytes: Most gradient that left the block in a step that was looked at.
        resumed_from: The step that this run began at; None if it began at none.
    """

    step: int = 0
    order: Mapping[str, Any] | None = None
    initial_digest: str = ""
    first: list[float] = field(default_factory=list)
    last: list[list[float]] = field(default_factory=list)
    validation: float | None = None
    seconds: dict[str, float] = field(
        default_factory=lambda: {"data": 0.0, "validation": 0.0, "checkpoint": 0.0, "total": 0.0}
    )
    bytes_read: int = 0
    queries: int = 0
    leaving_bytes: int = 0
    resumed_from: int | None = None
    _pending: list[tuple[Tensor, float, int]] = field(default_factory=list)
    _seen: Tensor | None = None
    _mark: float = field(default_factory=time.perf_counter)

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Self:
        """From `as_state`."""
        return cls(**state)

    def as_state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {name: getattr(self, name) for name in self.__slots__ if not name.startswith("_")}

    def begin(self) -> None:
        """Time runs from here on."""
        self._mark = time.perf_counter()

    def tick(self) -> float:
        """Bring the total time up to now; seconds in all."""
        now = time.perf_counter()
        self.seconds["total"] += now - self._mark
        self._mark = now
        return self.seconds["total"]

    def add(self, *numbers: Tensor) -> None:
        """A micro-batch's loss, boundary loss, Σ‖error‖² and Σ‖h_{b+1} − h_b‖², on the device: they add up."""
        seen = torch.stack([number.detach().float() for number in numbers])
        self._seen = seen if self._seen is None else self._seen + seen

    def end_step(self, order: Mapping[str, Any], *, norm: Tensor | float, lr: float, tokens: int) -> None:
        """A step is taken."""
        assert self._seen is not None
        length = whole(norm.detach()).float() if isinstance(norm, Tensor) else self._seen.new_full((), norm)
        self._pending.append((torch.cat([self._seen, length.reshape(1)]), lr, tokens))
        self._seen, self.order = None, order
        self.step += 1

    def look(self, log: Log, ranks: Ranks) -> None:
        """Look at the device: the numbers since the last look go into windows and log.

        Raises:
            zgstore.NonFinite: if a loss or a gradient's norm is not finite.
        """
        rows = []
        if self._pending:
            numbers = torch.stack([each for each, _, _ in self._pending])
            numbers[:, :4] = ranks.sum(numbers[:, :4])
            rows = numbers.tolist()
        beside = [(lr, tokens) for _, lr, tokens in self._pending]
        self._pending.clear()
        seconds = self.tick()
        for step, (row, (lr, tokens)) in enumerate(zip(rows, beside, strict=True), self.step - len(rows) + 1):
            loss, boundary, error, moved, norm = row
            for what, number in (("loss", loss), ("gradient's norm", norm)):
                if not math.isfinite(number):
                    raise not_finite(f"the {what} of step {step} is {number}", step=step)
            if len(self.first) < WINDOW:
                self.first.append(loss)
            self.last = [*self.last[1 - WINDOW :], [loss, error, moved]]
            log(
                {
                    "step": step, "loss": loss, "boundary_loss": boundary,
                    "residual_error": error / moved if moved else None, "grad_norm": norm, "lr": lr,
                    "tokens": tokens, "seconds": round(seconds, 6),
                }
            )  # fmt: skip

    def windows(self) -> tuple[float, float, float | None]:
        """Mean loss of the first and of the last window, and the last's residual error."""
        loss, error, moved = (sum(row[at] for row in self.last) for at in range(3))
        count = max(1, len(self.last))
        return sum(self.first) / max(1, len(self.first)), loss / count, error / moved if moved else None
