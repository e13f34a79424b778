"""What the many processes of a stress do to one store, each operation a small function; and what it may hear.

An operation is given the place and its own source of chance. What it raises is held
against ``HEARS``: the errors that the interface allows for the races it can lose. It raises ``AssertionError`` itself
where what it was given is not right.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader

from tests.faults.operations import DAY, ahead
from zgstore import errors
from zgstore.building.builder import build
from zgstore.errors import Busy, Missing, ZgError
from zgstore.format.digest import Digest
from zgstore.reading.opening import follow, read
from zgstore.storage.store import Store
from zgstore.upkeep import inspector, keeper
from zgstore.upkeep.accounts import usage, why
from zgstore.upkeep.collector import collect
from zgstore.upkeep.copier import copy
from zgstore.upkeep.differ import diff
from zgstore.upkeep.verifier import verify

sys.path[:0] = [str(Path(__file__).parents[1] / "building")]

from projects import make_project, write_recipe, write_rows  # noqa: E402

ROOT = Path(__file__).parents[2]
T = TypeVar("T")
LIMITS = (None, 9, 5)  # the last batch cut, whole batches and all of it
NAMES = 4  # of each kind: few, so that many hands reach for the same
LONG_SECONDS = 20.0  # until something befalls who waits for it; who waits for a lock waits for 30
KEPT = 2  # snapshots that are held from the beginning to the end


@dataclass(frozen=True, slots=True)
class Project:
    """The recipes that are built, and what they come to when nothing disturbs them.

    Args:
        recipes: Their files.
        snapshots: (recipe, limit) → the snapshot's digest.
        contents: Digest → a digest of all that a reader gives.
    """

    recipes: tuple[Path, ...]
    snapshots: Mapping[tuple[int, int | None], str] = field(default_factory=dict)
    contents: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Place:
    """Where the hands work.

    Args:
        project: What is built.
        store: The store that all work on.
        target: Another one that snapshots are carried to, and back from.
        index: The folder of the store's index.
    """

    project: Project
    store: Path
    target: Path
    index: Path

    @property
    def kept(self) -> tuple[str, ...]:
        """The digests that nobody lets go."""
        return tuple(dict.fromkeys(self.project.snapshots.values()))[:KEPT]

    def rev(self, chance: random.Random) -> str:
        """Anything that may name a snapshot: a name that is there now, a past one, a digest."""
        names = [ref.name for ref in Store.open(self.store).refs.list()]
        lot = chance.random()
        if lot < 0.3 or not names:
            return chance.choice([*self.project.snapshots.values()])
        return chance.choice(names) + ("@{1}" if lot < 0.4 else "")


def _names(kind: str) -> list[str]:
    return [f"{kind}/{each}" for each in range(NAMES)]


# ---- the project ----


def make_recipes(folder: Path) -> Project:
    """Recipes that overlap: in columns, in rows, in teacher and data; one is ragged."""
    first, module = make_project(folder / "a", rows=13, name="r0", boundaries=("layers.0:in", "norm:in"))
    more = write_recipe(first.parent, module, name="r1", boundaries=("layers.0:in", "layers.2:in", "norm:in"))
    bf16 = write_recipe(
        first.parent, module, name="r2", boundaries=("norm:in",), storage='batches_per_shard = 2\ndtype = "bfloat16"'
    )
    capture = 'lengths = "attention_mask"\nsequence = ["input_ids", "labels"]'
    ragged, _ = make_project(folder / "b", name="r3", boundaries=("layers.1:in", "norm:in"), capture=capture)
    write_rows(folder / "b", 13, ragged=True, ids=True)
    return Project((first, more, bf16, ragged))


def references(project: Project, folder: Path) -> dict[str, Any]:
    """What each recipe comes to, each in a store of its own; as JSON can have it."""
    snapshots, contents = [], {}
    for at, recipe in enumerate(project.recipes):
        for limit in LIMITS:
            store = Store.init(folder / f"{at}-{limit}")
            digest = str(build(store, recipe, limit=limit, ref=None).snapshot)
            contents[digest] = content_of(store, digest)
            snapshots.append([at, limit, digest])
            shutil.rmtree(store.path)
    return {"snapshots": snapshots, "contents": contents}


def content_of(store: Store, rev: str, *, workers: int = 0) -> str:
    """A digest of every row that a reader gives, in order, by column."""
    with read(store, Digest.parse(rev) if ":" in rev else rev) as reader:
        found = {name: hashlib.sha256() for name in reader.columns}
        batches: Iterable[Sequence[Mapping[str, torch.Tensor]]] = [reader.__getitems__(list(range(len(reader))))]
        if workers:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of more workers than cores
                batches = DataLoader(reader, batch_size=3, num_workers=workers, collate_fn=list)
        for batch in batches:
            for row in batch:
                for name, each in found.items():
                    each.update(row[name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return " ".join([reader.snapshot, *(f"{name} {each.hexdigest()[:16]}" for name, each in found.items())])


# ---- operations ----


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
    got = _whole_while_named(store, rev, lambda: content_of(store, rev, workers=workers))
    due = place.project.contents[got.split()[0]]
    assert got == due, f"a reader gave {got}, and undisturbed {due}"


def _whole_while_named(store: Store, rev: str, work: Callable[[], T]) -> T:
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
    _is_sound(Store.open(place.store if chance.random() < 0.8 else place.target), **how)


def _is_sound(store: Store, revs: Sequence[Digest] | None = None, **how: Any) -> None:
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
    _whole_while_named(source, rev, lambda: copy(source, rev, to=target))


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
    command = chance.choice(COMMANDS)
    _command(place.store, *command)


def _command(store: Path, *command: str) -> None:
    line = [sys.executable, "-m", "zgstore.cli.main", "--store", str(store), "--json", *command]
    done = subprocess.run(line, capture_output=True, text=True, check=False, cwd=ROOT)
    assert not done.stderr.count("Traceback"), f"{command}: {done.stderr}"
    value = json.loads(done.stdout)
    if done.returncode == 0:
        assert value.get("ok", True), f"{command} ended well and says {value}"
        return
    said = value["error"]
    error = KINDS[said["kind"]]
    assert done.returncode == error.exit_code, f"{command}: {done.returncode} is not the exit code of {said}"
    assert "problems" not in value, f"{command}: {value['problems']}"
    raise error(f"{command}: {said['message']}", hint=said["hint"])


# ---- operations of one hazard ----


def takes(place: Place, _chance: random.Random) -> int:
    """A collection after somebody's lease has grown old, as soon as no other is under way."""
    give_up = time.monotonic() + 2.0
    while True:
        try:
            return collect(Store.open(place.store), now=True, expire_reflog_seconds=0.0).freed.objects
        except Busy:
            if time.monotonic() > give_up:
                raise
            time.sleep(0.02)


def collects_at_another_time(place: Place, chance: random.Random) -> int:
    """As the clock of the file system has it, which was set, or is about to be."""
    with ahead(chance.choice([-1, 1, 1, 2, 10]) * DAY):
        store = Store.open(place.store)
        return collect(store, now=chance.random() < 0.5, expire_reflog_seconds=0.0).freed.objects


def cannot_collect(place: Place, chance: random.Random) -> None:
    """Where locks lie nobody collects, unless it is said who does."""
    if chance.random() < 0.3:
        _command(place.store, "gc", "--now")
    collect(Store.open(place.store), now=chance.random() < 0.5)
    raise AssertionError("something was collected though locks lie")


def collects_alone(place: Place, _chance: random.Random) -> int:
    """The one host that collects, at a moment when nobody else does anything."""
    return collect(Store.open(place.store), now=True, owner=True, expire_reflog_seconds=0.0).freed.objects


def grabs(place: Place, chance: random.Random) -> None:
    """A lock that is held for longer than any is: whoever holds it is killed meanwhile."""
    store = Store.open(place.store)
    if chance.random() < 0.5:
        lock = store.leases.store_lock(exclusive=chance.random() < 0.5)
    else:
        lock = chance.choice([store.leases.gc_lock(), store.refs._files.alone()])
    with lock:
        time.sleep(LONG_SECONDS)


def lingers(place: Place, chance: random.Random) -> None:
    """A snapshot reserved, then nothing until the process was stopped and goes on, then a name given to it."""
    store, digest = Store.open(place.store), Digest.parse(chance.choice([*place.project.contents]))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCONT})
    try:
        with store.writing("linger") as session:
            try:
                session.adopt(digest)
            except Missing:
                digest = Digest.parse(place.kept[0])
                session.adopt(digest)
            signal.sigtimedwait({signal.SIGCONT}, LONG_SECONDS)
            with session.confirmed(digest):
                store.refs.move("s/late", "head", digest)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCONT})


def reads_only(place: Place, chance: random.Random) -> None:
    """What a mount that cannot be written is for: what is held can be read, looked at and verified."""
    digest, store = chance.choice(place.kept), Store.open(place.store)
    if chance.random() < 0.5:
        assert content_of(store, digest, workers=chance.choice([0, 0, 2])) == place.project.contents[digest]
    elif chance.random() < 0.7:
        _is_sound(store, [Digest.parse(digest)])
    else:
        _command(place.store, *chance.choice([("show", digest), ("verify", digest)]))


def cannot_write(place: Place, chance: random.Random) -> None:
    """And everything else is refused."""
    store, rev = Store.open(place.store), chance.choice(place.kept)
    writes: list[Callable[[], Any]] = [
        lambda: keeper.tag(store, "t/new", rev, force=True),
        lambda: keeper.hold(store, "new", rev),
        lambda: keeper.unhold(store, "kept/0"),
        lambda: keeper.forget(store, "kept/0", "tag"),
        lambda: collect(store, now=True),
        lambda: build(store, place.project.recipes[0], ref="new"),
        lambda: copy(Store.open(place.target), "kept/0", to=store),
        lambda: _command(place.store, "tag", "t/new", rev),
    ]
    chance.choice(writes)()
    raise AssertionError("something was written where nothing can be")


def hurts_index(place: Place, chance: random.Random) -> None:
    """The index deleted, garbled, cut, or its disk full: in between, so under the lock that its users hold."""
    ballast = place.index.parent / "ballast"
    with contextlib.suppress(FileNotFoundError):
        how = chance.choice(["delete", "garble", "cut", "unseal", "fill", "fill"])
        if how == "delete":
            shutil.rmtree(place.index, ignore_errors=True)
        elif how == "fill":
            _fill(ballast, chance)
        else:
            with _folder(place.index) as folder:
                fcntl.flock(folder, fcntl.LOCK_EX)
                hurt = place.index / chance.choice(["data.mdb", "data.mdb", "lock.mdb", "seal"])
                if how == "unseal":
                    (place.index / "seal").unlink()
                elif how == "cut":
                    os.truncate(hurt, chance.randrange(hurt.stat().st_size + 1))
                else:
                    _garble(hurt, chance)


def _fill(ballast: Path, chance: random.Random) -> None:
    """Only where the index has a small disk of its own."""
    if os.statvfs(ballast.parent).f_blocks * os.statvfs(ballast.parent).f_frsize > 16 << 20:
        return
    if ballast.exists() and chance.random() < 0.5:
        ballast.unlink(missing_ok=True)
        return
    with contextlib.suppress(OSError), ballast.open("ab", buffering=0) as file:
        while file.write(bytes(4096)):
            pass


def _garble(path: Path, chance: random.Random) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(min(len(content), 200)):
        content[chance.randrange(len(content))] = chance.randrange(256)
    path.write_bytes(content)


@contextlib.contextmanager
def _folder(path: Path) -> Any:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield handle
    finally:
        os.close(handle)


# ---- which, how often, and what they may hear ----

#: Those that collect say how many objects they freed.
Operation = Callable[[Place, random.Random], int | None]

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
    takes: {"busy"},
    collects_at_another_time: {"busy"},
    cannot_collect: {"refused"},
    collects_alone: set(),
    grabs: {"busy"},
    lingers: set(),
    reads_only: set(),
    cannot_write: {"invalid"},
    hurts_index: set(),
}
