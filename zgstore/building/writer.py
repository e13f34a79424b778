"""Tensors brought from anywhere, an inference server for instance, into a snapshot: without a recipe.

The rows of full shards are remembered by the writer's pins, so that one that was killed, or is to be extended, asks for
the rest only; their blobs are found as a build finds them, by the actions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import torch
from torch import Tensor

from zgstore.building.execution import columns_beside, constant_bytes
from zgstore.building.planner import ANY_PLATFORM, BuildPlan, ShardInputs, Wanted
from zgstore.building.publication import assemble, keep_constants, nonfinite_error, publish, record_of
from zgstore.building.recall import Found
from zgstore.building.rows import SampleBatch, join, row_digests
from zgstore.building.shards import ShardDraft
from zgstore.errors import Invalid, Refused
from zgstore.format import canonical
from zgstore.format.action import Action
from zgstore.format.digest import DIGEST_BYTES, Digest, digest_of
from zgstore.format.fields import nth_digest
from zgstore.format.manifest import CODECS, Column, Constant, Pins, Record
from zgstore.format.pages import rows_tree
from zgstore.storage.memos import platform_tag
from zgstore.storage.refs import ANY, Expectation
from zgstore.storage.sharing import Job
from zgstore.storage.store import Session, Store

Given = TypeVar("Given")
Result = TypeVar("Result")

DEFAULT_CUT: Final = 16
WRITERS: Final = 2  # threads of a shard's blobs; bench "ingest": one waits for the disk while the other hashes


@dataclass(frozen=True, slots=True)
class _Shard:
    """A durable shard.

    Args:
        rows: Its row digests, 32 bytes each.
        columns: Its columns.
        keys: Of their actions.
        actions: What they came out as.
    """

    rows: bytes
    columns: tuple[Column, ...]
    keys: tuple[Digest, ...]
    actions: tuple[Action, ...]


@dataclass(frozen=True, slots=True)
class _Known:
    """A shard that an earlier writer made durable; None where its blobs are gone since."""

    rows: bytes
    shard: _Shard | None


def writer(
    store: Store, pins: Pins, cut: int = DEFAULT_CUT, *, codecs: Mapping[str, str] | None = None,
    on_nonfinite: str = "error",
) -> Writer:  # fmt: skip
    """Write a snapshot batch by batch.

    Args:
        store: Where it goes.
        pins: ``teacher`` and ``data`` with ``id`` and ``revision``, and a ``capture`` of your own; the data's digest is
            taken of the rows.
        cut: Batches for each shard. Memory holds one shard.
        codecs: Column → ``raw`` or ``int8``.
        on_nonfinite: ``error``, or ``drop``: mask rows whose boundaries or outputs are not finite.

    Raises:
        Invalid: if a pin is missing.
    """
    return Writer(store, pins, cut, codecs=codecs or {}, on_nonfinite=on_nonfinite)


class Writer:
    """See `writer`; a context manager, whose end without ``commit`` leaves what is durable for the next one."""

    def __init__(self, store: Store, pins: Pins, cut: int, *, codecs: Mapping[str, str], on_nonfinite: str) -> None:
        _check(pins, cut, codecs)
        self._store = store
        self._base = {
            "teacher": dict(pins.teacher),
            "data": {"pins": {}, **{name: value for name, value in pins.data.items() if name != "digest"}},
            "capture": dict(pins.capture),
        }
        self._cut = cut
        self._codecs = dict(codecs)
        self._on_nonfinite = on_nonfinite
        self._opened: AbstractContextManager[Session] | None = None
        self._session: Session | None = None
        self._known: list[_Known] = []  # in the order of the stream that was brought before
        self._at = (0, 0)  # the durable shard, and the row of it, that the stream has come to
        self._due: list[bytes] = []
        self._pending: list[SampleBatch] = []
        self._shards: list[_Shard] = []
        self._constants: dict[str, Tensor] = {}

    def __enter__(self) -> Self:
        self._opened = self._store.writing("write tensors")
        self._session = self._opened.__enter__()
        while (value := self._store.memos.measurement(self._memo_key(len(self._known)))) is not None:
            self._known.append(_Known(value["rows"], self._found(value)))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._opened is not None:
            self._opened.__exit__(kind, error, at)
        self._opened = self._session = None

    def missing(self, digests: Sequence[Digest]) -> list[int]:
        """Which rows are still to be brought; the others are durable, and take their place in the snapshot.

        Args:
            digests: Of a batch's rows, from `row_digests`, in the order of the stream.

        Returns:
            Positions in ``digests``, ascending.

        Raises:
            Refused: if the stream leaves the one that was brought before, in the middle of a durable shard.
        """
        self._live()
        todo = [at for at, digest in enumerate(digests) if not self._is_durable(digest.raw)]
        self._due += [digests[at].raw for at in todo]
        return todo

    def add(self, batch: SampleBatch) -> None:
        """Bring a batch; every ``cut`` batches a shard becomes durable.

        Its rows are ``batch.digests``; else those that ``missing`` last asked for, in order; else those of its context.

        Raises:
            Invalid: if its tensors do not go together, or with the batches before.
            NonFinite: if a boundary has NaN or Inf, under ``error``.
        """
        self._live()
        batch = batch.wait()
        if not len(batch):
            raise Invalid("a batch of zero rows was added", hint="leave empty batches out")
        batch = replace(batch, digests=self._digests(batch))
        if batch.ids is None:
            first = self._rows()
            batch = replace(batch, ids=torch.arange(first, first + len(batch), dtype=torch.int64, device="cpu"))
        for name, tensor in batch.constants.items():
            known = self._constants.setdefault(name, tensor.detach().cpu().clone())
            if constant_bytes(known)[0] != constant_bytes(tensor)[0]:
                raise Invalid(f"the constant {name!r} is another one now", hint="give what changes as a column")
        full = len(self._pending) + 1 == self._cut
        # Until its shard is full a batch waits here, and its owner may fill the same tensors again.
        self._pending.append(batch if full else _own(batch))
        if full:
            self._flush()

    def commit(
        self, ref: str | None = None, *, expect: Digest | Expectation | None = ANY,
        circumstance: Mapping[str, Any] | None = None,
    ) -> Digest:  # fmt: skip
        """Publish what was brought.

        Args:
            ref: The ref to move; None moves none.
            expect: What the ref must name now; None if it must not exist.
            circumstance: Further fields of the record.

        Returns:
            The snapshot's digest.

        Raises:
            Invalid: if there is nothing, or a durable shard was asked for in part.
            Conflict: if the ref moved, to another snapshot than this.
        """
        session = self._live()
        if self._pending:
            self._flush()
        if not self._shards:
            raise Invalid("nothing was added", hint="add at least one batch before the commit")
        if self._inside():
            raise Invalid(
                "only some rows of a shard that is durable were asked for",
                hint="call missing() with every batch of the stream, in its order",
            )
        root, pages = rows_tree(b"".join(shard.rows for shard in self._shards))
        pin = {**self._base["data"], "digest": digest_of("page", root.encode()).raw}
        constants: tuple[Constant, ...] = keep_constants(session, self._constants)
        plan = self._plan(Pins(self._base["teacher"], pin, self._base["capture"]))
        assembled = assemble(plan, [*pages, root], constants, {}, cut=self._cut, on_nonfinite=self._on_nonfinite)
        parent = self._store.refs.get(ref, "head") if ref else None

        def record() -> Record:
            return record_of(
                self._store, assembled, plan, None, parent=parent, durations={}, circumstance=circumstance or {}
            )

        publish(session, assembled, ref=ref, expect=expect, record=record)
        return assembled.digest

    # ---- what was brought before ----

    def _is_durable(self, row: bytes) -> bool:
        """Whether the stream's next row is there already.

        It is found by its place, not by its digest alone: a row may stand in a stream more than once.
        """
        shard, at = self._at
        if shard == len(self._known):
            return False
        known = self._known[shard]
        if known.rows[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES] != row:
            if self._inside():
                raise Refused(
                    f"the row after {self._rows()} durable ones is not the one that was brought under these pins",
                    hint="give the changed data a revision of its own, or bring the rows that this revision names",
                )
            self._known = self._known[:shard]  # another stream from here on
            return False
        if at == 0 and known.shard is not None:
            if self._pending:
                self._flush()
            self._shards.append(known.shard)
        self._at = (shard, at + 1) if (at + 1) * DIGEST_BYTES < len(known.rows) else (shard + 1, 0)
        return known.shard is not None

    def _inside(self) -> bool:
        """Whether the stream has come to the middle of a durable shard."""
        shard, at = self._at
        return at > 0 and self._known[shard].shard is not None

    def _rows(self) -> int:
        """Rows of the snapshot so far."""
        return sum(len(shard.rows) for shard in self._shards) // DIGEST_BYTES + sum(map(len, self._pending))

    # ---- shards ----

    def _live(self) -> Session:
        if self._session is None:
            raise Invalid("the writer is closed", hint="use it inside `with zgstore.writer(…) as w:`")
        return self._session

    def _digests(self, batch: SampleBatch) -> bytes:
        count = len(batch)
        if batch.digests is not None:
            if len(batch.digests) != count * DIGEST_BYTES:
                raise Invalid(
                    f"a batch of {count} rows has {len(batch.digests)} bytes of row digests",
                    hint="give 32 bytes a row: zgstore.row_digests of the batch, joined",
                )
            return batch.digests
        if self._due:
            if count > len(self._due):
                raise Invalid(
                    f"{count} rows were added where {len(self._due)} are missing",
                    hint="add the rows that missing() returned, or give the batch its digests",
                )
            taken, self._due = self._due[:count], self._due[count:]
            return b"".join(taken)
        context = {name: tensor for name, tensor in batch.context.items() if name not in batch.packed}
        if not context:
            raise Invalid(
                "a batch without context says nothing of its rows",
                hint="call missing(zgstore.row_digests(batch)) before it is added, or give the batch its digests",
            )
        return join(row_digests(context))

    def _flush(self) -> None:
        """The pending batches as a shard: blobs, then actions, then which rows they hold."""
        session, batches = self._live(), self._pending
        self._pending = []
        rows = b"".join(batch.digests or b"" for batch in batches)
        ids = torch.cat([batch.ids for batch in batches if batch.ids is not None])
        wanted = self._wanted(batches[0])
        size = sum(tensor.nbytes for batch in batches for tensor in _tensors(batch).values())
        self._store.check_space(size)
        drafts = [ShardDraft(session, [one], rows=None, lengths=None) for one in wanted]
        try:
            _in_parallel(_done, [_taken(draft, batches) for draft in drafts])
            self._refuse(drafts, rows=self._rows())
            stored = _in_parallel(lambda draft: draft.keep()[0], drafts)
        except BaseException:
            for draft in drafts:
                draft.discard()
            raise
        session.sync()
        keys, actions = [], []
        for one, each in zip(wanted, stored, strict=True):
            key = self._key(one, rows, ids)
            action = Action(
                key, each.blob, each.rows, each.column.dtype, each.column.shape, ANY_PLATFORM, each.nonfinite,
                each.statistics,
            )  # fmt: skip
            self._store.memos.put_action(action, platform_tag(ANY_PLATFORM))
            keys.append(key)
            actions.append(action)
        shard = _Shard(rows, tuple(each.column for each in stored), tuple(keys), tuple(actions))
        if len(batches) == self._cut:
            # A short shard would be another one in a longer stream: its rows are asked for again.
            self._remember(shard)
        self._shards.append(shard)

    def _refuse(self, drafts: Sequence[ShardDraft], *, rows: int) -> None:
        if self._on_nonfinite == "drop":
            return
        for draft in drafts:
            for name, (bad, shown) in draft.check().items():
                raise nonfinite_error({rows + row: f"{name} is not finite" for row in bad}, shown=shown)

    def _wanted(self, batch: SampleBatch) -> list[Wanted]:
        listed: list[tuple[str, str, int | None]] = [(name, "boundary", at) for at, name in enumerate(batch.columns)]
        listed += [(name, "output", None) for name in batch.outputs]
        beside = columns_beside(batch)
        if "position_ids" in beside:
            beside.pop("start", None)
        listed += [(name, "context", None) for name in beside]
        unknown = [name for name in self._codecs if name not in {each[0] for each in listed}]
        if unknown:
            raise Invalid(f"there is no column {unknown[0]!r} to have a codec", hint="name columns of the batches")
        return [
            Wanted(name, role, depth, None, self._codecs.get(name, "raw"), "inputs", None, {"name": name}, b"")
            for name, role, depth in listed
        ]

    def _key(self, wanted: Wanted, rows: bytes, ids: Tensor) -> Digest:
        value = {"writer": self._base, "name": wanted.name, "codec": wanted.codec, "rows": rows}
        if wanted.name == "id":
            value["ids"] = digest_of("batch", str(ids.dtype).encode(), constant_bytes(ids)[0]).raw
        return digest_of("action", canonical.encode(value))

    def _memo_key(self, number: int) -> Digest:
        value = {"kind": "writer-shard", "writer": self._base, "cut": self._cut, "shard": number}
        return digest_of("measurement", canonical.encode(value))

    def _remember(self, shard: _Shard) -> None:
        self._store.memos.put_measurement(
            self._memo_key(len(self._shards)),
            {
                "kind": "writer-shard",
                "rows": shard.rows,
                "columns": [column.as_value() for column in shard.columns],
                "keys": b"".join(key.raw for key in shard.keys),
            },
        )

    def _found(self, value: Mapping[str, Any]) -> _Shard | None:
        """A shard that an earlier writer made durable, if its blobs are still there."""
        columns = tuple(Column.from_value(each) for each in value["columns"])
        if any(column.codec != self._codecs.get(column.name, "raw") for column in columns):
            return None
        keys = tuple(nth_digest(value["keys"], at) for at in range(len(columns)))
        actions = [self._store.memos.action(key, platform_tag(ANY_PLATFORM)) for key in keys]
        whole = tuple(action for action in actions if action is not None)
        if len(whole) != len(keys) or not all(self._live().reserve([action.blob for action in whole])):
            return None
        return _Shard(value["rows"], columns, keys, whole)

    def _plan(self, pins: Pins) -> BuildPlan:
        """What was brought, as a build's plan in which everything is found."""
        first = self._shards[0]
        for shard in self._shards:
            if shard.columns != first.columns:
                names = sorted({column.name for column in {*shard.columns} ^ {*first.columns}})
                raise Invalid(
                    f"the shards differ in the columns {', '.join(names)}",
                    hint="give every batch the same columns, dtypes and shapes",
                )
        columns = tuple(
            Wanted(c.name, c.role, c.depth, None, c.codec, "inputs", c, {"name": c.name}, b"") for c in first.columns
        )
        shards = tuple(_inputs(at, shard.rows) for at, shard in enumerate(self._shards))
        found = tuple(tuple(Found.of(shard.actions[c]) for shard in self._shards) for c in range(len(columns)))
        return BuildPlan(pins, columns, shards, found, ANY_PLATFORM)


def _check(pins: Pins, cut: int, codecs: Mapping[str, str]) -> None:
    for part in ("teacher", "data"):
        for name in ("id", "revision"):
            if not isinstance(getattr(pins, part).get(name), str) or not getattr(pins, part)[name]:
                raise Invalid(
                    f"the pins have no {part}.{name}",
                    hint='give Pins(teacher={"id": …, "revision": …}, data={…}, capture={…}): where it is all from',
                )
    if cut < 1:
        raise Invalid(f"a cut of {cut} batches makes no shard", hint="at least 1")
    for name, codec in codecs.items():
        if codec not in CODECS:
            raise Invalid(f"the codec of {name!r} is {codec!r}", hint=f"one of {', '.join(CODECS)}")


def _inputs(index: int, rows: bytes) -> ShardInputs:
    return ShardInputs(
        index=index, first_batch=0, batches=0, rows=len(rows) // DIGEST_BYTES, tokens=0, first_row=0, joined=rows,
        joined_ids=b"", inputs=digest_of("batch", rows),
    )  # fmt: skip


def _own(batch: SampleBatch) -> SampleBatch:
    def one(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.detach().to("cpu", copy=True)

    def each(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}

    return replace(
        batch, columns=each(batch.columns), outputs=each(batch.outputs), context=each(batch.context),
        lengths=one(batch.lengths), starts=one(batch.starts), ids=one(batch.ids),
    )  # fmt: skip


def _tensors(batch: SampleBatch) -> dict[str, Tensor]:
    return {**batch.columns, **batch.outputs, **columns_beside(batch)}


def _taken(draft: ShardDraft, batches: Sequence[SampleBatch]) -> list[Job]:
    # What was seen of a captured batch is not asked for: its tensors may have been changed since.
    return [job for batch in batches for job in draft.take(_tensors(batch), lengths=batch.lengths, packed=batch.packed)]


def _done(jobs: Sequence[Job]) -> None:
    for job in jobs:
        job()


def _in_parallel(work: Callable[[Given], Result], given: Sequence[Given]) -> list[Result]:
    with ThreadPoolExecutor(WRITERS) as pool:
        return list(pool.map(work, given))
