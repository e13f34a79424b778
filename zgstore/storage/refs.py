"""Names, tags, their history, and what is held: small files, moved by compare-and-set."""

from __future__ import annotations

import builtins
import contextlib
import difflib
import enum
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from zgstore.errors import Conflict, Corrupt, Invalid, NotFound
from zgstore.format.digest import Digest
from zgstore.storage import locks
from zgstore.storage.files import directory, faults, listing, read_all, write_file

KINDS: Final = {"head": "heads", "tag": "tags"}
MAX_NAME_BYTES: Final = 128
_MAX_FILE_BYTES: Final = 1 << 16
_WAIT_SECONDS: Final = 30.0

_COMPONENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
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
    """One move of a ref."""

    old: Digest | None
    new: Digest
    record: Digest | None
    time_seconds: float
    number: int = 0


@dataclass(frozen=True, slots=True)
class Hold:
    """A digest that is kept until somebody says otherwise."""

    name: str
    snapshot: Digest
    reason: str
    time_seconds: float


def check_name(name: str, what: str = "ref") -> str:
    """``name``, if FORMAT's rules for names allow it.

    Raises:
        Invalid: if they do not.
    """
    parts = name.split("/")
    why = ""
    if len(name.encode("utf-8", "replace")) > MAX_NAME_BYTES:
        why = f"it is over {MAX_NAME_BYTES} bytes"
    elif not all(_COMPONENT.fullmatch(part) for part in parts):
        why = "its parts must begin with a letter or a digit, and hold only those and . _ -"
    elif any(part.lower().endswith(".lock") for part in parts):
        why = "a part ends in .lock"
    if why:
        raise Invalid(f"{name[:140]!r} cannot name a {what}: {why}", hint="choose a name like main or team/run-3")
    return name


def check_clashes(name: str, others: Iterable[str], what: str = "ref") -> None:
    """Refuse a name that differs from another by case alone, or is a prefix of it or has it as one.

    Raises:
        Invalid: naming the other.
    """
    folded = name.lower()
    for other in others:
        if other == name:
            continue
        below = other.lower()
        if below == folded:
            why = "differs from it by case alone"
        elif below.startswith(folded + "/") or folded.startswith(below + "/"):
            why = "is a folder where the other is a name"
        else:
            continue
        raise Invalid(f"the {what} {name!r} clashes with {other!r}: it {why}", hint="choose another name")


class Refs:
    """The names of one store.

    Args:
        root: The store.
        file_mode: Permissions of files.
        dir_mode: Permissions of folders.
    """

    def __init__(self, root: Path, *, file_mode: int, dir_mode: int) -> None:
        self.root = root
        self._file_mode = file_mode
        self._dir_mode = dir_mode

    # -- refs and tags ---------------------------------------------------------------------------------------------

    def get(self, name: str, kind: str | None = None) -> Digest | None:
        """What the name means: the head, else the tag; None if there is neither.

        Raises:
            Corrupt: if its file does not hold a digest.
        """
        with contextlib.suppress(Invalid):
            check_name(name)
            for each in (kind,) if kind else KINDS:
                text = self._read(("refs", KINDS[each]), name)
                if text is not None:
                    return self._digest(text.strip(), f"refs/{KINDS[each]}/{name}")
        return None

    def list(self) -> builtins.list[Ref]:
        """All heads, then all tags, each by name.

        Raises:
            Corrupt: if one's file does not hold a digest.
        """
        found = []
        for kind, folder in KINDS.items():
            for name in sorted(self._names(("refs", folder))):
                snapshot = self.get(name, kind)
                if snapshot is not None:
                    found.append(Ref(name, kind, snapshot))
        return found

    def nearest(self, name: str) -> str:
        """A hint that lists the names most like ``name``, or says that there are none."""
        names = sorted({each for folder in KINDS.values() for each in self._names(("refs", folder))})
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.5) or names[:3]
        return f"nearest names: {', '.join(near)}; see `zgstore ls`" if near else "the store has no refs yet: build one"

    def move(
        self, name: str, kind: str, new: Digest, *, expect: Digest | Expectation | None = ANY,
        record: Digest | None = None,
    ) -> None:  # fmt: skip
        """Compare with the expected old value, append the reflog, write, rename, ``fsync``.

        The caller holds the store lock, and has seen that everything of ``new`` is there.

        Args:
            name: The ref's name.
            kind: ``head`` or ``tag``.
            new: The snapshot it shall name.
            expect: What it must name now; None if it must not exist; ANY if that does not matter.
            record: The record that tells of it.

        Raises:
            Conflict: if it names something else than expected.
            Invalid: if the name breaks the rules, or clashes with another.
        """
        check_name(name, kind)
        folder = KINDS[kind]
        with self._alone():
            old = self.get(name, kind)
            if expect is not ANY and expect != old:
                raise _moved(name, kind, old, expect)
            if old == new:
                return
            if old is None:
                check_clashes(name, self._names(("refs", folder)), kind)
            self._append(folder, name, old, new, record)
            *above, last = name.split("/")
            self._clear_way(("refs", folder), name)
            write_file(
                self.root, ("refs", folder, *above), last, f"{new}\n".encode(),
                mode=self._file_mode, dir_mode=self._dir_mode,
            )  # fmt: skip

    def remove(self, name: str, kind: str) -> Digest:
        """Forget the name and its reflog; returns what it named.

        Raises:
            NotFound: if there is no such name.
        """
        folder = KINDS[kind]
        with self._alone():
            old = self.get(name, kind)
            if old is None:
                raise NotFound(f"there is no {_what(kind)} {name!r}", hint=self.nearest(name))
            self._unlink(("refs", folder), name)
            for entry in self._entries(folder, name):
                self._unlink(("reflog", folder), f"{name}/{entry.number:012d}")
            return old

    # -- history ---------------------------------------------------------------------------------------------------

    def log(self, name: str, kind: str | None = None) -> builtins.list[LogEntry]:
        """The moves of a ref, newest first; one that was logged and then never took place is left out.

        Raises:
            NotFound: if there is no such ref.
        """
        for each in (kind,) if kind else KINDS:
            now = self.get(name, each)
            if now is None:
                continue
            taken: builtins.list[LogEntry] = []
            expected: Digest | None = now
            for entry in self._entries(KINDS[each], name):
                if entry.new == expected:
                    taken.append(entry)
                    expected = entry.old
            return taken
        raise NotFound(f"there is no ref or tag {name!r}", hint=self.nearest(name))

    def at(self, name: str, n: int) -> Digest:
        """``NAME@{N}``: what the name meant N moves ago.

        Raises:
            NotFound: if there is no such name, or its history is shorter.
        """
        entries = self.log(name)
        if n == 0:
            now = self.get(name)
            if now is not None:
                return now
        if n < len(entries):
            return entries[n].new
        if n == len(entries) and entries and entries[-1].old is not None:
            return entries[-1].old
        raise NotFound(
            f"{name}@{{{n}}} is older than its history, which has {len(entries)} entries",
            hint=f"see `zgstore log {name}`",
        )

    def expire(
        self, older_than_seconds: float, *, now: float, dry_run: bool = False
    ) -> builtins.list[tuple[str, LogEntry]]:
        """Remove reflog entries older than that, but no ref's latest; returns them with their names.

        The caller holds the store lock exclusively.
        """
        gone = []
        for folder in KINDS.values():
            for name in sorted({str(Path(each).parent) for each in self._names(("reflog", folder))}):
                entries = self._entries(folder, name)
                current = self._read(("refs", folder), name)
                for at, entry in enumerate(entries):
                    if (at == 0 and current is not None) or now - entry.time_seconds < older_than_seconds:
                        continue
                    gone.append((name, entry))
                    if not dry_run:
                        self._unlink(("reflog", folder), f"{name}/{entry.number:012d}")
        return gone

    def forget(self, name: str, kind: str, entries: Iterable[LogEntry]) -> None:
        """Remove these reflog entries. The caller holds the store lock exclusively."""
        with self._alone():
            for entry in entries:
                self._unlink(("reflog", KINDS[kind]), f"{name}/{entry.number:012d}")

    def _entries(self, folder: str, name: str) -> builtins.list[LogEntry]:
        """All that was logged for a name, newest first."""
        entries = []
        parts = name.split("/")
        with contextlib.suppress(FileNotFoundError), directory(self.root, "reflog", folder, *parts) as handle:
            for each in sorted(filter(_ENTRY.fullmatch, listing(handle)), reverse=True):
                path = self.root.joinpath("reflog", folder, *parts, each)
                with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                    body = read_all(handle, each, path, limit_bytes=_MAX_FILE_BYTES)
                    time_seconds = os.stat(each, dir_fd=handle).st_mtime
                    fields = body.decode("ascii", "replace").split()
                    if len(fields) != 3:
                        raise _corrupt(path, "three fields: old, new, record")
                    old, new, record = (None if text == "-" else self._digest(text, str(path)) for text in fields)
                    if new is None:
                        raise _corrupt(path, "a new digest")
                    entries.append(LogEntry(old, new, record, time_seconds, int(each)))
        return entries

    def _append(self, folder: str, name: str, old: Digest | None, new: Digest, record: Digest | None) -> None:
        entries = self._entries(folder, name)
        number = entries[0].number + 1 if entries else 1
        body = f"{old or '-'} {new} {record or '-'}\n".encode()
        fresh = write_file(
            self.root, ("reflog", folder, *name.split("/")), f"{number:012d}", body,
            mode=self._file_mode, dir_mode=self._dir_mode, replace=False,
        )  # fmt: skip
        if not fresh:  # only where locks do not work
            raise Conflict(f"{name!r} was moved at the same time", hint="look at it again, then retry")

    # -- holds -----------------------------------------------------------------------------------------------------

    def holds(self) -> builtins.list[Hold]:
        """All holds by name.

        Raises:
            Corrupt: if one's file does not begin with a digest.
        """
        return [hold for name in sorted(self._names(("holds",))) if (hold := self.get_hold(name)) is not None]

    def get_hold(self, name: str) -> Hold | None:
        """One hold; None if there is none of that name."""
        check_name(name, "hold")
        text = self._read(("holds",), name)
        if text is None:
            return None
        first, _, reason = text.partition("\n")
        time_seconds = self.root.joinpath("holds", name).lstat().st_mtime
        return Hold(name, self._digest(first, f"holds/{name}"), reason.strip(), time_seconds)

    def hold(self, name: str, digest: Digest, reason: str = "") -> None:
        """Keep a digest from gc under a name. The caller holds the store lock, and has seen that it is all there.

        Raises:
            Conflict: if the name holds something else.
        """
        check_name(name, "hold")
        with self._alone():
            old = self.get_hold(name)
            if old is not None and old.snapshot != digest:
                raise Conflict(
                    f"the hold {name!r} keeps {old.snapshot.short} already",
                    hint=f"choose another name, or `zgstore unhold {name}` first",
                )
            check_clashes(name, self._names(("holds",)), "hold")
            *above, last = name.split("/")
            self._clear_way(("holds",), name)
            line = " ".join(reason.split())
            write_file(
                self.root, ("holds", *above), last, f"{digest}\n{line}\n".encode(),
                mode=self._file_mode, dir_mode=self._dir_mode,
            )  # fmt: skip

    def unhold(self, name: str) -> Digest:
        """Give a hold up; returns what it kept.

        Raises:
            NotFound: if there is no such hold.
        """
        with self._alone():
            old = self.get_hold(name)
            if old is None:
                names = ", ".join(sorted(self._names(("holds",)))[:5])
                raise NotFound(f"there is no hold {name!r}", hint=f"holds: {names}" if names else "nothing is held")
            self._unlink(("holds",), name)
            return old.snapshot

    # -- files -----------------------------------------------------------------------------------------------------

    def _alone(self) -> contextlib.AbstractContextManager[None]:
        # Movers share the store lock; among them, comparing and setting is one step under this one.
        return locks.hold(
            self.root, "refs", exclusive=True, wait_seconds=_WAIT_SECONDS, mode=self._file_mode, what="the refs"
        )

    def _read(self, top: tuple[str, ...], name: str) -> str | None:
        *above, last = name.split("/")
        path = self.root.joinpath(*top, name)
        try:
            with directory(self.root, *top, *above) as folder:
                return read_all(folder, last, path, limit_bytes=_MAX_FILE_BYTES).decode("utf-8", "replace")
        except FileNotFoundError:
            return None
        except Corrupt:
            if path.is_dir() or any(self.root.joinpath(*top, *above[:at]).is_file() for at in range(1, len(above) + 1)):
                return None  # the name is a folder, or would be below a name: there is no such ref
            raise

    def _names(self, top: tuple[str, ...]) -> Iterator[str]:
        """Names below a folder, as they lie there."""
        with contextlib.suppress(FileNotFoundError), directory(self.root, *top) as handle:
            for each in sorted(listing(handle)):
                if not _COMPONENT.fullmatch(each):
                    continue
                below = self.root.joinpath(*top, each)
                if below.is_dir() and not below.is_symlink():
                    yield from (f"{each}/{name}" for name in self._names((*top, each)))
                else:
                    yield each

    def _clear_way(self, top: tuple[str, ...], name: str) -> None:
        """Remove empty folders that stand where the name's file shall be."""
        for parent, folders, files in os.walk(self.root.joinpath(*top, name), topdown=False):
            if not folders and not files:
                with contextlib.suppress(OSError):
                    Path(parent).rmdir()
        with contextlib.suppress(OSError):
            self.root.joinpath(*top, name).rmdir()

    def _unlink(self, top: tuple[str, ...], name: str) -> None:
        *above, last = name.split("/")
        with faults(f"removing {name}"):
            with directory(self.root, *top, *above) as folder:
                os.unlink(last, dir_fd=folder)
                os.fsync(folder)
            for depth in range(len(above), 0, -1):  # folders that are empty now
                with contextlib.suppress(OSError), directory(self.root, *top, *above[: depth - 1]) as folder:
                    os.rmdir(above[depth - 1], dir_fd=folder)

    def _digest(self, text: str, path: str) -> Digest:
        try:
            return Digest.parse(text)
        except Invalid as error:
            raise _corrupt(Path(path), "one text digest") from error


def _what(kind: str) -> str:
    return "ref" if kind == "head" else kind


def _corrupt(path: Path, wanted: str) -> Corrupt:
    return Corrupt(
        f"{path} does not hold {wanted}",
        hint="set it again: `zgstore ref set NAME REV`, with REV from `zgstore log`",
        object=path.name,
        expected=wanted,
        actual="something else",
        path=str(path),
    )


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
