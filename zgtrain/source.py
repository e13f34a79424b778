"""Where targets come from: cached, following or live; one interface, bitwise the same targets.

`cached` reads a snapshot. `following` reads a build that still grows, in stored order until it is published. `live`
runs the teacher over whole capture batches, casts and codes its states as the columns are stored, and only then takes
the rows: another padding would give other bits.

N rows of a batch, T their longest length, D width.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import torch
from torch import Tensor, nn

import zgstore

CACHED, FOLLOWING, LIVE, RELAY = "cached", "following", "live", "relay"
IGNORED_LABEL: Final = -100
_LOOK_SECONDS: Final = 0.1

Rows = Sequence[int]
Stop = Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Batch:
    """Some rows of a block's two boundaries, in host memory.

    Args:
        source: ``[N, T, D]``, right-padded; ``[N, D]`` without a sequence axis.
        target: Likewise.
        context: ``mask`` (bool ``[N, T]``), ``positions`` and ``lengths`` where there is a sequence axis; the
            snapshot's context columns and constants. Labels are −100 in the padding.
        rows: Their numbers in the snapshot.
    """

    source: Tensor
    target: Tensor
    context: Mapping[str, Any]
    rows: Rows = ()

    def __len__(self) -> int:
        return len(self.source)

    def to(self, device: torch.device, *, dtype: torch.dtype) -> Batch:
        """On a device, by copies that nobody waits for; floating boundaries in the dtype that the block computes in."""

        def moved(value: Any, dtype: torch.dtype | None) -> Any:
            if not isinstance(value, Tensor):
                return value
            if device.type == "cuda":
                value = value.pin_memory().to(device, non_blocking=True)
            return value.to(dtype) if dtype is not None and value.is_floating_point() else value

        context = {name: moved(value, None) for name, value in self.context.items()}
        return Batch(moved(self.source, dtype), moved(self.target, None), context, self.rows)


@dataclass(slots=True)
class Source:
    """Batches by row numbers; close it, or use it as a context.

    Args:
        kind: ``cached``, ``following``, ``live``, or ``relay`` of the student's own states.
        reader: What orders the rows, and reads whatever is not given.
        source: Column of boundary b.
        target: Column of boundary b + 1.
        given: Columns that do not come from the reader: a function of row numbers.
        teacher: The loaded teacher of live targets.
        pins: Digest of the snapshot's, or the growing build's, pins; empty where nothing says.
        close_: What else is to be closed.
        beside: Readers that given columns are read from: counted and closed with it.
    """

    kind: str
    reader: zgstore.Reader
    source: str
    target: str
    given: Callable[[Rows], Mapping[str, Sequence[Tensor]]] | None = None
    teacher: nn.Module | None = None
    pins: str = ""
    close_: Callable[[], None] = lambda: None
    constants: Mapping[str, Tensor] = field(default_factory=dict)
    beside: tuple[zgstore.Reader, ...] = ()

    def __post_init__(self) -> None:
        self.constants = dict(self.reader.constants)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the reader and, of live targets, let the teacher go."""
        self.close_()
        for reader in (*self.beside, self.reader):
            reader.close()

    @property
    def snapshot(self) -> str:
        """Full digest; empty while a build grows."""
        return self.reader.snapshot

    @property
    def bytes_read(self) -> int:
        """Bytes of rows that this process read, ahead of the training too."""
        return sum(reader.bytes_read for reader in (self.reader, *self.beside))

    def batch(self, rows: Rows) -> Batch:
        """The rows, in that order.

        Raises:
            zgstore.Corrupt: if a shard is met whose bytes are not what its name says.
        """
        given = None if self.given is None else self.given(rows)
        held = self.reader.batch(rows, given=given)
        source, target = held.pop(self.source), held.pop(self.target) if self.target != self.source else None
        context = {**self.constants, **held}
        mask, labels = context.get("mask"), context.get("labels")
        if isinstance(labels, Tensor) and isinstance(mask, Tensor) and labels.shape == mask.shape:
            context["labels"] = labels.masked_fill(~mask, IGNORED_LABEL)  # a reader pads with zeros, which is a token
        return Batch(source, source if target is None else target, context, tuple(rows))

    def batches(self, step: Sequence[Rows]) -> list[Batch]:
        """The micro-batches of a step."""
        return [self.batch(rows) for rows in step]

    def ahead(
        self, steps: Iterable[Sequence[Rows]], *, workers: int = 1, stop: Stop = lambda: False
    ) -> Iterator[list[Batch]]:
        """The micro-batches of each step, in order, read by ``workers`` threads while the steps before are trained.

        Args:
            steps: For each step the rows of its micro-batches; taken a little ahead.
            workers: Threads; 0 reads when asked.
            stop: Asked while waiting whether to give up.

        Raises:
            zgstore.Interrupted: if asked to stop while waiting.
        """
        if not workers:
            for step in steps:
                yield _unless(stop, self.batches(step))
            return
        coming = deque[Future[list[Batch]]]()
        pool = ThreadPoolExecutor(workers, thread_name_prefix="zgtrain-read")
        try:
            for step in steps:
                coming.append(pool.submit(self.batches, step))
                # Of a build that grows the next step may be long in coming: nothing waits that could be trained on.
                while len(coming) > (workers + 1 if getattr(self.reader, "done", True) else 0):
                    yield _result(coming.popleft(), stop)
            while coming:
                yield _result(coming.popleft(), stop)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _unless(stop: Stop, batches: list[Batch]) -> list[Batch]:
    if stop():
        raise interrupted()
    return batches


def _result(coming: Future[list[Batch]], stop: Stop) -> list[Batch]:
    while True:
        try:
            return _unless(stop, coming.result(timeout=_LOOK_SECONDS))
        except NotYet:
            if coming.done():
                raise
            if stop():
                raise interrupted() from None


def interrupted() -> zgstore.Interrupted:
    """What a job says that was asked to stop."""
    return zgstore.Interrupted("stopped as asked; its state is saved", hint="run the same command again: it resumes")


# ---- the three ----


def cached(reader: zgstore.Reader, source: str, target: str, *, pins: str = "") -> Source:
    """Targets that a snapshot's reader reads.

    Args:
        reader: With both columns, and the context that is wanted.
        source: Column of boundary b.
        target: Column of boundary b + 1.
        pins: Digest of the snapshot's pins; the reader's if not given.
    """
    _need(reader, source, target)
    kind = FOLLOWING if reader.build else CACHED
    return Source(kind, reader, source, target, pins=pins or reader.pins)


def following(store: zgstore.Store, build: str, source: str, target: str, *, context: Sequence[str] = ()) -> Source:
    """Targets of a build that still grows.

    Args:
        store: Where it is.
        build: The build's UUID.
        source: Column of boundary b.
        target: Column of boundary b + 1.
        context: Context columns to read too.
    """
    head = store.memos.build(build)
    if head is None:
        raise zgstore.NotFound(
            f"no build {build!r} is known",
            hint="`zgstore lease ls --json` lists the UUIDs of those that run; one that has ended is read by its ref",
        )
    pins = zgstore.Pins(**{name: head.head["pins"][name] for name in ("teacher", "data", "capture")})
    names = [*dict.fromkeys((source, target, *context))]
    return Source(FOLLOWING, zgstore.follow(store, build, names), source, target, pins=str(pins.digest()))


def live(
    store: zgstore.Store,
    rev: str,
    recipe: zgstore.Recipe | str | Path,
    source: str,
    target: str,
    *,
    context: Sequence[str] = (),
    devices: Sequence[str] = (),
) -> Source:
    """Targets that the teacher computes anew, of the rows of a snapshot and in its order.

    Args:
        store: Who has the snapshot, of which only context is read.
        rev: The snapshot.
        recipe: What made it.
        source: Column of boundary b.
        target: Column of boundary b + 1.
        context: Context columns to read.
        devices: Where the teacher runs.

    Raises:
        zgstore.Refused: if the recipe's teacher or data are not the snapshot's.
    """
    digest = store.resolve(rev)
    boundaries = [*dict.fromkeys((source, target))]
    again = zgstore.Recapture(store, digest, recipe, boundaries, devices=devices)
    reader = zgstore.read(store, digest, [*boundaries, *context])
    pins = str(store.snapshot(digest).pins.digest())
    return Source(
        LIVE, reader, source, target, given=again.rows, teacher=again.teacher, pins=pins, close_=again.close
    )  # fmt: skip


def _need(reader: zgstore.Reader, *columns: str) -> None:
    lacking = [name for name in columns if name not in reader.columns]
    if lacking:
        raise zgstore.Invalid(
            f"the reader has no column {lacking[0]!r}" if lacking[0] else "no source or no target was named",
            hint=f"name two of the reader's columns as source and target: {', '.join(reader.columns)}; "
            "zgstore.read(…, columns=[…]) reads others",
        )


# ---- the order ----


class Trained:
    """The rows that are trained on, as a sampler wants them: a reader's, without those held out at its beginning.

    Args:
        reader: A snapshot's, or of a build that grows.
        held_out: So many first rows are left to the validation.
        stop: Asked while waiting for a build whether to give up.
    """

    def __init__(self, reader: zgstore.Reader, *, held_out: int = 0, stop: Stop = lambda: False) -> None:
        self._reader = reader
        self._stop = stop
        self.held_out = held_out
        if getattr(reader, "done", True) and held_out >= len(reader):
            raise zgstore.Invalid(
                f"{held_out} rows held out of {len(reader)} leave none to train on",
                hint="hold out fewer, or build more",
            )

    @property
    def data_digest(self) -> str:
        return self._reader.data_digest

    @property
    def done(self) -> bool:
        return bool(getattr(self._reader, "done", True))

    def __len__(self) -> int:
        return max(0, len(self._reader) - self.held_out)

    def lengths(self) -> Tensor:
        return self._reader.lengths()[self.held_out :]

    def wait(self, rows: int) -> bool:
        """Wait until the build has so many, is published, or somebody asks to stop."""
        wait = self._reader.wait  # type: ignore[attr-defined]  # asked for of a follower alone
        while not wait(rows + self.held_out, timeout_seconds=_LOOK_SECONDS) and not self.done:
            if self._stop():
                raise interrupted()
        return len(self) >= rows


def micro_batches(rows: Rows, size: int, *, first: int = 0) -> list[list[int]]:
    """A step's rows in pieces of at most ``size``, counted from the first row that is trained on."""
    return [[first + row for row in rows[at : at + size]] for at in range(0, len(rows), size)]
