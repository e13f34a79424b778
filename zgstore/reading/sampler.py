"""Which rows each step takes: batches of a seeded order, resumed at any step at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal, Protocol

import numpy as np
from torch import Tensor
from torch.utils.data import BatchSampler

from zgstore.errors import Invalid, Refused
from zgstore.reading.order import Permutation, Rows, permutation

ORDERS: Final = ("shuffled", "sequential", "sequential-first")
_AHEAD: Final = 4096  # rows put in order at once: a call costs as much for one as for a hundred

Order = Literal["shuffled", "sequential", "sequential-first"]


class Ordered(Protocol):
    """What a sampler needs of a reader, or of what stands in for one."""

    @property
    def data_digest(self) -> str: ...

    def __len__(self) -> int: ...

    def lengths(self) -> Tensor: ...


class Sampler(BatchSampler):
    """Lists of row numbers, one for each step of this rank, to loop over or as ``sampler`` of a DataLoader.

    A DataLoader takes it with ``batch_size=None``: its own collating knows no rows of different lengths.

    The rows of a step are a function of (seed, epoch, data digest) and of the batch's size; not of columns, workers or
    prefetch. An epoch has every row once. Each pass is the next epoch; `set_epoch` says which. Iteration may be broken
    off anywhere: `state_dict` is a few numbers, and loading it skips nothing by reading.

    A step of all ranks takes ``world`` batches that follow each other. The last rows of an epoch, too few for that, are
    shared out evenly, so that every rank takes as many steps; where they are fewer than the ranks, some row is taken
    by more than one.

    Args:
        reader: Whose rows; its length, data digest and, for a budget, lengths are looked at.
        seed: Of the order.
        batch_size: Rows for each rank and step; or
        token_budget: at most so many real tokens for each rank and step, taken greedily; a longer row goes alone.
        drop_last: Leave out a last step that is not full.
        shuffle: Else rows as they are stored.
        order: ``shuffled``, ``sequential``, or ``sequential-first``: stored order in epoch 0, as followers need it.
        rank: Of this process.
        world: Processes that train together.

    Raises:
        Invalid: unless exactly one of batch_size and token_budget is given, and positive.
    """

    def __init__(
        self,
        reader: Ordered,
        *,
        seed: int = 0,
        batch_size: int | None = None,
        token_budget: int | None = None,
        drop_last: bool = False,
        shuffle: bool = True,
        order: Order | None = None,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        # The parent's own initialiser wants a sampler of single rows; only its interface is ours.
        if batch_size is not None and token_budget is not None:
            raise Invalid("a sampler takes batch_size or token_budget, and both were given", hint="leave one out")
        if (batch_size or token_budget or 0) < 1:
            raise Invalid("a sampler needs batch_size or token_budget, at least 1", hint="give one: batch_size=4")
        if order is not None and order not in ORDERS:
            raise Invalid(f"{order!r} is no order", hint=f"one of {', '.join(ORDERS)}")
        if not 0 <= rank < world:
            raise Invalid(f"rank {rank} of {world}", hint="ranks count from 0 to world - 1")
        self.reader = reader
        self.seed = seed
        self.batch_size = batch_size  # type: ignore[assignment]  # None under a budget, as the libraries expect
        self.token_budget = token_budget
        self.drop_last = drop_last
        self.order: Order = order or ("shuffled" if shuffle else "sequential")
        self.rank = rank
        self.world = world
        self.epoch = 0
        self._position = 0
        self._resume: tuple[int, int] | None = None
        self._turn = 0
        self._known: tuple[int, Rows] = (-1, np.zeros(0, np.int64))
        self._cut: tuple[tuple[int, int], list[int]] | None = None

    # -- iteration -------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[list[int]]:
        # Where to begin is decided at the first step: a DataLoader makes iterators that it never uses.
        epoch, position = self._resume or (self.epoch, 0)
        self._resume = None
        self._turn += 1
        turn = self._turn
        self.epoch, self._position = epoch, position
        order = _Epoch(self, epoch)
        while rows := self._step(order, position):
            position += len(rows)
            if turn == self._turn:
                self._position = position
            yield self._mine(rows)
        if turn == self._turn:
            self.epoch, self._position = epoch + 1, 0

    def __len__(self) -> int:
        """Steps of an epoch; under a budget, of the epoch that is next or under way."""
        if self.batch_size is not None:
            step = self.batch_size * self.world
            return len(self.reader) // step if self.drop_last else -(-len(self.reader) // step)
        return len(self._cuts(self.epoch)) - 1

    def rows(self, step: int, *, epoch: int = 0) -> list[int]:
        """The rows of this rank's step, counted from 0 in the epoch; empty after the last.

        The same as iteration gives, without iterating; under a budget the first call lays out the epoch.
        """
        position = self._position_of(step, epoch)
        return self._mine(self._step(_Epoch(self, epoch), position))

    def _step(self, order: _Epoch, position: int) -> list[int]:
        """The rows of all ranks' next step; empty at the epoch's end."""
        rows: list[int] = []
        for _ in range(self.world):
            batch = self._batch(order, position + len(rows))
            if self.drop_last and (not batch or (self.batch_size is not None and len(batch) < self.batch_size)):
                return []
            rows += batch
        return rows

    def _batch(self, order: _Epoch, position: int) -> list[int]:
        if self.batch_size is not None:
            return _whole(order.rows(position, position + self.batch_size))
        assert self.token_budget is not None
        ahead = 64
        while True:
            rows = order.rows(position, position + ahead)
            taken = int(np.searchsorted(np.cumsum(self._lengths()[rows]), self.token_budget, side="right"))
            if taken < len(rows) or len(rows) < ahead:
                return _whole(rows[: max(taken, 1)])
            ahead *= 2

    def _mine(self, rows: list[int]) -> list[int]:
        """This rank's part: a batch of its own of a full step, an even share of a last one."""
        if self.world == 1 or not rows:
            return rows
        if self.batch_size is not None and len(rows) == self.batch_size * self.world:
            return rows[self.rank * self.batch_size : (self.rank + 1) * self.batch_size]
        if self.token_budget is not None:
            bounds = self._budgeted(rows)
            if len(bounds) == self.world + 1:
                return rows[bounds[self.rank] : bounds[self.rank + 1]]
        share, extra = divmod(len(rows), self.world)
        first = self.rank * share + min(self.rank, extra)
        return rows[first : first + share + (self.rank < extra)] or [rows[self.rank % len(rows)]]

    def _lengths(self) -> Rows:
        if self._known[0] != len(self.reader):
            self._known = (len(self.reader), self.reader.lengths().numpy())
        return self._known[1]

    def _budgeted(self, rows: list[int]) -> list[int]:
        """Where the batches of a step under a budget begin, and its end."""
        assert self.token_budget is not None
        ends, bounds = np.cumsum(self._lengths()[rows]), [0]
        while bounds[-1] < len(rows):
            before = int(ends[bounds[-1] - 1]) if bounds[-1] else 0
            taken = int(np.searchsorted(ends, before + self.token_budget, side="right"))
            bounds.append(max(taken, bounds[-1] + 1))
        return bounds

    def _cuts(self, epoch: int) -> list[int]:
        """Positions where the steps of an epoch under a budget begin, and the end."""
        key = (epoch, len(self.reader))
        if self._cut is None or self._cut[0] != key:
            bounds = self._budgeted(_Epoch(self, epoch).rows(0, len(self.reader)).tolist())
            whole, end = bounds[:-1][:: self.world], bounds[-1]
            if self.drop_last and (len(bounds) - 1) % self.world:
                end = whole.pop()
            self._cut = (key, [*whole, end])
        return self._cut[1]

    def _position_of(self, step: int, epoch: int) -> int:
        if self.batch_size is not None:
            return min(step * self.batch_size * self.world, len(self.reader))
        cuts = self._cuts(epoch)
        return cuts[min(step, len(cuts) - 1)]

    # -- state -----------------------------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Which epoch the next pass is.

        Raises:
            Invalid: if a loaded state, not yet begun, is of another epoch and would be lost.
        """
        if self._resume is not None and self._resume[0] != epoch:
            raise Invalid(
                f"a state of epoch {self._resume[0]} is loaded, and epoch {epoch} would lose it",
                hint=f"begin with set_epoch({self._resume[0]}), or make a new sampler",
            )
        if epoch != self.epoch:
            self.epoch, self._position = epoch, 0

    def state_dict(self) -> dict[str, Any]:
        """Where iteration is: behind the last list that was taken. Ahead of the training where something prefetches."""
        epoch, position = self._resume or (self.epoch, self._position)
        return self._state(epoch, position)

    def state_after(self, steps: int, *, epoch: int = 0) -> dict[str, Any]:
        """The state behind so many steps of an epoch, however far something has prefetched."""
        return self._state(epoch, self._position_of(steps, epoch))

    def _state(self, epoch: int, position: int) -> dict[str, Any]:
        growing = _grows(self.reader)
        return {
            "seed": self.seed,
            "order": self.order,
            "epoch": epoch,
            "position": position,
            "rows": None if growing else len(self.reader),
            "data": self.reader.data_digest,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where that state was; seed and order are the state's. The batch's size may be another.

        Raises:
            Refused: if it is of other data.
            Invalid: if it is no state of a sampler.
        """
        mine = self._state(0, 0)
        for name in ("data", "rows"):
            theirs = state.get(name)
            if theirs and mine[name] and theirs != mine[name]:
                raise Refused(
                    f"the state is of {name} {theirs}, and the reader has {mine[name]}",
                    hint="read the snapshot that the state was saved with, or begin anew",
                    expected=theirs,
                    actual=mine[name],
                )
        try:
            self.seed, self.order = int(state["seed"]), state["order"]
            self._resume = (int(state["epoch"]), int(state["position"]))
        except KeyError as error:
            raise Invalid(f"the state has no {error}", hint="load what `state_dict` gave") from error


class _Epoch:
    """The order of one epoch, put in order a stretch at a time."""

    def __init__(self, sampler: Sampler, epoch: int) -> None:
        self._sampler = sampler
        self._shuffled = sampler.order == "shuffled" or (sampler.order == "sequential-first" and epoch > 0)
        self._epoch = epoch
        self._permutation: Permutation | None = None
        self._held: tuple[int, Rows] = (0, np.zeros(0, np.int64))

    def rows(self, start: int, stop: int) -> Rows:
        """The rows at these positions, clipped to the epoch."""
        if not self._shuffled:
            return np.arange(start, max(start, min(stop, self._available(stop))), dtype=np.int64)
        order = self._permuted()
        first, held = self._held
        if start < first or min(stop, len(order)) > first + len(held):
            first, held = start, order.rows(start, max(stop, start + _AHEAD))
            self._held = (first, held)
        return held[start - first : max(start, stop) - first]

    def _permuted(self) -> Permutation:
        if self._permutation is None:
            reader = self._sampler.reader
            if _grows(reader):
                raise Invalid(
                    "a build that still grows has no shuffled order",
                    hint='use order="sequential-first", or wait until the build is published',
                )
            self._permutation = permutation(self._sampler.seed, self._epoch, reader.data_digest, len(reader))
        return self._permutation

    def _available(self, stop: int) -> int:
        """Rows there are; of a growing build, after waiting for those that are needed."""
        reader = self._sampler.reader
        if _grows(reader):
            wait: Any = getattr(reader, "wait", None)
            if wait is not None:
                wait(stop)
        return len(reader)


def _grows(reader: Ordered) -> bool:
    return not getattr(reader, "done", True)


def _whole(rows: Rows) -> list[int]:
    return [int(row) for row in rows]
