"""The scenarios: small sets of processes around one store, each with what it must never come to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

from tests.properties.gc_model import collecting, processes
from tests.properties.gc_model.logs import (
    ANOTHER,
    LAST,
    MONTH,
    NONE,
    NOTHING,
    THIS,
    Entry,
    Ref,
    logged,
    moved,
    oldest_forgotten,
)
from tests.properties.gc_model.protocol import Protocol
from tests.properties.gc_model.search import Scenario
from tests.properties.gc_model.world import (
    BLOB,
    BOTH,
    ENDED,
    LINKED,
    OLD,
    OVER,
    SNAPSHOT,
    TAKEN,
    UNKNOWN,
    YOUNG,
    Collector,
    Process,
    State,
    Store,
    aged,
    broken,
    gone,
    littered,
    lost,
    promised,
)

Event = Callable[[State, Protocol], Iterator[tuple[str, State]]]

# --- Whose turn it is -----------------------------------------------------------------------------------------------


def world_steps(*events: Event) -> Callable[[State, Protocol], Iterator[tuple[str, State]]]:
    """Every step that some process could take next, or that befalls one."""

    def steps(state: State, protocol: Protocol) -> Iterator[tuple[str, State]]:
        if not state.locks_work:
            protocol = _without_locks(protocol)
        if state.in_pieces:
            protocol = _in_pieces(protocol)
        yield from _processes(state, protocol)
        yield from _collectors(state, protocol)
        for event in events:
            yield from event(state, protocol)

    return steps


@cache
def _without_locks(protocol: Protocol) -> Protocol:
    return replace(protocol, collector_locks=False)


@cache
def _in_pieces(protocol: Protocol) -> Protocol:
    return replace(protocol, in_pieces=True)


def _processes(state: State, protocol: Protocol) -> Iterator[tuple[str, State]]:
    is_alone = any(each.step in collecting.IN_HOLD for each in state.collectors)
    if is_alone and not protocol.unlinks_aside:
        is_alone = any(each.step == "rename" for each in state.collectors)
    for at, me in enumerate(state.processes):
        if me.step in OVER:
            continue
        others = (*state.processes[:at], *state.processes[at + 1 :])
        if me.step in processes.MOVES and any(other.step in processes.MOVING for other in others):
            continue
        if not (is_alone and me.step in processes.LOCKED[me.kind] and _excludes(me, protocol)):
            for name, store, after in processes.STEPS[me.kind](state.store, me, protocol):
                yield f"{me.kind}: {name}", _with(state, store, others, after)
        yield f"{me.kind}: killed", _with(state, state.store, others, ENDED)


def _with(state: State, store: Store, others: tuple[Process, ...], me: Process) -> State:
    """Processes that are alike are exchangeable: states that differ by their order are one."""
    return state._replace(store=store, processes=tuple(sorted((*others, me))))


def _excludes(me: Process, protocol: Protocol) -> bool:
    """Whether the store lock keeps this process and a collector apart."""
    takes = protocol.readers_lock if me.kind in {"reader", "follower"} else protocol.writers_lock
    if me.linked == TAKEN and me.step in processes.IN_HOLD:
        # It slept within a hold, and its file server gave the lock away; the last look takes it anew.
        takes = takes and me.step == "last look" and protocol.last_look_locks
    return takes and protocol.collector_locks


def _is_held(state: State, protocol: Protocol) -> bool:
    """Whether somebody holds the store lock, shared, between two steps."""
    return protocol.publishes_in_one_hold and any(
        each.step in processes.IN_HOLD and each.linked != TAKEN and _excludes(each, protocol)
        for each in state.processes
    )


def _collectors(state: State, protocol: Protocol) -> Iterator[tuple[str, State]]:
    is_held = _is_held(state, protocol)
    for at, me in enumerate(state.collectors):
        others = (*state.collectors[:at], *state.collectors[at + 1 :])
        if me.step == "roots" and protocol.one_at_a_time and any(each.step not in IDLE for each in others):
            continue
        if is_held and me.step in EXCLUSIVE:
            continue
        for name, store, after in collecting.collector_steps(state, me, protocol):
            yield f"collector: {name}", state._replace(store=store, collectors=tuple(sorted((*others, after))))


IDLE = frozenset({"roots", "over", "littered"})
EXCLUSIVE = frozenset({"roots", "leases", "forget", "free", "restore", "quarantine", "trash", "unlink"})


# --- What befalls them ----------------------------------------------------------------------------------------------


def _moves(state: State) -> bool:
    """Whether somebody is in the middle of moving a ref: that keeps other movers out."""
    return any(each.step in processes.MOVING for each in state.processes)


def ref_removed(state: State, protocol: Protocol) -> Iterator[tuple[str, State]]:
    """``ref rm`` forgets the name and its reflog, the log first."""
    store = state.store
    if store.head.means == THIS and not _moves(state):
        stale = store.stale or not protocol.removal_forgets_the_reflog
        after = _forgotten(state, len(store.head.log))
        yield "ref removed", after._replace(store=store._replace(head=Ref(), stale=stale, recent=0))


def removal_killed(state: State, _: Protocol) -> Iterator[tuple[str, State]]:
    store = state.store
    if store.head.means != NOTHING and store.misfortunes and not _moves(state):
        less = state._replace(store=store._replace(misfortunes=store.misfortunes - 1, recent=0))
        for count in range(1, len(store.head.log) + 1):
            yield f"removal killed, {count} entries forgotten", _forgotten(less, count)


def _forgotten(state: State, count: int) -> State:
    """The head's oldest entries; of those that a collection planned to forget, so many fewer are there."""
    store = state.store._replace(head=oldest_forgotten(state.store.head, count))
    planned = tuple(each._replace(expires=max(0, each.expires - count)) for each in state.collectors)
    return state._replace(store=store, collectors=tuple(sorted(planned)))


def ref_moved_on(state: State, protocol: Protocol) -> Iterator[tuple[str, State]]:
    """The head moves on to another snapshot, and leaves this one to its log; or its mover is killed before it does."""
    store = state.store
    if store.head.means == THIS and not _moves(state):
        recent = store.recent if state.keeps != MONTH else BOTH
        after = store._replace(head=moved(store.head, ANOTHER, store.month, protocol), recent=recent)
        yield "ref moved on", state._replace(store=after)
        if store.misfortunes:
            head = logged(store.head, ANOTHER, store.month, protocol)
            less = store._replace(head=head, misfortunes=store.misfortunes - 1)
            yield "ref about to move on, killed", state._replace(store=less)


def lease_taken(state: State, protocol: Protocol) -> Iterator[tuple[str, State]]:
    """A host sleeps for longer than every grace, so a collector elsewhere takes its lease for dead; then it wakes."""
    store = state.store
    if not store.misfortunes or (_is_held(state, protocol) and not state.in_pieces):
        return
    less = store._replace(misfortunes=store.misfortunes - 1)
    for at, me in enumerate(state.processes):
        if me.linked == LINKED:
            others = (*state.processes[:at], *state.processes[at + 1 :])
            after = me._replace(linked=TAKEN, told=0)
            if me.kind == "grower":  # its file goes with its lease, and followers see no more of it
                after = after._replace(kind="builder", step="pages" if me.step == "tell" else me.step)
            yield f"{me.kind}: lease taken for dead", _with(state, less, others, after)


def hour_passed(state: State, _: Protocol) -> Iterator[tuple[str, State]]:
    """What was published without a name must be tagged within the hour; what was made has a week."""
    store = state.store
    if store.young:
        recent = 0 if store.memo == UNKNOWN else store.recent
        yield "an hour passes", state._replace(store=store._replace(young=0, recent=recent))


def week_passed(state: State, _: Protocol) -> Iterator[tuple[str, State]]:
    store = state.store
    if store.memo == YOUNG and store.misfortunes:
        less = store._replace(memo=OLD, young=0, recent=0, misfortunes=store.misfortunes - 1)
        yield "a week passes", state._replace(store=less)


def month_passed(state: State, _: Protocol) -> Iterator[tuple[str, State]]:
    store = state.store
    if state.keeps == MONTH and not store.month and (store.head.log or store.tag.log):
        yield "a month passes", state._replace(store=store._replace(month=1, recent=0))


def clock_set_back(state: State, _: Protocol) -> Iterator[tuple[str, State]]:
    store = state.store
    if store.month and store.misfortunes:
        less = store._replace(month=0, recent=0, misfortunes=store.misfortunes - 1)
        yield "the clock is set back by a month", state._replace(store=less)


def repaired(state: State, _: Protocol) -> Iterator[tuple[str, State]]:
    """A damaged snapshot that a name needs is fetched from another store; its blob would take a teacher."""
    store = state.store
    if store.damaged and promised(store):
        fetched = store._replace(damaged=False, here=store.here | SNAPSHOT)
        yield "the snapshot is repaired", state._replace(store=fetched)


# --- The scenarios --------------------------------------------------------------------------------------------------


def _starts(groups: tuple[str, ...], stores: list[Store], **how: object) -> list[State]:
    """Each group of processes beside each store."""
    first = {"tagger": "resolve", "setter": "resolve", "copier": "plan"}
    how = {"collectors": (Collector(runs=2),), **how}
    people = [tuple(sorted(Process(kind, first.get(kind, "begin")) for kind in group.split())) for group in groups]
    return [State(store, each, **how) for each in people for store in stores]  # type: ignore[arg-type]


def _any_of(*violations: Callable[[State], str | None]) -> Callable[[State], str | None]:
    return lambda state: next(filter(None, (violation(state) for violation in violations)), None)


# Heads: made for the snapshot; moved on from it; made for another; moved from there to it.
NAMED = Ref(THIS, (Entry(NOTHING, THIS),))
ONCE = Ref(ANOTHER, (Entry(THIS, ANOTHER), Entry(NOTHING, THIS)))
NEVER = Ref(ANOTHER, (Entry(NOTHING, ANOTHER),))
BACK = Ref(THIS, (Entry(ANOTHER, THIS), Entry(NOTHING, ANOTHER)))
ORPHANS = [
    # A published snapshot; a killed build's orphan; the same in the trash; an empty store.
    Store(here=BOTH, head=NAMED), Store(here=BLOB), Store(trash=BOTH), Store(),
]  # fmt: skip
SAFE = _any_of(lost, broken, littered)


def of_stores(*, deep: bool = False) -> list[Scenario]:
    """All scenarios; ``deep``: of all that are alternatives else at once, and a build beside the others."""

    def meet(*groups: str) -> tuple[str, ...]:
        together = " ".join(dict.fromkeys(" ".join(groups).split()))
        return (f"{together} builder",) if deep else groups

    moved, slept = world_steps(ref_removed), world_steps(ref_removed, lease_taken)
    sleepy = _once(ORPHANS)
    named = [
        Store(here=BOTH, head=Ref(THIS)), Store(here=BOTH, tag=Ref(THIS)), Store(here=BOTH, head=ONCE),
        Store(here=BOTH, held=True), Store(here=BOTH),
    ]  # fmt: skip
    unreadable = [Store(here=BOTH, head=Ref(THIS), damaged=True), Store(here=BOTH, damaged=True)]
    shared = [Store(here=BOTH, head=NAMED), Store(here=BOTH, trash=BLOB)]
    made = [Store(), Store(memo=OLD), Store(here=BLOB, memo=YOUNG, recent=BLOB), Store(trash=BLOB, memo=OLD)]
    unnamed = [Store(here=BLOB), Store(here=BLOB, trash=SNAPSHOT), Store()]
    elsewhere = _once([Store(here=BOTH, head=NEVER), Store(here=SNAPSHOT, trash=BLOB, head=NEVER)])
    wandered = _once([Store(here=BOTH, head=ref) for ref in (ONCE, BACK)])
    asleep = _once([*ORPHANS, Store(here=BOTH, head=NEVER)])
    two = (Collector(), Collector())
    return [
        Scenario("builders", _starts(meet("builder builder", "builder tagger"), ORPHANS), moved, SAFE),
        Scenario("sleeper", _starts(meet("builder", "tagger"), sleepy), slept, SAFE),
        Scenario(
            "asleep", _starts(meet("builder"), asleep, in_pieces=True)
            + _starts(meet("tagger"), asleep, in_pieces=True, keeps=LAST), slept, SAFE,
        ),
        Scenario("readers", _starts(meet("reader builder"), _once(shared)), slept, SAFE),
        Scenario("copy", _starts(meet("copier builder"), ORPHANS), moved, SAFE),
        Scenario("follower", _starts(meet("follower grower"), sleepy[1::2]), slept, FOLLOWED),
        Scenario(
            "actions", _starts(("resumer",), _once(made), graces=True),
            world_steps(ref_removed, hour_passed, week_passed), AGED,
        ),
        Scenario("unnamed", _starts(("nameless",), unnamed, graces=True), world_steps(hour_passed), AGED),
        Scenario(
            "names", [*_starts(("",), named + unreadable), *_starts(("",), named, keeps=NONE)],
            world_steps(ref_removed, month_passed, repaired), SAFE,
        ),
        Scenario(
            "moves",
            _starts(meet("setter"), elsewhere + wandered) + _starts(meet("setter setter"), elsewhere, keeps=LAST),
            world_steps(ref_moved_on, ref_removed, removal_killed, month_passed, clock_set_back), AGED,
        ),
        Scenario("collectors", _starts(("builder tagger",), ORPHANS, collectors=two), moved, SAFE),
        Scenario("no locks", _starts(("builder tagger",), ORPHANS, locks_work=False), moved, SAFE),
        Scenario("mistakes", _starts(meet("builder", "tagger"), ORPHANS, locks_work=False, owner=True), moved, gone),
    ]  # fmt: skip


def _once(stores: list[Store]) -> list[Store]:
    """The same, with one misfortune to come."""
    return [store._replace(misfortunes=1) for store in stores]


def _file_kept(state: State) -> str | None:
    """A build's file is kept while its lease lives."""
    told = {"publish", "close"}
    if state.store.file < 0 and any(
        each.kind == "grower" and each.linked == LINKED and each.step in told for each in state.processes
    ):
        return "broken: a build's file is gone while its lease lives"
    return None


FOLLOWED = _any_of(lost, broken, _file_kept, littered)
AGED = _any_of(aged, lost, broken, littered)
