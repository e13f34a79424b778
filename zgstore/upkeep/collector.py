"""A store collected: what nothing keeps goes to the trash, and a grace later for good (FORMAT 1, § 8).

The order is the proof: ``tests/properties/gc_model`` has the same steps under the same names, and searches every
interleaving of them. Steps (1) to (3), in ``gcplan``, make a plan, which is what a dry run reports. Steps (4) and (5)
are here: lock, re-read, re-check, rename, in small batches; unlink outside the lock. Renames and unlinks alone: so a
full disk can be collected.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from zgstore.errors import Corrupt, Missing, Refused
from zgstore.format.digest import DIGEST_BYTES, Digest, digest_prefix
from zgstore.format.fields import all_digests, raw_digests
from zgstore.storage import partials
from zgstore.storage.files import SETTLE_SECONDS, directory, faults
from zgstore.storage.names import names_in
from zgstore.storage.objects import FAMILIES, PREFIXES, Trashed
from zgstore.storage.store import Store
from zgstore.upkeep.digestsets import DigestSet
from zgstore.upkeep.gcplan import Candidate, Count, GcPlan, Leftover, plan
from zgstore.upkeep.reachability import Reach, history_of, read_any, roots

__all__ = ["GcPlan", "GcReport", "collect", "plan"]

# So many renames keep the lock for a few milliseconds.
BATCH: Final = 256
NOTHING: Final = Count()


@dataclass(frozen=True, slots=True)
class GcReport:
    """What one collection did, or would do.

    Args:
        dry_run: Whether nothing was touched.
        live: What stays in its place.
        trashed: Moved into the trash.
        freed: Unlinked.
        restored: In the trash though something keeps it: moved back.
        quarantined: Metadata that nothing keeps and that cannot be parsed: set aside for people to look at.
        leftovers: Of killed processes: removed.
        kept: What stays, by what keeps it, as in ``GcPlan``.
        freeable_now: What ``--now`` would free beyond this.
        resumable: What only young actions keep: what ``--now`` costs.
    """

    dry_run: bool
    live: Count
    trashed: Count
    freed: Count
    restored: Count
    quarantined: Count
    leftovers: Count
    kept: Mapping[str, Count]
    freeable_now: Count
    resumable: Count

    def as_json(self) -> dict[str, Any]:
        counts = ("live", "trashed", "freed", "restored", "quarantined", "leftovers", "freeable_now", "resumable")
        return {
            "dry_run": self.dry_run,
            **{name: getattr(self, name).as_json() for name in counts},
            "kept": {reason: count.as_json() for reason, count in self.kept.items()},
        }


@dataclass(slots=True)
class Done:
    """What was done so far; of a dry run, what would be."""

    trashed: Count = NOTHING
    freed: Count = NOTHING
    restored: Count = NOTHING
    quarantined: Count = NOTHING
    leftovers: Count = NOTHING

    @classmethod
    def all_of(cls, planned: GcPlan) -> Done:
        trashed, freed = Count.of(planned.trash), Count.of(planned.free)
        return cls(
            trashed=trashed,
            freed=freed + trashed if planned.rules.trash_grace <= 0 else freed,
            restored=Count.of(planned.restore),
            quarantined=Count.of(planned.quarantine),
            leftovers=Count.of(planned.leftovers),
        )


def collect(
    store: Store,
    *,
    dry_run: bool = False,
    keep_last: int | None = None,
    grace_seconds: float | None = None,
    expire_reflog_seconds: float | None = None,
    now: bool = False,
    owner: bool = False,
    before: Callable[[GcPlan], None] | None = None,
) -> GcReport:
    """Collect garbage.

    Args:
        store: What is collected.
        dry_run: Only say what would be done.
        keep_last: Keep so many entries of each reflog, however old; alone, it replaces the age.
        grace_seconds: Sets both graces: how old an object must be, and how long it stays in the trash.
        expire_reflog_seconds: Reflog entries go when their value was replaced so long ago; 30 days.
        now: No grace at all, and nothing is kept for builds to resume; every re-check is made all the same.
        owner: This host alone collects: locks need not work.
        before: Told the plan before anything is touched.

    Raises:
        Refused: if file locks do not keep another process out here, and ``owner`` does not say that there is none.
        Busy: if another collection runs.
        Missing, Corrupt: if metadata that something keeps is not there or cannot be parsed. Nothing was touched.
    """
    with contextlib.ExitStack() as stack:
        if not dry_run:
            _check_locks(store, owner=owner)
            stack.enter_context(store.leases.gc_lock())
        planned = plan(
            store, keep_last=keep_last, grace_seconds=grace_seconds,
            expire_reflog_seconds=expire_reflog_seconds, now=now,
        )  # fmt: skip
        if before is not None:
            before(planned)
        done = Done.all_of(planned) if dry_run else _Collection(store, planned).run()
        return _report(planned, done, dry_run=dry_run)


def _check_locks(store: Store, *, owner: bool) -> None:
    if not owner and not store.leases.locks_work():
        raise Refused(
            "file locks do not keep another process out of this store",
            hint="collect on one host alone, and say so with `zgstore gc --owner`",
            path=str(store.path),
        )


def _report(planned: GcPlan, done: Done, *, dry_run: bool) -> GcReport:
    kept = dict(planned.kept)
    spared = Count.of(planned.trash).objects - done.trashed.objects
    if spared:  # a re-check found that something keeps it since the plan was made
        kept["recheck"] = Count(spared, Count.of(planned.trash).bytes - done.trashed.bytes)
    in_trash = planned.waiting if planned.rules.trash_grace <= 0 else planned.waiting + done.trashed
    return GcReport(
        dry_run=dry_run,
        live=sum(kept.values(), NOTHING),
        trashed=done.trashed, freed=done.freed, restored=done.restored,
        quarantined=done.quarantined, leftovers=done.leftovers, kept=kept,
        freeable_now=in_trash + kept.get("recent", Count()) + kept.get("action", Count()),
        resumable=planned.resumable,
    )  # fmt: skip


class _Collection:
    """Carries a plan out."""

    def __init__(self, store: Store, planned: GcPlan) -> None:
        self.store, self.planned = store, planned
        self.done = Done()
        self.recheck = _Recheck(store, planned)
        self.epoch = str(int(planned.rules.now))
        self.aside = f"gc-{uuid.uuid4()}"  # in tmp/: on its way out

    def run(self) -> Done:
        """What frees space comes first: on a full disk the rest may need it."""
        self._expire_reflogs()
        self._remove_leftovers()
        self._unlink(self.planned.free)
        self._restore()
        self._quarantine()
        trashed = self._trash()
        if self.planned.rules.trash_grace <= 0:
            self._unlink(trashed)
        self._remove_memos()
        for epoch in self.store.objects.epochs():
            self.store.objects.remove_epoch(epoch)
        return self.done

    def _expire_reflogs(self) -> None:
        """What was past retention when the roots were read; what was logged since is none of it, by whatever clock."""
        if self.planned.expire:
            with self._alone():
                for ref, entry in self.planned.expire:
                    if entry in history_of(self.store, ref).entries:  # else removed, and given anew maybe
                        self.store.refs.forget(ref.name, ref.kind, through=entry.number)

    def _remove_leftovers(self) -> None:
        for leftover in self.planned.leftovers:
            if leftover.about is None and self._bury(leftover):
                if leftover.kind == "tmp":
                    self.store.objects.remove_aside(self.aside)
                self.done.leftovers += Count(1, leftover.size)

    def _remove_memos(self) -> None:
        """Last, and only of what is gone in the end: a re-check may have kept it."""
        objects = self.store.objects
        for leftover in self.planned.leftovers:
            if leftover.about is None:
                continue
            family, digest = leftover.about
            if objects.stat(digest, family) is None and not objects.in_trash(digest, family):
                if leftover.kind == "action":
                    self.store.memos.remove(Path(leftover.name))
                else:
                    partials.clear(self.store.path, digest)
                self.done.leftovers += Count(1, leftover.size)

    def _bury(self, leftover: Leftover) -> bool:
        """Remove what is left of a dead holder, unless it turns out to live.

        Its folder is set aside under the lock: one that wakes then finds that it has none, and makes itself another.
        """
        with self._alone():
            if self.store.leases.alive(leftover.name):
                return False
            if leftover.kind == "lease":
                self.store.leases.remove(leftover.name)
            elif leftover.kind == "builds":
                self.store.memos.remove_build(leftover.name)
            elif leftover.kind == "tmp":
                self.store.objects.folder_aside(leftover.name, self.aside)
            return True

    # (5) Repeat the re-check per batch, rename aside, unlink outside the lock.
    def _unlink(self, trashed: Sequence[Trashed]) -> None:
        for batch in _batches(trashed):
            with self._alone():
                loose = self.recheck.loose([(item.family, item.digest) for item in batch])
                due = [item for item in batch if (item.family, item.digest) in loose or self._is_in_place(item)]
                gone = self.store.objects.all_aside(due, self.aside)
            self.store.objects.remove_aside(self.aside)
            self.done.freed += Count.of(gone)

    def _is_in_place(self, item: Trashed) -> bool:
        """A second copy: it was moved to the trash, and written again since."""
        return self.store.objects.stat(item.digest, item.family) is not None

    def _restore(self) -> None:
        for batch in _batches(self.planned.restore):
            with self._alone():
                for item in batch:
                    if self.store.objects.restore(item.digest, item.family):
                        self.done.restored += Count(1, item.size)
        self.store.objects.sync()

    def _quarantine(self) -> None:
        for batch in _batches(self.planned.quarantine):
            with self._alone():
                loose = self.recheck.loose([(item.family, item.digest) for item in batch])
                for item in batch:
                    if (item.family, item.digest) in loose:
                        self.store.objects.quarantine(item.digest, item.family)
                        self.done.quarantined += Count(1, item.size)

    # (4) Lock exclusive, small batches: re-read, re-check each candidate, rename into the trash.
    def _trash(self) -> list[Trashed]:
        trashed: list[Trashed] = []
        for batch in _batches(self.planned.trash):
            with self._alone():
                loose = self.recheck.loose([(item.family, item.digest) for item in batch])
                moved = set(self.store.objects.all_to_trash(self.epoch, loose))
            trashed += [Trashed(self.epoch, *item) for item in batch if item[:2] in moved]
        self.done.trashed = Count.of(trashed)
        return trashed

    def _alone(self) -> contextlib.AbstractContextManager[None]:
        return self.store.leases.store_lock(exclusive=True)


Item = TypeVar("Item", Candidate, Trashed)


def _batches(items: Sequence[Item]) -> Iterator[Sequence[Item]]:
    for at in range(0, len(items), BATCH):
        yield items[at : at + BATCH]


class _Recheck:
    """What the candidates of a plan are kept by since it was made; asked under the exclusive lock."""

    def __init__(self, store: Store, planned: GcPlan) -> None:
        self.store, self.rules, self.marks = store, planned.rules, planned.marks
        self.since = Reach(store, beyond=planned.marks.reach)
        self.read = dict(planned.marks.leased)
        self.folders = dict.fromkeys((store.path / "meta" / prefix for prefix in PREFIXES), 0)

    def loose(self, items: Sequence[tuple[str, Digest]]) -> set[tuple[str, Digest]]:
        """Those of the items (family, digest) that nothing keeps."""
        # A ref that moved since leaves entries that nobody forgets now, by whatever clock or number they would be due.
        found = roots(self.store, retention=self.rules.retention, now=self.rules.now, expired=True)
        for root in found.named:
            self.since.add(root.digest, root.kind)
        batch = DigestSet(b"".join(digest.raw for _, digest in items))
        leased: set[bytes] = set()
        for lease, digests in found.leased:
            leased.update(raw_digests(batch.within(digests)))
            self._reach_what_is_new(lease, digests)
        self._reach_snapshots_born_since()
        loose: set[tuple[str, Digest]] = set()
        for family in FAMILIES:
            mine = b"".join(digest.raw for of, digest in items if of == family and digest.raw not in leased)
            loose.update((family, digest) for digest in all_digests(self.since.without(mine, family)))
        return loose

    def _reach_what_is_new(self, lease: str, digests: bytes) -> None:
        """A reader's lease may name a snapshot that nothing else keeps."""
        read = min(self.read.get(lease, 0), len(digests))
        self.read[lease] = len(digests)
        for digest in all_digests(digests[read:]):
            with contextlib.suppress(Missing):
                if self.store.objects.stat(digest, "meta") is not None:
                    self.since.add(digest, "lease")

    def _reach_snapshots_born_since(self) -> None:
        settled = (self.store.now() - SETTLE_SECONDS) * 1e9
        for folder, seen in self.folders.items():
            changed = 0
            with contextlib.suppress(FileNotFoundError):  # a copy may have lost its empty folders
                changed = folder.lstat().st_mtime_ns
            if changed == seen:
                continue
            if changed < settled:  # else more may come under the same stamp
                self.folders[folder] = changed
            with faults(f"listing {folder}"), directory(folder.parent) as meta:
                names = b"".join(map(_digest_named, names_in(meta, folder.name)))
            for digest in all_digests(self.marks.meta.without(names)):
                with contextlib.suppress(Missing, Corrupt):
                    if read_any(self.store, digest)[0] == "snapshot":
                        self.since.add(digest, "recent")


def _digest_named(name: str) -> bytes:
    """The digest in a metadata file's name; nothing if it is no such name."""
    prefix = digest_prefix(name.removesuffix(FAMILIES["meta"]))
    return bytes.fromhex(prefix) if prefix is not None and len(prefix) == 2 * DIGEST_BYTES else b""
