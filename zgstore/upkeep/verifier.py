"""A store examined: a stream of problems that never stops at the first, each with what it hurts and what mends it.

The metadata is read whole at every level, for it says what the rest should be. Of the blobs, the quick level looks at
presence, size and header; the full one hashes every byte besides, and leaves a stamp, so that readers on this host need
not look again.
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from operator import gt
from pathlib import Path
from shlex import quote
from typing import Any, Final, NamedTuple

from zgstore.errors import Busy, Corrupt, Invalid, Missing, NoSpace, Transient, ZgError
from zgstore.format.blobheader import ALIGNMENT, BlobHeader, check_layout, lay_out, read_header
from zgstore.format.digest import Digest
from zgstore.format.manifest import CODECS, DTYPES, Column, Constant
from zgstore.storage.files import on_network
from zgstore.storage.objects import Stat
from zgstore.storage.store import Store
from zgstore.upkeep.survey import Fault, Problem, Survey, Verified, Wanted

__all__ = ["Problem", "Verification", "VerifyReport", "failure", "verify"]

THREADS: Final = 2  # two saturate memory on two cores, and no common disk feeds more
CHUNK: Final = 1000
# Less to read than this is read at once: handing it to a thread takes longer. On a network's disk nothing is.
ALONE_BYTES: Final = 256 << 10


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What one verification looked at, and found.

    Args:
        objects: Objects examined, each once; those that ``new`` skipped are not among them.
        bytes: Read and checked: under ``quick`` the metadata and the headers.
        seconds: Wall time.
        problems: All of them.
    """

    objects: int
    bytes: int
    seconds: float
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def as_json(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "objects": self.objects,
            "bytes": self.bytes,
            "seconds": self.seconds,
            "problems": [problem.as_json() for problem in self.problems],
        }


def failure(problems: Sequence[Problem]) -> ZgError | None:
    """The error that the problems amount to: ``Missing`` if nothing worse, else ``Corrupt``; None if there are none."""
    if not problems:
        return None
    counts = {kind: sum(problem.kind == kind for problem in problems) for kind in (p.kind for p in problems)}
    message = "the store is not sound: " + ", ".join(f"{count} {kind}" for kind, count in counts.items())
    hint = problems[0].hint if len(problems) == 1 else "each problem names what mends it"
    return Missing(message, hint=hint) if counts.keys() == {"missing"} else Corrupt(message, hint=hint)


class _Outcome(NamedTuple):
    """What came of looking at one blob."""

    fault: Fault | None
    bytes: int = 0
    stat: Stat | None = None
    skipped: bool = False


class Verification:
    """A verification: iterate it for its problems as they are found; ``report`` has the whole afterwards.

    Iterated again, it repeats what it found. Made by ``verify``.
    """

    def __init__(
        self, survey: Survey, *, quick: bool, part: tuple[int, int] | None, new: bool, threads: int,
        progress: Callable[[int], None] | None,
    ) -> None:  # fmt: skip
        self._survey, self._store = survey, survey.store
        self._quick, self._part, self._new = quick, part, new
        self._threads, self._progress = threads, progress
        self._objects = self._bytes = 0
        self._found: list[Problem] = []
        self._stamped: list[Verified] = []
        self._steps = self._run()
        self._report: VerifyReport | None = None

    def __iter__(self) -> Iterator[Problem]:
        at = 0
        while True:
            if at == len(self._found) and next(self._steps, None) is None:
                return
            yield self._found[at]
            at += 1

    @property
    def report(self) -> VerifyReport:
        """What was looked at and found; finishes the verification if it is not finished."""
        for _ in self:
            pass
        assert self._report is not None
        return self._report

    def _run(self) -> Iterator[Problem]:
        started = time.monotonic()
        with self._kept():
            yield from self._examined()
        self._stamp(at_least=1)
        self._report = VerifyReport(self._objects, self._bytes, time.monotonic() - started, tuple(self._found))

    @contextlib.contextmanager
    def _kept(self) -> Iterator[None]:
        """A reader's lease on what is examined, where one can be had: what is collected meanwhile is no problem."""
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(NoSpace, Transient, Busy):
                lease = self._store.leases.try_take("verify")
                if lease is not None:
                    stack.callback(lease.close)
                    # An iterator: names are looked up under the lock too, so that none is of what is gone by then.
                    self._store.leases.name(lease, self._survey.named())
            yield

    def _examined(self) -> Iterator[Problem]:
        self._survey.walk()
        for fault in self._survey.faults:
            yield from self._tell(fault)
        self._count_metadata()
        for fault in self._blob_faults():
            yield from self._tell(fault)
        for fault in self._foreign():
            yield from self._tell(fault)

    def _tell(self, fault: Fault) -> Iterator[Problem]:
        if self._is_mine(fault.digest):
            self._found.append(self._survey.problem(fault))
            yield self._found[-1]

    def _is_mine(self, digest: Digest | None) -> bool:
        """Whether it is in the part: objects by their first 8 bytes, all else in the first part."""
        if self._part is None:
            return True
        at, parts = self._part
        mine = 0 if digest is None else int.from_bytes(digest.raw[:8], "big") * parts >> 64
        return mine == at - 1

    # -- metadata --------------------------------------------------------------------------------------------------

    def _count_metadata(self) -> None:
        """It was read whole, and hashed, by the walk."""
        self._objects += sum(map(self._is_mine, self._survey.pages))
        for verified in self._survey.verified:
            if self._is_mine(verified[0]):
                self._advance(verified[2].size)
                self._stamped.append(verified)

    def _foreign(self) -> Iterator[Fault]:
        known = {problem.path for problem in self._found}
        try:
            for path in self._store.objects.foreign():
                if str(path) not in known:
                    yield Fault(
                        "foreign", None, path, f"{path} is no object of this store",
                        f"move it away, if it is yours: `mv {quote(str(path))} ELSEWHERE`; nothing needs it here",
                    )  # fmt: skip
        except ZgError as error:
            yield Fault("unreadable", None, self._store.path, error.message, error.hint)

    # -- blobs -----------------------------------------------------------------------------------------------------

    def _blob_faults(self) -> Iterator[Fault]:
        """Blobs in the order of the pages, a few ahead on each thread; one problem for each blob is enough."""
        seen: set[Digest] = set()
        faulty: set[Digest] = set()
        waiting: deque[tuple[Wanted, Callable[[], _Outcome]]] = deque()
        pool = ThreadPoolExecutor(self._threads, "verify")
        blobs = self._vouched(wanted for wanted in self._survey.blobs() if self._is_mine(wanted.digest))
        alone = 0 if on_network(self._store.path) else ALONE_BYTES
        try:
            for wanted, vouched in blobs:
                # Described once more, otherwise: its bytes need no second look, its header does.
                hashes = not self._quick and wanted.digest not in seen
                seen.add(wanted.digest)
                look = partial(self._look, wanted, hashes=hashes, vouched=vouched)
                waiting.append((wanted, look if hashes * wanted.size < alone else pool.submit(look).result))
                if len(waiting) > 4 * self._threads:
                    yield from self._settle(*waiting.popleft(), faulty)
            while waiting:
                yield from self._settle(*waiting.popleft(), faulty)
        finally:
            pool.shutdown(cancel_futures=True)
        self._objects += len(seen)

    def _vouched(self, blobs: Iterable[Wanted]) -> Iterator[tuple[Wanted, Stat | None]]:
        """Each blob with what a valid stamp says its file looks like, where only what is new is wanted."""
        rest = iter(blobs)
        while chunk := list(islice(rest, CHUNK)):
            if not self._new:
                yield from ((wanted, None) for wanted in chunk)
                continue
            now = self._store.now()
            stamps = self._store.index.stamps([wanted.digest.raw for wanted in chunk])
            for wanted, stamp in zip(chunk, stamps, strict=True):
                valid = stamp is not None and stamp.kind == "objects" and stamp.fits(stamp.stat, now)
                yield wanted, stamp.stat if stamp is not None and valid else None

    def _settle(self, wanted: Wanted, look: Callable[[], _Outcome], faulty: set[Digest]) -> Iterator[Fault]:
        outcome = look()
        self._objects -= outcome.skipped
        self._advance(outcome.bytes)
        if outcome.fault is not None:
            if wanted.digest not in faulty:
                faulty.add(wanted.digest)
                yield outcome.fault
        elif outcome.stat is not None:
            self._stamped.append((wanted.digest, "objects", outcome.stat))
            self._stamp(at_least=CHUNK)

    def _advance(self, size: int) -> None:
        self._bytes += size
        if self._progress is not None:
            self._progress(size)

    def _stamp(self, *, at_least: int) -> None:
        if not self._quick and len(self._stamped) >= at_least:
            self._store.stamp(self._stamped)
            self._stamped.clear()

    def _look(self, wanted: Wanted, *, hashes: bool, vouched: Stat | None) -> _Outcome:
        """One blob; perhaps on a thread of the pool, so it touches nothing shared."""
        digest, path = wanted.digest, self._store.objects.path(wanted.digest, "objects")
        try:
            return self._examine(wanted, path, hashes=hashes, vouched=vouched)
        except Missing:
            return _Outcome(self._absent(wanted, path))
        except Corrupt as error:
            return _Outcome(Fault("corrupt", digest, path, error.message))
        except ZgError as error:
            return _Outcome(Fault("unreadable", digest, path, error.message, error.hint))
        except OSError as error:
            return _Outcome(Fault("unreadable", digest, path, f"{path}: {error.strerror}", "check the disk"))

    def _examine(self, wanted: Wanted, path: Path, *, hashes: bool, vouched: Stat | None) -> _Outcome:
        objects = self._store.objects
        if vouched is not None and vouched.size == wanted.size and objects.stat(wanted.digest, "objects") == vouched:
            return _Outcome(None, skipped=True)
        try:
            handle = objects.open(wanted.digest, "objects")
        except Missing:
            fault = self._absent(wanted, path)
            return _Outcome(fault, skipped=fault is None)  # a part has not all of its snapshot's blobs
        try:
            size = os.fstat(handle).st_size
            if size != wanted.size:
                why = f"{path} has {size} bytes, and its page says {wanted.size}"
                return _Outcome(Fault("corrupt", wanted.digest, path, why))
            before = objects.rehash(wanted.digest, "objects") if hashes else None
            header_bytes, why = _misfit(wanted, handle, size)
        finally:
            os.close(handle)
        if why:
            why = f"{path} is not what its page describes: {why}"
            return _Outcome(Fault("corrupt", wanted.digest, path, why))
        return _Outcome(None, header_bytes if before is None else before.size, before)

    def _absent(self, wanted: Wanted, path: Path) -> Fault | None:
        if not wanted.required and not self._store.objects.in_trash(wanted.digest, "objects"):
            return None
        missing = self._store.objects.missing(wanted.digest, "objects")
        in_trash = self._store.objects.in_trash(wanted.digest, "objects")
        return Fault("missing", wanted.digest, path, missing.message, missing.hint if in_trash else "")


def _misfit(wanted: Wanted, handle: int, size: int) -> tuple[int, str]:
    """Bytes of the header and offsets that were read, and how they differ from the description; "" if not."""
    prefix = os.pread(handle, ALIGNMENT, 0)
    what = f"blob {wanted.digest.short}"
    header = read_header(prefix, file_size=size, what=what)
    why = _check_header(header, wanted, what=what)
    if why or not isinstance(wanted.like, Column) or not wanted.like.ragged:
        return len(prefix), why
    spec = header.tensor("offsets")
    offsets = os.pread(handle, spec.size, spec.start)
    return len(prefix) + len(offsets), _broken_offsets(offsets, header.tensor("data").shape[0])


def _check_header(header: BlobHeader, wanted: Wanted, *, what: str) -> str:
    """How a header differs from what its page promises; "" if it does not.

    Raises:
        Corrupt: if it is of another column.
    """
    like = wanted.like
    if isinstance(like, Constant):
        promised = lay_out({"data": (like.dtype, like.shape)})
        return "" if header == promised else "it is another constant"
    if like.codec not in CODECS or like.dtype not in DTYPES:
        return ""  # a later version's: the column cannot be read here, and is not corrupt for that
    rows = check_layout(header, like, what=what)
    return "" if rows == wanted.rows else f"it holds {rows} rows, and should hold {wanted.rows}"


def _broken_offsets(packed: bytes, tokens: int) -> str:
    offsets = struct.unpack(f"<{len(packed) // 8}q", packed)
    if offsets[0] != 0 or offsets[-1] != tokens or any(map(gt, offsets, offsets[1:])):
        return f"its offsets do not rise from 0 to its {tokens} tokens"
    return ""


def verify(
    store: Store,
    revs: Sequence[str | Digest] | None = None,
    *,
    quick: bool = False,
    part: tuple[int, int] | None = None,
    new: bool = False,
    threads: int = THREADS,
    progress: Callable[[int], None] | None = None,
) -> Verification:
    """Examine a store; iterate the result for its problems.

    Args:
        store: What is examined.
        revs: Which snapshots; None for everything that names reach.
        quick: Presence, sizes, headers and canonical form, without hashing a blob.
        part: (I, N), counting from 1: only the I-th of N parts of the objects, by digest.
        new: Only what has no valid stamp.
        threads: That read and hash.
        progress: Told the bytes read, as they are.

    Raises:
        NotFound, Invalid: if a REV names nothing, or the part makes no sense.
    """
    if part is not None and not 1 <= part[0] <= part[1]:
        raise Invalid(f"{part} is no part", hint="give (I, N), counting from 1: the third twentieth is (3, 20)")
    survey = Survey(store, revs)
    return Verification(survey, quick=quick, part=part, new=new, threads=threads, progress=progress)
