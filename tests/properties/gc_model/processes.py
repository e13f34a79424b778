"""Those beside the collector: builders, copies, taggers, readers, followers; each step as the code takes it.

A step is what is done under one hold of the store lock, or one change without it. Where a mutation lets others in
between, a hold is as many steps as it has changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tests.properties.gc_model.logs import THIS, Ref, logged, moved, taken_back
from tests.properties.gc_model.protocol import Protocol
from tests.properties.gc_model.world import (
    BLOB,
    BOTH,
    ENDED,
    LINKED,
    NO_FILE,
    NO_LEASE,
    OLD,
    SNAPSHOT,
    TAKEN,
    UNKNOWN,
    UNNOTICED,
    YOUNG,
    Process,
    Store,
    restored,
)

Steps = Iterator[tuple[str, Store, Process]]

# Steps that are taken under the store lock, shared; in the middle of some of them it is still held.
LOCKED = {
    "builder": frozenset({"reserve", "look", "append", "pages", "publish", "snapshot in", "ref", "last look", "show"}),
    "tagger": frozenset({"confirm", "tag", "last look", "show"}),
    "reader": frozenset({"name"}),
    "follower": frozenset({"name"}),
}
IN_HOLD = frozenset({"snapshot in", "ref", "tag", "last look", "show"})
# Movers of refs keep each other out from one of these to the last.
MOVING = frozenset({"last look", "show"})
MOVES = frozenset({"ref", "tag"})
SETTERS = frozenset({"tagger", "setter"})  # of what is there
REFS = {"tagger": "tag"}  # which name one moves; the others move the head
NOTICING = frozenset({"reserve", "append", "pages", "publish"})  # a writer's holds begin with a look at its lease


# --- Writers --------------------------------------------------------------------------------------------------------


def builder_steps(store: Store, me: Process, protocol: Protocol) -> Steps:
    """A build of one shard, and a copy, which looks first what is there: ``zgstore.storage.session``."""
    if me.step == "plan":
        # A copy's plan, made before anything is reserved.
        yield "plan", store, me._replace(step="begin", sees=store.here & BLOB)
    elif me.step == "begin":
        skips = me.sees and not protocol.copies_reserve_what_is_there
        step = "pages" if skips else _first(protocol)
        yield "take lease", store, Process(me.kind, step, lease=0, linked=LINKED, told=me.sees if skips else 0)
    elif me.step in NOTICING and me.linked == TAKEN and me.lease != NO_LEASE:
        if protocol.writers_notice:
            yield "notice, take another lease", *_taken_again(store, me, protocol)
        else:
            yield "do not notice", store, me._replace(linked=UNNOTICED)
    elif me.step == "reserve":
        yield from _look(store, me._replace(lease=me.lease | BLOB), protocol)
    elif me.step == "look":
        yield from _look(store, me, protocol)
    elif me.step == "append":
        yield "append", store, _counted(me._replace(lease=me.lease | BLOB), protocol)
    elif me.step == "place":
        # Not under the lock. The file, then the action that says of it; both are young.
        placed = store._replace(here=store.here | BLOB, young=store.young | BLOB)
        if me.kind == "resumer":
            memo = YOUNG if protocol.actions_are_replaced else max(store.memo, OLD)
            placed = placed._replace(memo=memo, recent=BLOB)
        yield "place", placed, _told(me, protocol, me.linked != TAKEN)
    elif me.step == "tell":
        yield "tell followers", store._replace(file=BLOB), me._replace(step=_next(protocol))
    elif me.step == "pages":
        # Pages and the snapshot are reserved like blobs, and put in where they are not there.
        yield "reserve the snapshot", store, me._replace(step="publish", lease=me.lease | SNAPSHOT)
    elif me.step in {"publish", "snapshot in", "ref"}:
        yield from _publish(store, me, protocol)
    elif me.step in MOVING:
        yield from _show(store, me, protocol)
    elif me.step == "close":
        yield "close lease", store, ENDED
    elif me.step == "close early":
        yield "close lease", store, Process(me.kind, "publish", told=me.told)


def _first(protocol: Protocol) -> str:
    return "reserve" if protocol.reserves and protocol.reserves_before_looking else "look"


def _taken_again(store: Store, me: Process, protocol: Protocol) -> tuple[Store, Process]:
    """Everything that was reserved is reserved again; what is gone for good shows when it is looked for."""
    names = me.lease if protocol.reserves_again else 0
    store = restored(store, me.lease, protocol)
    return store, me._replace(lease=names, linked=LINKED, told=me.lease & store.here & BLOB)


def _told(me: Process, protocol: Protocol, is_sure: bool = True) -> Process:
    """That the blob is there."""
    after = me._replace(told=BLOB if is_sure else 0)
    is_named = protocol.reserves_before_looking or not protocol.reserves
    return _counted(after, protocol) if is_named else after._replace(step="append")


def _counted(me: Process, protocol: Protocol) -> Process:
    """Its blob is there: followers are told, then it is published."""
    return me._replace(step="tell" if me.kind == "grower" else _next(protocol))


def _next(protocol: Protocol) -> str:
    return "pages" if protocol.closes_last else "close early"


def _look(store: Store, me: Process, protocol: Protocol) -> Steps:
    """Present → hit; in trash → move back → hit; else miss."""
    if not protocol.looks_at_files and store.memo != UNKNOWN:
        yield "look: the memo says so", store, _told(me, protocol)
    elif store.here & BLOB:
        yield "look: hit", store, _told(me, protocol)
    elif store.trash & BLOB and protocol.restores:
        yield "look: in trash, move back", restored(store, BLOB, protocol), _told(me, protocol)
    elif store.trash & BLOB:
        yield "look: in trash, a miss", store, me._replace(step="made anew")
    else:
        yield "look: miss", store, me._replace(step="place")


def _publish(store: Store, me: Process, protocol: Protocol) -> Steps:
    """Publish and ref under one hold: every blob present, snapshot in, ref moved."""
    if me.step == "publish":
        if protocol.publish_looks and (protocol.looks_at_files or store.memo == UNKNOWN):
            if me.lease != NO_LEASE:
                me = me._replace(lease=me.lease | BLOB)
            if not store.here & BLOB and not (store.trash & BLOB and protocol.restores):
                yield "publish: its blob is gone", store, me._replace(step="failed") if me.told else ENDED
                return
            store = restored(store, BLOB, protocol)
        me = me._replace(step="snapshot in", sees=SNAPSHOT & ~store.here)
        if not (protocol.holds and protocol.publishes_in_one_hold):
            yield "publish: every blob present", store, me
            return
    if me.step == "snapshot in":
        if protocol.names_last:
            store = _in(store, protocol)
            yield "snapshot in, killed", store, ENDED
        else:
            store = store._replace(head=moved(store.head, THIS, store.month, protocol))
            yield "ref moved, killed", store, ENDED
        me = me._replace(step="ref")
        if not (protocol.holds and protocol.publishes_in_one_hold):
            yield "snapshot in", store, me
            return
    if not protocol.publishes_in_one_hold and me.linked == TAKEN:
        # A hold of its own begins as each does, with a look at the lease, and says nothing of what was in the other.
        store, me = _taken_again(store, me, protocol)
    if me.kind == "nameless":  # published for a moment, and for whoever tags it
        yield "published", *_shown(store._replace(recent=BOTH if me.sees else 0), me, protocol)
    elif protocol.names_last:
        yield from _move(store, me, protocol)
    else:
        yield "snapshot in", *_shown(_in(store, protocol), me, protocol)


def _ref(store: Store, me: Process) -> Ref:
    ref: Ref = getattr(store, REFS.get(me.kind, "head"))
    return ref


def _with_ref(store: Store, me: Process, ref: Ref) -> Store:
    return store._replace(**{REFS.get(me.kind, "head"): ref})


def _move(store: Store, me: Process, protocol: Protocol) -> Steps:
    """The log tells what is about to be named. Under a hold that holds, only a kill comes between this and that."""
    ref = _ref(store, me)
    after = _with_ref(store, me, logged(ref, THIS, store.month, protocol))
    if ref.means == THIS:
        yield "named already", *_shown(after, me, protocol)
    elif protocol.holds:
        yield "logged, killed", after, ENDED
        yield "moved", *_shown(_with_ref(store, me, moved(ref, THIS, store.month, protocol)), me, protocol)
    else:
        yield "logged", after, me._replace(step="last look")


def _show(store: Store, me: Process, protocol: Protocol) -> Steps:
    """Look once more if the lease was taken since the first look, then move the ref."""
    ref = _ref(store, me)
    if me.step == "show":
        yield "show", *_shown(_with_ref(store, me, ref._replace(means=THIS)), me, protocol)
        return
    if me.linked != LINKED and me.lease != NO_LEASE and protocol.looks_once_more:
        store = restored(store, BOTH, protocol)
        if store.here & BOTH != BOTH:
            yield "last look: gone, take the entry back", _with_ref(store, me, taken_back(ref)), ENDED
            return
        me = me._replace(lease=BOTH, linked=LINKED)
    yield "last look", store, me._replace(step="show")


def _shown(store: Store, me: Process, protocol: Protocol) -> tuple[Store, Process]:
    """A ref was moved: followers are told, and the lease is closed."""
    if me.kind == "grower" and store.file != NO_FILE:
        store = store._replace(file=BOTH)
    return store, ENDED if me.kind in SETTERS or not protocol.closes_last else me._replace(step="close")


def _in(store: Store, protocol: Protocol) -> Store:
    store = restored(store, SNAPSHOT, protocol)
    if store.here & SNAPSHOT:
        return store
    return store._replace(here=store.here | SNAPSHOT, young=store.young | SNAPSHOT)


# --- Tagging, holding, resetting ------------------------------------------------------------------------------------


def tagger_steps(store: Store, me: Process, protocol: Protocol) -> Steps:
    """An existing snapshot is given a name, or a name set to it: the same check, restored from trash, or refused."""
    if me.step == "resolve":
        if store.here & SNAPSHOT:
            yield "resolve", store, me._replace(step="confirm")
    elif me.step == "confirm":
        if protocol.tagging_looks and (store.here | store.trash) & BOTH != BOTH:
            yield "refuse", store, ENDED
            return
        if protocol.tagging_looks:
            # Each rename is a step of its own to a kill, but not to the collector, which waits for the lock.
            yield "restore the blob, killed", restored(store, BLOB, protocol), ENDED
            store = restored(store, BOTH, protocol)
        me = me._replace(step="tag", lease=BOTH, linked=LINKED)
        if protocol.holds:
            yield from _move(store, me, protocol)
        else:
            yield "confirm", store, me
    elif me.step == "tag":
        yield from _move(store, me, protocol)
    elif me.step in MOVING:
        yield from _show(store, me, protocol)


# --- Readers --------------------------------------------------------------------------------------------------------


def reader_steps(store: Store, me: Process, protocol: Protocol) -> Steps:
    """Lease first, then resolve, then check presence: ``zgstore.reading.opening.read``, and a copy's source."""
    first, second = ("name", "look") if protocol.readers_name_before_looking else ("look", "name")
    if me.step == "begin":
        yield "take lease", store, me._replace(step="resolve", lease=0, linked=LINKED)
    elif me.step == "resolve":
        if store.here & SNAPSHOT:
            yield "resolve", store, me._replace(step=first)
    elif me.step == "name":
        after = _named(me, SNAPSHOT, protocol)
        yield "name", store, after._replace(step=second if first == "name" else "read")
    elif me.step == "look":
        if store.here & BOTH != BOTH:
            yield "look: missing", store, ENDED
        else:
            after = me._replace(step=second if first == "look" else "read", told=BOTH if me.linked != TAKEN else 0)
            yield "look: there", store, after
    elif me.step == "read":
        yield "close lease", store, ENDED


def _named(me: Process, names: int, protocol: Protocol) -> Process:
    """Named in the lease; in another, with all that was named before, if that was taken."""
    linked = me.linked or (LINKED if protocol.readers_notice else UNNOTICED)
    return me._replace(lease=me.lease | names, linked=linked)


def follower_steps(store: Store, me: Process, protocol: Protocol) -> Steps:
    """A reader of a growing build: what is new of its file is named, then seen to be there, and no more taken up."""
    if me.step == "begin":
        yield "take lease", store, me._replace(step="follow", lease=0, linked=LINKED)
    elif me.step == "follow":
        if store.file != NO_FILE and store.file & ~me.told:
            yield "read the build's file", store, me._replace(step="name", sees=store.file)
    elif me.step == "name":
        yield "name", store, _named(me, me.sees, protocol)._replace(step="look")
    elif me.step == "look":
        sees = me.sees if protocol.followers_take_up_what_they_named else store.file
        if sees == NO_FILE or sees & ~store.here:
            yield "look: missing", store, ENDED
        else:
            step = "read" if sees & SNAPSHOT else "follow"
            yield "look: there", store, me._replace(step=step, sees=0, told=sees if me.linked != TAKEN else 0)
    elif me.step == "read":
        yield "close lease", store, ENDED


STEPS: dict[str, Callable[[Store, Process, Protocol], Steps]] = {
    "builder": builder_steps,
    "copier": builder_steps,
    "nameless": builder_steps,
    "resumer": builder_steps,
    "grower": builder_steps,
    "tagger": tagger_steps,
    "setter": tagger_steps,
    "reader": reader_steps,
    "follower": follower_steps,
}
LOCKED["setter"] = LOCKED["tagger"]
LOCKED |= dict.fromkeys(("copier", "nameless", "resumer", "grower"), LOCKED["builder"])
