"""Names, tags, their history, and what is held: small files, moved by compare-and-set."""

from __future__ import annotations

import builtins
import contextlib
import difflib
import enum
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

from zgstore.errors import Conflict, Corrupt, Invalid, Missing, NotFound, Transient, ZgError
from zgstore.format.digest import Digest
from zgstore.storage.files import Modes, directory, faults, listing, read_all
from zgstore.storage.naming import MAX_FILE_BYTES, NamedFiles, check_clashes, check_name, is_name, parse_digest, torn

KINDS: Final = {"head": "heads", "tag": "tags"}
_HOLDS: Final = ("holds",)
_ENTRY = re.compile(r"[0-9]{12}")


class Expectation(enum.Enum):
    """What a ref is expected to be, where that is no digest and not None (which means: no such ref yet)."""

    ANY = "any"


ANY: Final = Expectation.ANY


@dataclass(frozen=True, slots=True)
class Ref:
    """A name for a snapshot: a ``head`` moves, a ``tag`` does not."""

    name: str
    kind: str
    snapshot: Digest


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One move of a ref.

    Args:
        old: What it named before; None if it is where the ref begins.
        new: What it named then.
        record: Who, when and why.
        time_seconds: When, by the file system's clock.
        number: Its place in the ref's history, from 1.
    """

    old: Digest | None
    new: Digest
    record: Digest | None
    time_seconds: float
    number: int = 0


class Break(NamedTuple):
    """Where a ref and its reflog, or two entries of it, do not follow each other: something between them is lost.

    Args:
        path: The ref's file, or the entry after which something is missing.
        digest: What it says that came before, and that nothing before it tells of.
    """

    path: Path
    digest: Digest


class History(NamedTuple):
    """The moves of a ref, newest first, and where they do not follow each other.

    Args:
        entries: Those that took place.
        breaks: Where something between them is lost.
        coming: One that was logged, and is about to take place or never did.
    """

    entries: tuple[LogEntry, ...]
    breaks: tuple[Break, ...]
    coming: LogEntry | None = None


@dataclass(frozen=True, slots=True)
class Hold:
    """A digest that is kept until somebody says otherwise; whose file says so, and since when."""

    name: str
    snapshot: Digest
    reason: str
    time_seconds: float
    uid: int


class Refs:
    """The names of one store.

    Args:
        root: The store.
        modes: Permissions.
    """

    def __init__(self, root: Path, modes: Modes) -> None:
        self.root = root
        self._files = NamedFiles(root, modes)

    # -- refs and tags ---------------------------------------------------------------------------------------------

    def get(self, name: str, kind: str | None = None) -> Digest | None:
        """What the name means: the head, else the tag; None if there is neither.

        Raises:
            Corrupt: if its file does not hold a digest.
            Invalid, Transient: if it is there and cannot be read: what it keeps is not known.
        """
        if not is_name(name):
            return None
        for each in (kind,) if kind else KINDS:
            text = self._files.read(("refs", KINDS[each]), name)
            if text is not None:
                return parse_digest(text.strip(), self.root / "refs" / KINDS[each] / name)
        return None

    def list(self, *, damaged: builtins.list[ZgError] | None = None) -> builtins.list[Ref]:
        """All heads, then all tags, each by name.

        Args:
            damaged: Where given, what is wrong with a file is put here, and the others are listed.

        Raises:
            Corrupt: if one's file does not hold a digest.
        """
        found = []
        for kind, folder in KINDS.items():
            for name in sorted(self._files.names(("refs", folder))):
                with _collected(damaged):
                    snapshot = self.get(name, kind)
                    if snapshot is not None:
                        found.append(Ref(name, kind, snapshot))
        return found

    def nearest(self, name: str) -> str:
        """A hint that lists the names most like ``name``, or says that there are none."""
        names = sorted({each for folder in KINDS.values() for each in self._files.names(("refs", folder))})
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.5) or names[:3]
        return f"nearest names: {', '.join(near)}; see `zgstore ls`" if near else "the store has no refs yet: build one"

    def check(self, name: str, kind: str = "head") -> None:
        """See that a name may be given, before the work is done that it is for.

        Raises:
            Invalid: if it breaks the rules, or clashes with another.
        """
        check_name(name, _what(kind))
        check_clashes(name, self._files.names(("refs", KINDS[kind])), _what(kind))

    def move(
        self, name: str, kind: str, new: Digest, *, expect: Digest | Expectation | None = ANY,
        record: Digest | None = None, last_look: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        """Compare with the expected old value, append the reflog, (look once more,) write, rename, ``fsync``.

        The caller holds the store lock, and has seen that everything of ``new`` is there.

        Args:
            name: The ref's name.
            kind: ``head`` or ``tag``.
            new: The snapshot it shall name.
            expect: What it must name now; None if it must not exist; ANY if that does not matter.
            record: The record that tells of it.
            last_look: Called when the reflog names it, which keeps it from then on; if it is not there, the name stays.

        Raises:
            Conflict: if it names something else than expected.
            Missing: from ``last_look``.
            Invalid: if the name breaks the rules, or clashes with another.
        """
        check_name(name, _what(kind))
        top = ("refs", KINDS[kind])
        with self._files.alone():
            try:
                old = self.get(name, kind)
            except Corrupt:
                if expect is not ANY:
                    raise
                old = self.last_logged(name, kind)  # a torn ref is mended by setting it
            if expect is not ANY and expect != old:
                raise _moved(name, kind, old, expect)
            if old is not None and not self._is_logged(name, kind, old):
                self._append(name, kind, LogEntry(self.last_logged(name, kind), old, None, 0.0))
            if old == new and self._files.read(top, name) == _line(new):
                return
            if old is None:
                check_clashes(name, self._files.names(top), _what(kind))
            self._append(name, kind, LogEntry(old, new, record, 0.0))
            if last_look is not None:
                try:
                    last_look()
                except Missing:
                    self._forget(name, kind, self._numbers(name, kind)[:1])
                    raise
            self._files.write(top, name, _line(new))

    def remove(self, name: str, kind: str) -> Digest:
        """Forget the name and its reflog; returns what it named.

        Raises:
            NotFound: if there is no such name.
        """
        with self._files.alone():
            old = self.get(name, kind)
            if old is None:
                raise NotFound(f"there is no {_what(kind)} {name!r}", hint=self.nearest(name))
            # The name last: a log without its name tells that the name was lost.
            self._forget(name, kind, self._numbers(name, kind))
            self._files.unlink(("refs", KINDS[kind]), name)
            return old

    # -- history ---------------------------------------------------------------------------------------------------

    def log(
        self, name: str, kind: str | None = None, *, damaged: builtins.list[ZgError] | None = None
    ) -> builtins.list[LogEntry]:
        """The moves of a ref, newest first; one that was logged and then never took place is left out.

        Args:
            name: The ref's name.
            kind: ``head`` or ``tag``; None takes the head, else the tag.
            damaged: Where given, what is wrong with an entry is put here, and the others are listed.

        Raises:
            NotFound: if there is no such ref.
            Corrupt: if an entry is torn.
        """
        return [*self.history(name, kind, damaged=damaged).entries]

    def history(self, name: str, kind: str | None = None, *, damaged: builtins.list[ZgError] | None = None) -> History:
        """The same, and where its parts do not follow each other. Raises as ``log``."""
        for each in (kind,) if kind else KINDS:
            while (now := self.get(name, each)) is not None:
                numbers, torn = self._numbers(name, each), builtins.list[ZgError]()
                entries = self._entries(name, each, damaged=torn)
                if now == self.get(name, each):  # else it moved meanwhile, and its log may tell of more than one move
                    if torn and damaged is None:
                        raise torn[0]
                    if damaged is not None:
                        damaged += torn
                    return self._history(name, each, now, numbers, entries)
        raise NotFound(f"there is no ref or tag {name!r}", hint=self.nearest(name))

    def _history(
        self, name: str, kind: str, now: Digest, numbers: Sequence[int], entries: Sequence[LogEntry]
    ) -> History:
        taken, breaks = builtins.list[LogEntry](), builtins.list[Break]()
        expected: Digest | None = now
        torn_ones = {*numbers} - {entry.number for entry in entries}  # each told by itself
        below = next(iter(numbers), 0)  # the number that should come next
        path = self.root / "refs" / KINDS[kind] / name
        for entry in entries:
            # One that was to replace what stayed never took place.
            does_not_follow = expected not in {entry.old, entry.new}
            if does_not_follow and expected is not None and torn_ones.isdisjoint(range(entry.number, below + 1)):
                breaks.append(Break(path, expected))
            # What stood between two entries that do not follow each other is not known: both count.
            if entry.new == expected or entry.number < below or does_not_follow:
                taken.append(entry)
                expected, below = entry.old, entry.number - 1
                path = self.root.joinpath("reflog", KINDS[kind], name, f"{entry.number:012d}")
            elif entry.number == below:
                below -= 1
        coming = entries[0] if entries and entries[0] not in taken[:1] else None
        return History(tuple(taken), tuple(breaks), coming)

    def _is_logged(self, name: str, kind: str, digest: Digest) -> bool:
        """Whether the newest entry tells of it: as what it gave, or as what it was about to replace."""
        newest = next(self._read_entries(name, kind, damaged=[]), None)
        return newest is not None and digest in {newest.old, newest.new}

    def lost(self) -> builtins.list[tuple[str, str, tuple[LogEntry, ...]]]:
        """Names (and kinds) that have a log and are not there, with all that was logged, newest first.

        The name was lost, or the process that gave it for the first time was killed: then no entry replaces anything.
        """
        found = []
        for kind, folder in KINDS.items():
            logged = dict.fromkeys(path.rpartition("/")[0] for path in self._files.names(("reflog", folder)))
            for name in sorted(set(logged) - {"", *self._files.names(("refs", folder))}):
                entries = self._entries(name, kind, damaged=[])
                # One that is being given for the first time has its log first, and may move on while this is read.
                if entries and name not in self._files.names(("refs", folder)):
                    found.append((name, kind, tuple(entries)))
        return found

    def at(self, name: str, n: int) -> Digest:
        """``NAME@{N}``: what the name meant N moves ago.

        Raises:
            NotFound: if there is no such name, or its history is shorter.
        """
        entries = self.log(name)
        now = self.get(name)
        if n == 0 and now is not None:
            return now
        if n < len(entries):
            return entries[n].new
        raise NotFound(
            f"{name}@{{{n}}} is older than its history, which begins with {name}@{{{max(0, len(entries) - 1)}}}",
            hint=f"see `zgstore log {name}`",
        )

    def forget(self, name: str, kind: str, *, through: int) -> None:
        """Remove the reflog's entries up to this number. The caller holds the store lock exclusively."""
        with self._files.alone():
            self._forget(name, kind, [number for number in self._numbers(name, kind) if number <= through])

    def _forget(self, name: str, kind: str, numbers: Iterable[int]) -> None:
        """The oldest first: whenever this ends, what is left follows each other."""
        for number in sorted(numbers):
            self._files.unlink(("reflog", KINDS[kind]), f"{name}/{number:012d}")

    def forget_record(self, record: Digest) -> bool:
        """Let the reflog name this record no more; whether it did. The caller holds the store lock."""
        found = False
        with self._files.alone():
            for kind, folder in KINDS.items():
                for name in self._files.names(("refs", folder)):
                    for entry in self._entries(name, kind, damaged=[]):
                        if entry.record == record:
                            self._rewrite(name, kind, replace(entry, record=None))
                            found = True
        return found

    def _rewrite(self, name: str, kind: str, entry: LogEntry) -> None:
        """The entry anew, as old as it was: its age decides how long it is kept."""
        path = f"{name}/{entry.number:012d}"
        self._files.write(("reflog", KINDS[kind]), path, _entry_line(entry))
        with directory(self.root, "reflog", KINDS[kind], *name.split("/")) as folder:
            os.utime(f"{entry.number:012d}", (entry.time_seconds, entry.time_seconds), dir_fd=folder)

    def last_logged(self, name: str, kind: str) -> Digest | None:
        """What the newest sound reflog entry says the ref should name: what to set a torn one to."""
        newest = next(self._read_entries(name, kind, damaged=[]), None)
        return newest.new if newest else None

    def _numbers(self, name: str, kind: str) -> builtins.list[int]:
        """The numbers of a name's reflog entries, newest first."""
        found: builtins.list[str] = []
        parts = ("reflog", KINDS[kind], *name.split("/"))
        with contextlib.suppress(FileNotFoundError), directory(self.root, *parts) as handle:
            found = listing(handle)
        return sorted(map(int, filter(_ENTRY.fullmatch, found)), reverse=True)

    def _entries(
        self, name: str, kind: str, *, damaged: builtins.list[ZgError] | None = None
    ) -> builtins.list[LogEntry]:
        """All that was logged for a name, newest first."""
        return [*self._read_entries(name, kind, damaged=damaged)]

    def _read_entries(
        self, name: str, kind: str, *, damaged: builtins.list[ZgError] | None = None
    ) -> Iterator[LogEntry]:
        parts = ("reflog", KINDS[kind], *name.split("/"))
        for number in self._numbers(name, kind):
            path = self.root.joinpath(*parts, f"{number:012d}")
            with (
                _collected(damaged),
                contextlib.suppress(FileNotFoundError),
                faults(f"reading {path}", but_absence=True),
                directory(self.root, *parts) as handle,
            ):
                body = read_all(handle, path.name, path, limit_bytes=MAX_FILE_BYTES)
                time_seconds = os.stat(path.name, dir_fd=handle).st_mtime
                yield _parse_entry(path, body, time_seconds)

    def _append(self, name: str, kind: str, entry: LogEntry) -> None:
        number = next(iter(self._numbers(name, kind)), 0) + 1
        if not self._files.write(("reflog", KINDS[kind]), f"{name}/{number:012d}", _entry_line(entry), replace=False):
            # Only where locks do not work.
            raise Conflict(f"{name!r} was moved at the same time", hint="look at it again, then retry")

    # -- holds -----------------------------------------------------------------------------------------------------

    def holds(self, *, damaged: builtins.list[ZgError] | None = None) -> builtins.list[Hold]:
        """All holds by name.

        Args:
            damaged: Where given, what is wrong with a file is put here, and the others are listed.

        Raises:
            Corrupt: if one's file does not begin with a digest.
        """
        found = []
        for name in sorted(self._files.names(_HOLDS)):
            with _collected(damaged):
                hold = self.get_hold(name)
                if hold is not None:
                    found.append(hold)
        return found

    def get_hold(self, name: str) -> Hold | None:
        """One hold; None if there is none of that name. Raises as ``get``."""
        if not is_name(name):
            return None
        with contextlib.suppress(FileNotFoundError):
            text = self._files.read(_HOLDS, name)
            if text is not None:
                first, _, reason = text.partition("\n")
                path = self.root / "holds" / name
                stat = path.lstat()
                return Hold(name, parse_digest(first, path), reason.strip(), stat.st_mtime, stat.st_uid)
        return None

    def hold(self, name: str, digest: Digest, reason: str = "") -> None:
        """Keep a digest from gc under a name. The caller holds the store lock, and has seen that it is all there.

        Raises:
            Conflict: if the name holds something else.
        """
        check_name(name, "hold")
        with self._files.alone():
            old = self.get_hold(name)
            if old is not None and old.snapshot != digest:
                raise Conflict(
                    f"the hold {name!r} keeps {old.snapshot.short} already",
                    hint=f"choose another name, or `zgstore unhold {name}` first",
                )
            check_clashes(name, self._files.names(_HOLDS), "hold")
            self._files.write(_HOLDS, name, _line(digest) + " ".join(reason.split()) + "\n")

    def unhold(self, name: str) -> Digest:
        """Give a hold up; returns what it kept.

        Raises:
            NotFound: if there is no such hold.
        """
        with self._files.alone():
            old = self.get_hold(name)
            if old is None:
                names = ", ".join(sorted(self._files.names(_HOLDS))[:5])
                raise NotFound(f"there is no hold {name!r}", hint=f"holds: {names}" if names else "nothing is held")
            self._files.unlink(_HOLDS, name)
            return old.snapshot


@contextlib.contextmanager
def _collected(damaged: builtins.list[ZgError] | None) -> Iterator[None]:
    """Put what is corrupt or cannot be read into the list, if there is one, and go on."""
    try:
        yield
    except (Corrupt, Invalid, Transient) as error:
        if damaged is None:
            raise
        damaged.append(error)


def _line(digest: Digest) -> str:
    return f"{digest}\n"


def _entry_line(entry: LogEntry) -> str:
    return f"{entry.old or '-'} {entry.new} {entry.record or '-'}\n"


def _parse_entry(path: Path, body: bytes, time_seconds: float) -> LogEntry:
    fields = body.decode("ascii", "replace").split()
    if len(fields) != 3:
        raise torn(path, "three fields: old, new, record")
    old, new, record = (None if text == "-" else parse_digest(text, path) for text in fields)
    if new is None:
        raise torn(path, "a new digest")
    return LogEntry(old, new, record, time_seconds, int(path.name))


def _what(kind: str) -> str:
    return "ref" if kind == "head" else kind


def _moved(name: str, kind: str, old: Digest | None, expect: object) -> Conflict:
    now = f"names {old.short}" if old else "does not exist"
    if kind == "tag" and expect is None:
        return Conflict(
            f"the tag {name!r} {now} already", hint="tags do not move; choose another name, or say --force", ref=name
        )
    wanted = f"name {expect.short}" if isinstance(expect, Digest) else "not exist yet"
    return Conflict(
        f"the {_what(kind)} {name!r} {now}, but was expected to {wanted}",
        hint=f"somebody moved it: see `zgstore log {name}`, then retry",
        ref=name,
        expected=str(expect) if isinstance(expect, Digest) else None,
        actual=str(old) if old else None,
    )
