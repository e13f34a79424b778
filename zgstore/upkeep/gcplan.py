"""What a collection will do, as a value: the roots read, the reachable marked, the rest listed (FORMAT 1, § 8, 1–3)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from stat import S_ISDIR
from typing import Any, Final, NamedTuple

from zgstore.errors import Corrupt, Missing
from zgstore.format.digest import DIGEST_BYTES, Digest
from zgstore.format.fields import all_digests, raw_digests
from zgstore.storage import partials
from zgstore.storage.files import directory, faults
from zgstore.storage.memos import ActionFile
from zgstore.storage.names import names_in
from zgstore.storage.objects import FAMILIES, Stat, Trashed
from zgstore.storage.refs import LogEntry, Ref
from zgstore.storage.store import Store
from zgstore.upkeep.digestsets import DigestSet
from zgstore.upkeep.reachability import (
    DAY_SECONDS,
    Reach,
    Retention,
    Roots,
    read_any,
    roots,
)

MIN_AGE_SECONDS: Final = 3600.0
TRASH_GRACE_SECONDS: Final = DAY_SECONDS
ACTION_SECONDS: Final = 7 * DAY_SECONDS
# A file in tmp/ that no lease names may be a ref on its way: an hour is more than any writer needs for it.
LEFTOVER_SECONDS: Final = 3600.0

# Trashed in this order, so that a kill leaves nothing that refers to what is gone.
_ORDER: Final = {"snapshot": 0, "record": 1, "root": 2, "rows-root": 2, "leaf": 3}


@dataclass(frozen=True, slots=True)
class Count:
    """So many objects of so many bytes."""

    objects: int = 0
    bytes: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(self.objects + other.objects, self.bytes + other.bytes)

    @classmethod
    def of(cls, items: Sequence[Candidate] | Sequence[Trashed] | Sequence[Leftover]) -> Count:
        return cls(len(items), sum(item.size for item in items))

    def as_json(self) -> dict[str, int]:
        return {"objects": self.objects, "bytes": self.bytes}


class Candidate(NamedTuple):
    """One object that is listed and not marked."""

    family: str
    digest: Digest
    size: int


class Leftover(NamedTuple):
    """What is left of what is gone.

    A dead ``lease``; something in ``tmp`` or ``builds`` of a dead one; an ``action`` without its blob; the marker of a
    ``part`` whose snapshot is gone. These two say what they are about (family, digest).
    """

    kind: str
    name: str
    size: int
    about: tuple[str, Digest] | None = None


@dataclass(frozen=True, slots=True)
class Rules:
    """Which ages protect what, in seconds by the file system's clock.

    Args:
        now: The moment the plan is about.
        min_age: An object younger than this is no candidate.
        trash_grace: What is in the trash for less stays there.
        action_age: An action younger than this keeps its blob.
        retention: Which reflog entries keep their snapshots.
    """

    now: float
    min_age: float = MIN_AGE_SECONDS
    trash_grace: float = TRASH_GRACE_SECONDS
    action_age: float = ACTION_SECONDS
    retention: Retention = field(default_factory=Retention)


@dataclass(frozen=True, slots=True)
class Marks:
    """What a re-check begins from.

    Args:
        reach: Everything that was reached.
        leased: How much of each lease was read.
        meta: The metadata that was listed: what is not among it was born since.
    """

    reach: Reach
    leased: Mapping[str, int]
    meta: DigestSet


@dataclass(frozen=True, slots=True)
class GcPlan:
    """What one collection will do; each step is re-checked when it is done.

    Args:
        rules: The ages it was made by.
        expire: Of each ref, the newest reflog entry past retention, which goes with all before it.
        leftovers: Of the dead, to remove.
        restore: In the trash, and kept by something: to move back.
        free: In the trash for longer than the grace: to unlink.
        quarantine: Metadata that nothing keeps and that cannot be parsed: to set aside.
        trash: What nothing keeps: to move into the trash, snapshots first and blobs last.
        waiting: What stays in the trash.
        kept: What stays in its place, by what keeps it: the kinds of roots, then ``action`` (a killed build can be
            resumed), ``recent`` (too young), ``foreign`` (no regular file: `verify` names it).
        resumable: What only young actions keep, or would if ``now`` did not collect it.
        marks: What a re-check begins from.
    """

    rules: Rules
    expire: tuple[tuple[Ref, LogEntry], ...]
    leftovers: tuple[Leftover, ...]
    restore: tuple[Trashed, ...]
    free: tuple[Trashed, ...]
    quarantine: tuple[Candidate, ...]
    trash: tuple[Candidate, ...]
    waiting: Count
    kept: Mapping[str, Count]
    resumable: Count
    marks: Marks = field(repr=False, compare=False)


def plan(
    store: Store,
    *,
    keep_last: int | None = None,
    grace_seconds: float | None = None,
    expire_reflog_seconds: float | None = None,
    now: bool = False,
) -> GcPlan:
    """Plan a collection; nothing is touched.

    Args:
        store: What is collected.
        keep_last: Keep so many entries of each reflog, however old; alone, it replaces the age.
        grace_seconds: Sets both graces: how old an object must be, and how long it stays in the trash.
        expire_reflog_seconds: Reflog entries go when their value was replaced so long ago; 30 days.
        now: Both graces and the actions' age are nothing.

    Raises:
        Missing, Corrupt: if metadata that something keeps is not there or cannot be parsed: what it keeps is unknown.
    """
    grace = 0.0 if now else grace_seconds
    rules = Rules(
        now=store.now(),
        min_age=MIN_AGE_SECONDS if grace is None else grace,
        trash_grace=TRASH_GRACE_SECONDS if grace is None else grace,
        action_age=0.0 if now else ACTION_SECONDS,
        retention=Retention.chosen(keep_last=keep_last, seconds=expire_reflog_seconds),
    )
    # (1) Lock exclusive: read the roots.
    with store.leases.store_lock(exclusive=True):
        found = roots(store, retention=rules.retention, now=rules.now)
    # (2) Unlocked: mark. What is there is listed before: what comes later is born since, whatever leases say of it.
    listed = {family: b"".join(store.objects.packed_names(family)) for family in FAMILIES}
    marks = _mark(store, found, listed["meta"])
    # (3) Candidates: listed and not marked.
    return _Sorting(store, rules, found, marks, listed).plan()


def _mark(store: Store, found: Roots, listed_meta: bytes) -> Marks:
    reached = Reach(store)
    for root in found.named:
        reached.add(root.digest, root.kind)
    meta = DigestSet(listed_meta)
    for _, leased in found.leased:
        # Most of what a builder's lease names are blobs; its pages may not all be there yet.
        for digest in all_digests(meta.within(leased)):
            with contextlib.suppress(Missing):
                reached.add(digest, "lease")
    for measurement in store.memos.measurements():
        named = b"".join(_digests_in(measurement))
        for digest in all_digests(meta.within(named)):
            # A memo's row pages, without which a build measures anew: no reason to stop.
            with contextlib.suppress(Missing, Corrupt):
                reached.add(digest, "measurement")
    return Marks(reached, {uuid: len(leased) for uuid, leased in found.leased}, meta)


def _digests_in(value: Any) -> Iterator[bytes]:
    """Whatever in a canonical value has a digest's width."""
    if isinstance(value, bytes) and len(value) == DIGEST_BYTES:
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _digests_in(each)
    elif isinstance(value, list):
        for each in value:
            yield from _digests_in(each)


class _Sorting:
    """Sorts what is listed and not marked into what stays and what goes."""

    def __init__(self, store: Store, rules: Rules, found: Roots, marks: Marks, listed: Mapping[str, bytes]) -> None:
        self.store, self.rules, self.marks, self.listed = store, rules, marks, listed
        self.found = found
        self.leased = DigestSet(b"".join(leased for _, leased in found.leased))
        self.sets = {family: DigestSet(joined) for family, joined in listed.items()}
        self.kept: dict[str, Count] = {}
        self.resumable = Count()

    def plan(self) -> GcPlan:
        loose = {family: self._loose(family) for family in FAMILIES}
        trashed = list(self.store.objects.trashed())
        actions: list[tuple[ActionFile, Digest, int]] = []
        if any(loose.values()) or trashed:  # else nothing depends on them, and there may be many
            actions = list(self._actions())
        if any(loose.values()):
            self._keep_what_young_snapshots_have(loose["meta"])
            loose = {family: self._loose(family) for family in FAMILIES}
        candidates = self._candidates(loose, actions)
        quarantine, trash = self._in_order(candidates)
        self._count_marked()
        restore, free, waiting = self._trash(trashed)
        gone = {(item.family, item.digest) for item in free}
        if self.rules.trash_grace <= 0:
            gone.update((item.family, item.digest) for item in trash)
        return GcPlan(
            rules=self.rules,
            expire=self.found.past,
            leftovers=(*self._leftovers(), *self._stale(actions, gone)),
            restore=restore, free=free, quarantine=quarantine, trash=trash, waiting=waiting,
            kept={reason: self.kept[reason] for reason in sorted(self.kept)},
            resumable=self.resumable, marks=self.marks,
        )  # fmt: skip

    def _loose(self, family: str) -> bytes:
        return self.marks.reach.without(self.listed[family], family)

    def _keep(self, reason: str, size: int) -> None:
        self.kept[reason] = self.kept.get(reason, Count()) + Count(1, size)

    # -- objects in their places -----------------------------------------------------------------------------------

    def _keep_what_young_snapshots_have(self, loose_meta: bytes) -> None:
        """A snapshot that was published without a ref keeps what it refers to while it is young."""
        for digest, stat in zip(all_digests(loose_meta), self._stats(loose_meta, "meta"), strict=True):
            if stat is not None and self._is_young(stat):
                with contextlib.suppress(Missing, Corrupt):
                    if read_any(self.store, digest)[0] == "snapshot":
                        self.marks.reach.add(digest, "recent")

    def _candidates(
        self, loose: Mapping[str, bytes], actions: Sequence[tuple[ActionFile, Digest, int]]
    ) -> list[Candidate]:
        """Only they are stat-ed; each is kept by a lease, an action or its youth, or goes."""
        young = {blob.raw for file, blob, _ in actions if self.rules.now - file.mtime_seconds < ACTION_SECONDS}
        candidates = []
        for family, joined in loose.items():
            leased = self.leased.mask(joined)
            for at, (raw, stat) in enumerate(zip(raw_digests(joined), self._stats(joined, family), strict=True)):
                if stat is None:
                    continue
                if stat is FOREIGN:
                    self._keep("foreign", 0)
                elif leased[at]:
                    self._keep("lease", stat.size)
                elif family == "objects" and raw in young:
                    self.resumable += Count(1, stat.size)
                    if self.rules.action_age > 0:
                        self._keep("action", stat.size)
                    else:
                        candidates.append(Candidate(family, Digest(raw), stat.size))
                elif self._is_young(stat):
                    self._keep("recent", stat.size)
                else:
                    candidates.append(Candidate(family, Digest(raw), stat.size))
        return candidates

    def _in_order(self, candidates: Iterable[Candidate]) -> tuple[tuple[Candidate, ...], tuple[Candidate, ...]]:
        quarantine, ordered = [], []
        for item in candidates:
            place = len(_ORDER) + 1
            if item.family == "meta":
                try:
                    place = _ORDER.get(read_any(self.store, item.digest)[0], len(_ORDER))
                except Corrupt:
                    quarantine.append(item)
                    continue
                except Missing:
                    continue
            ordered.append((place, item))
        ordered.sort(key=lambda each: each[0])
        return tuple(quarantine), tuple(item for _, item in ordered)

    def _count_marked(self) -> None:
        for met in self.marks.reach.meta.values():
            self._keep(met.reason, met.size_bytes)
        for reason, (objects, size) in self.marks.reach.credit(self.sets["objects"]).items():
            self.kept[reason] = self.kept.get(reason, Count()) + Count(objects, size)

    def _is_young(self, stat: Stat) -> bool:
        return self.rules.now - stat.touched_seconds < self.rules.min_age

    def _stats(self, joined: bytes, family: str) -> list[Stat | None]:
        digests = list(all_digests(joined))
        with contextlib.suppress(Corrupt):
            return self.store.objects.stats(digests, family)
        return [self._stat_of_any(digest, family) for digest in digests]

    def _stat_of_any(self, digest: Digest, family: str) -> Stat | None:
        try:
            return self.store.objects.stat(digest, family)
        except Corrupt:
            return FOREIGN

    # -- the trash, and what the dead left -------------------------------------------------------------------------

    def _trash(self, trashed: Sequence[Trashed]) -> tuple[tuple[Trashed, ...], tuple[Trashed, ...], Count]:
        restore, free, waiting = [], [], []
        for item in trashed:
            in_place = self._is_listed(item.digest, item.family)
            if not in_place and not self.marks.reach.without(item.digest.raw, item.family):
                restore.append(item)
            elif self._is_due(item) and (in_place or item.digest.raw not in self.leased):
                free.append(item)
            else:
                waiting.append(item)
        return tuple(restore), tuple(free), Count.of(waiting)

    def _is_listed(self, digest: Digest, family: str) -> bool:
        return digest.raw in self.sets[family]

    def _is_due(self, item: Trashed) -> bool:
        return item.epoch.isdecimal() and self.rules.now - int(item.epoch) >= self.rules.trash_grace

    def _leftovers(self) -> Iterator[Leftover]:
        """Dead leases, what lies in ``tmp/`` for no living one, and files of builds that are over."""
        leases = {lease.uuid: lease.alive for lease in self.store.leases.all(now=self.rules.now)}
        for uuid, alive in leases.items():
            if not alive:
                yield Leftover("lease", uuid, 0)
        for kind in ("tmp", "builds"):
            with faults(f"listing {kind}"), directory(self.store.path) as root:
                paths = [self.store.path / kind / name for name in sorted(names_in(root, kind))]
            for path in paths:
                touched, size = _touched_and_size(path)
                is_left = leases.get(path.name) is None and self.rules.now - touched >= LEFTOVER_SECONDS
                if leases.get(path.name) is False or is_left:
                    yield Leftover(kind, path.name, size)

    # -- memos -----------------------------------------------------------------------------------------------------

    def _actions(self) -> Iterator[tuple[ActionFile, Digest, int]]:
        for file in self.store.memos.actions():
            action = self.store.memos.read_action(file)
            if action is not None:
                yield file, action.blob.digest, file.size

    def _stale(
        self, actions: Sequence[tuple[ActionFile, Digest, int]], gone: set[tuple[str, Digest]]
    ) -> Iterator[Leftover]:
        """Memos of what is neither in its place nor in the trash, once this collection is over."""
        in_trash = {item.digest for item in self.store.objects.trashed() if item.family == "objects"}
        for path, snapshot in partials.listed(self.store.path):
            here = self._is_listed(snapshot, "meta") or self.store.objects.in_trash(snapshot, "meta")
            if not here or ("meta", snapshot) in gone:
                yield Leftover("part", snapshot.hex, path.lstat().st_size, ("meta", snapshot))
        for file, blob, size in actions:
            there = self._is_listed(blob, "objects") or blob in in_trash
            if not there or ("objects", blob) in gone:
                yield Leftover("action", str(file.path), size, ("objects", blob))


#: What ``stat`` says of something that has an object's name and is no regular file.
FOREIGN: Final = Stat(0, 0, 0, 0, 0)


def _touched_and_size(path: Path) -> tuple[float, int]:
    """When a file or folder was last touched, and the bytes of all in it; links are not followed."""
    touched, size = 0.0, 0
    coming = [path]  # no recursion: folders may lie in folders without end
    while coming:
        with contextlib.suppress(OSError):  # gone meanwhile, or too deep for a path
            each = coming.pop()
            entry = each.lstat()
            touched = max(touched, Stat.of(entry).touched_seconds)
            if S_ISDIR(entry.st_mode):
                coming += each.iterdir()
            else:
                size += entry.st_size
    return touched, size
