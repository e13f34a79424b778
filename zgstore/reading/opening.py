"""Plan, lease and stamps joined into a reader: of a snapshot, or of a build that is still growing."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from zgstore.building import lockfile
from zgstore.errors import Interrupted, Missing
from zgstore.format.digest import Digest
from zgstore.format.manifest import Column, Constant
from zgstore.format.readplan import BlobPlan, ReadPlan
from zgstore.reading.blobs import Stamp
from zgstore.reading.layouts import auxiliaries
from zgstore.reading.reader import Closing, Reader, Verify, plain_reader
from zgstore.storage import partials
from zgstore.storage.leases import Lease
from zgstore.storage.naming import refuse_text
from zgstore.storage.objects import Stat
from zgstore.storage.store import Store

_TRIES: Final = 3
_LOOK_SECONDS: Final = 0.05
_ALIVE_SECONDS: Final = 1.0


def read(
    store: Store,
    rev: str | Digest,
    columns: Sequence[str] | None = None,
    *,
    verify: Verify = "first-use",
    near: Path | None = None,
) -> Reader:
    """A reader of a snapshot, whose objects gc keeps until the reader is closed.

    Where the store cannot be written there is no lease: then only gc's grace times, or a hold, keep the snapshot. Where
    no hold does, a ``RuntimeWarning`` says so.

    Args:
        store: Where it is.
        rev: Ref, tag, digest or prefix, ``NAME@{N}``, ``lock:NAME``.
        columns: Names, in the order wanted; default all that the store has.
        verify: ``first-use``, ``open`` or ``never``.
        near: Where the lock file of ``lock:NAME`` is looked for, going up; default the working directory.

    Raises:
        NotFound: if nothing is named so.
        Invalid: if the snapshot has no such column, or one text is given for them all.
        Missing: naming blobs that are not there.
        Partial: if the store has only a part of the snapshot, without a wanted column.
        Corrupt: if a blob has another size than it should; with ``open``, if one has other bytes.
    """
    refuse_text(columns, "columns")
    if isinstance(rev, str):
        rev = lockfile.resolve(rev, near or Path.cwd())
    lease = store.leases.try_take("read")
    try:
        plan, wanted, absent = _planned(store, lease, rev, columns)
        if lease is None and (said := store.unkept(Digest.parse(plan.snapshot))):
            warnings.warn(said, RuntimeWarning, stacklevel=2)
        return Reader(plan, columns=wanted, absent=absent, verify=verify, on_close=_closing(store, lease))
    except BaseException:
        if lease is not None:
            lease.close()
        raise


def follow(store: Store, build: str, columns: Sequence[str] | None = None, *, verify: Verify = "first-use") -> Follower:
    """A reader of a build that is still growing; its length grows by ``refresh`` and ``wait``.

    Args:
        store: Where it is.
        build: The build's UUID.
        columns: Names, in the order wanted; default all that the build makes.
        verify: ``first-use``, ``open`` or ``never``.

    Raises:
        NotFound: if there is no such build.
        Invalid: if it makes no such column.
    """
    refuse_text(columns, "columns")
    lease = store.leases.try_take("follow")
    try:
        grown = store.memos.build(build)
        available = grown.columns if grown is not None else ()
        wanted = [column.name for column in available] if columns is None else list(columns)
        chosen = [column for column in available if column.name in wanted]
        names = [*wanted, *auxiliaries(chosen, available)]
        plan, done = _leased_build_plan(store, lease, build, names, since=0)
        return Follower(plan, store=store, lease=lease, names=names, columns=wanted, verify=verify, done=done)
    except BaseException:
        if lease is not None:
            lease.close()
        raise


class Follower(Reader):
    """A reader whose rows become more as the build makes shards durable. ``follow`` makes one.

    Rows come in stream order, and a row's number never changes while the build grows. Pickled, and in workers, it is a
    plain reader of what was there.

    Args:
        plan: The build so far.
        store: Where it is.
        lease: What keeps it; None where the store cannot be written.
        names: The plan's columns.
        columns: Those to return.
        verify: As for a reader.
        done: Whether the build is published.
    """

    def __init__(
        self,
        plan: ReadPlan,
        *,
        store: Store,
        lease: Lease | None,
        names: Sequence[str],
        columns: Sequence[str],
        verify: Verify,
        done: bool,
    ) -> None:
        super().__init__(plan, columns=columns, verify=verify, on_close=_closing(store, lease))
        self._store = store
        self._lease = lease
        self._names = list(names)
        self._verify_open = verify == "open"
        self._seen_bytes = 0
        self._look_again = time.monotonic() + _ALIVE_SECONDS
        self.done = done

    def __reduce__(self) -> tuple[Any, ...]:
        return plain_reader, (self.__getstate__(),)

    def __getstate__(self) -> dict[str, Any]:
        mine = {"_store", "_lease", "_names", "_verify_open", "_seen_bytes", "_look_again", "done"}
        return {name: value for name, value in super().__getstate__().items() if name not in mine}

    def refresh(self) -> int:
        """Look for shards that became durable; the number of rows now.

        Raises:
            Corrupt: with ``verify="open"``, if a new blob is not what its name says.
        """
        if self.done:
            return len(self)
        # Asked many times between two shards: only a file that has grown is parsed, and its blobs are looked for.
        grown_bytes = self._store.memos.build_bytes(self.build)
        if not grown_bytes or grown_bytes != self._seen_bytes:
            plan, self.done = _leased_build_plan(
                self._store, self._lease, self.build, self._names, since=len(self._table.plan.shard_rows)
            )
            self._table.grow(plan)
            self._seen_bytes = grown_bytes
            if self._verify_open:
                self.verify_all()
        return len(self)

    def wait(self, rows: int, *, timeout_seconds: float | None = None) -> bool:
        """Wait until there are ``rows`` rows, or the build is published.

        Each second of waiting, in one call or in many short ones, the builder is seen to live.

        Args:
            rows: How many are needed.
            timeout_seconds: How long at most; None for as long as the build lives.

        Returns:
            Whether they are there.

        Raises:
            Interrupted: if the build ended without being published; rerunning it resumes it.
        """
        give_up = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while self.refresh() < rows and not self.done:
            now = time.monotonic()
            if give_up is not None and now >= give_up:
                break
            if now >= self._look_again:
                self._look_again = now + _ALIVE_SECONDS
                self._see_it_lives(rows)
            time.sleep(_LOOK_SECONDS)
        return len(self) >= rows

    def _see_it_lives(self, rows: int) -> None:
        if any(lease.uuid == self.build and lease.alive for lease in self._store.leases.all()):
            return
        if self.refresh() < rows and not self.done:  # what it did last, before it ended
            raise Interrupted(
                f"the build {self.build} ended after {len(self)} rows and was not published",
                hint="`zgstore build RECIPE` resumes it: start it, then follow that build",
                build=self.build,
                rows=len(self),
            )


def _planned(
    store: Store, lease: Lease | None, rev: str | Digest, columns: Sequence[str] | None
) -> tuple[ReadPlan, list[str], list[str]]:
    """Lease first, then resolve, then check presence; a ref that moved meanwhile is resolved again."""
    for attempt in range(_TRIES):
        digest = rev if isinstance(rev, Digest) else store.resolve(rev)
        try:
            if lease is not None:
                store.leases.name(lease, [digest])
            wanted, names, absent = _columns(store, digest, columns)
            return store.read_plan(digest, names), wanted, absent
        except Missing:
            moved = not isinstance(rev, Digest) and store.resolve(rev) != digest
            if not moved or attempt == _TRIES - 1:
                raise
    raise AssertionError


def _columns(store: Store, digest: Digest, columns: Sequence[str] | None) -> tuple[list[str], list[str], list[str]]:
    """The columns to return, those to open, and those that would serve and are not here."""
    snapshot = store.snapshot(digest)
    expected = partials.expected(store.path, digest)
    here = [column for column in snapshot.columns if expected is None or column.name in expected]
    wanted = [column.name for column in here] if columns is None else list(dict.fromkeys(columns))
    chosen: list[Column] = [snapshot.column(name)[1] for name in wanted]
    serving = auxiliaries(chosen, here)
    absent = [name for name in auxiliaries(chosen, snapshot.columns) if name not in serving]
    return wanted, [*wanted, *serving], absent


def _leased_build_plan(
    store: Store, lease: Lease | None, build: str, names: Sequence[str], *, since: int
) -> tuple[ReadPlan, bool]:
    """The same order for a growing build: what is new of it is named, then seen to be there, and no more taken up."""
    grown = store.memos.build(build)
    if grown is not None and lease is not None:
        digests = [blob.digest for shard in grown.shards[since:] for blob in shard.blobs]
        if not since:
            digests += [Constant.from_value(value).blob for value in grown.head.get("constants") or ()]
        store.leases.name(lease, digests if grown.snapshot is None else [*digests, grown.snapshot])
    return store.build_plan(build, names, grown=grown)


def _closing(store: Store, lease: Lease | None) -> Closing:
    def close(verified: list[tuple[BlobPlan, Stamp]]) -> None:
        try:
            if verified:
                stamps = [(Digest.parse(plan.name), "objects", Stat(*stamp)) for plan, stamp in verified]
                store.stamp(stamps)
        finally:
            if lease is not None:
                lease.close()

    return close
