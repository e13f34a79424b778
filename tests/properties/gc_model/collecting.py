"""The collector's steps (1) to (5), numbered as in FORMAT 1, section 8, and in zgstore.upkeep."""

from __future__ import annotations

from collections.abc import Iterator

from tests.properties.gc_model.protocol import Protocol
from tests.properties.gc_model.world import (
    BLOB,
    BOTH,
    COMING,
    LINKED,
    NO_FILE,
    OLD,
    OVER,
    PROMISED,
    SNAPSHOT,
    UNKNOWN,
    YOUNG,
    Collector,
    State,
    Store,
    leased,
    named,
    reach,
    restored,
)

Steps = Iterator[tuple[str, Store, Collector]]
EACH = ((BLOB, "blob"), (SNAPSHOT, "snapshot"))
# Between these and the step before, the collector holds the store lock.
IN_HOLD = frozenset({"rename", "rename aside"})


def collector_steps(state: State, me: Collector, protocol: Protocol) -> Steps:
    """Every step that the collector could take next."""
    store = state.store
    if me.step in {"over", "littered"}:
        return
    if me.step != "roots":
        yield "killed", store, next_run(me)

    if me.step == "roots":
        yield from _read_roots(state, me, protocol)
    elif me.step == "leases":
        yield "roots: leases", store, me._replace(step="list", marked=me.marked | leased(state, protocol))
    elif me.step == "list":
        # (2) and (3) Unlocked. What is there is listed first: what comes later is born since.
        if protocol.lists_before_marking:
            yield "list", store, me._replace(step="mark", listed=store.here, due=store.trash)
        else:
            yield "mark", store, me._replace(step="list late", marked=reach(store, me.marked))
    elif me.step == "list late":
        yield "list", *_sorted(state, me._replace(listed=store.here, due=store.trash), protocol)
    elif me.step == "mark":
        yield from _mark(state, me, protocol)
    elif me.step == "restore":
        # In the trash though something keeps it.
        yield "restore", *_go_on(state, restored(store, me.marked, protocol), me._replace(step="trash"), protocol)
    elif me.step == "trash":
        yield from _trash(state, me, protocol)
    elif me.step == "rename":
        after = me._replace(step="trash", loose=0)
        yield "rename into the trash", *_go_on(state, _trashed(store, me.loose, protocol), after, protocol)
    elif me.step == "unlink":
        yield from _unlink(state, me, protocol)
    elif me.step == "rename aside":
        after = me._replace(step="unlink", loose=0)
        yield "rename aside", *_go_on(state, store._replace(trash=store.trash & ~me.loose), after, protocol)


def next_run(me: Collector) -> Collector:
    """The next collection, if there is one."""
    return Collector(runs=me.runs - 1) if me.runs > 1 else Collector("over", runs=0)


def _read_roots(state: State, me: Collector, protocol: Protocol) -> Steps:
    """(1) Lock exclusive: read the roots."""
    store = state.store
    if not (state.locks_work or state.owner) and protocol.refuses_without_locks:
        yield "refuse: locks do not work", store, Collector("over", runs=0)
        return
    after = me._replace(marked=named(store, protocol), garbage=_garbage(state))
    if not protocol.roots_in_one_hold:
        yield "roots: names", store, after._replace(step="leases")
    else:
        yield "roots", store, after._replace(step="list", marked=after.marked | leased(state, protocol))


def _mark(state: State, me: Collector, protocol: Protocol) -> Steps:
    """(2) Unlocked: mark. What a root names is immutable, and nobody but a collector would remove it."""
    store = state.store
    if me.marked & SNAPSHOT and _is_unreadable(store) and protocol.stops_at_damage:
        yield "mark: cannot be read, stop", store, Collector("over", runs=0)
    elif protocol.leased_snapshots_reach:
        yield "mark", *_sorted(state, me._replace(marked=reach(store, me.marked)), protocol)
    else:
        marked = me.marked | reach(store, named(store, protocol))
        yield "mark", *_sorted(state, me._replace(marked=marked), protocol)


def _is_unreadable(store: Store) -> bool:
    """Whether a name keeps what is not known: the snapshot is not there, or cannot be parsed."""
    return bool(store.names & PROMISED) and (store.damaged or not store.here & SNAPSHOT)


def _sorted(state: State, me: Collector, protocol: Protocol) -> tuple[Store, Collector]:
    """(3) Candidates: listed and not marked; not young, and no young action's."""
    store, marked = state.store, me.marked
    todo = me.listed & ~marked
    if state.graces:
        young = store.young if protocol.spares_the_young and protocol.one_clock else 0
        if todo & young & SNAPSHOT and protocol.young_snapshots_reach:
            marked |= BOTH
        memos = {YOUNG} if protocol.young_actions_keep else set()
        if not protocol.old_actions_keep_nothing:
            memos.add(OLD)
        todo &= ~marked & ~young & ~(BLOB if store.memo in memos else 0)
    if store.damaged and todo & SNAPSHOT:  # unreachable, and cannot be parsed
        if not protocol.quarantines:
            return store, _over(state, store, me)
        store = store._replace(here=store.here & ~SNAPSHOT)
        todo &= ~SNAPSHOT
    step = "restore" if me.due & marked & ~me.listed else "trash"
    return _go_on(state, store, me._replace(step=step, marked=marked, todo=todo), protocol)


def _go_on(state: State, store: Store, me: Collector, protocol: Protocol) -> tuple[Store, Collector]:
    """With nothing left to trash, to what is to be unlinked; with nothing left of that, to the end."""
    if me.step == "trash" and not me.todo:
        # Without graces this run unlinks what it has just trashed.
        me = me._replace(step="unlink", todo=me.due & store.trash if state.graces else store.trash, due=0)
    if me.step == "unlink" and not me.todo:
        if store.memo != UNKNOWN and not (store.here | store.trash) & BLOB:
            store = store._replace(memo=UNKNOWN)
        grows = any(process.kind == "grower" and process.linked == LINKED for process in state.processes)
        if store.file != NO_FILE and not (grows and protocol.build_files_live_with_their_lease):
            store = store._replace(file=NO_FILE)
        return store, _over(state, store, me)
    return store, me


def _kept_now(state: State, me: Collector, protocol: Protocol) -> int:
    """What names reach, leases name and reach, and snapshots born since refer to, under the lock."""
    store, kept = state.store, 0
    if protocol.rereads_names:
        kept |= reach(store, named(store, protocol))
    if protocol.rereads_leases:
        now = leased(state, protocol)
        kept |= now
        if protocol.reaches_what_is_newly_leased:  # what was leased before, (2) has reached
            kept |= reach(store, now & ~me.marked)
    born = store.here & SNAPSHOT & ~me.listed
    if protocol.rereads_births and born:
        kept |= reach(store, born)
    return kept


def _trash(state: State, me: Collector, protocol: Protocol) -> Steps:
    """(4) Lock exclusive, small batches: re-read, re-check each candidate, rename into the trash."""
    store = state.store
    kept = _kept_now(state, me, protocol)
    if _is_unreadable(store) and protocol.stops_at_damage:
        yield "re-check: cannot be read, stop", store, Collector("over", runs=0)
        return
    for which, name in EACH:
        if me.todo & which:
            after = me._replace(todo=me.todo & ~which)
            loose = which & store.here & ~kept
            if loose and not protocol.holds:
                yield f"re-check {name}: loose", store, after._replace(step="rename", loose=loose)
            elif loose:
                yield f"re-check {name}, trash", *_go_on(state, _trashed(store, loose, protocol), after, protocol)
            else:
                yield f"re-check {name}: kept", *_go_on(state, store, after, protocol)


def _trashed(store: Store, loose: int, protocol: Protocol) -> Store:
    loose &= store.here
    trash = store.trash | loose if protocol.trash_first else store.trash
    return store._replace(here=store.here & ~loose, trash=trash, young=store.young & ~loose)


def _unlink(state: State, me: Collector, protocol: Protocol) -> Steps:
    """(5) Repeat the re-check per batch, rename aside, unlink outside the lock: what lies aside concerns nobody."""
    store = state.store
    kept = _kept_now(state, me, protocol) & ~store.here if protocol.unlink_rechecks else 0
    if _is_unreadable(store) and protocol.stops_at_damage:
        yield "re-check: cannot be read, stop", store, Collector("over", runs=0)
        return
    for which, name in EACH:
        if me.todo & which:
            after = me._replace(todo=me.todo & ~which)
            loose = which & store.trash & ~kept
            if loose and not (protocol.holds and protocol.unlinks_aside):
                yield f"re-check {name}: loose", store, after._replace(step="rename aside", loose=loose)
            elif loose:
                aside = store._replace(trash=store.trash & ~loose)
                yield f"re-check {name}, rename aside", *_go_on(state, aside, after, protocol)
            else:
                yield f"re-check {name}: kept", *_go_on(state, store, after, protocol)


def _garbage(state: State) -> int:
    """What nothing keeps, where all others are over: it has to be gone when a collection is that begins now."""
    store = state.store
    if any(process.step not in OVER for process in state.processes):
        return 0
    kept = BOTH if store.names & (PROMISED | COMING) else 0
    if not state.graces:
        return (store.here | store.trash) & ~kept
    kept |= BOTH if store.young & SNAPSHOT else store.young
    return store.here & ~kept & ~(BLOB if store.memo == YOUNG else 0)


def _over(state: State, store: Store, me: Collector) -> Collector:
    """The next run; or the end, if there is left what must not be."""
    if me.garbage & (store.here if state.graces else store.here | store.trash):
        return Collector("littered", runs=0)
    return next_run(me)
