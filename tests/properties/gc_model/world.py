"""What the processes share: one blob, the snapshot that refers to it, names, a memo, the leases of the living.

An object may lie in its place, in the trash, in both, or nowhere. Sets of objects, and of names, are bits.
"""

from __future__ import annotations

from typing import NamedTuple

from tests.properties.gc_model.logs import MONTH, Ref, Rules, keeps, promises
from tests.properties.gc_model.protocol import Protocol

BLOB, SNAPSHOT = 1, 2
BOTH = BLOB | SNAPSHOT
NO_LEASE = -1
NO_FILE = -1
# A lease's file is there; was taken for dead since its holder's last hold; was taken, and a hold did not notice.
LINKED, TAKEN, UNNOTICED = 1, 0, -1
UNKNOWN, OLD, YOUNG = -1, 0, 1  # a memo: none, older than 7 days, younger
OVER = frozenset({"over", "failed", "made anew"})


class Store(NamedTuple):
    here: int = 0  # objects in their places
    trash: int = 0  # objects in the trash
    head: Ref = Ref()
    tag: Ref = Ref()
    held: bool = False  # whether a hold keeps the snapshot
    stale: bool = False  # whether the log of a name that was removed is left, which should keep nothing
    young: int = 0  # objects younger than min_age, by max(mtime, ctime)
    memo: int = UNKNOWN  # the action that says what the blob's key came out as
    recent: int = 0  # what was made, published or replaced a moment ago, that ages alone protect
    file: int = NO_FILE  # the growing build's file: what it lists
    damaged: bool = False  # whether the snapshot's file cannot be parsed
    month: int = 0  # by the file system's clock
    misfortunes: int = 0  # how many are still to come: a lease taken for dead, time that passes, …


class Process(NamedTuple):
    kind: str
    step: str
    lease: int = NO_LEASE  # what its lease names
    linked: int = TAKEN
    sees: int = 0  # what it read, and has not looked for yet
    told: int = 0  # what it was told is there; nothing any more once its lease is taken


# Done, refused or killed: it has no lease any more, and does nothing. ``lifetimes`` is about how that is seen.
ENDED = Process("", "over")


class Collector(NamedTuple):
    step: str = "roots"
    month: int = 0  # when it began
    leased: int = 0
    marked: int = 0
    reached: int = 0  # what is marked not by its lease alone
    listed: int = 0  # whether the snapshot was
    expires: int = 0  # how many of the head's oldest entries were past retention when it read the roots
    todo: int = 0  # what is still to be trashed
    back: int = 0  # what is to be moved back, in the trash though something keeps it
    due: int = 0  # what is to be unlinked: it lay in the trash when that was listed, or this run moved it there
    loose: int = 0  # what the re-check of this batch found loose
    garbage: int = 0  # what nothing kept when it read the roots, if all others were over
    runs: int = 1  # this one, and those still to come


class State(NamedTuple):
    store: Store
    processes: tuple[Process, ...]
    collectors: tuple[Collector, ...]
    graces: bool = False  # whether ages count; with --now they do not
    keeps: int = MONTH  # what of a log
    locks_work: bool = True
    owner: bool = False  # whether somebody says that locks need not work
    in_pieces: bool = False  # whether a host may sleep within a hold, and its file server give the lock to others


def leased(state: State, protocol: Protocol) -> int:
    """What leases name whose files are linked and whose holders live."""
    names = 0
    if protocol.leases_keep:
        for process in state.processes:
            if process.linked == LINKED:
                names |= process.lease
    return names


def named(state: State, month: int, protocol: Protocol, *, expired: bool = False) -> int:
    """The snapshot, if a name keeps it, or a log; ``expired``: what was past retention has been forgotten."""
    store, rules = state.store, Rules(state.keeps, month)
    is_kept = (
        keeps(store.head, rules, protocol, expired=expired, name_keeps=protocol.heads_keep)
        or keeps(store.tag, rules, protocol, expired=expired, name_keeps=protocol.tags_keep)
        or (store.held and protocol.holds_keep)
        or store.stale
    )
    return SNAPSHOT if is_kept else 0


def promised(store: Store) -> bool:
    """Whether the snapshot, and its blob, have to be in their places."""
    return store.held or promises(store.head) or promises(store.tag)


def reach(store: Store, roots: int) -> int:
    """The roots, and the blob where the snapshot is one, is there and can be parsed."""
    return roots | BLOB if roots & store.here & SNAPSHOT and not store.damaged else roots


def restored(store: Store, objects: int, protocol: Protocol) -> Store:
    """Those of the objects that lie in the trash moved back, one rename each; it makes them young by their ctime."""
    back = objects & store.trash & ~store.here
    if not back:
        return store
    young = store.young | back if protocol.ctime_counts else store.young
    return store._replace(here=store.here | back, trash=store.trash & ~back, young=young)


# --- What must never be ---------------------------------------------------------------------------------------------


def lost(state: State) -> str | None:
    """Whenever a name, or an entry of its log, is visible, that snapshot and its blob are in their places."""
    if promised(state.store) and state.store.here & BOTH != BOTH:
        return "lost: a name is visible, and what it names is not there"
    return None


def gone(state: State) -> str | None:
    """The least of all: what a name names is at least in the trash, from where it comes back."""
    store = state.store
    if promised(store) and (store.here | store.trash) & BOTH != BOTH:
        return "gone: a name is visible, and what it names is not even in the trash"
    return None


def broken(state: State) -> str | None:
    """What a living holder was told is there stays, unless its lease is taken after that."""
    for process in state.processes:
        if process.told & ~state.store.here and process.lease != NO_LEASE:
            return f"broken: a {process.kind} was told that something is there, and it is not"
        if process.step == "failed" and process.told:
            return f"broken: a {process.kind} was told that something is there, and fails without it"
        if process.step == "made anew":
            return f"repeated: a {process.kind} made anew what the store had"
    return None


def aged(state: State) -> str | None:
    """What was made, published or replaced a moment ago stays, with no name and no lease: it is young."""
    store = state.store
    if store.recent & ~store.here:
        return "untimely: what was made, published or replaced a moment ago is gone"
    return None


def littered(state: State) -> str | None:
    """A collection that began when all others were over leaves nothing that nothing keeps."""
    for collector in state.collectors:
        if collector.step == "littered":
            return "garbage: a collection left what nothing kept when it began"
    return None
