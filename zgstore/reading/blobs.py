"""The blobs of a plan, by number: opened, verified at first use, and read, with a bounded number of descriptors.

A blob's first use reads its whole file once, which is also its read-ahead; what is verified is noted in memory that
all workers of a reader share. A note counts only for the file that was looked at: another inode, size or time, and
the bytes are hashed again. Each process opens files for itself, so that a fork or a pickle carries no descriptor.
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import get_worker_info

from zgstore.errors import Corrupt, Invalid, Missing, Transient, ZgError
from zgstore.format.blobheader import ALIGNMENT, BlobHeader, check_layout, read_header
from zgstore.format.digest import Digest
from zgstore.format.manifest import Column
from zgstore.format.readplan import BlobPlan
from zgstore.format.tensorfile import as_tensor, check_offsets
from zgstore.storage.files import SETTLE_SECONDS
from zgstore.storage.hashing import hash_file
from zgstore.storage.sharing import SecondThread

FEWEST_OPEN, MOST_OPEN = 32, 1024
MAX_VECTORS: Final = 1024  # IOV_MAX
WAIT_SECONDS: Final = 1.0

# What the shared notes say of a blob.
UNKNOWN, STAMPED, VERIFIED, YOUNG = 0, 1, 2, 3

_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a fifo must not block the open
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

Offsets = NDArray[np.int64]
Stamp = tuple[int, int, int, int, int]
Kind = Column | BlobHeader  # what a blob must be: one of a column's, or, of a constant, exactly this


class OpenBlob:
    """One open file: its descriptor, its header and, of a ragged column, its offsets."""

    __slots__ = ("data", "fd", "header", "number", "offsets", "retired", "users")

    def __init__(self, number: int, fd: int, header: BlobHeader, offsets: Offsets | None) -> None:
        self.number = number
        self.fd = fd
        self.header = header
        self.data = header.tensor("data")
        self.offsets = offsets
        self.users = 0
        self.retired = False


class _Here:
    """What belongs to this process alone."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.most_open = _most_open()
        self.lock = threading.Lock()
        self.files: OrderedDict[int, OpenBlob] = OrderedDict()
        self.looked_at: dict[int, Stamp] = {}  # verified here although it is not the file of the plan
        self.second: SecondThread | None = None
        self.bytes_read = 0
        self.bytes_verified = 0

    def __del__(self) -> None:
        for file in self.files.values():
            os.close(file.fd)


class Blobs:
    """The files of a plan.

    Args:
        objects: The store's ``objects`` folder.
        hint: The command that mends a damaged blob.
        verify: Whether a blob's bytes are hashed at its first use, unless a stamp says that they were.
    """

    def __init__(self, objects: str, *, hint: str, verify: bool) -> None:
        self.objects = objects
        self.hint = hint
        self.verify = verify
        self.plans: list[BlobPlan] = []
        self.kinds: list[Kind] = []
        self.rows: list[int] = []
        self.shared = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.notes: NDArray[np.uint8] = self.shared.numpy()
        self.closed = False
        self._here: _Here | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in {"_here", "notes"}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, notes=state["shared"].numpy(), _here=None)

    def extend(self, blobs: Iterable[tuple[BlobPlan, Kind, int]]) -> None:
        """Add blobs, each with what it must be and its rows; numbers go on counting. A growing build does so often."""
        for plan, kind, rows in blobs:
            self.plans.append(plan)
            self.kinds.append(kind)
            self.rows.append(rows)
        if len(self.plans) > len(self.shared):
            shared = torch.zeros(max(len(self.plans), 2 * len(self.shared)), dtype=torch.uint8, device="cpu")
            shared[: len(self.shared)] = self.shared
            self.shared = shared.share_memory_()  # type: ignore[no-untyped-call]
            self.notes = self.shared.numpy()
        for number, plan in enumerate(self.plans):
            if plan.verified and not self.notes[number]:
                self.notes[number] = STAMPED

    # -- verification ----------------------------------------------------------------------------------------------

    def require(self, numbers: Iterable[int]) -> None:
        """Verify those of the blobs that nobody has; two at a time, which is what one disk and two cores have.

        Raises:
            Corrupt: if a blob's bytes are not what its name says.
            Missing: if it is not there.
        """
        if not self.verify:
            return
        notes = self.notes
        todo = [number for number in dict.fromkeys(numbers) if not notes[number]]
        todo = [number for number in todo if number not in self.here().looked_at]
        self.run([partial(self._touch, number) for number in todo])

    def run(self, jobs: Sequence[Callable[[], None]]) -> None:
        """Do the jobs on this thread and one more. See `SecondThread.share`."""
        if len(jobs) < 2:
            for job in jobs:
                job()
            return
        here = self.here()
        with here.lock:
            here.second = here.second or SecondThread("zgstore-read")
        here.second.share(jobs)

    def verified_here(self) -> list[tuple[BlobPlan, Stamp]]:
        """The blobs that this run verified long enough after their last change, and that are still the plan's files."""
        found = []
        for number in np.flatnonzero(self.notes[: len(self.plans)] == VERIFIED).tolist():
            plan = self.plans[number]
            try:
                now = stamp_of(Path(self.path(number)).lstat())
            except OSError:
                continue
            if now == tuple(plan.stamp):
                found.append((plan, now))
        return found

    def _touch(self, number: int) -> None:
        with self.open(number):
            pass

    def _check(self, number: int, fd: int, seen: Stamp) -> None:
        """Hash the whole file, unless it was: by this run if it is the plan's, else by this process."""
        plan, here = self.plans[number], self.here()
        ours = seen == tuple(plan.stamp)
        if (ours and self.notes[number]) or here.looked_at.get(number) == seen:
            return
        with _alone(fd, until=lambda: ours and bool(self.notes[number])) as needed:
            if not needed:
                return
            begun = time.time()
            (actual,), size = hash_file(fd)
            here.bytes_verified += size
            if actual.hex != plan.name or stamp_of(os.fstat(fd)) != seen:
                raise self._corrupt(number, f"its bytes hash to {actual.short}", f"blake3:{plan.name}", str(actual))
            if ours:
                # A file that changed within its clock's step of its last change would look the same.
                young = begun - seen[4] / 1e9 < SETTLE_SECONDS
                self.notes[number] = YOUNG if young else VERIFIED
            else:
                here.looked_at[number] = seen

    # -- files -----------------------------------------------------------------------------------------------------

    def path(self, number: int) -> str:
        name = self.plans[number].name
        return f"{self.objects}/{name[:2]}/{name}.safetensors"

    def here(self) -> _Here:
        """This process's own descriptors and threads; what a fork brought along is left to the parent."""
        here = self._here
        if here is None or here.pid != os.getpid():
            here = self._here = _Here(os.getpid())
        return here

    @contextmanager
    def open(self, number: int) -> Iterator[OpenBlob]:
        """The open, verified file; others may be closed for it, but none that is in use.

        Raises:
            Corrupt: if it is not the blob of the plan.
            Missing: if it is not there.
            Transient: if the system would not read it.
            Invalid: if the reader was closed.
        """
        if self.closed:
            raise Invalid("the reader is closed, and its lease with it", hint="open it anew with `zgstore.read`")
        here = self.here()
        with here.lock:
            file = here.files.get(number)
            if file is not None:
                here.files.move_to_end(number)
                file.users += 1
        if file is None:
            try:
                opened = self._open(number)
            except ZgError as error:
                if get_worker_info() is None:
                    raise
                raise error.carried() from error  # a loader hands on the class and the text alone
            with here.lock:
                file = here.files.setdefault(number, opened)
                file.users += 1
                if file is not opened:
                    os.close(opened.fd)
                self._retire(here)
        try:
            yield file
        finally:
            with here.lock:
                file.users -= 1
                if file.retired and not file.users:
                    os.close(file.fd)

    def close(self) -> None:
        """Close this process's files, for good."""
        self.closed = True
        here, self._here = self._here, None
        if here is None or here.pid != os.getpid():
            return
        with here.lock:
            if here.second is not None:
                here.second.close()
            while here.files:
                self._let_go(here)

    @staticmethod
    def _retire(here: _Here) -> None:
        while len(here.files) > here.most_open:
            Blobs._let_go(here)

    @staticmethod
    def _let_go(here: _Here) -> None:
        _, file = here.files.popitem(last=False)
        if file.users:
            file.retired = True  # closed by its last user
        else:
            os.close(file.fd)

    def _open(self, number: int) -> OpenBlob:
        fd = self._open_regular(number)
        try:
            return self._inspected(number, fd)
        except OSError as error:
            os.close(fd)
            raise self._unread(number, error) from error
        except BaseException:
            os.close(fd)
            raise

    def _inspected(self, number: int, fd: int) -> OpenBlob:
        seen, size = stamp_of(os.fstat(fd)), self.plans[number].size
        if seen[2] != size:
            raise self._corrupt(number, f"it has {seen[2]} bytes, not {size}", size, seen[2])
        if self.verify:
            self._check(number, fd, seen)
        return self._described(number, fd)

    def _open_regular(self, number: int) -> int:
        path = self.path(number)
        folder, name = os.path.split(path)
        try:
            handle = os.open(folder, _DIRECTORY)
            try:
                fd = os.open(name, _FLAGS, dir_fd=handle)
            finally:
                os.close(handle)
        except OSError as error:
            raise self._unopened(number, error) from error
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise self._corrupt(number, "it is no regular file", "a regular file", "another kind of file")
        return fd

    def _unopened(self, number: int, error: OSError) -> ZgError:
        path = self.path(number)
        if error.errno == errno.ENOENT:
            return Missing(
                f"{path} is gone: {self._what(number)} cannot be read",
                hint=self.hint,
                object=f"blake3:{self.plans[number].name}",
                path=path,
            )
        if error.errno in {errno.ELOOP, errno.ENOTDIR, errno.ENXIO}:
            return self._corrupt(number, "it is no regular file", "a regular file", "a link or a device")
        if error.errno in {errno.EACCES, errno.EPERM}:
            return Invalid(f"{path} may not be read: {error.strerror}", hint="ask its owner for the store's group")
        return Transient(
            f"opening {path}: {error.strerror}", hint="raise `ulimit -n`, or check the disk, then run again", path=path
        )

    def _unread(self, number: int, error: OSError) -> Transient:
        path = self.path(number)
        return Transient(
            f"reading {path}: {error.strerror}", hint="check the disk or the network, then run again", path=path
        )

    def _described(self, number: int, fd: int) -> OpenBlob:
        """Its header, strictly read and seen to be the column's, and its offsets."""
        kind, what, offsets = self.kinds[number], self._what(number), None
        try:
            header = read_header(os.pread(fd, ALIGNMENT, 0), file_size=self.plans[number].size, what=what)
            if isinstance(kind, Column) and (rows := check_layout(header, kind, what=what)) != self.rows[number]:
                raise self._corrupt(number, f"it holds {rows} rows, not {self.rows[number]}", self.rows[number], rows)
            if isinstance(kind, Column) and kind.ragged:
                spec = header.tensor("offsets")
                raw = as_tensor(os.pread(fd, spec.size, spec.start), "I64", spec.shape)
                check_offsets(raw, header.tensor("data").shape[0], what=what)
                offsets = raw.numpy()
        except Corrupt as error:
            raise self._corrupt(number, error.message, error.expected, error.actual) from error
        if isinstance(kind, BlobHeader) and header != kind:
            raise self._corrupt(number, "it is another constant", kind.tensors, header.tensors)
        return OpenBlob(number, fd, header, offsets)

    def _what(self, number: int) -> str:
        kind = self.kinds[number]
        return f"a shard of column {kind.name!r}" if isinstance(kind, Column) else "a constant"

    def _corrupt(self, number: int, why: str, expected: object, actual: object) -> Corrupt:
        return Corrupt(
            f"{self.path(number)}, {self._what(number)}, is corrupt: {why}",
            hint=self.hint,
            object=str(Digest(bytes.fromhex(self.plans[number].name))),
            expected=expected,
            actual=actual,
            path=self.path(number),
        )

    # -- bytes -----------------------------------------------------------------------------------------------------

    def read(self, file: OpenBlob, at: int, views: list[memoryview], size: int) -> None:
        """Fill the views, in order, with the ``size`` bytes from ``at``: one system call where the system allows it.

        Raises:
            Corrupt: if the file ends before.
            Transient: if the system would not read it.
        """
        try:
            if len(views) <= MAX_VECTORS and os.preadv(file.fd, views, at) == size:
                self.here().bytes_read += size
                return
            for view in views:
                rest, place = view, at
                while rest:
                    got = os.preadv(file.fd, [rest], place)
                    if not got:
                        raise self._corrupt(file.number, f"it ends at byte {place}", f"{at + size} bytes", place)
                    rest, place = rest[got:], place + got
                at = place
        except OSError as error:
            raise self._unread(file.number, error) from error
        self.here().bytes_read += size


def _most_open() -> int:
    """An eighth of the descriptors that this process may have: others read beside, and a shuffled step needs many."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = MOST_OPEN * 8 if allowed == resource.RLIM_INFINITY else allowed
    return min(max(allowed // 8, FEWEST_OPEN), MOST_OPEN)


def stamp_of(entry: os.stat_result) -> Stamp:
    """Device, inode, size and times of a file: what tells that it is still the same."""
    return (entry.st_dev, entry.st_ino, entry.st_size, entry.st_mtime_ns, entry.st_ctime_ns)


@contextmanager
def _alone(fd: int, *, until: Callable[[], bool]) -> Iterator[bool]:
    """Verify once, not once in each worker: wait for who is at it; False if ``until`` came true meanwhile.

    An advisory lock on the blob, gone with its holder. It saves work and guards nothing: where it cannot be had
    within a second, or at all, this process verifies beside the other.
    """
    give_up = time.monotonic() + WAIT_SECONDS
    held = False
    while not held:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = True
        except BlockingIOError:
            if until() or time.monotonic() > give_up:
                break
            time.sleep(0.001)
        except OSError:
            break
    try:
        yield not until()
    finally:
        if held:
            fcntl.flock(fd, fcntl.LOCK_UN)
