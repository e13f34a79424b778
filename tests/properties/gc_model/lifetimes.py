"""When a lease is dead, what its file says, and what goes with it: ``zgstore.storage.leases`` on its own."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from tests.properties.gc_model.protocol import Protocol
from tests.properties.gc_model.search import Scenario

# --- Whether its holder lives ---------------------------------------------------------------------------------------


class Holder(NamedTuple):
    """A holder, and what a collector can see of it."""

    same_boot: bool  # whether the collector runs under the kernel that the holder runs under, or ran
    locks_seen: bool  # whether a lock that is held shows
    pids_seen: bool  # whether its processes show: not from another container
    life: str = "awake"  # awake, asleep, dead; dead with a child: one that was forked lives on
    refreshed: bool = True  # within the hour
    linked: bool = True
    verdict: str = ""  # what the last collector found: alive, dead, kept
    hours: int = 3  # still to pass


def _steps(state: Holder, protocol: Protocol) -> Iterator[tuple[str, Holder]]:
    if state.life == "awake":
        yield "host falls asleep", state._replace(life="asleep")
        yield "killed", state._replace(life="dead", verdict="")
        yield "killed, and a forked child lives on", state._replace(life="dead with a child", verdict="")
    if state.hours:
        refreshed = state.life == "awake" and protocol.refreshes
        yield "an hour passes", state._replace(refreshed=refreshed, hours=state.hours - 1, verdict="")
    if state.linked:
        is_dead = _is_dead(state, protocol)
        if not is_dead:
            yield "collector: alive", state._replace(verdict="alive")
        elif protocol.dead_leases_keep_nothing:
            yield "collector: dead, remove it", state._replace(linked=False, verdict="dead")
        else:
            yield "collector: dead, keep what it names", state._replace(linked=False, verdict="kept")


def _is_dead(state: Holder, protocol: Protocol) -> bool:
    """On the same boot only when its lock is free *and* its process gone; elsewhere an hour after its last refresh."""
    by_age = not (state.refreshed and protocol.one_clock) if protocol.elsewhere_an_hour else False
    if not state.same_boot:
        return by_age
    holds = state.life in {"awake", "asleep"} or (
        state.life == "dead with a child" and not protocol.forked_children_close
    )
    lock_free = not (holds and state.locks_seen)
    gone = not (state.life in {"awake", "asleep"} and state.pids_seen)
    return (lock_free or not protocol.needs_a_free_lock) and (gone or not protocol.needs_a_process_gone)


def _violation(state: Holder) -> str | None:
    if state.life == "awake" and not state.linked:
        return "broken: the lease of a holder that is awake was taken for dead"
    if state.life.startswith("dead") and state.verdict == "kept":
        return "garbage: a dead lease keeps what it names for a run longer"
    is_over = state.hours == 0 and not state.refreshed
    if state.life.startswith("dead") and is_over and state.verdict == "alive":
        return "garbage: a dead holder's lease is kept for ever"
    return None


# A lock or a process that does not show: one of both is survived, and then by noticing that the lease is gone.
_HOLDERS = [Holder(*seen) for seen in product((True, False), repeat=3) if seen[1] or seen[2]]


# --- What its file says ---------------------------------------------------------------------------------------------


class File(NamedTuple):
    """A lease's file, in halves of digests: a write may end in the middle of one, on a disk that is full."""

    content: tuple[str, ...] = ()
    holds: tuple[str, ...] = ()  # what the holder was told is there
    fails: int = 2  # how many writes may still end early
    keeps: frozenset[str] | None = None  # what a collector read


def _appends(state: File, protocol: Protocol) -> Iterator[tuple[str, File]]:
    if len(state.holds) < 2:
        name = "AB"[len(state.holds)]
        halves = (f"{name}1", f"{name}2")
        yield f"append {name}", state._replace(content=state.content + halves, holds=(*state.holds, name), keeps=None)
        if state.fails:
            content = state.content if protocol.failed_appends_are_cut else (*state.content, halves[0])
            # The holder is told, lives on, and tries again when there is space.
            yield f"append {name}: disk full", state._replace(content=content, fails=state.fails - 1, keeps=None)
            # Whoever looks now sees the half of it.
            torn = _read((*state.content, halves[0]), protocol)
            yield "collector reads a torn tail", state._replace(keeps=torn)
    yield "collector reads", state._replace(keeps=_read(state.content, protocol))


def _read(content: tuple[str, ...], protocol: Protocol) -> frozenset[str]:
    if len(content) % 2 and not protocol.torn_tails_are_ignored:
        return frozenset()
    pairs = zip(content[::2], content[1::2], strict=False)
    return frozenset(first[0] for first, second in pairs if (first[0], first[1], second[1]) == (second[0], "1", "2"))


def _unread(state: File) -> str | None:
    if state.keeps is not None and not state.keeps.issuperset(state.holds):
        return "broken: a lease does not say what its holder was told is there"
    return None


# --- What goes with it ----------------------------------------------------------------------------------------------


class Session(NamedTuple):
    """A writer's lease and its folder in ``tmp/``; drafts are written into the folder that it holds open."""

    linked: bool = True
    folder: str = "held"  # held; aside: no more where it was, and about to be removed; removed
    collector: str = "look"  # look, bury, sweep, over
    sleeps: int = 1
    is_sure: bool = True  # whether its last hold saw that it has both


def _sweeps(state: Session, protocol: Protocol) -> Iterator[tuple[str, Session]]:
    if state.sleeps and state.collector == "look":
        yield "lease dead", state._replace(sleeps=0, collector="bury", is_sure=False)
    if state.collector == "bury":
        folder = "aside" if protocol.folders_go_with_their_lease else state.folder
        yield (
            "collector: remove the lease",
            state._replace(linked=False, folder=folder, collector="sweep", is_sure=False),
        )
    if state.collector == "sweep":
        # Not under the lock, for a folder takes milliseconds a file: what has its name now, or what was set aside.
        if protocol.folders_go_with_their_lease:
            swept = "removed" if state.folder == "aside" else state.folder
        else:
            swept = "removed"
        yield "collector: remove the folder", state._replace(folder=swept, collector="over")
    if not state.is_sure and state.collector != "bury":
        yield "writer: notice, take both again", state._replace(linked=True, folder=_opened(state), is_sure=True)


def _opened(state: Session) -> str:
    return "held" if state.folder in {"aside", "removed"} else state.folder


def _unsure(state: Session) -> str | None:
    if state.is_sure and state.folder != "held":
        return "broken: a writer that took its lease again has no folder to write into"
    return None


def of_leases() -> list[Scenario]:
    """The scenarios of leases alone."""
    return [
        Scenario("lives", _HOLDERS, _steps, _violation),
        Scenario("lease file", [File()], _appends, _unread),
        Scenario("folder", [Session()], _sweeps, _unsure),
    ]
