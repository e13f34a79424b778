"""What befalls a stress: traits of its processes, disks that are no use, operations of their own; each by its name."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.faults import crowd
from tests.faults.crowd import Operation, command, is_sound
from tests.faults.operations import DAY, ahead
from tests.faults.places import Place, content_of
from zgstore.building.builder import build
from zgstore.errors import Busy, Missing
from zgstore.format.digest import Digest
from zgstore.storage.store import Store
from zgstore.upkeep import keeper
from zgstore.upkeep.collector import collect
from zgstore.upkeep.copier import copy

LONG_SECONDS = 20.0  # until something befalls who waits for it; who waits for a lock waits for 30


@dataclass(frozen=True, slots=True)
class Traits:
    """What is not as usual with a hand.

    Args:
        lying_locks: Its locks are always free.
        seconds_ahead: Its clock is off.
        elsewhere: It seems to run on a host of its own: others tell its leases dead by their age alone.
        small_map: Its index is full at once.
        read_only: It sees the store through a mount that cannot be written.
    """

    lying_locks: bool = False
    seconds_ahead: int = 0
    elsewhere: bool = False
    small_map: bool = False
    read_only: bool = False


@dataclass(frozen=True, slots=True)
class Hazard:
    """What befalls the hands of a run.

    Args:
        traits: The hands', in turn.
        more: Operations beyond the usual, and how often they are chosen; each comes once before all others.
        instead: Usual ones that others take the place of.
        hears: What an operation may hear besides.
        kills: Of all operations, how many are killed at some moment.
        stops: How many are stopped for a while.
        takes: How many are stopped until somebody has taken their lease.
        disks: Prepares a place and cleans up after it.
        needs_lies: Whether the system must be able to lie.
    """

    traits: tuple[Traits, ...] = (Traits(),)
    more: dict[Operation, int] = field(default_factory=dict)
    instead: dict[Operation, Operation] = field(default_factory=dict)
    hears: dict[Operation, set[str]] = field(default_factory=dict)
    kills: float = 0.05
    stops: float = 0.05
    takes: float = 0.0
    disks: Callable[[Place], contextlib.AbstractContextManager[Place]] = contextlib.nullcontext
    needs_lies: bool = False


class CannotBe(Exception):
    """Why a hazard cannot be had here."""


@contextlib.contextmanager
def _mounted(at: Path, *commands: Sequence[str]) -> Iterator[None]:
    at.mkdir()
    for line in commands:
        if os.geteuid() or subprocess.run(line, check=False, capture_output=True).returncode:
            raise CannotBe(f"nothing can be mounted here: {' '.join(line)}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(at)], check=True)


@contextlib.contextmanager
def _read_only(place: Place) -> Iterator[Place]:
    at = place.store.with_name("read-only")
    bind = ["mount", "--bind", str(place.store), str(at)]
    with _mounted(at, bind, ["mount", "-o", "remount,bind,ro", str(at)]):
        yield place


@contextlib.contextmanager
def _small_index(place: Place) -> Iterator[Place]:
    """The index on a disk of a MiB of its own."""
    at, config = place.store.with_name("index-disk"), place.store / "zgstore.toml"
    with _mounted(at, ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(at)]):
        config.write_text(f'{config.read_text()}index = "{at}"\n')
        folder = at / Store.open(place.store).id
        folder.mkdir()
        yield replace(place, index=folder / "lmdb-1")


# ---- their operations ----


def takes(place: Place, _chance: random.Random) -> int:
    """A collection after somebody's lease has grown old, as soon as no other is under way."""
    give_up = time.monotonic() + 8.0
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
        command(place.store, "gc", "--now")
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
                with session.confirmed(digest):
                    pass
            except Missing:
                digest = Digest.parse(place.kept[0])
                with session.confirmed(digest):
                    pass
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
        is_sound(store, [Digest.parse(digest)])
    else:
        command(place.store, *chance.choice([("show", digest), ("verify", digest)]))


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
        lambda: command(place.store, "tag", "t/new", rev),
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


# ---- the table ----

HAZARDS = {
    "none": Hazard(),
    "lying-flock": Hazard(
        traits=(Traits(lying_locks=True),), more={collects_alone: 6},
        instead={crowd.collects: cannot_collect}, hears={crowd.commands: {"refused"}}, needs_lies=True,
    ),
    "killed-holder": Hazard(more={grabs: 10}, kills=0.25, stops=0.0),
    "stopped-holder": Hazard(traits=(Traits(elsewhere=True),), more={lingers: 6}, takes=0.2),
    "clock": Hazard(
        traits=tuple(Traits(seconds_ahead=days * 86400, elsewhere=days != 0) for days in (-1, 0, 1)),
        more={collects_at_another_time: 8},
        # A file that is on its way for more than an hour, as it seems, is swept away under its writer's hands.
        hears={each: {"transient"} for each in crowd.WRITES}, needs_lies=True,
    ),
    "read-only": Hazard(traits=(Traits(), Traits(), Traits(read_only=True)), disks=_read_only),
    "index": Hazard(
        traits=(Traits(), Traits(), Traits(small_map=True)), more={hurts_index: 20, crowd.verifies: 16},
        disks=_small_index,
    ),
}  # fmt: skip
READS_ONLY: dict[Operation, int] = {reads_only: 4, cannot_write: 3}
#: What befalls those that wait for it, and those that are there to be counted.
FATES: dict[Operation, str] = {grabs: "kill", lingers: "take"}
FATES |= dict.fromkeys([*READS_ONLY, cannot_collect, collects_alone, hurts_index], "")
#: What may be stopped until its lease was taken: what it then hears is that something is gone, its own drafts perhaps.
TAKEABLE = (lingers, crowd.builds, crowd.tags, crowd.moves, crowd.holds, crowd.reads, crowd.follows, crowd.copies)
GONE = {"missing", "not_found", "conflict", "transient"}

#: What each operation may hear.
HEARS: dict[Operation, set[str]] = crowd.HEARS | {
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
