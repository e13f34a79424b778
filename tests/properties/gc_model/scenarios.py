"""The scenarios: small sets of processes around one store, each with what it must never come to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

from tests.properties.gc_model import collecting, processes
from tests.properties.gc_model.protocol import Protocol
from tests.properties.gc_model.search import Scenario
from tests.properties.gc_model.world import (
    BLOB,
    BOTH,
    ENDED,
    HEAD,
    HOLD,
    LINKED,
    OLD,
    OVER,
    REFLOG,
    SNAPSHOT,
    STALE,
    TAG,
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
EXCLUSIVE = frozenset({"roots", "leases", "restore", "trash", "unlink"})


# --- What befalls them ----------------------------------------------------------------------------------------------


def ref_removed(state: State, protocol: Protocol) -> Iterator[tuple[str, State]]:
    """``ref rm`` forgets the name and its reflog; a head that moves on leaves the snapshot to the reflog."""
    store = state.store
    if store.names & HEAD:
        left = 0 if protocol.removal_forgets_the_reflog else STALE
        yield "ref removed", state._replace(store=store._replace(names=store.names & ~HEAD | left))


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


def month_passed(state: State, protocol: Protocol) -> Iterator[tuple[str, State]]:
    store = state.store
    if store.names & REFLOG:
        left = 0 if protocol.reflogs_expire else STALE
        yield "a month passes", state._replace(store=store._replace(names=store.names & ~REFLOG | left))


def repaired(state: State, _: Protocol) -> Iterator[tuple[str, State]]:
    """A damaged snapshot that a name needs is fetched from another store; its blob would take a teacher."""
    store = state.store
    if store.damaged and store.names:
        fetched = store._replace(damaged=False, here=store.here | SNAPSHOT)
        yield "the snapshot is repaired", state._replace(store=fetched)


# --- The scenarios --------------------------------------------------------------------------------------------------


def _starts(groups: tuple[str, ...], stores: list[Store], **how: object) -> list[State]:
    """Each group of processes beside each store."""
    first = {"tagger": "resolve", "copier": "plan"}
    how = {"collectors": (Collector(runs=2),), **how}
    people = [tuple(sorted(Process(kind, first.get(kind, "begin")) for kind in group.split())) for group in groups]
    return [State(store, each, **how) for each in people for store in stores]  # type: ignore[arg-type]


def _any_of(*violations: Callable[[State], str | None]) -> Callable[[State], str | None]:
    return lambda state: next(filter(None, (violation(state) for violation in violations)), None)


ORPHANS = [
    # A published snapshot; a killed build's orphan; the same in the trash; an empty store.
    Store(here=BOTH, names=HEAD), Store(here=BLOB), Store(trash=BOTH), Store(),
]  # fmt: skip
SAFE = _any_of(lost, broken, littered)


def of_stores(*, deep: bool = False) -> list[Scenario]:
    """All scenarios; ``deep``: of all that are alternatives else at once, and a build beside the others."""

    def meet(*groups: str) -> tuple[str, ...]:
        together = " ".join(dict.fromkeys(" ".join(groups).split()))
        return (f"{together} builder",) if deep else groups

    moved, slept = world_steps(ref_removed), world_steps(ref_removed, lease_taken)
    sleepy = _once(ORPHANS)
    named = [Store(here=BOTH, names=name) for name in (HEAD, TAG, REFLOG, HOLD, 0)]
    unreadable = [Store(here=BOTH, names=name, damaged=True) for name in (HEAD, 0)]
    shared = [Store(here=BOTH, names=HEAD), Store(here=BOTH, trash=BLOB)]
    made = [Store(), Store(memo=OLD), Store(here=BLOB, memo=YOUNG, recent=BLOB), Store(trash=BLOB, memo=OLD)]
    unnamed = [Store(here=BLOB), Store(here=BLOB, trash=SNAPSHOT), Store()]
    two = (Collector(), Collector())
    return [
        Scenario("builders", _starts(meet("builder builder", "builder tagger"), ORPHANS), moved, SAFE),
        Scenario("sleeper", _starts(meet("builder", "tagger"), sleepy), slept, SAFE),
        Scenario("asleep", _starts(meet("builder", "tagger"), sleepy, in_pieces=True), slept, SAFE),
        Scenario("readers", _starts(meet("reader builder"), _once(shared)), slept, SAFE),
        Scenario("copy", _starts(meet("copier builder"), ORPHANS), moved, SAFE),
        Scenario("follower", _starts(meet("follower grower"), sleepy[1::2]), slept, FOLLOWED),
        Scenario(
            "actions", _starts(("resumer",), _once(made), graces=True),
            world_steps(ref_removed, hour_passed, week_passed), AGED,
        ),
        Scenario("unnamed", _starts(("nameless",), unnamed, graces=True), world_steps(hour_passed), AGED),
        Scenario("names", _starts(("",), named + unreadable), world_steps(ref_removed, month_passed, repaired), SAFE),
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
