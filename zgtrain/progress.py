"""How far each block is, read from the small files beside its checkpoint; no tensor is loaded."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import zgstore
from zgtrain.job import Job
from zgtrain.journal import FILE_NAME as LOG_NAME
from zgtrain.journal import read_lines

TODO, RUNNING, STOPPED, DONE = "to do", "running", "stopped", "done"
_TAIL_BYTES: Final = 1 << 16
_HOLDER: Final = re.compile(r"pid (\d+) on (\S+) since ")
_QUIET_SECONDS: Final = 300  # another host's process that has said nothing for so long is taken to have ended


@dataclass(frozen=True, slots=True)
class BlockStatus:
    """How far a block is.

    Args:
        block: b.
        state: ``to do``, ``running``, ``stopped`` or ``done``.
        step: The last one that was logged.
        steps: Those of the job.
        loss: Of that step.
        rate: Steps a second, lately; None before there are two looks at the device.
        eta_seconds: Until the last step, at that rate; None where there is nothing to expect.
        checkpoint_step: Of the last checkpoint; None if there is none.
        checkpoint_time: When it was written, in seconds of Unix time.
        holder: Which process trains it: ``pid 17 on host``.
    """

    block: int
    state: str
    step: int
    steps: int
    loss: float | None
    rate: float | None
    eta_seconds: float | None
    checkpoint_step: int | None
    checkpoint_time: float | None
    holder: str | None

    def as_value(self) -> dict[str, Any]:
        """The JSON object."""
        return asdict(self)


def status(job: Job) -> list[BlockStatus]:
    """Every block's, in depth order."""
    return [block_status(job, block) for block in range(count_blocks(job))]


def block_status(job: Job, block: int) -> BlockStatus:
    """One block's."""
    folder = job.folder(block)
    lines = read_lines(folder / LOG_NAME, tail_bytes=_TAIL_BYTES)
    losses = [line for line in lines if "loss" in line]
    told = _json(folder / "checkpoint.json")
    report = _json(folder / "report.json")
    done = report.get("job") == job.identity() and report.get("steps", 0) >= job.train.steps and report.get("snapshot")
    holder = _holder(folder)
    step = report["steps"] if done else losses[-1]["step"] if losses else 0
    rate = _rate(losses)
    running = holder is not None and not done
    left = job.train.steps - step
    return BlockStatus(
        block=block,
        state=DONE if done else RUNNING if running else STOPPED if told or losses else TODO,
        step=step,
        steps=job.train.steps,
        loss=losses[-1]["loss"] if losses else None,
        rate=rate,
        eta_seconds=left / rate if running and rate else None,
        checkpoint_step=told.get("step"),
        checkpoint_time=_time(folder / "checkpoint.json") if told else None,
        holder=holder if running else None,
    )


def count_blocks(job: Job) -> int:
    """B: by the job's boundaries, else by the snapshot's, else by the folders that are there.

    Raises:
        zgstore.NotFound: if nothing says.
    """
    if job.student.boundaries:
        return len(job.student.boundaries) - 1
    try:
        store = zgstore.Store.open(job.snapshot.store)
        rev = job.snapshot.rev
        name = rev.removeprefix("lock:")
        digest = store.resolve(rev) if rev == name else zgstore.locked(name, job.directory).snapshot
        return sum(column.role == "boundary" for column in store.snapshot(digest).columns) - 1
    except zgstore.NotFound:
        folders = sorted(job.output.glob("block-*"))
        if not folders:
            raise
        return int(folders[-1].name.removeprefix("block-")) + 1


def _rate(lines: list[dict[str, Any]]) -> float | None:
    """Steps a second between the first and the last look at the device that the lines come from."""
    if not lines or lines[-1]["seconds"] <= lines[0]["seconds"]:
        return None
    # Lines come in bursts of one look; the first burst's last line is where its time was taken.
    first = max(line["step"] for line in lines if line["seconds"] == lines[0]["seconds"])
    rate: float = (lines[-1]["step"] - first) / (lines[-1]["seconds"] - lines[0]["seconds"])
    return rate or None


def _holder(folder: Path) -> str | None:
    """Who has the block's folder, as far as this host can tell."""
    try:
        found = _HOLDER.match((folder / ".lock").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    if found is None:
        return None
    pid, host = int(found[1]), found[2]
    if host == socket.gethostname():
        alive = Path(f"/proc/{pid}").exists() if Path("/proc/self").exists() else _answers(pid)
    else:
        alive = time.time() - (_time(folder / LOG_NAME) or _time(folder / ".lock") or 0.0) < _QUIET_SECONDS
    return f"pid {pid} on {host}" if alive else None


def _answers(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _json(path: Path) -> Mapping[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _time(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return None
