"""The protocol of collecting garbage (FORMAT 1, section 8) as a small model, and its exhaustive search.

Two builders, a tagger, somebody who deletes a ref, and two collections share one store of two objects: a *blob* and
the *snapshot* that refers to it. Every process moves in atomic steps, named as the format names them and no coarser
than the holds of the store lock in the code; any of them may be killed between two steps. ``search`` walks every
interleaving and returns a shortest way to data loss, if there is one.

What the model leaves out makes it stricter: all graces are zero, so no age protects anything (as under ``--now``),
and a publication does not look whether its blobs are there, so that nothing but the leases protects them. (The code
looks as well: ``publish_looks``.) Builders are alike, so states that differ by exchanging them are one state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

# An object may lie in its place, in the trash, in both, or nowhere.
GONE, HERE, TRASH = 0, 1, 2
# Sets of objects are bits; what leases, marks and lists hold.
BLOB, SNAPSHOT = 1, 2


@dataclass(frozen=True)
class Protocol:
    """The protocol's promises; each False is a mutation."""

    rechecks: bool = True  # Collector (4, 5): re-read leases and refs under the exclusive lock, re-check each candidate
    reserves_first: bool = True  # Writers, Reserve: append digests to the lease *first*, then look
    reserves: bool = True  # Writers, Reserve: at all
    closes_last: bool = True  # Writing (5): close the lease, last
    tagging_checks: bool = True  # Tagging: the same check, restores from trash, or refuses
    ref_step_notices: bool = True  # Every step first checks that the lease file is still linked
    publish_looks: bool = False  # Publish: every blob present


class Builder(NamedTuple):
    """One writer: the step it takes next, and its lease."""

    step: str  # take-lease, append, look, place, publish, close, done, failed; dead, dead-published
    lease: int | None = None  # what the lease names; None where there is none
    linked: bool = False  # whether the lease's file is still there
    published: bool = False  # whether its ref is visible


class Collector(NamedTuple):
    """The collecting process: which run, the step it takes next, and what it carries from step to step."""

    run: int
    step: str  # roots, mark, list, trash, unlink, over
    objects: int = 0  # roots, then marks, then candidates still to move


class State(NamedTuple):
    blob: int
    snapshot: int
    main: bool  # whether the ref that somebody deletes is there
    tagger: str  # resolve, tag, tagged, refused
    builders: tuple[Builder, Builder]
    collector: Collector
    takes: int  # how often a live holder's lease may still be taken for dead


COLLECTIONS = 2
WRITER = Builder("take-lease")
STARTS = [
    # A published snapshot; a killed build's orphan; the same in the trash; an empty store.
    State(blob, snapshot, main, "resolve", (WRITER, WRITER), Collector(1, "roots"), takes=1)
    for blob, snapshot, main in [(HERE, HERE, True), (HERE, GONE, False), (TRASH, TRASH, False), (GONE, GONE, False)]
]


def refs_visible(state: State) -> bool:
    """Whether any ref or tag names the snapshot."""
    return state.main or state.tagger == "tagged" or any(builder.published for builder in state.builders)


def lost(state: State) -> str | None:
    """The invariant: whenever a ref is visible, its snapshot and that snapshot's blob are in their places."""
    if refs_visible(state) and not (state.blob & HERE and state.snapshot & HERE):
        return "a ref is visible, and what it names is not there"
    return None


def broken_promise(state: State) -> str | None:
    """A stronger one: what a live builder under its own lease was told is there stays, so that it can publish."""
    for builder in state.builders:
        told = builder.step in {"publish", "close"} and not builder.published
        if (told and builder.linked and not state.blob & HERE) or builder.step == "failed":
            return "a builder was told that its blob is there, and it is not"
    return None


def search(protocol: Protocol, invariant=lost) -> tuple[list[str] | None, int]:
    """A shortest sequence of steps that breaks the invariant, or None; and how many states were seen."""
    came_from: dict[State, tuple[State, str] | None] = dict.fromkeys(STARTS)
    waiting = deque(STARTS)
    while waiting:
        state = waiting.popleft()
        if invariant(state):
            return _way_to(state, came_from), len(came_from)
        for name, after in steps(state, protocol):
            if after not in came_from:
                came_from[after] = (state, name)
                waiting.append(after)
    return None, len(came_from)


def _way_to(state: State, came_from: dict[State, tuple[State, str] | None]) -> list[str]:
    way = [str(state)]
    while (step := came_from[state]) is not None:
        state, name = step
        way.append(name)
    return [*way[::-1][:-1], way[0]]


def steps(state: State, protocol: Protocol) -> Iterator[tuple[str, State]]:
    """Every step that some process could take next, and the state after it."""
    for at in (0, 1):
        builder, other = state.builders[at], state.builders[1 - at]
        if builder.step not in {"done", "failed", "dead"}:
            for name, blob, snapshot, after in builder_steps(state, builder, protocol):
                pair = (after, other) if after <= other else (other, after)
                yield f"builder {at}: {name}", state._replace(blob=blob, snapshot=snapshot, builders=pair)
            if builder.linked and state.takes:
                # Suspended for an hour on another host, say: the lease is judged dead, its file unlinked.
                taken = builder._replace(linked=False)
                pair = (taken, other) if taken <= other else (other, taken)
                yield f"lease of builder {at} taken", state._replace(builders=pair, takes=state.takes - 1)
    if state.main:
        yield "ref rm main", state._replace(main=False)
    yield from tagger_steps(state, protocol)
    yield from collector_steps(state, protocol)


# --- Writers -------------------------------------------------------------------------------------------------------


def builder_steps(state: State, builder: Builder, protocol: Protocol) -> Iterator[tuple[str, int, int, Builder]]:
    blob, snapshot = state.blob, state.snapshot
    # Killed: its lease is dead from that moment on; its ref, if it got that far, stays.
    yield "killed", blob, snapshot, Builder("dead", published=builder.published)

    if builder.step == "take-lease":
        first = "append" if protocol.reserves_first else "look"
        yield "take lease", blob, snapshot, Builder(first, lease=0, linked=True)
        return
    notices = builder.step != "publish" or (protocol.ref_step_notices and protocol.closes_last)
    if notices and not builder.linked and builder.step != "close":
        # A new lease is taken and everything reserved again.
        yield "notices that its lease is gone", blob, snapshot, WRITER
        return

    if builder.step == "append":
        after = builder._replace(lease=BLOB if protocol.reserves else 0)
        yield "append", blob, snapshot, after._replace(step="look" if protocol.reserves_first else "publish")
    elif builder.step == "look":
        told = "publish" if protocol.reserves_first else "append"
        told = told if protocol.closes_last else "close"
        if blob & HERE:
            yield "look: hit", blob, snapshot, builder._replace(step=told)
        elif blob & TRASH:
            yield "look: in trash, move back", HERE, snapshot, builder._replace(step=told)
        else:
            yield "look: miss", blob, snapshot, builder._replace(step="place")
    elif builder.step == "place":
        told = "publish" if protocol.reserves_first else "append"
        told = told if protocol.closes_last else "close"
        yield "place", blob | HERE, snapshot, builder._replace(step=told)
    elif builder.step == "publish":
        yield from _publish(state, builder, protocol)
    elif builder.step == "close":
        after = Builder("done", published=True) if builder.published else Builder("publish", lease=None)
        yield "close lease", blob, snapshot, after


def _publish(state: State, builder: Builder, protocol: Protocol) -> Iterator[tuple[str, int, int, Builder]]:
    """Publish and ref under one hold: (every blob present,) snapshot in, ref moved; killed in between, an orphan."""
    blob, snapshot = state.blob, state.snapshot
    if protocol.publish_looks and not blob & HERE:
        if not blob & TRASH:
            yield "publish: its blob is gone", blob, snapshot, Builder("failed")
            return
        blob = HERE
    yield "snapshot in, killed", blob, snapshot | HERE, Builder("dead")
    after = builder._replace(step="close", published=True) if protocol.closes_last else Builder("done", published=True)
    yield "snapshot in, ref moved", blob, snapshot | HERE, after


def tagger_steps(state: State, protocol: Protocol) -> Iterator[tuple[str, State]]:
    """Tagging an existing snapshot: resolved without a lock, then checked, restored from trash or refused."""
    if state.tagger == "resolve" and state.snapshot & HERE:
        yield "tagger: resolve", state._replace(tagger="tag")
    elif state.tagger == "tag":
        if not protocol.tagging_checks:
            yield "tagger: tag unchecked", state._replace(tagger="tagged")
        elif state.blob and state.snapshot:
            # Each rename is a step of its own to a kill, but not to the collector, which waits for the lock.
            blob = state.blob if state.blob & HERE else HERE
            snapshot = state.snapshot if state.snapshot & HERE else HERE
            yield "tagger: restore, killed", state._replace(blob=blob, snapshot=state.snapshot, tagger="refused")
            yield "tagger: check, tag", state._replace(blob=blob, snapshot=snapshot, tagger="tagged")
        else:
            yield "tagger: refuse", state._replace(tagger="refused")


# --- Collector -----------------------------------------------------------------------------------------------------


def kept_now(state: State) -> int:
    """What refs reach and live leases name, read under the exclusive lock."""
    return (BLOB | SNAPSHOT if refs_visible(state) else 0) | leased_now(state)


def leased_now(state: State) -> int:
    """What leases name whose files are linked and whose holders live."""
    leased = 0
    for builder in state.builders:
        if builder.linked:
            leased |= builder.lease or 0
    return leased


def collector_steps(state: State, protocol: Protocol) -> Iterator[tuple[str, State]]:
    run, step, objects = state.collector
    if step == "over":
        return
    again = Collector(run + 1, "roots") if run < COLLECTIONS else Collector(run, "over")
    if step != "roots":
        yield f"collection {run}: killed", state._replace(collector=again)

    if step == "roots":
        # (1) Lock exclusive: read the roots.
        roots = (SNAPSHOT if refs_visible(state) else 0) | leased_now(state)
        yield f"collection {run}: roots", state._replace(collector=Collector(run, "mark", roots))
    elif step == "mark":
        # (2) Unlocked: mark. What a root names is immutable, and nobody but the collector would remove it.
        marked = objects | BLOB if objects & SNAPSHOT else objects
        yield f"collection {run}: mark", state._replace(collector=Collector(run, "list", marked))
    elif step == "list":
        # (3) Candidates: listed and not marked.
        here = (BLOB if state.blob & HERE else 0) | (SNAPSHOT if state.snapshot & HERE else 0)
        yield f"collection {run}: list", state._replace(collector=Collector(run, "trash", here & ~objects))
    elif step == "trash":
        # (4) Lock exclusive, small batches: re-read, re-check each candidate, rename into trash.
        kept = kept_now(state) if protocol.rechecks else 0
        for which, name in ((BLOB, "blob"), (SNAPSHOT, "snapshot")):
            if objects & which:
                after = state._replace(collector=Collector(run, "trash", objects & ~which))
                if not kept & which and getattr(state, name) & HERE:
                    after = after._replace(**{name: TRASH})
                yield f"collection {run}: re-check {name}, trash", after
        if not objects:
            trashed = (BLOB if state.blob & TRASH else 0) | (SNAPSHOT if state.snapshot & TRASH else 0)
            yield f"collection {run}: list trash", state._replace(collector=Collector(run, "unlink", trashed))
    elif step == "unlink":
        # (5) Repeats the re-check per batch, renames aside; unlinking what lies aside concerns nobody.
        kept = kept_now(state) if protocol.rechecks else 0
        for which, name in ((BLOB, "blob"), (SNAPSHOT, "snapshot")):
            if objects & which:
                after = state._replace(collector=Collector(run, "unlink", objects & ~which))
                if not kept & which:
                    after = after._replace(**{name: getattr(state, name) & HERE})
                yield f"collection {run}: re-check {name}, unlink", after
        if not objects:
            yield f"collection {run}: over", state._replace(collector=again)
