"""What may be a name, and the small files that names are: one for each, in folders as the name has parts."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from zgstore.errors import Corrupt, Invalid
from zgstore.format.digest import Digest
from zgstore.storage import locks
from zgstore.storage.files import Modes, directory, faults, listing, read_all, remove_empty, write_file

MAX_NAME_BYTES: Final = 128
MAX_FILE_BYTES: Final = 1 << 16
_WAIT_SECONDS: Final = 30.0

_COMPONENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


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


def is_name(name: str) -> bool:
    """Whether FORMAT's rules for names allow it."""
    try:
        check_name(name)
    except Invalid:
        return False
    return True


def refuse_text(names: object, what: str) -> None:
    """Refuse one text in the place of several: its letters would be taken for them.

    Raises:
        Invalid: if it is one.
    """
    if isinstance(names, str):
        raise Invalid(f"{what} is {names[:140]!r}, one text", hint=f"give a list: {what}=[{names[:140]!r}]")


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


class NamedFiles:
    """Folders of a store whose files are names.

    Args:
        root: The store.
        modes: Permissions.
    """

    def __init__(self, root: Path, modes: Modes) -> None:
        self.root = root
        self.modes = modes

    def alone(self) -> contextlib.AbstractContextManager[None]:
        """Movers share the store lock; among them, comparing and setting is one step under this one."""
        return locks.hold(
            self.root, "refs", exclusive=True, wait_seconds=_WAIT_SECONDS, mode=self.modes.file, what="the refs"
        )

    def read(self, top: tuple[str, ...], name: str) -> str | None:
        """The text of a name's file; None if there is none.

        Raises:
            Corrupt: if it is not a regular file.
        """
        *above, last = name.split("/")
        path = self.root.joinpath(*top, name)
        try:
            with faults(f"reading {path}", but_absence=True), directory(self.root, *top, *above) as folder:
                return read_all(folder, last, path, limit_bytes=MAX_FILE_BYTES).decode("utf-8", "replace")
        except FileNotFoundError:
            return None
        except Corrupt:
            if self._is_no_name(top, name):
                return None
            raise

    def _is_no_name(self, top: tuple[str, ...], name: str) -> bool:
        """Whether a folder has that name, or a file a part of it: then it names nothing."""
        parts = name.split("/")
        whole = self.root.joinpath(*top, name)
        below = [self.root.joinpath(*top, *parts[:at]) for at in range(1, len(parts))]
        return (whole.is_dir() and not whole.is_symlink()) or any(path.is_file() for path in below)

    def names(self, top: tuple[str, ...]) -> Iterator[str]:
        """The names in a folder, those with parts too."""
        with contextlib.suppress(FileNotFoundError), directory(self.root, *top) as handle:
            for each in sorted(listing(handle)):
                if not _COMPONENT.fullmatch(each):
                    continue
                below = self.root.joinpath(*top, each)
                if len(str(below)) - len(str(self.root)) > MAX_NAME_BYTES + 32:
                    continue  # no name is as long, and folders may lie in folders without end
                if below.is_dir() and not below.is_symlink():
                    yield from (f"{each}/{name}" for name in self.names((*top, each)))
                else:
                    yield each

    def write(self, top: tuple[str, ...], name: str, text: str, *, replace: bool = True) -> bool:
        """Write a name's file, durably; False if it is there and must not be replaced."""
        *above, last = name.split("/")
        if not above or not self.root.joinpath(*top, name).is_file():
            self._clear_way(top, name)
        return write_file(
            self.root, (*top, *above), last, text.encode(), mode=self.modes.file, dir_mode=self.modes.folder,
            replace=replace,
        )  # fmt: skip

    def _clear_way(self, top: tuple[str, ...], name: str) -> None:
        """Remove empty folders that stand where the file shall be."""
        *above, last = name.split("/")
        with contextlib.suppress(OSError, Corrupt), directory(self.root, *top, *above) as folder:
            remove_empty(folder, last, deep=MAX_NAME_BYTES)

    def unlink(self, top: tuple[str, ...], name: str) -> None:
        """Remove a name's file, durably, and the folders that are empty then; one that is gone is no fault."""
        *above, last = name.split("/")
        with (
            faults(f"removing {name}"),
            contextlib.suppress(FileNotFoundError),
            directory(self.root, *top, *above) as folder,
        ):
            os.unlink(last, dir_fd=folder)
            os.fsync(folder)
        for depth in range(len(above), 0, -1):
            with contextlib.suppress(OSError), directory(self.root, *top, *above[: depth - 1]) as folder:
                os.rmdir(above[depth - 1], dir_fd=folder)


def parse_digest(text: str, path: Path) -> Digest:
    """The digest that a name's file holds.

    Raises:
        Corrupt: if it is none.
    """
    try:
        return Digest.parse(text)
    except Invalid as error:
        raise torn(path, "one text digest") from error


def torn(path: Path, wanted: str) -> Corrupt:
    """The error that a name's file does not hold what it should."""
    return Corrupt(
        f"{path} does not hold {wanted}",
        hint="set it again: `zgstore ref set NAME REV`, with REV from `zgstore log`",
        object=path.name,
        expected=wanted,
        actual="something else",
        path=str(path),
    )
