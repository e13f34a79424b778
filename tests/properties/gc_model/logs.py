"""Names and their logs, as ``storage.refs`` writes them, and what of them ``upkeep.reachability`` keeps.

A name means the one snapshot, another, which is always whole and concerns nobody, or nothing.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from tests.properties.gc_model.protocol import Protocol

NOTHING, THIS, ANOTHER = 0, 1, 2  # what a name may mean
MONTH, NONE, LAST = -1, 0, 1  # what of a log is kept: what was replaced within 30 days; or so many entries


class Entry(NamedTuple):
    """One move, logged before it takes place."""

    old: int
    new: int
    month: int = 0  # when, by the clock


class Ref(NamedTuple):
    """A head or a tag, and its log, newest first."""

    means: int = NOTHING
    log: tuple[Entry, ...] = ()


class History(NamedTuple):
    taken: tuple[int, ...]  # places in the log of the moves that took place, the newest first
    coming: bool  # whether the newest is about to take place, or never did


class Rules(NamedTuple):
    """By which a collection keeps entries; ages are counted to when it began."""

    keeps: int
    month: int


# --- Moving, and removing -------------------------------------------------------------------------------------------


def logged(ref: Ref, new: int, month: int, protocol: Protocol) -> Ref:
    """``Refs.move`` up to the log; what the name means now is logged first, if the newest entry does not tell of it."""
    is_told = any(ref.means in {entry.old, entry.new} for entry in ref.log[:1])
    if ref.means != NOTHING and not is_told and protocol.moves_log_what_was:
        told_last = ref.log[0].new if ref.log else NOTHING
        ref = _appended(ref, Entry(told_last, ref.means, month))
    return ref if ref.means == new else _appended(ref, Entry(ref.means, new, month))


def _appended(ref: Ref, entry: Entry) -> Ref:
    return ref._replace(log=(entry, *ref.log))


def moved(ref: Ref, new: int, month: int, protocol: Protocol) -> Ref:
    """``Refs.move``: logged, then seen by everybody."""
    return logged(ref, new, month, protocol)._replace(means=new)


def taken_back(ref: Ref) -> Ref:
    """What the last look did not find is not named, and not logged."""
    return ref._replace(log=ref.log[1:])


def oldest_forgotten(ref: Ref, count: int) -> Ref:
    """The oldest entries first: whenever this ends, what is left follows each other."""
    return ref._replace(log=ref.log[: len(ref.log) - count])


# --- What is kept ---------------------------------------------------------------------------------------------------


@cache
def history(ref: Ref) -> History:
    """``Refs.history``: what stood between two entries that do not follow each other is not known, both count."""
    taken: list[int] = []
    expected = ref.means
    for at, entry in enumerate(ref.log):
        # One that was to replace what stayed never took place.
        if entry.new == expected or entry.old != expected:
            taken.append(at)
            expected = entry.old
    return History(tuple(taken), bool(ref.log) and 0 not in taken)


@cache
def kept(ref: Ref, rules: Rules, protocol: Protocol) -> int:
    """``Retention.kept``: how many of the moves that took place; an entry ages from when its value was replaced."""
    log = [ref.log[at] for at in history(ref).taken]
    if not protocol.reflogs_expire:
        return len(log)
    count = min(len(log), max(1, rules.keeps))
    since = 1 if protocol.ages_from_replacement else 0
    if rules.keeps == MONTH:
        while count < len(log) and log[count - since].month >= rules.month:
            count += 1
    return count


def _keeps_coming(at: int, entry: Entry, rules: Rules) -> bool:
    """``Retention.keeps_coming``: what nothing replaced ages from when it was logged."""
    return at < rules.keeps or (rules.keeps == MONTH and entry.month >= rules.month)


@cache
def keeps(ref: Ref, rules: Rules, protocol: Protocol, *, expired: bool, name_keeps: bool) -> bool:
    """``roots``: whether the name, its log, or a move that is about to take place keeps the snapshot.

    ``expired``: what was past retention has been forgotten; then each entry that is left keeps.
    """
    if ref.means == NOTHING:  # ``lost_entries``: of a name's first move, too
        first = any(each.new == THIS and _keeps_coming(at, each, rules) for at, each in enumerate(ref.log))
        return first and protocol.first_moves_keep
    taken, coming = history(ref)
    places = taken if expired else taken[: kept(ref, rules, protocol)]
    return (
        (name_keeps and ref.means == THIS)
        or (protocol.reflogs_keep and any(ref.log[at].new == THIS for at in places))
        or (protocol.coming_moves_keep and coming and ref.log[0].new == THIS and _keeps_coming(0, ref.log[0], rules))
    )


@cache
def expired(ref: Ref, rules: Rules, protocol: Protocol) -> int:
    """What ``roots(…).past`` names: how many of the oldest entries go, the newest past retention and all before it."""
    taken = history(ref).taken if ref.means != NOTHING else ()
    past = taken[kept(ref, rules, protocol) :][:1]
    return len(ref.log) - past[0] if past else 0


@cache
def promises(ref: Ref) -> bool:
    """Whether the snapshot has to be there: while a name means it, or an entry of a name's log is left that does."""
    taken = history(ref).taken if ref.means != NOTHING else ()
    return ref.means == THIS or any(ref.log[at].new == THIS for at in taken)
