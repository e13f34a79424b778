"""What the many processes of a stress do to one store, each operation a small function; and what it may hear.

An operation is given the place and its own source of chance. What it raises is held
against ``HEARS``: the errors that the interface allows for the races it can lose. It raises ``AssertionError`` itself
where what it was given is not right.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tests.faults.places import Place, content_of
from zgstore import errors
from zgstore.building.builder import build
from zgstore.errors import Missing, ZgError
from zgstore.format.digest import Digest
from zgstore.reading.opening import follow
from zgstore.storage.store import Store
from zgstore.upkeep import inspector, keeper
from zgstore.upkeep.accounts import usage, why
from zgstore.upkeep.collector import collect
from zgstore.upkeep.copier import copy
from zgstore.upkeep.differ import diff
from zgstore.upkeep.verifier import verify

ROOT = Path(__file__).parents[2]
T = TypeVar("T")
#: Those that collect say how many objects they freed.
Operation = Callable[[Place, random.Random], int | None]
NAMES = 4  # of each kind: few, so that many hands reach for the same


def _names(kind: str) -> list[str]:
    return [f"{kind}/{each}" for each in range(NAMES)]


def builds(place: Place, chance: random.Random) -> None:
    at, limit = chance.choice([*place.project.snapshots])
    ref = None if chance.random() < 0.3 else f"r{at}"
    worker = (chance.randrange(2), 2) if chance.random() < 0.1 else None
    report = build(Store.open(place.store), place.project.recipes[at], limit=limit, ref=ref, worker=worker)
    if worker is None:
        came, due = str(report.snapshot), place.project.snapshots[at, limit]
        assert came == due, f"r{at} of {limit} rows came to {came}, and undisturbed to {due}"


def tags(place: Place, chance: random.Random) -> None:
    keeper.tag(Store.open(place.store), chance.choice(_names("t")), place.rev(chance), force=chance.random() < 0.5)


def moves(place: Place, chance: random.Random) -> None:
    store, name = Store.open(place.store), chance.choice(_names("s"))
    expected = {"expect": store.refs.get(name)} if chance.random() < 0.5 else {}
    keeper.set_ref(store, name, place.rev(chance), **expected)


def deletes(place: Place, chance: random.Random) -> None:
    """Some of the names that are there: somebody else may be faster."""
    store = Store.open(place.store)
    listed = [ref for ref in store.refs.list() if not ref.name.startswith("kept/")]
    for ref in chance.sample(listed, min(len(listed), chance.randint(1, 4))):
        keeper.forget(store, ref.name, ref.kind)


def holds(place: Place, chance: random.Random) -> None:
    keeper.hold(Store.open(place.store), f"h{chance.randrange(NAMES)}", place.rev(chance), "for a while")


def unholds(place: Place, chance: random.Random) -> None:
    keeper.unhold(Store.open(place.store), f"h{chance.randrange(NAMES)}")


def reads(place: Place, chance: random.Random) -> None:
    _reads(place, chance, workers=0)


def reads_with_workers(place: Place, chance: random.Random) -> None:
    _reads(place, chance, workers=2)


def _reads(place: Place, chance: random.Random, *, workers: int) -> None:
    store, rev = Store.open(place.store), place.rev(chance)
    got = whole_while_named(store, rev, lambda: content_of(store, rev, workers=workers))
    due = place.project.contents[got.split()[0]]
    assert got == due, f"a reader gave {got}, and undisturbed {due}"


def whole_while_named(store: Store, rev: str, work: Callable[[], T]) -> T:
    """What a name keeps is missing only if the name was taken away meanwhile: not again and again."""
    for _ in range(3):
        try:
            return work()
        except Missing:
            if store.refs.get(rev) is None:
                raise
    raise AssertionError(f"{rev} is there, and again and again something of it is missing")


def follows(place: Place, chance: random.Random) -> None:
    """A build that somebody is in the middle of, read as it grows."""
    store = Store.open(place.store)
    growing = store.memos.builds()
    if growing:
        with follow(store, chance.choice(growing)) as reader:
            reader.wait(13, timeout_seconds=0.3)
            reader.batch(range(len(reader)))


def verifies(place: Place, chance: random.Random) -> None:
    how = chance.choice([{}, {"quick": True}, {"new": True}])
    is_sound(Store.open(place.store if chance.random() < 0.8 else place.target), **how)


def is_sound(store: Store, revs: Sequence[Digest] | None = None, **how: Any) -> None:
    problems = list(verify(store, revs, **how))
    assert not problems, f"{store.path.name} is not sound: {problems}"


def looks(place: Place, chance: random.Random) -> None:
    store, rev = Store.open(place.store), place.rev(chance)
    looking: list[Callable[[], Any]] = [
        lambda: usage(store),
        lambda: inspector.listing(store),
        lambda: inspector.log(store),
        lambda: inspector.show(store, rev),
        lambda: diff(store, rev, place.rev(chance)),
        lambda: why(store, store.resolve(rev)),
        store.leases.all,
    ]
    chance.choice(looking)()


def collects(place: Place, chance: random.Random) -> int:
    """At once, as one wants who needs the space, or in two phases, seconds apart; how much went for good."""
    store = Store.open(place.store if chance.random() < 0.8 else place.target)
    expire = chance.choice([0.0, 0.0, None])
    if chance.random() < 0.6:
        return collect(store, now=True, expire_reflog_seconds=expire).freed.objects
    grace, keep = chance.choice([0.0, 1.0, 5.0]), chance.choice([None, 1])
    return collect(store, grace_seconds=grace, expire_reflog_seconds=expire, keep_last=keep).freed.objects


def rehearses(place: Place, _chance: random.Random) -> None:
    collect(Store.open(place.store), dry_run=True, now=True)


def copies(place: Place, chance: random.Random) -> None:
    source, target = Store.open(place.store), Store.open(place.target)
    if chance.random() < 0.4:
        source, target = target, source
    rev = place.rev(chance)
    whole_while_named(source, rev, lambda: copy(source, rev, to=target))


def reindexes(place: Place, _chance: random.Random) -> None:
    Store.open(place.store).index.clear()


COMMANDS = (
    ("ls",), ("du",), ("log",), ("verify",), ("verify", "--quick"), ("gc", "--now"), ("gc", "--dry-run"),
    ("reindex",), ("lease", "ls"), ("tag", "t/1", "r0", "--force"), ("ref", "set", "s/1", "t/1"), ("ref", "rm", "s/2"),
    ("show", "r1"), ("diff", "r0", "r1"),
)  # fmt: skip
KINDS = {each.kind: each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, ZgError)}


def commands(place: Place, chance: random.Random) -> None:
    """The command itself: one JSON object, and the exit code that its error means."""
    command(place.store, *chance.choice(COMMANDS))


def command(store: Path, *words: str) -> None:
    line = [sys.executable, "-m", "zgstore.cli.main", "--store", str(store), "--json", *words]
    done = subprocess.run(line, capture_output=True, text=True, check=False, cwd=ROOT)
    assert not done.stderr.count("Traceback"), f"{words}: {done.stderr}"
    value = json.loads(done.stdout)
    if done.returncode == 0:
        assert value.get("ok", True), f"{words} ended well and says {value}"
        return
    said = value["error"]
    error = KINDS[said["kind"]]
    assert done.returncode == error.exit_code, f"{words}: {done.returncode} is not the exit code of {said}"
    assert "problems" not in value, f"{words}: {value['problems']}"
    raise error(f"{words}: {said['message']}", hint=said["hint"])


# ---- which, how often, and what they may hear ----

#: Operation → how often it is chosen among the others.
USUAL: dict[Operation, int] = {
    builds: 24, tags: 8, moves: 8, deletes: 10, holds: 4, unholds: 2, reads: 12, reads_with_workers: 4, follows: 4,
    verifies: 8, looks: 6, collects: 16, rehearses: 2, copies: 6, reindexes: 1, commands: 4,
}  # fmt: skip

#: Those that put small files in place.
WRITES = (builds, tags, moves, deletes, holds, copies, commands)

_GONE = {"not_found", "missing"}  # the name, or what it named, was taken away; nothing was promised yet

#: What each may hear on any store that many work on.
HEARS: dict[Operation, set[str]] = {
    builds: {"conflict"},
    tags: {*_GONE, "conflict"},
    moves: {*_GONE, "conflict"},
    deletes: {"not_found"},
    holds: {*_GONE, "conflict"},
    unholds: {"not_found"},
    reads: _GONE,
    reads_with_workers: _GONE,
    follows: {*_GONE, "interrupted"},
    verifies: set(),
    looks: _GONE,
    collects: {"busy"},
    rehearses: set(),
    copies: {*_GONE, "conflict"},
    reindexes: set(),
    commands: {*_GONE, "conflict", "busy"},
}
