"""Who is using what, and the store's locks.

A lease is a file: a head of fixed width that says whose it is, then raw digests that the holder needs. What live leases
name is not collected. The holder keeps the file locked and refreshes it each minute; the lock goes with the process.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import uuid as uuids
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from zgstore.errors import Corrupt, Invalid, ZgError
from zgstore.format import canonical
from zgstore.format.digest import DIGEST_BYTES, Digest
from zgstore.storage import locks
from zgstore.storage.files import READ_ONLY, Modes, clock, directory, faults, listing, open_regular, write_all

TTL_SECONDS: Final = 3600
REFRESH_SECONDS: Final = 60.0
HEAD_BYTES: Final = 1024  # length, canonical msgpack, zeros: digests begin where they can be found even if it is torn
WAIT_SECONDS: Final = 30.0
LOOK_SECONDS: Final = 1.0  # beyond it, this file system's locks do not work as they should
MAX_LEASE_BYTES: Final = 1 << 30  # 33 million objects: a lease is read whole


@dataclass(frozen=True, slots=True)
class LeaseInfo:
    """A lease as others see it.

    Args:
        uuid: Its file, and the name of its holder's folder in ``tmp/``.
        host: Where the holder runs; "" if the head is torn.
        boot: Which boot of that host.
        pid: The holder's process.
        start: When it was taken, in seconds of Unix time.
        purpose: What for.
        alive: Whether it still keeps what it names.
        digests: Raw digests joined; empty for a dead lease, which is not parsed.
        age_seconds: Since it was last refreshed.
    """

    uuid: str
    host: str
    boot: str
    pid: int
    start: float
    purpose: str
    alive: bool
    digests: bytes
    age_seconds: float = 0.0


class Lease:
    """A lease that this process holds: one close-on-exec descriptor, refreshed by a thread of its own.

    Closing it is the last thing a holder does; one that is forgotten closes itself, at the latest as the process ends.
    Forked children close their descriptor and hold nothing.
    """

    def __init__(self, root: Path, uuid: str, handle: int, head: bytes) -> None:
        self.uuid = uuid
        self._root = root
        self._handle = handle
        self._content = bytearray(head)  # what its file says
        self._pid = os.getpid()
        stop = threading.Event()
        self._give_back = weakref.finalize(self, _give_back, root, uuid, handle, self._pid, stop)
        threading.Thread(
            target=_refresh_each_minute, args=(weakref.ref(self), stop), name=f"lease-{uuid[:8]}", daemon=True
        ).start()

    def add(self, digests: Iterable[Digest]) -> None:
        """Name more digests, before looking whether they are there."""
        self.add_raw(b"".join(digest.raw for digest in digests))

    def add_raw(self, joined: bytes) -> None:
        """The same for raw digests joined.

        Raises:
            Invalid: if these are more than a lease can name.
        """
        self._check_owner()
        if len(self._content) + len(joined) > MAX_LEASE_BYTES:
            raise Invalid(
                f"one lease names at most {MAX_LEASE_BYTES // DIGEST_BYTES} objects",
                hint="work in several parts: by columns, or with `--worker I/N`",
            )
        with faults(f"writing the lease {self.uuid}"):
            try:
                write_all(self._handle, joined)
            except OSError:
                # A full disk may end a write within a digest, and what is named later must begin where one does.
                os.ftruncate(self._handle, len(self._content))
                raise
        self._content += joined

    def linked(self) -> bool:
        """Whether the lease's file is still the one we hold: if not, a collector took us for dead."""
        self._check_owner()
        with faults("looking at a lease"):
            return _is_linked(self._root, self.uuid, self._handle)

    def restore(self, fresh: int) -> None:
        """Say in a new file, of its name, what the old one said, and hold that one from now on."""
        self._check_owner()
        write_all(fresh, bytes(self._content))
        os.dup2(fresh, self._handle, inheritable=False)

    def refresh(self) -> None:
        """Say that the holder lives."""
        if not self.closed:
            with contextlib.suppress(OSError):
                os.utime(self._handle)

    @property
    def closed(self) -> bool:
        """Whether it was given back, or belongs to the process that this one was forked from."""
        return not self._give_back.alive or self._pid != os.getpid()

    def close(self) -> None:
        """Give it back; harmless when repeated, and in a forked child."""
        self._give_back()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_owner(self) -> None:
        if self.closed:
            raise Invalid(
                "this lease is closed, or was taken by the process that this one was forked from",
                hint="open the store anew in each process",
            )


def _is_linked(root: Path, uuid: str, handle: int) -> bool:
    try:
        with directory(root, "leases") as folder:
            named = os.stat(uuid, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    held = os.fstat(handle)
    return (named.st_dev, named.st_ino) == (held.st_dev, held.st_ino)


def _give_back(root: Path, uuid: str, handle: int, pid: int, stop: threading.Event) -> None:
    stop.set()
    if pid != os.getpid():
        return
    with contextlib.suppress(OSError, ZgError):
        # Only our own file: after we were taken for dead, another may have the name.
        if _is_linked(root, uuid, handle):
            (root / "leases" / uuid).unlink()
    locks.close_owned(handle)


def _refresh_each_minute(lease: weakref.ref[Lease], stop: threading.Event) -> None:
    # A teacher pass may take long, so no step of the holder's own is sure to come in time.
    while not stop.wait(REFRESH_SECONDS):
        held = lease()
        if held is None:
            return
        held.refresh()
        del held


class Leases:
    """The leases and locks of one store.

    Args:
        root: The store.
        modes: Permissions.
    """

    def __init__(self, root: Path, modes: Modes) -> None:
        self.root = root
        self._modes = modes

    def take(self, purpose: str, *, ttl_seconds: int = TTL_SECONDS) -> Lease:
        """Take a lease.

        Args:
            purpose: What for, in a word: ``build``, ``read``, ``copy``.
            ttl_seconds: How long other hosts believe in it after a refresh.

        Raises:
            Invalid: if the store cannot be written here.
            NoSpace, Transient: as the disk says.
        """
        uuid = str(uuids.uuid4())
        with self._new_file(uuid) as handle:
            head = _head(purpose, ttl_seconds)
            write_all(handle, head)
        return Lease(self.root, uuid, handle, head)

    @contextlib.contextmanager
    def _new_file(self, uuid: str) -> Iterator[int]:
        """A lease's file, locked, to be written in the block; it stays open, or if that fails is no more."""
        with faults("taking a lease"), directory(self.root, "leases", make=self._modes.folder) as folder:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND
            handle = locks.open_owned(uuid, flags, mode=self._modes.file, dir_fd=folder)
            try:
                # Whoever looks at leases tries each lock for a moment, this one too since its file is there.
                give_up = time.monotonic() + LOOK_SECONDS
                while not locks.try_lock(handle, exclusive=True) and time.monotonic() < give_up:
                    time.sleep(LOOK_SECONDS / 1000)
                yield handle
            except BaseException:
                os.unlink(uuid, dir_fd=folder)
                locks.close_owned(handle)
                raise

    def see_linked(self, lease: Lease) -> bool:
        """Whether the lease's file is still there; if not, a collector took its holder for dead, and it is put back.

        The first thing in each step of a holder. The caller holds the store lock.
        """
        if lease.linked():
            return True
        with self._new_file(lease.uuid) as fresh:
            lease.restore(fresh)
        locks.close_owned(fresh)
        return False

    def name(self, lease: Lease, digests: Iterable[Digest]) -> None:
        """Name what a reader is about to look for.

        Under the store lock: a collector's batch either sees the names, or is over before the reader looks.
        """
        with self.store_lock(exclusive=False):
            self.see_linked(lease)
            lease.add(digests)

    def try_take(self, purpose: str, *, ttl_seconds: int = TTL_SECONDS) -> Lease | None:
        """Take a lease, or None where the store cannot be written: such a reader has only the grace times."""
        try:
            return self.take(purpose, ttl_seconds=ttl_seconds)
        except Invalid as error:
            if isinstance(error.__cause__, OSError) and error.__cause__.errno in READ_ONLY:
                return None
            raise

    def all(self, *, now: float | None = None) -> list[LeaseInfo]:
        """Every lease, dead ones too; for a moment's truth, under the store lock.

        Args:
            now: The file system's time; by default that of a look at it.
        """
        now = clock(self.root) if now is None else now
        found = []
        with contextlib.suppress(FileNotFoundError), directory(self.root, "leases") as folder:
            for uuid in sorted(listing(folder)):
                lease = self._look(folder, uuid, now)
                if lease is not None:
                    found.append(lease)
        return found

    def alive(self, uuid: str) -> bool:
        """Whether there is a lease of this name that still keeps what it names; for a moment's truth, as `all`."""
        with contextlib.suppress(FileNotFoundError), directory(self.root, "leases") as folder:
            lease = self._look(folder, uuid, clock(self.root))
            return lease is not None and lease.alive
        return False

    def remove(self, uuid: str) -> None:
        """Remove a dead lease. The caller holds the store lock exclusively, and has seen under it that it is dead."""
        with (
            faults(f"removing the lease {uuid}"),
            directory(self.root, "leases") as folder,
            contextlib.suppress(FileNotFoundError),
        ):
            os.unlink(uuid, dir_fd=folder)

    def _look(self, folder: int, uuid: str, now: float) -> LeaseInfo | None:
        """One lease, as it is; None if it is gone, or no file."""
        handle = _opened(folder, uuid, self.root / "leases" / uuid)
        if handle is None:
            return None
        with os.fdopen(handle, "rb", buffering=0), faults(f"looking at the lease {uuid}"):
            entry = os.fstat(handle)
            head = _parse_head(os.pread(handle, HEAD_BYTES, 0))
            age = max(0.0, now - entry.st_mtime)
            alive = _alive(head, age, lock_free=_lock_is_free(handle))
            body = b""
            if alive:
                if entry.st_size > MAX_LEASE_BYTES:
                    raise _too_long(self.root / "leases" / uuid, entry.st_size)
                body = _read_from(handle, HEAD_BYTES)
        return LeaseInfo(
            uuid=uuid,
            host=head["host"],
            boot=head["boot"],
            pid=head["pid"],
            start=head["start"],
            purpose=head["purpose"],
            alive=alive,
            digests=body[: len(body) // DIGEST_BYTES * DIGEST_BYTES],  # a torn tail is ignored
            age_seconds=age,
        )

    # -- locks -----------------------------------------------------------------------------------------------------

    def store_lock(
        self, *, exclusive: bool, wait_seconds: float = WAIT_SECONDS
    ) -> contextlib.AbstractContextManager[None]:
        """``locks/store``: shared for each step of a writer, exclusive for each step of the collector.

        Raises:
            Busy: if it is still held after ``wait_seconds``.
        """
        return locks.hold(
            self.root, "store", exclusive=exclusive, wait_seconds=wait_seconds, mode=self._modes.file, what="the store"
        )

    def gc_lock(self, *, wait_seconds: float = 0.0) -> contextlib.AbstractContextManager[None]:
        """``locks/gc``: one collector at a time.

        Raises:
            Busy: naming the other's host, process and age.
        """
        return locks.hold(
            self.root, "gc", exclusive=True, wait_seconds=wait_seconds, mode=self._modes.file, what="garbage collection"
        )

    def locks_work(self) -> bool:
        """Whether a lock held by one process keeps another out here."""
        return locks.locks_work(self.root, dir_mode=self._modes.folder)


def _boot() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


def _process_start(pid: int) -> int:
    """When the kernel started the process, in its ticks, so that a pid used again is told apart; 0 if unknown."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        return int(text.rpartition(")")[2].split()[19])
    return 0


def _process_gone(pid: int, process_start: int) -> bool:
    if pid <= 0:  # to the system that is whole groups of processes
        return True
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:
        pass
    now_start = _process_start(pid)
    return process_start != 0 and now_start not in {0, process_start}


def _head(purpose: str, ttl_seconds: int) -> bytes:
    body = canonical.encode(
        {
            "kind": "lease",
            "host": socket.gethostname()[:255],
            "boot": _boot(),
            "pid": os.getpid(),
            "process_start": _process_start(os.getpid()),
            "start": time.time(),
            "purpose": purpose[:100],
            "ttl_seconds": ttl_seconds,
        }
    )
    return (len(body).to_bytes(4, "little") + body).ljust(HEAD_BYTES, b"\0")


_TORN: Final[dict[str, Any]] = {
    "host": "", "boot": "", "pid": 0, "process_start": 0, "start": 0.0, "purpose": "unknown",
    "ttl_seconds": TTL_SECONDS,
}  # fmt: skip


def _parse_head(content: bytes) -> dict[str, Any]:
    """The head's fields; for a torn one, those of a lease that only its age can tell dead."""
    size = int.from_bytes(content[:4], "little")
    if not 0 < size <= HEAD_BYTES - 4:
        return _TORN
    try:
        head = canonical.decode(content[4 : 4 + size], what="lease")
    except Corrupt:
        return _TORN
    fits = isinstance(head, dict) and all(type(head.get(name)) is type(value) for name, value in _TORN.items())
    return head if fits else _TORN


def _opened(folder: int, uuid: str, path: Path) -> int | None:
    """The lease's file; None if it is gone, or no file."""
    with contextlib.suppress(FileNotFoundError, Corrupt), faults(f"opening the lease {uuid}", but_absence=True):
        return open_regular(folder, uuid, path)
    return None


def _lock_is_free(handle: int) -> bool:
    return locks.try_lock(handle, exclusive=False)  # given back as the file is closed


def _read_from(handle: int, at: int) -> bytes:
    """The rest of a file that may still grow."""
    pieces = []
    while piece := os.pread(handle, 1 << 20, at):
        pieces.append(piece)
        at += len(piece)
        if at > MAX_LEASE_BYTES:
            break
    return b"".join(pieces)


def _too_long(path: Path, size: int) -> Corrupt:
    return Corrupt(
        f"the lease {path} has {size} bytes, and a lease at most {MAX_LEASE_BYTES}: what it keeps is not known",
        hint=f"see who it is with `zgstore lease ls`; when that process is gone, remove {path}",
        object=path.name,
        expected=f"at most {MAX_LEASE_BYTES} bytes",
        actual=size,
        path=str(path),
    )


def _alive(head: dict[str, Any], age_seconds: float, *, lock_free: bool) -> bool:
    """Dead on the same boot only when its lock is free and its process gone; elsewhere when it was not refreshed."""
    if head["boot"] and head["boot"] == _boot():
        return not (lock_free and _process_gone(head["pid"], head["process_start"]))
    return bool(age_seconds <= head["ttl_seconds"])
