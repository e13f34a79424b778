"""The teacher, run where the plan has gaps: shard by shard, its columns written batch by batch.

Nothing here decides what becomes of a shard: when its last batch has been handed over, ``finish`` is called on the
writing thread, and keeps it (a build), or only compares it (``verify --recompute``).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from zgstore.building.capture import Capture, Capturer, Extraction
from zgstore.building.identity import TeacherMemo, ambient, extractor_pin, known_teacher, measure_teacher, teacher_memo
from zgstore.building.inputs import START, Inputs, Replay, context_tensor
from zgstore.building.planner import Outline, ShardInputs, TeacherIdentity, Wanted
from zgstore.building.pool import Pool, trim
from zgstore.building.recipe import Recipe
from zgstore.building.rows import ID, Batch, SampleBatch, lengths_of
from zgstore.building.shards import Background, ShardDraft, weight_of
from zgstore.errors import Interrupted, Invalid
from zgstore.format.blobheader import lay_out, layout_of_column
from zgstore.format.digest import digest_of
from zgstore.format.manifest import Column
from zgstore.format.tensorfile import TORCH_OF, as_bytes, dtype_name
from zgstore.storage.sharing import Job
from zgstore.storage.store import Session, Store


class TeacherSource:
    """The recipe's teacher: known from an earlier measurement if it can be, loaded when it is needed.

    Args:
        store: Where measurements are.
        recipe: Who declares it.
        devices: Where it runs; several: a replica on each. Empty: where its factory puts it.
    """

    def __init__(self, store: Store, recipe: Recipe, *, devices: Sequence[str] = ()) -> None:
        self.store = store
        self.recipe = recipe
        self.devices = tuple(devices)
        for device in self.devices:
            _check_device(device)
        self.memo: TeacherMemo = teacher_memo(store, recipe)
        self.extractor: Mapping[str, Any] | None = extractor_pin(store, recipe)
        self.identity: TeacherIdentity | None = known_teacher(
            store, recipe, self.memo, device=self.devices[0] if self.devices else None
        )
        self.modules: list[nn.Module] = []
        self.measurement: dict[str, Any] | None = None
        self.seconds = 0.0

    @property
    def loaded(self) -> bool:
        """Whether its factory has been called."""
        return self.measurement is not None

    def load(self) -> TeacherIdentity:
        """Load and measure it, once.

        Raises:
            Refused: if it is not what an earlier build measured under its pins.
        """
        if self.modules and self.identity is not None:
            return self.identity
        began = time.perf_counter()
        before = ambient()
        modules = [self._placed(device) for device in self.devices or (None,)]
        self.identity, self.measurement = measure_teacher(
            self.store, self.recipe, modules[0], self.memo, ambient=before
        )
        self.modules = modules
        self.seconds += time.perf_counter() - began
        return self.identity

    def _placed(self, device: str | None) -> nn.Module:
        if device is not None and torch.device(device).type == "cuda":
            index, count = torch.device(device).index or 0, torch.cuda.device_count()
            if index >= count:
                raise Invalid(f"there is no {device}: this host has {count} CUDA devices", hint="name one that it has")
        module = self.recipe.teacher.load()
        if not isinstance(module, nn.Module):
            raise Invalid(
                f"{self.recipe.teacher.factory.text!r} returned a {type(module).__name__}, not a torch.nn.Module",
                hint="return the model itself",
            )
        return module.eval() if device is None else module.to(device).eval()

    def capturer(self, module: nn.Module, names: Sequence[str], pool: Pool) -> Capturer:
        """Hooks at the points among ``names``, or the extractor."""
        capture = self.recipe.capture
        dtype = self._common_dtype()
        if capture.extractor is not None:
            return Extraction(
                module, capture.extractor.resolve(), capture.args, context=capture.context, dtype=dtype,
                lengths=capture.lengths, sequence=capture.sequence, constants=capture.constants, pool=pool,
            )  # fmt: skip
        return Capture(
            module,
            [name for name in capture.boundaries if name in names],
            outputs=[name for name in capture.outputs if name in names],
            dtype=dtype, lengths=capture.lengths, sequence=capture.sequence, constants=capture.constants,
            inputs=capture.inputs, pool=pool,
        )  # fmt: skip

    def _common_dtype(self) -> torch.dtype | None:
        """The dtype that every boundary is cast to as it is copied; where they differ, the writer casts."""
        storage = self.recipe.storage
        if storage.dtype is None or any(each.dtype not in {None, storage.dtype} for each in storage.columns.values()):
            return None
        return TORCH_OF[storage.dtype]

    def close(self) -> None:
        """Let the teacher go."""
        self.modules = []


def _check_device(device: str) -> None:
    try:
        torch.device(device)
    except RuntimeError as error:
        raise Invalid(f"{device!r} is no device", hint="name devices as torch does: cpu, cuda:0") from error


@dataclass(frozen=True, slots=True)
class Captured:
    """A shard whose batches have all been handed over.

    Args:
        shard: Which.
        wanted: The columns that were captured.
        draft: Their bytes.
        left_out: Rows that an extractor left out: stream index → reason.
        seconds: The teacher's time.
    """

    shard: ShardInputs
    wanted: Sequence[Wanted]
    draft: ShardDraft
    left_out: Mapping[int, str]
    seconds: float


@dataclass(frozen=True, slots=True)
class Task:
    """A shard and the columns that are to be captured of it."""

    shard: ShardInputs
    wanted: tuple[Wanted, ...]

    @property
    def by_teacher(self) -> tuple[str, ...]:
        """The columns that the teacher makes."""
        return tuple(wanted.name for wanted in self.wanted if wanted.source == "teacher")


@dataclass(slots=True)
class Run:
    """Everything that running tasks needs.

    Args:
        session: Whose drafts.
        source: The teacher.
        inputs: The stream.
        limit: Rows of the stream at most; None: all.
        finish: Called on the writing thread with each whole shard.
        refresh: Called before a shard: the columns still to be captured; another build may have made some by now.
        stop: Asks whether to end after the shard in flight.
        tick: Called with (rows, bytes) handed over.
        check_space: Whether a disk that is too small is refused at the first batch.
        constants: Digest by name, as the first batch gave them; filled here for an extractor's.
        columns: All that an extractor's first batch gave; empty if that is not known.
        waiting: Tasks whose space has not been asked for.
        drafts: Of the shards under way.
        teacher_seconds: What the teacher took.
        store_seconds: What looking, hashing and writing took.
        needed_bytes: What the first shard's shapes said that all of them need.
    """

    session: Session
    source: TeacherSource
    inputs: Inputs
    limit: int | None
    finish: Callable[[Captured], None]
    refresh: Callable[[Task], Task] = lambda task: task
    stop: Callable[[], bool] = lambda: False
    tick: Callable[[int, int], None] = lambda _rows, _size: None
    check_space: bool = True
    constants: dict[str, bytes] = field(default_factory=dict)
    columns: Collection[str] = ()
    waiting: Sequence[Task] = ()
    drafts: list[ShardDraft] = field(default_factory=list)
    teacher_seconds: float = 0.0
    store_seconds: float = 0.0
    needed_bytes: int = 0
    _counting: threading.Lock = field(default_factory=threading.Lock)

    def spent(self, *, teacher: float = 0.0, store: float = 0.0) -> None:
        """Count seconds, from any thread."""
        with self._counting:
            self.teacher_seconds += teacher
            self.store_seconds += store


def run_tasks(run: Run, tasks: Sequence[Task]) -> None:
    """Capture every task, dealt out to the replicas, which run side by side; returns when the last shard is finished.

    Raises:
        Interrupted: if asked to stop; the shards so far are finished.
        Whatever the teacher, the capture or the writing thread raised.
    """
    run.waiting = tasks
    try:
        _run_all(run, tasks)
    finally:
        # The writing thread has ended: what it left unfinished is nobody's any more.
        for draft in run.drafts:
            draft.discard()
    if run.stop():
        raise Interrupted(
            "stopped after the shard in flight", hint="the store is sound: run the same command again to go on"
        )


def _run_all(run: Run, tasks: Sequence[Task]) -> None:
    replicas: list[nn.Module | None] = [*run.source.modules] or [None]
    over = threading.Event()  # what ends one replica ends the others at their next shard
    with Background() as background:
        if len(replicas) == 1:
            _run_share(run, background, replicas[0], tasks, over)
        else:
            with ThreadPoolExecutor(len(replicas)) as pool:
                shares = [
                    pool.submit(_run_share, run, background, module, tasks[at :: len(replicas)], over)
                    for at, module in enumerate(replicas)
                ]
                try:
                    for share in as_completed(shares):
                        share.result()
                finally:
                    over.set()
        background.drain()


def _run_share(
    run: Run, background: Background, module: nn.Module | None, tasks: Sequence[Task], over: threading.Event
) -> None:
    replay = Replay(run.source.recipe, run.inputs, limit=run.limit)
    pool = Pool()
    before: threading.Event | None = None
    with _Capturers(run.source, module, pool) as capturers:
        for task in tasks:
            if over.is_set() or run.stop():
                return
            left = run.refresh(task)
            if left.wanted:
                finished = _run_shard(run, background, capturers, replay, left)
                # A teacher that is faster than the disk would run ahead by shards, and a kill would cost them all.
                if before is not None:
                    background.wait(before)
                before = finished
                trim()


class _Capturers:
    """The capturer that stands now; another only when other points are missing."""

    def __init__(self, source: TeacherSource, module: nn.Module | None, pool: Pool) -> None:
        self.source = source
        self.module = module
        self.pool = pool
        self._names: tuple[str, ...] = ()
        self._capturer: Capturer | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._capturer is not None:
            self._capturer.close()

    def at(self, names: tuple[str, ...]) -> Capturer | None:
        """A capturer of these columns; None if they need no teacher."""
        if not names:
            return None
        if self.module is None:
            raise Invalid("columns of the teacher are missing and it is not loaded", hint="load it first")
        if self._capturer is None or self._names != names:
            if self._capturer is not None:
                self._capturer.close()
            self._capturer, self._names = self.source.capturer(self.module, names, self.pool), names
        return self._capturer


def _run_shard(run: Run, background: Background, capturers: _Capturers, replay: Replay, task: Task) -> threading.Event:
    """Hand the shard's batches over, then its end; what is returned is set when it is finished."""
    shard, inputs, recipe = task.shard, run.inputs, run.source.recipe
    filters = recipe.capture.extractor is not None
    lengths = None
    if inputs.lengths is not None:
        lengths = inputs.lengths[shard.first_row : shard.first_row + shard.rows]
    rows = None if filters else shard.rows
    draft = ShardDraft(run.session, task.wanted, rows=rows, lengths=lengths, pool=capturers.pool)
    run.drafts.append(draft)
    left_out, seconds = dict[int, str](), 0.0
    capturer = capturers.at(task.by_teacher)
    for index in range(shard.first_batch, shard.first_batch + shard.batches):
        info, batch = inputs.batches[index], replay.batch(index)
        began = time.perf_counter()
        tensors, sample = _tensors(run, task, capturer, batch, first=info.first)
        seconds += time.perf_counter() - began
        left_out |= {info.first + row: reason for row, reason in sample.left_out.items()}
        size = weight_of(tensors)
        if index == shard.first_batch and run.check_space:
            # The shapes are known from here on: refuse before rather than fail half way.
            needed = _still_needed(run, task, tensors, sample.packed)
            run.needed_bytes = max(run.needed_bytes, needed)
            run.session.store.check_space(needed or size * shard.batches)
        _add(run, background, draft, tensors, sample)
        run.tick(info.rows, size)
    run.spent(teacher=seconds)
    captured = Captured(shard, task.wanted, draft, left_out, seconds)

    finished = threading.Event()

    def finish() -> None:
        run.finish(captured)
        run.drafts.remove(draft)
        finished.set()

    background.submit(partial(_timed, run, finish))
    return finished


def _still_needed(run: Run, task: Task, tensors: Mapping[str, Tensor], packed: Collection[str]) -> int:
    """Bytes of all that is to be captured as this task is, asked once; 0 where an extractor may leave rows out."""
    waiting, run.waiting = run.waiting, ()
    if run.source.recipe.capture.extractor is not None:
        return 0
    columns = [_column_of(wanted, tensors[wanted.name], packed) for wanted in task.wanted]
    return sum(
        layout_of_column(column, rows=each.shard.rows, tokens=each.shard.tokens).file_size
        for each in waiting
        if each.wanted == task.wanted
        for column in columns
    )


def _column_of(wanted: Wanted, tensor: Tensor, packed: Collection[str]) -> Column:
    """The column that a wanted one is, as its first tensor shows it."""
    if wanted.known is not None:
        return wanted.known
    rest = tuple(tensor.shape[1:])
    dtype = wanted.dtype if wanted.dtype and tensor.is_floating_point() else dtype_name(tensor)
    return wanted.column(dtype, (None, *rest) if wanted.name in packed else rest)


def _add(
    run: Run, background: Background, draft: ShardDraft, tensors: Mapping[str, Tensor], sample: SampleBatch
) -> None:
    """Have a batch written: here, or by the writing thread once its tensors have come from a device."""
    pooled = frozenset({*sample.columns, *sample.outputs})

    def add() -> None:
        whole = sample.wait()
        background.share(
            draft.take(tensors, lengths=whole.lengths, packed=whole.packed, pooled=pooled, seen=whole.seen)
        )

    if sample.ready is not None:
        background.submit(partial(_timed, run, add), weight_bytes=weight_of(tensors))
    else:
        # Beside a teacher on the CPU no core is free: its threads would wait busily for the one that is taken.
        _timed(run, add)


def _timed(run: Run, work: Job) -> None:
    began = time.perf_counter()
    try:
        work()
    finally:
        run.spent(store=time.perf_counter() - began)


def _tensors(
    run: Run, task: Task, capturer: Capturer | None, batch: Batch, *, first: int
) -> tuple[dict[str, Tensor], SampleBatch]:
    """The wanted columns of one batch."""
    recipe = run.source.recipe
    sample = capturer(batch, first=first) if capturer is not None else SampleBatch(columns={})
    tensors = {**sample.columns, **sample.outputs}
    if recipe.capture.extractor is not None:
        _check_constants(run, sample)
        tensors |= columns_beside(sample)
        more = [name for name in (*sample.columns, *sample.outputs) if run.columns and name not in run.columns]
        if more:
            raise Invalid(
                f"the extractor gave the column {more[0]!r} for the batch at row {first}, and none such before",
                hint=f"it gave {', '.join(sorted(run.columns))}; give every batch the same columns",
            )
        return {wanted.name: tensors[wanted.name] for wanted in task.wanted if wanted.name in tensors}, sample
    runs = lengths_of(batch, recipe.capture.lengths) if recipe.capture.lengths else None
    ragged = set(sample.packed)
    for wanted in task.wanted:
        if wanted.source == "inputs" and wanted.known is not None:
            tensors[wanted.name] = context_tensor(batch, wanted.known, runs, first=first)
            if wanted.known.ragged:
                ragged.add(wanted.name)
    return tensors, replace(sample, lengths=runs[0] if runs else None, packed=frozenset(ragged))


def columns_beside(sample: SampleBatch) -> dict[str, Tensor]:
    """The context, ``id`` and ``start`` that a sample batch brings."""
    beside = dict(sample.context)
    if sample.ids is not None:
        beside[ID] = sample.ids
    if sample.starts is not None:
        beside[START] = sample.starts
    return beside


def constant_bytes(tensor: Tensor) -> tuple[bytes, str, tuple[int, ...]]:
    """A constant as a blob: its bytes, dtype and shape."""
    tensor = tensor.detach().cpu()
    dtype, shape = dtype_name(tensor, what="a constant"), tuple(tensor.shape)
    return lay_out({"data": (dtype, shape)}).encode() + bytes(as_bytes(tensor)), dtype, shape


def _check_constants(run: Run, sample: SampleBatch) -> None:
    for name, tensor in sample.constants.items():
        digest = digest_of(None, constant_bytes(tensor)[0]).raw
        if run.constants.setdefault(name, digest) != digest:
            raise Invalid(
                f"the extractor's constant {name!r} is another one in a later batch",
                hint="a constant is the same in every batch; give what changes as a column",
            )


def first_sample(source: TeacherSource, inputs: Inputs, *, limit: int | None) -> SampleBatch:
    """What the teacher makes of the first batch: names and shapes of all its columns."""
    source.load()
    capture = source.recipe.capture
    names = (*capture.boundaries, *capture.outputs)
    batch = Replay(source.recipe, inputs, limit=limit).batch(0)
    with contextlib.closing(source.capturer(source.modules[0], names, Pool())) as capturer:
        return capturer(batch, first=0).wait()


def outline_of(sample: SampleBatch) -> Outline:
    """The names and roles in an extractor's sample batch, in the snapshot's order, and its constants."""
    columns: list[tuple[str, str, int | None]] = [(name, "boundary", at) for at, name in enumerate(sample.columns)]
    columns += [(name, "output", None) for name in sample.outputs]
    columns += [(name, "context", None) for name in sample.context]
    if sample.ids is not None:
        columns.append((ID, "context", None))
    if sample.starts is not None and "position_ids" not in sample.context:
        columns.append((START, "context", None))
    return Outline(tuple(columns), tuple(name for name in sample.constants))
