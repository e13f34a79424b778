"""The processes of one launch: a pool of blocks, retried from their checkpoints, and perhaps a build beside them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

import zgstore
from zgtrain.blockreport import finished
from zgtrain.blocks import boundaries_among, boundaries_of, refuse_shared, resolve_snapshot
from zgtrain.files import made
from zgtrain.job import Job
from zgtrain.source import LIVE

WAITING, RUNNING, DONE, FAILED, STOPPED = "waiting", "running", "done", "failed", "stopped"
# What another attempt would only meet again.
FINAL: Final = tuple(
    error.exit_code for error in (zgstore.Refused, zgstore.NonFinite, zgstore.Corrupt, zgstore.Missing, zgstore.Partial)
)
_ERRORS: Final = (
    zgstore.NotFound, zgstore.Busy, zgstore.Conflict, zgstore.Corrupt, zgstore.Missing, zgstore.Partial,
    zgstore.NoSpace, zgstore.Refused, zgstore.NonFinite, zgstore.Invalid, zgstore.Transient, zgstore.Interrupted,
)  # fmt: skip
ERRORS: Final = "stderr.log"
_REMEDY: Final = "remove it: a new one is begun"
_PATIENCE: Final = "60s"  # for whoever still has a block's folder: an earlier launch that is saving


@dataclass(slots=True)
class BlockRun:
    """What became of a block in this launch.

    Args:
        block: b.
        state: ``waiting``, ``running``, ``done``, ``failed`` or ``stopped``.
        attempts: Times that its process was started; those that ended for the build's sake are not counted.
        device: Where it ran last.
        error: The last one, as ``--json`` prints it.
        report: Of a block that is done.
        unsaved: Whether its process was stopped and ended otherwise than one that has saved.
    """

    block: int
    state: str = WAITING
    attempts: int = 0
    device: str | None = None
    error: dict[str, Any] | None = None
    report: dict[str, Any] | None = None
    unsaved: bool = False


@dataclass(slots=True)
class Child:
    """A process, and what it prints: one JSON object."""

    process: subprocess.Popen[bytes]
    out: IO[bytes]
    told: bool = False  # to stop

    def terminate(self) -> None:
        """Once: more would say nothing new."""
        if not self.told and self.process.poll() is None:
            self.told = True
            self.process.send_signal(signal.SIGTERM)

    def answer(self) -> dict[str, Any]:
        """What it said; what its exit means, if it said nothing."""
        self.out.seek(0)
        text = self.out.read().decode("utf-8", "replace").strip()
        self.out.close()
        try:
            value = json.loads(text.rpartition("\n")[2])
        except ValueError:
            value = None
        if isinstance(value, dict):
            return value
        code = self.process.returncode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        hint = "its folder's stderr.log may say more; run the same launch again: it resumes"
        return {"ok": False, "error": {"kind": "transient", "message": f"its process {how}", "hint": hint}}


@dataclass(slots=True)
class Crew:
    """The processes of one launch.

    Args:
        job: The job.
        width: Blocks at a time.
        devices: Spread over them.
        source: ``cached`` or ``live``.
        follow: The recipe of the build beside them.
        retries: Of a block, and of the build.
    """

    job: Job
    width: int
    devices: tuple[str, ...]
    source: str
    follow: Path | None
    retries: int
    runs: list[BlockRun] = field(default_factory=list)
    build_value: dict[str, Any] | None = None
    _children: dict[int, Child] = field(default_factory=dict)  # slot → process
    _at: dict[int, int] = field(default_factory=dict)  # slot → block
    _build: Child | None = None
    _build_id: str = ""
    _build_attempts: int = 0
    _stopping: bool = False

    def __post_init__(self) -> None:
        if self.follow is None:
            store = zgstore.Store.open(self.job.snapshot.store)
            self._meet(boundaries_of(self.job, store), str(resolve_snapshot(self.job, store)))
        else:
            zgstore.Store.init(self.job.snapshot.store)
            self._start_build()

    def advance(self) -> bool:
        """Look at every process, start what can be started; False when nothing is left to do."""
        self._look_at_build()
        for slot, child in list(self._children.items()):
            if child.process.poll() is not None:
                del self._children[slot]
                self._ended(self.runs[self._at.pop(slot)], child)
        for slot in range(min(self.width, len(self.runs))):
            if slot not in self._children and self._ready():
                run = next((each for each in self.runs if each.state == WAITING), None)
                if run is not None:
                    self._start(run, slot)
        waiting = not self._stopping and (not self.runs or any(run.state == WAITING for run in self.runs))
        return bool(self._children) or self._build is not None or waiting

    def terminate(self) -> None:
        """Ask all to save and end; nothing more is started."""
        self._stopping = True
        for child in (*self._children.values(), *([self._build] if self._build else [])):
            child.terminate()
        for run in self.runs:
            run.state = STOPPED if run.state == WAITING else run.state

    @contextlib.contextmanager
    def ended_at_last(self) -> Iterator[None]:
        """However the launch ends, no process outlives it."""
        try:
            yield
        finally:
            self.terminate()
            for child in (*self._children.values(), *([self._build] if self._build else [])):
                child.process.wait()
                child.out.close()

    # -- blocks --

    def _meet(self, names: Sequence[str], snapshot: str) -> None:
        """The blocks are known: those that are done stay as they are."""
        refuse_shared(self.job, len(names) - 1)
        for block in range(len(names) - 1):
            run = BlockRun(block)
            try:
                report = finished(self.job, block)
            except zgstore.ZgError as error:  # of this block alone: the others are trained
                run.state, run.error, report = FAILED, error.as_json(), None
            if report is not None and report.snapshot == snapshot and (report.targets == LIVE) == (self.source == LIVE):
                run.state, run.report = DONE, report.as_value()
            self.runs.append(run)

    def _ready(self) -> bool:
        return not self._stopping and (self.follow is None or self._build is None or bool(self._build_id))

    def _start(self, run: BlockRun, slot: int) -> None:
        run.device = self.devices[slot % len(self.devices)] if self.devices else None
        words = ["run", str(self.job.path), "--block", str(run.block), "--json", "--wait", _PATIENCE]
        words += [word for text in self.job.overrides for word in ("--set", text)]
        words += ["--device", run.device] if run.device else []
        words += ["--follow", "--build", self._build_id] if self._build_id else ["--source", self.source]
        run.attempts += 1
        try:
            with made(self.job.folder(run.block) / ERRORS, remedy=_REMEDY) as errors:
                self._children[slot] = started(["zgtrain", *words], errors)
        except zgstore.ZgError as error:
            run.state, run.error = FAILED, error.as_json()
            return
        self._at[slot] = run.block
        run.state, run.error = RUNNING, None

    def _ended(self, run: BlockRun, child: Child) -> None:
        value = child.answer()
        if child.process.returncode == 0 and value.get("ok"):
            run.state, run.report = DONE, value
            return
        if run.state == FAILED:  # with the build
            return
        run.error = value.get("error")
        if child.told or self._stopping:  # for the build's sake, or everybody's
            run.attempts -= not self._stopping
            run.state = STOPPED if self._stopping else WAITING
            run.unsaved = self._stopping and child.process.returncode != zgstore.Interrupted.exit_code
        elif self._build_id and child.process.returncode == zgstore.Interrupted.exit_code:  # its build went first
            run.attempts -= 1
            run.state = WAITING
        elif child.process.returncode in FINAL or run.attempts > self.retries:
            run.state = FAILED
        else:
            run.state = WAITING

    # -- the build beside them --

    def _start_build(self) -> None:
        assert self.follow is not None
        words = ["zgstore", "build", str(self.follow), "--store", str(self.job.snapshot.store), "--json"]
        rev = self.job.snapshot.rev
        if not rev.startswith("lock:") and not set(rev) & set("@:"):
            words += ["--ref", rev]
        with made(self.job.output / "build.log", remedy=_REMEDY) as errors:
            self._build = started(words, errors)
        self._build_id = ""
        self._build_attempts += 1

    def _look_at_build(self) -> None:
        if self._build is None:
            return
        ended = self._build.process.poll() is not None
        store = zgstore.Store.open(self.job.snapshot.store)
        if not self._build_id:
            self._find_build(store)
        if ended:
            self._build_ended(store)

    def _find_build(self, store: zgstore.Store) -> None:
        """The growing build's name and columns, as soon as it says them."""
        assert self._build is not None
        mine = {lease.uuid for lease in store.leases.all() if lease.pid == self._build.process.pid and lease.alive}
        uuid = next((each for each in store.memos.builds() if each in mine), "")
        found = store.memos.build(uuid) if uuid else None
        if found is not None:
            self._build_id = uuid
            if not self.runs:
                self._meet(boundaries_among(self.job, found.columns), "")

    def _build_ended(self, store: zgstore.Store) -> None:
        assert self._build is not None
        child, self._build = self._build, None
        value = child.answer()
        if child.process.returncode == 0 and value.get("ok"):
            self.build_value = value
            if not self._build_id:  # it was over before anybody saw it: what it made is there to be read
                self.runs.clear()
                self._meet(boundaries_of(self.job, store), str(resolve_snapshot(self.job, store)))
            return
        if self._stopping:
            return
        for each in self._children.values():  # they would wait for shards that never come
            each.terminate()
        if child.process.returncode in FINAL or self._build_attempts > self.retries:
            error = value.get("error") or {}
            self.build_value = value
            if not self.runs:
                raise as_error(error, f"the build failed: {error.get('message')}")
            for run in self.runs:
                if run.state in {WAITING, RUNNING}:
                    run.error = {**error, "message": f"the build failed: {error.get('message')}"}
                    run.state = FAILED
            self._stopping = True
            return
        self._start_build()


def as_error(value: Mapping[str, Any], message: str, **fields: Any) -> zgstore.ZgError:
    """An error as ``--json`` prints it, as one that can be raised, with another message."""
    kind = next((each for each in _ERRORS if each.kind == value.get("kind")), zgstore.Transient)
    again = "run the same launch again: what is done stays, the rest resumes"
    return kind(message, hint=str(value.get("hint") or again), **fields)


def cause(log: Path, begin: int) -> dict[str, Any] | None:
    """Why several processes of a block failed, where one of them says what another attempt would only meet again.

    The others then say no more than that it is gone.

    Args:
        log: What they wrote to standard error; each answer in JSON, but for the first one's.
        begin: Where this run's part of it begins, in bytes.
    """
    for line in log.read_bytes()[begin:].splitlines():
        with contextlib.suppress(ValueError):
            value = json.loads(line)
            error = value.get("error") if isinstance(value, dict) else None
            if error and as_error(error, "").exit_code in FINAL:
                return dict(error)
    return None


def started(words: Sequence[str], errors: IO[bytes]) -> Child:
    """A process that ends with this one, and that no Ctrl-C in our terminal reaches but through us."""
    out = tempfile.TemporaryFile()  # noqa: SIM115 - read and closed when the process has ended
    command = [sys.executable, "-m", "zgtrain.cli.tied", str(os.getpid()), *words]
    process = subprocess.Popen(  # noqa: S603 - our own commands, no shell
        command, stdin=subprocess.DEVNULL, stdout=out, stderr=errors, start_new_session=True
    )
    return Child(process, out)
