"""A snapshot carried to another store: what is missing there, hashed as it is written, the ref last."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from shlex import quote
from typing import Any, Final

from zgstore.errors import Corrupt, Invalid, NoSpace, Partial
from zgstore.format.digest import Digest
from zgstore.format.fields import all_digests
from zgstore.format.manifest import Snapshot
from zgstore.format.pages import Blob
from zgstore.storage import partials
from zgstore.storage.naming import refuse_text
from zgstore.storage.store import ANY, Session, Store

PIECE_BYTES: Final = 1 << 20
# Reading, hashing and writing overlap on two threads; more of them only fight for one disk.
THREADS: Final = 2
RESERVED_AT_ONCE: Final = 4096


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """What a copy means to do.

    Args:
        snapshot: What is carried.
        columns: The columns whose blobs are carried; None means all.
        pages: Every page of the snapshot, in an order in which none comes before what it names.
        blobs: Blobs to carry, each once.
        present: Blobs that the target has already.
    """

    snapshot: Digest
    columns: tuple[str, ...] | None
    pages: tuple[Digest, ...]
    blobs: tuple[Blob, ...]
    present: tuple[Blob, ...]

    @property
    def bytes_to_copy(self) -> int:
        return sum(blob.size for blob in self.blobs)

    def as_json(self) -> dict[str, Any]:
        return {
            "snapshot": str(self.snapshot),
            "partial": self.columns is not None,
            "columns": None if self.columns is None else list(self.columns),
            "objects": {"copied": len(self.blobs), "present": len(self.present)},
            "bytes": {"copied": self.bytes_to_copy, "present": sum(blob.size for blob in self.present)},
        }


@dataclass(frozen=True, slots=True)
class CopyReport:
    """What a copy did; ``plan`` counts what was copied by this run and what was there.

    Args:
        plan: As it was carried out.
        ref: The name that was moved in the target; None where none was.
        to: The target's path.
        seconds: How long it took.
    """

    plan: CopyPlan
    ref: str | None
    to: str
    seconds: float

    def as_json(self) -> dict[str, Any]:
        return {**self.plan.as_json(), "ref": self.ref, "to": self.to, "seconds": self.seconds}


def plan_copy(store: Store, rev: str | Digest, *, to: Store, columns: Sequence[str] | None = None) -> CopyPlan:
    """What a copy would carry. Reads pages; opens no blob.

    Args:
        store: Where the snapshot is.
        rev: Which.
        to: The target.
        columns: A part: only these columns' blobs. Pages and constants are always whole.

    Raises:
        Invalid: for an unknown column, or a target that is the source.
        Partial: for a column that the source itself has not.
    """
    if store.path.samefile(to.path):
        raise Invalid(f"{to.path} is the store the snapshot is in", hint="name another store after --to")
    digest = rev if isinstance(rev, Digest) else store.resolve(rev)
    snapshot = store.snapshot(digest)
    chosen = columns_here(store, digest, snapshot, columns)
    carried: list[Blob] = []
    present: list[Blob] = []
    wanted = list(_blobs(store, snapshot, chosen))
    for blob, found in zip(wanted, to.objects.stats([blob.digest for blob in wanted], "objects"), strict=True):
        # A file of another size is not the object: the copy brings it, and placing it sets the bad one aside.
        (present if found is not None and found.size == blob.size else carried).append(blob)
    return CopyPlan(digest, chosen, tuple(_pages(store, snapshot)), tuple(carried), tuple(present))


def copy(
    store: Store,
    rev: str | Digest,
    *,
    to: Store,
    columns: Sequence[str] | None = None,
    ref: str | None = None,
    progress: Callable[[int], None] | None = None,
) -> CopyReport:
    """Carry a snapshot to another store: only what is missing there, its record with it, the ref last.

    Interrupted, it leaves whole objects only; a rerun carries the rest. Two copies at once agree: each object is
    placed once, and the ref moves when everything is there.

    Args:
        store: Where the snapshot is.
        rev: Which. Where it is a ref or tag and ``ref`` is None, the target gets the same name.
        to: The target.
        columns: A part: only these columns' blobs. The target is told that it has a part.
        ref: The head to move in the target.
        progress: Told the bytes carried, as they are.

    Raises:
        NoSpace: before anything is written, where the target cannot hold it.
        Corrupt, Missing: where a source object is not what its name says, or not there; nothing of it is kept.
        Conflict: where the target has a tag of that name on another snapshot.
    """
    started = time.monotonic()
    kind = "head"
    if ref is None and not isinstance(rev, Digest):
        ref, kind = _named(store, rev)
    if ref is not None:
        to.refs.check(ref, kind)
    digest = rev if isinstance(rev, Digest) else store.resolve(rev)
    with store.using(digest, purpose="copy"), to.writing("copy") as session:
        plan = plan_copy(store, digest, to=to, columns=columns)
        to.check_space(plan.bytes_to_copy)
        try:
            carried = _carry_blobs(store, session, plan, progress)
        except NoSpace:  # a disk that fills up meanwhile does not say what is needed
            to.check_space(plan_copy(store, digest, to=to, columns=columns).bytes_to_copy)
            raise
        _carry_pages(store, session, plan)
        session.sync()
        # A head follows; a tag is made, or is there already.
        expect = ANY if kind == "head" or ref is None else _if_made(to, ref, digest)
        session.publish(
            store.snapshot(digest),
            record=store.record_of(digest),
            ref=ref,
            kind=kind,
            expect=expect,
            columns=plan.columns,
        )
    everything = (*plan.blobs, *plan.present)
    done = replace(
        plan,
        blobs=tuple(blob for blob in everything if blob in carried),
        present=tuple(blob for blob in everything if blob not in carried),
    )
    return CopyReport(done, ref, str(to.path), time.monotonic() - started)


def _named(store: Store, rev: str) -> tuple[str | None, str]:
    for each in store.refs.list():
        if each.name == rev:
            return each.name, each.kind
    return None, "head"


def _if_made(to: Store, tag: str, digest: Digest) -> Digest | None:
    return digest if to.refs.get(tag, "tag") == digest else None


def columns_here(
    store: Store, digest: Digest, snapshot: Snapshot, columns: Sequence[str] | None
) -> tuple[str, ...] | None:
    """The chosen columns in the snapshot's order, None for all of them; of a part, those that are here.

    Raises:
        Invalid: for a column that the snapshot has not, or one text for them all.
        Partial: for one that it has, and this store has not.
    """
    refuse_text(columns, "columns")
    here = partials.expected(store.path, digest)
    names = [column.name for column in snapshot.columns]
    wanted = set(names if columns is None else [snapshot.column(name)[1].name for name in columns])
    if here is not None:
        absent = wanted - here
        if columns is not None and absent:
            raise Partial(
                f"{store.path} has only a part of {digest.short}, without {', '.join(sorted(absent))}",
                hint=f"take it from a store that has it whole, or choose among {', '.join(sorted(here))}",
                columns=sorted(here),
            )
        wanted &= here
    return None if len(wanted) == len(names) else tuple(name for name in names if name in wanted)


def _blobs(store: Store, snapshot: Snapshot, columns: tuple[str, ...] | None) -> Iterator[Blob]:
    """The blobs to carry, each once: constants first, then shard by shard."""
    seen: set[Digest] = set()
    places = [at for at, column in enumerate(snapshot.columns) if columns is None or column.name in columns]
    constants = (Blob(constant.blob, constant.size) for constant in snapshot.constants)
    shards = (shard.blobs[at] for shard in store.shards(snapshot) for at in places)
    for blobs in (constants, shards):
        for blob in blobs:
            if blob.digest not in seen:
                seen.add(blob.digest)
                yield blob


def _pages(store: Store, snapshot: Snapshot) -> Iterator[Digest]:
    """Every page of a snapshot, leaves before the root that names them."""
    yield from all_digests(store.root(snapshot).leaves)
    yield snapshot.root
    if snapshot.dropped is not None:
        yield snapshot.dropped
    root, rows = store.rows_root_of(snapshot), store.rows_root(snapshot)
    if root is not None and rows is not None:
        yield from all_digests(rows.pages)
        yield root


def _carry_blobs(store: Store, session: Session, plan: CopyPlan, progress: Callable[[int], None] | None) -> set[Blob]:
    """Carry what is missing; the blobs that this run brought.

    All are reserved before they are looked for, those that were there when the plan was made too.
    """
    carried: set[Blob] = set()
    everything = [*plan.present, *plan.blobs]
    running: set[Future[Blob]] = set()
    with ThreadPoolExecutor(THREADS, thread_name_prefix="copy") as pool:
        try:
            for start in range(0, len(everything), RESERVED_AT_ONCE):
                batch = everything[start : start + RESERVED_AT_ONCE]
                for blob, hit in zip(batch, session.reserve(batch), strict=True):
                    if not hit:
                        if len(running) >= 2 * THREADS:
                            running = _collect(running, carried)
                        running.add(pool.submit(carry, store, session, blob, progress))
            while running:
                running = _collect(running, carried)
        except BaseException:
            for future in running:
                future.cancel()
            raise
    return carried


def _collect(running: set[Future[Blob]], carried: set[Blob]) -> set[Future[Blob]]:
    done, left = wait(running, return_when=FIRST_COMPLETED)
    carried.update(future.result() for future in done)
    return left


def carry(store: Store, session: Session, blob: Blob, progress: Callable[[int], None] | None = None) -> Blob:
    """One blob: read, written, hashed as written; kept only if it is what its name says.

    Raises:
        Missing, Corrupt: if it is not there, or not what its name says: nothing of it is kept.
    """
    with os.fdopen(store.objects.open(blob.digest, "objects", size=blob.size), "rb", buffering=0) as file:
        draft = session.draft(size_hint=blob.size)
        try:
            piece = memoryview(bytearray(PIECE_BYTES))
            while count := file.readinto(piece):
                draft.write(piece[:count])
                if progress is not None:
                    progress(count)
            _check(store, blob, draft.finish())
        except BaseException:
            draft.discard()
            raise
    return session.keep(draft)


def _check(store: Store, blob: Blob, found: Blob) -> None:
    if found.digest == blob.digest:
        return
    raise Corrupt(
        f"blob {blob.digest.short} of {store.path} is not what its name says",
        hint=f"run `zgstore --store {quote(str(store.path))} verify --repair --recipe RECIPE`, then run this again",
        object=str(blob.digest),
        expected=str(blob.digest),
        actual=str(found.digest),
        path=str(store.objects.path(blob.digest, "objects")),
    )


def _carry_pages(store: Store, session: Session, plan: CopyPlan) -> None:
    for page in plan.pages:
        session.put_meta("page", store.objects.read_meta(page, "page"))
