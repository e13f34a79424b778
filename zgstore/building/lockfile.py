"""The lock file: which snapshot an experiment uses, to be committed beside it.

``zgstore.lock`` is TOML with one section for each name: the digests of the snapshot, of its recipe and of its pins.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Final

from zgstore.errors import Invalid, NotFound
from zgstore.format import foreign
from zgstore.format.digest import Digest
from zgstore.storage.store import Store

FILE_NAME: Final = "zgstore.lock"
PREFIX: Final = "lock:"

_HEAD: Final = "# Which snapshots this experiment uses. Written by `zgstore lock`; commit it.\n"
_BARE = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True, slots=True)
class Locked:
    """One section of a lock file.

    Args:
        snapshot: The snapshot's digest.
        recipe: Digest of the recipe that made it; None where it was not made by one.
        pins: Digest of its pins.
    """

    snapshot: Digest
    recipe: Digest | None
    pins: Digest


def find(start: Path) -> Path | None:
    """The nearest ``zgstore.lock`` in ``start`` or above it."""
    start = Path(start).absolute()
    for directory in (start, *start.parents):
        path = directory / FILE_NAME
        if path.is_file():
            return path
    return None


def read(path: Path) -> dict[str, Locked]:
    """All sections of a lock file, by name.

    Raises:
        Invalid: if the file is not TOML or a section is not one of ours.
    """
    try:
        value = foreign.parse_toml(Path(path).read_bytes())
    except FileNotFoundError as error:
        raise NotFound(
            f"there is no lock file {path}", hint=f"`zgstore lock NAME --file {quote(str(path))}` writes one"
        ) from error
    except ValueError as error:
        raise Invalid(f"{path} is not TOML: {error}", hint="restore it from version control") from error
    return {name: _section(path, name, section) for name, section in value.items()}


def write(path: Path, name: str, locked: Locked) -> None:
    """Set one section and keep the others; the file is replaced as a whole."""
    path = Path(path)
    sections = read(path) if path.exists() else {}
    sections[name] = locked
    parts = [_HEAD]
    for key in sorted(sections):
        one = sections[key]
        lines = [f"\n[{_key(key)}]", f'snapshot = "{one.snapshot}"']
        lines += [f'recipe = "{one.recipe}"'] if one.recipe else []
        parts += ["\n".join([*lines, f'pins = "{one.pins}"']) + "\n"]
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write("".join(parts))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def resolve(rev: str, start: Path) -> str:
    """A REV with ``lock:NAME`` replaced by the locked snapshot's digest; any other REV unchanged.

    Args:
        rev: What the user named.
        start: Where to begin looking for the lock file, going up.

    Raises:
        NotFound: if there is no lock file, or it has no such section.
    """
    if not rev.startswith(PREFIX):
        return rev
    return str(section(find(start), rev.removeprefix(PREFIX), start).snapshot)


def section(path: Path | None, name: str, start: Path) -> Locked:
    """The section ``name`` of the lock file ``path``.

    Raises:
        NotFound: if there is no lock file in or above ``start``, or it has no such section.
    """
    if path is None:
        raise NotFound(f"there is no {FILE_NAME} in {start} or above", hint=f"`zgstore lock {name}` writes one")
    sections = read(path)
    if name not in sections:
        names = ", ".join(sorted(sections)) or "nothing"
        hint = f"it locks {names}; a build says which by --ref, and `zgstore lock {name}` adds this one"
        raise NotFound(f"{path} does not lock {name!r}", hint=hint)
    return sections[name]


def locked(name: str, start: Path) -> Locked:
    """What the nearest lock file, in ``start`` or above it, says of ``name``.

    Raises:
        NotFound: if there is no lock file, or it has no such section.
    """
    return section(find(start), name, start)


def lock(store: Store, name: str, rev: str | None = None, *, file: Path | None = None) -> tuple[Path, Locked]:
    """Write a snapshot into the lock file, and hold it in the store.

    Args:
        store: The store that has it.
        name: The section's name.
        rev: What to lock; the ref ``name`` if not given.
        file: The lock file; else the nearest one upward of the current directory, else one here.

    Returns:
        The file, and what was written.
    """
    path = file or find(Path.cwd()) or Path.cwd() / FILE_NAME
    if not path.parent.is_dir() or path.is_dir():
        raise Invalid(f"{path} cannot be a lock file", hint="name a file in a folder that is there")
    digest = store.resolve(resolve(rev or name, Path.cwd()))
    snapshot = store.snapshot(digest)
    record = store.record_of(digest)
    recipe = record.fields.get("recipe") if record else None
    locked = Locked(digest, Digest(recipe) if isinstance(recipe, bytes) else None, snapshot.pins.digest())
    # Held first: a lock file must never name what gc may take.
    store.hold(f"lock/{name}/{digest.short}", digest, f"locked by {path}")
    write(path, name, locked)
    return path, locked


def _section(path: Path, name: str, value: object) -> Locked:
    try:
        snapshot, recipe, pins = (value.get(key) for key in ("snapshot", "recipe", "pins"))  # type: ignore[attr-defined]
        return Locked(Digest.parse(snapshot), None if recipe is None else Digest.parse(recipe), Digest.parse(pins))
    except (AttributeError, TypeError, Invalid) as error:
        raise Invalid(
            f"[{name!r:.80}] in {path} does not name a snapshot and its pins", hint="`zgstore lock NAME` writes it anew"
        ) from error


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else '"' + name.replace("\\", "\\\\").replace('"', '\\"') + '"'
