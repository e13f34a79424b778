"""Which columns of a snapshot a store means to have, where it has only a part.

A part is the same snapshot with the same digest: its pages are all here, and only some columns' blobs are. The file
``partials/SNAPSHOT`` names these columns; where there is none, every column is meant.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

from zgstore.errors import Corrupt
from zgstore.format.action import decode_sealed, encode_sealed
from zgstore.format.digest import Digest
from zgstore.storage import locks
from zgstore.storage.files import Modes, directory, fault, faults, read_all, write_file

FOLDER: Final = "partials"
MAX_MARKER_BYTES: Final = 16 << 20
WAIT_SECONDS: Final = 60.0


def expected(root: Path, snapshot: Digest) -> frozenset[str] | None:
    """The columns whose blobs the store at ``root`` means to have; None means all.

    Raises:
        Corrupt: if the marker is torn, or of another snapshot.
    """
    path = root / FOLDER / snapshot.hex
    try:
        with directory(root, FOLDER) as folder:
            content = read_all(folder, snapshot.hex, path, limit_bytes=MAX_MARKER_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise fault(error, f"reading {path}") from error
    try:
        value = decode_sealed("partial", content)
    except Corrupt as error:
        raise _bad(path, snapshot, error.message) from error
    columns = value.get("columns") if isinstance(value, dict) else None
    if not isinstance(columns, list) or not all(isinstance(name, str) for name in columns):
        raise _bad(path, snapshot, "it lists no columns")
    if value.get("kind") != "partial" or value.get("snapshot") != snapshot.raw:
        raise _bad(path, snapshot, "it is about another snapshot")
    return frozenset(columns)


def alone(root: Path, *, mode: int) -> AbstractContextManager[None]:
    """Nobody else changes markers in the block, so that two parts that arrive at once add up."""
    return locks.hold(root, "partials", exclusive=True, wait_seconds=WAIT_SECONDS, mode=mode, what="the parts")


def mark(root: Path, snapshot: Digest, columns: Collection[str], modes: Modes) -> None:
    """Say that only ``columns`` are meant to be here; durable when it returns.

    Args:
        root: The store.
        snapshot: Whose columns.
        columns: Their names.
        modes: Permissions of the file, and of the folder where it is made.
    """
    value = {"kind": "partial", "snapshot": snapshot.raw, "columns": sorted(columns)}
    write_file(root, (FOLDER,), snapshot.hex, encode_sealed("partial", value), mode=modes.file, dir_mode=modes.folder)


def clear(root: Path, snapshot: Digest) -> None:
    """Say that the whole snapshot is meant to be here."""
    with (
        contextlib.suppress(FileNotFoundError),
        faults(f"removing {FOLDER}/{snapshot.hex}", but_absence=True),
        directory(root, FOLDER) as folder,
    ):
        os.unlink(snapshot.hex, dir_fd=folder)
        os.fsync(folder)


def listed(root: Path) -> Iterator[tuple[Path, Digest]]:
    """Every marker and the snapshot that it is about."""
    folder = root / FOLDER
    if folder.is_dir():
        for path in sorted(folder.iterdir()):
            if len(path.name) == 64 and not path.name.strip("0123456789abcdef"):
                yield path, Digest(bytes.fromhex(path.name))


def _bad(path: Path, snapshot: Digest, why: str) -> Corrupt:
    return Corrupt(
        f"the list of columns of the part {snapshot.short} is damaged: {why}",
        hint=f"remove {path}, then `zgstore copy {snapshot.short} --columns … --to` this store from a whole one",
        object=str(snapshot),
        expected="the names of its columns",
        actual=why,
        path=str(path),
    )
