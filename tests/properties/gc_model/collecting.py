"""The collector's steps (1) to (5), numbered as in FORMAT 1, section 8, and in zgstore.upkeep."""

from __future__ import annotations

from collections.abc import Iterator

from tests.properties.gc_model.logs import Rules, expired, oldest_forgotten
from tests.properties.gc_model.protocol import Protocol
from tests.properties.gc_model.world import (
    BLOB,
    BOTH,
    LINKED,
    NO_FILE,
    OLD,
    OVER,
    SNAPSHOT,
    UNKNOWN,
    YOUNG,
    Collector,
    State,
    Store,
    leased,
    named,
    promised,
    reach,
    restored,
)

Steps = Iterator[tuple[str, Store, Collector]]
EACH = ((BLOB, "blob"), (SNAPSHOT, "snapshot"))
# Between these and the step before, the collector holds the store lock.
IN_HOLD = frozenset({"rename", "rename aside, free", "rename aside, unlink"})


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
        yield "roots: leases", store, me._replace(step="list", leased=leased(state, protocol))
    elif me.step == "list":
        # (2) and (3) Unlocked. What is there is listed first: what comes later is born since.
        if protocol.lists_before_marking:
            yield "list", store, me._replace(step="mark", listed=store.here, due=store.trash)
        else:
            yield "mark", store, _marked(store, me, store.here, protocol)._replace(step="list late")
    elif me.step == "list late":
        yield "list", *_sorted(state, me._replace(listed=store.here, due=store.trash), protocol)
    elif me.step == "mark":
        yield from _mark(state, me, protocol)
    elif me.step == "forget":
        yield from _forget(state, me, protocol)
    elif me.step == "restore":
        yield "restore", *_go_on(state, restored(store, me.back, protocol), me._replace(back=0), protocol)
    elif me.step == "quarantine":
        yield from _quarantine(state, me, protocol)
    elif me.step == "trash":
        yield from _trash(state, me, protocol)
    elif me.step == "rename":
        yield "rename into the trash", *_go_on(state, *_trashed(state, me, me.loose, protocol), protocol)
    elif me.step in {"free", "unlink"}:
        yield from _unlink(state, me, protocol)
    elif me.step in {"rename aside, free", "rename aside, unlink"}:
        after = me._replace(step=me.step.removeprefix("rename aside, "), loose=0)
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
    after = me._replace(
        month=store.month, marked=named(state, store.month, protocol),
        expires=expired(store.head, Rules(state.keeps, store.month), protocol), garbage=_garbage(state),
    )  # fmt: skip
    if not protocol.roots_in_one_hold:
        yield "roots: names", store, after._replace(step="leases")
    else:
        yield "roots", store, after._replace(step="list", leased=leased(state, protocol))


def _mark(state: State, me: Collector, protocol: Protocol) -> Steps:
    """(2) Unlocked: mark. What a root names is immutable, and nobody but a collector would remove it."""
    store = state.store
    if (me.marked | me.leased) & SNAPSHOT and _is_unreadable(store) and protocol.stops_at_damage:
        yield "mark: cannot be read, stop", store, Collector("over", runs=0)
    else:
        yield "mark", *_sorted(state, _marked(store, me, me.listed, protocol), protocol)


def _marked(store: Store, me: Collector, listed: int, protocol: Protocol) -> Collector:
    """What names reach, and what leased snapshots do that were listed; what else leases name may not be there yet."""
    snapshots = me.leased & listed & SNAPSHOT if protocol.leased_snapshots_reach else 0
    reached = reach(store, me.marked | snapshots)
    return me._replace(marked=reached | me.leased, reached=reached)


def _is_unreadable(store: Store) -> bool:
    """Whether a name keeps what is not known: the snapshot is not there, or cannot be parsed."""
    return promised(store) and (store.damaged or not store.here & SNAPSHOT)


def _sorted(state: State, me: Collector, protocol: Protocol) -> tuple[Store, Collector]:
    """(3) Candidates: listed and not marked; not young, and no young action's."""
    store, marked, reached = state.store, me.marked, me.reached
    todo = me.listed & ~marked
    if state.graces:
        young = store.young if protocol.spares_the_young and protocol.one_clock else 0
        if todo & young & SNAPSHOT and protocol.young_snapshots_reach:
            marked, reached = BOTH, BOTH
        memos = {YOUNG} if protocol.young_actions_keep else set()
        if not protocol.old_actions_keep_nothing:
            memos.add(OLD)
        todo &= ~marked & ~young & ~(BLOB if store.memo in memos else 0)
    # In the trash though something keeps it; what a lease alone names, its holder moves back.
    back = me.due & reached & ~me.listed
    due = me.due & ~back & (me.listed | ~me.leased)
    first = "forget" if protocol.forgets_before_trashing else "free"
    after = me._replace(step=first, leased=0, marked=marked, reached=0, todo=todo, back=back, due=due)
    return _go_on(state, store, after, protocol)


def _go_on(state: State, store: Store, me: Collector, protocol: Protocol) -> tuple[Store, Collector]:
    """The next of the steps that has something to do: what frees space comes first."""
    if me.step == "forget" and not me.expires:
        me = me._replace(step="free" if protocol.forgets_before_trashing else "over")
    if me.step == "free" and not me.due:
        me = me._replace(step="restore")
    if me.step == "restore" and not me.back:
        me = me._replace(step="quarantine")
    if me.step == "quarantine" and not (store.damaged and me.todo & SNAPSHOT):
        me = me._replace(step="trash")
    if me.step == "trash" and not me.todo:
        me = me._replace(step="unlink")
    if me.step == "unlink" and not me.due:
        me = me._replace(step="over" if protocol.forgets_before_trashing or not me.expires else "forget")
    return _over(state, store, me, protocol) if me.step == "over" else (store, me)


def _forget(state: State, me: Collector, protocol: Protocol) -> Steps:
    """Lock exclusive: what was past retention goes from the logs, before anything that it named."""
    store = state.store
    count = me.expires
    if not protocol.forgets_what_was_planned:
        count = expired(store.head, Rules(state.keeps, me.month), protocol)
    for some in range(1, count):
        killed = store._replace(head=oldest_forgotten(store.head, some))
        yield f"forget {some} of {count} entries, killed", killed, next_run(me)
    after = store._replace(head=oldest_forgotten(store.head, count))
    yield "forget", *_go_on(state, after, me._replace(expires=0), protocol)


def _kept_now(state: State, me: Collector, protocol: Protocol) -> int:
    """What names reach, leases name and reach, and snapshots born since refer to, under the lock."""
    store, kept = state.store, 0
    if protocol.rereads_names:
        # A ref that moved since leaves entries that nobody forgets now, whatever their age.
        kept |= reach(store, named(state, me.month, protocol, expired=protocol.rereads_all_that_is_logged))
    if protocol.rereads_leases:
        now = leased(state, protocol)
        kept |= now
        if protocol.reaches_what_is_newly_leased:  # what was leased before, (2) has reached
            kept |= reach(store, now & ~me.marked)
    born = store.here & SNAPSHOT & ~me.listed
    if protocol.rereads_births and born:
        kept |= reach(store, born)
    return kept


def _quarantine(state: State, me: Collector, protocol: Protocol) -> Steps:
    """What nothing keeps and cannot be parsed is set aside; re-checked like what is trashed."""
    store = state.store
    if _is_unreadable(store) and protocol.stops_at_damage:
        yield "re-check: cannot be read, stop", store, Collector("over", runs=0)
        return
    is_loose = not _kept_now(state, me, protocol) & SNAPSHOT and protocol.quarantines
    aside = store._replace(here=store.here & ~SNAPSHOT) if is_loose else store
    yield "quarantine", *_go_on(state, aside, me._replace(todo=me.todo & ~SNAPSHOT), protocol)


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
                yield f"re-check {name}, trash", *_go_on(state, *_trashed(state, after, loose, protocol), protocol)
            else:
                yield f"re-check {name}: kept", *_go_on(state, store, after, protocol)


def _trashed(state: State, me: Collector, loose: int, protocol: Protocol) -> tuple[Store, Collector]:
    """Without graces this run unlinks what it has just trashed."""
    store = state.store
    loose &= store.here
    trash = store.trash | loose if protocol.trash_first else store.trash
    due = me.due if state.graces else me.due | loose
    after = me._replace(step="trash", due=due, loose=0)
    return store._replace(here=store.here & ~loose, trash=trash, young=store.young & ~loose), after


def _unlink(state: State, me: Collector, protocol: Protocol) -> Steps:
    """(5) Repeat the re-check per batch, rename aside, unlink outside the lock: what lies aside concerns nobody."""
    store = state.store
    kept = _kept_now(state, me, protocol) & ~store.here if protocol.unlink_rechecks else 0
    if _is_unreadable(store) and protocol.stops_at_damage:
        yield "re-check: cannot be read, stop", store, Collector("over", runs=0)
        return
    for which, name in EACH:
        if me.due & which:
            after = me._replace(due=me.due & ~which)
            loose = which & store.trash & ~kept
            if loose and not (protocol.holds and protocol.unlinks_aside):
                yield f"re-check {name}: loose", store, after._replace(step=f"rename aside, {me.step}", loose=loose)
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
    kept = BOTH if named(state._replace(store=store._replace(stale=False)), store.month, Protocol()) else 0
    if not state.graces:
        return (store.here | store.trash) & ~kept
    kept |= BOTH if store.young & SNAPSHOT else store.young
    return store.here & ~kept & ~(BLOB if store.memo == YOUNG else 0)


def _over(state: State, store: Store, me: Collector, protocol: Protocol) -> tuple[Store, Collector]:
    """The next run; or the end, if there is left what must not be."""
    if store.memo != UNKNOWN and not (store.here | store.trash) & BLOB:
        store = store._replace(memo=UNKNOWN)
    grows = any(process.kind == "grower" and process.linked == LINKED for process in state.processes)
    if store.file != NO_FILE and not (grows and protocol.build_files_live_with_their_lease):
        store = store._replace(file=NO_FILE)
    if me.garbage & (store.here if state.graces else store.here | store.trash):
        return store, Collector("littered", runs=0)
    return store, next_run(me)
