"""Many processes at once, each told what to do and with which seed; killed, stopped and let go; and what they say.

Each process is a *hand*: forked from here, where torch is loaded already, it does one operation after another. What it
hears is held against what the interface allows.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import random
import select
import signal
import socket
import subprocess
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from tests.faults import aftermath, crowd, lies, steps
from tests.faults.crowd import Operation
from tests.faults.hazards import (
    FATES,
    GONE,
    HAZARDS,
    HEARS,
    READS_ONLY,
    TAKEABLE,
    CannotBe,
    Hazard,
    Traits,
    collects_alone,
    takes,
)
from tests.faults.places import Place, Project, place_in, prepared
from zgstore.errors import ZgError
from zgstore.storage import index, leases
from zgstore.storage.store import Store

STUCK_SECONDS = 180.0  # of any operation: locks are waited for for 30 s
LONGEST_STOP_SECONDS = 10.0
OLD_SECONDS = 2 * 3600.0
OPERATIONS = {work.__name__: work for work in HEARS}


# ---- a hand ----


@dataclass(slots=True)
class Task:
    """One operation that a hand is in the middle of.

    Args:
        number: Of all, from 1.
        work: Which.
        seed: Its chance.
        fate: What befalls it: "", ``kill``, ``stop`` or ``take``.
        at: When, in seconds of the monotonic clock.
        began: When it began.
        until: Until when it is stopped; 0 while it is not.
        was_taken: Whether its leases were made to look old.
    """

    number: int
    work: Operation
    seed: int
    fate: str
    at: float
    began: float
    until: float = 0.0
    was_taken: bool = False


@dataclass(slots=True)
class Hand:
    """A process, and what it does."""

    pid: int
    ours: socket.socket
    traits: Traits
    task: Task | None = None
    first: list[Operation] = field(default_factory=list)


def _be_a_hand(theirs: socket.socket, place: Place, traits: Traits, told: Path) -> NoReturn:
    """Do what one is told until there is nobody any more who would."""
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(lies.ENDS_WITH_ITS_PARENT, signal.SIGKILL)  # even while it is stopped
    log = os.open(told, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    if traits.lying_locks or traits.seconds_ahead:
        lies.lie(about_locks=traits.lying_locks, seconds_ahead=traits.seconds_ahead)
    if traits.elsewhere:
        boot = f"boot of {os.getpid()}"
        leases._boot = lambda: boot
    if traits.small_map:
        index._SMALLEST_MAP = index._LARGEST_MAP = 40960
    with theirs, theirs.makefile("r", encoding="utf-8") as orders:
        for order in orders:
            name, seed = json.loads(order)
            said = _said(OPERATIONS[name], place, random.Random(seed))
            theirs.sendall((json.dumps(said) + "\n").encode())
    os._exit(0)


def _said(work: Operation, place: Place, chance: random.Random) -> dict[str, Any]:
    """What came of it: the kind of its error, "" if there was none; of what is no error of ours, its class."""
    try:
        return {"kind": "", "freed": work(place, chance) or 0}
    except BaseException as error:  # noqa: BLE001 - it is told
        kind = error.kind if isinstance(error, ZgError) else type(error).__name__
        return {"kind": kind, "message": "".join(traceback.format_exception(error))[-4000:]}


# ---- all of them ----


@dataclass(slots=True)
class Counts:
    """What was done, what was heard, and what was found."""

    done: Counter[str] = field(default_factory=Counter)
    heard: Counter[str] = field(default_factory=Counter)
    befell: Counter[str] = field(default_factory=Counter)
    files: dict[str, list[int]] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Crowd:
    """The hands of one run, from the first to the last; each that is killed is replaced."""

    def __init__(self, place: Place, hazard: Hazard, *, hands: int, chance: random.Random) -> None:
        self.place, self.hazard, self.chance = place, hazard, chance
        self.counts = Counts()
        self.began = 0
        self.hands: list[Hand] = []
        self.next: list[Operation] = [*hazard.more, *hazard.instead.values()]
        self.log = place.store.with_name("said")
        for each in range(hands):
            self.hands.append(self._hire(hazard.traits[each % len(hazard.traits)]))

    def run(self, is_enough: Callable[[int], bool]) -> Counts:
        """Give out operations until it is enough, then see all of them end."""
        while not is_enough(self.began) or self.next or any(hand.first for hand in self.hands):
            self._give_out()
            self._attend()
        while any(hand.task for hand in self.hands):
            self._attend()
        for hand in self.hands:
            hand.ours.close()
            os.waitpid(hand.pid, 0)
        return self.counts

    def _hire(self, traits: Traits) -> Hand:
        ours, theirs = socket.socketpair()
        child = os.fork()
        if child == 0:
            for each in (ours, *(hand.ours for hand in self.hands)):
                each.close()
            place = self.place
            if traits.read_only:
                place = replace(place, store=place.store.with_name("read-only"))
            _be_a_hand(theirs, place, traits, self.log)
        with contextlib.suppress(OSError):  # whichever of both is first
            os.setpgid(child, child)
        theirs.close()
        return Hand(child, ours, traits, first=[*READS_ONLY] if traits.read_only else [])

    # -- giving out --

    def _give_out(self) -> None:
        for hand in self.hands:
            if hand.task is None:
                work = self._chosen(hand)
                if work is collects_alone and any(other.task for other in self.hands):
                    self.next.insert(0, work)  # as soon as nobody does anything
                    return
                self._give(hand, work)
                if work is collects_alone:
                    while hand.task is not None:
                        self._attend()

    def _chosen(self, hand: Hand) -> Operation:
        if hand.first:
            return hand.first.pop()
        if hand.traits.read_only:
            listed = READS_ONLY
        elif self.next:
            return self.next.pop(0)
        else:
            listed = crowd.USUAL | self.hazard.more
        (work,) = self.chance.choices([*listed], [*listed.values()])
        return self.hazard.instead.get(work, work)

    def _give(self, hand: Hand, work: Operation) -> None:
        self.began += 1
        seed, now = self.chance.randrange(1 << 32), time.monotonic()
        hand.task = Task(self.began, work, seed, self._fate(work), now + self.chance.expovariate(4.0), now)
        hand.ours.sendall((json.dumps([work.__name__, seed]) + "\n").encode())

    def _fate(self, work: Operation) -> str:
        if work in FATES:
            return FATES[work]
        lot, hazard = self.chance.random(), self.hazard
        if work in TAKEABLE and lot < hazard.takes:
            return "take"
        lot = self.chance.random()
        return "kill" if lot < hazard.kills else "stop" if lot < hazard.kills + hazard.stops else ""

    # -- attending --

    def _attend(self) -> None:
        """Hear who has something to say, and let befall what is due."""
        busy = [hand for hand in self.hands if hand.task is not None]
        ready, _, _ = select.select([hand.ours for hand in busy], [], [], self._patience(busy))
        for hand in busy:
            if hand.ours in ready:
                self._hear(hand)
            elif hand.task is not None:
                self._befall(hand, hand.task)

    def _patience(self, busy: Sequence[Hand]) -> float:
        now = time.monotonic()
        due = [task.until or task.at for hand in busy if (task := hand.task) and (task.fate or task.until)]
        return max(0.0, min([0.5, *(each - now for each in due)]))

    def _hear(self, hand: Hand) -> None:
        task, told = hand.task, b""
        assert task is not None
        with contextlib.suppress(ConnectionError):
            while not told.endswith(b"\n") and (piece := hand.ours.recv(1 << 16)):
                told += piece
        if not told:
            self._lost(hand, task)
            return
        hand.task = None
        if task.until:
            self._let_go(hand, task)
        said, name = json.loads(told), task.work.__name__
        allowed = HEARS[task.work] | self.hazard.hears.get(task.work, set())
        allowed |= GONE if task.was_taken else set()
        if not said["kind"]:
            self.counts.done[name] += 1
            self.counts.befell["objects freed"] += said["freed"]
        elif said["kind"] in allowed:
            self.counts.heard[f"{name}: {said['kind']}"] += 1
        else:
            self._found(task, said["message"])
        if task.work is takes:
            self._let_all_go()

    def _lost(self, hand: Hand, task: Task) -> None:
        _, status = os.waitpid(hand.pid, 0)
        self._found(task, f"its process ended: {os.waitstatus_to_exitcode(status)}\n{_tail(self.log)}")
        self._replace(hand)

    def _befall(self, hand: Hand, task: Task) -> None:
        now = time.monotonic()
        if task.until and now >= task.until:
            self._let_go(hand, task)
        elif now - task.began > STUCK_SECONDS:
            os.kill(hand.pid, signal.SIGUSR1)
            time.sleep(1.0)
            self._found(task, f"nothing came of it for {STUCK_SECONDS} s\n{_tail(self.log)}")
            self._kill(hand)
        elif task.fate and now >= task.at:
            self._meet_fate(hand, task, now)

    def _meet_fate(self, hand: Hand, task: Task, now: float) -> None:
        held = self._leases_of(hand) if task.fate == "take" else []
        if task.fate == "take" and not held:
            task.at = now + 0.05  # there is none yet
            return
        fate, task.fate = task.fate, ""
        if fate == "kill":
            self._kill(hand)
            self.counts.befell["killed"] += 1
            return
        os.killpg(hand.pid, signal.SIGSTOP)
        self.counts.befell["stopped"] += 1
        task.until = now + self.chance.uniform(0.05, 0.5)
        if fate == "take":
            task.until, task.was_taken = now + LONGEST_STOP_SECONDS, True
            self.counts.befell["leases made old"] += 1
            self.next.append(takes)
            old = time.time() - OLD_SECONDS
            for lease in held:
                with contextlib.suppress(FileNotFoundError):
                    os.utime(lease, (old, old))

    def _leases_of(self, hand: Hand) -> list[Path]:
        """The files of the leases that a hand holds now."""
        stores = (Store.open(self.place.store), Store.open(self.place.target))
        return [
            store.path / "leases" / lease.uuid
            for store in stores
            for lease in store.leases.all()
            if lease.pid == hand.pid
        ]

    def _let_go(self, hand: Hand, task: Task) -> None:
        task.until = 0.0
        os.killpg(hand.pid, signal.SIGCONT)

    def _let_all_go(self) -> None:
        for hand in self.hands:
            if hand.task is not None and hand.task.was_taken and hand.task.until:
                self._let_go(hand, hand.task)

    def _kill(self, hand: Hand) -> None:
        os.killpg(hand.pid, signal.SIGKILL)
        os.waitpid(hand.pid, 0)
        self._replace(hand)

    def _replace(self, hand: Hand) -> None:
        with contextlib.suppress(OSError):
            os.killpg(hand.pid, signal.SIGKILL)  # whom it has begun
        hand.ours.close()
        self.hands.remove(hand)
        self.hands.append(self._hire(hand.traits))

    def _found(self, task: Task, what: str) -> None:
        self.counts.findings.append(f"operation {task.number}, {task.work.__name__} with seed {task.seed}: {what}")


def _tail(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")[-4000:] if path.exists() else ""


# ---- one run ----


def stress(
    name: str, project: Project, folder: Path, *, hands: int, seed: int, is_enough: Callable[[int], bool]
) -> Counts:
    """One hazard: the crowd, and then the accounts."""
    hazard, began = HAZARDS[name], time.monotonic()
    if hazard.needs_lies and "lies.so" not in os.environ.get("LD_PRELOAD", ""):
        raise CannotBe(lies.cannot() or "it was not begun as a command")
    subprocess.run(["cp", "-a", project.recipes[0].parents[1] / "begin", folder], check=True)
    place = place_in(project, folder)
    with hazard.disks(place) as here:
        counts = Crowd(here, hazard, hands=hands, chance=random.Random(seed)).run(is_enough)
        for each in (here.store, here.target):
            found = steps.alone(lambda store=each: aftermath.settle(store, project))
            counts.findings += [f"afterwards, {each.name}: {what}" for what in found["findings"]]
            counts.files |= {f"{each.name}: {kind}": count for kind, count in found["files"].items()}
    counts.seconds = time.monotonic() - began
    return counts


def runs(
    names: Sequence[str], folder: Path, *, hands: int, seed: int, seconds: float, operations: int | None
) -> Iterator[dict[str, Any]]:
    """Each of these hazards in turn, for so many operations, or for so long; what came of it, as JSON can have it."""
    torch.set_num_threads(1)  # a process that is forked has one thread
    project = prepared(folder / "project")
    for name in names:
        until = time.monotonic() + seconds

        def is_enough(began: int, until: float = until) -> bool:
            return began >= operations if operations else time.monotonic() >= until

        told: dict[str, Any] = {"hazard": name, "seed": seed, "hands": hands}
        try:
            counts = stress(name, project, folder / name, hands=hands, seed=seed, is_enough=is_enough)
            yield told | {each.name: getattr(counts, each.name) for each in fields(counts)}
        except CannotBe as error:
            yield told | {"skipped": str(error)}
