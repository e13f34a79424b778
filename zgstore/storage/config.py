"""What a store is set up as: its configuration file, its permissions, and the making of a new one."""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from zgstore.errors import Corrupt, Invalid, NotFound
from zgstore.format import foreign
from zgstore.format.fields import FORMAT
from zgstore.format.manifest import check_features
from zgstore.storage.files import Modes, create, directory, faults, make_directory, read_all, write_file
from zgstore.storage.names import FAMILIES, PREFIXES

CONFIG: Final = "zgstore.toml"
POLICIES: Final = {
    "private": Modes(0o700, 0o600), "group": Modes(0o2770, 0o660), "world-read": Modes(0o755, 0o644),
}  # fmt: skip
OBJECT_MODE: Final = 0o444  # objects never change; who may not read them is kept out by the folders
_FANNED: Final = (*FAMILIES, "actions")
_FOLDERS: Final = (
    "measurements", "builds", "refs", "refs/heads", "refs/tags", "reflog", "reflog/heads", "reflog/tags", "holds",
    "leases", "tmp", "trash", "quarantine", "locks", "index",
)  # fmt: skip
_LOCKS: Final = ("store", "gc", "refs")
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@dataclass(frozen=True, slots=True)
class Config:
    """A store's configuration.

    Args:
        id: UUID given at init.
        policy: ``private``, ``group`` or ``world-read``.
        index: Where the index is kept, where that is not in the store.
    """

    id: str
    policy: str
    index: Path | None = None


def read_config(root: Path) -> Config:
    """The configuration of the store at ``root``.

    Raises:
        NotFound: if there is none.
        Invalid: if it needs a format or a feature that this version does not know.
        Corrupt: if it cannot be read.
    """
    try:
        with directory(root) as folder:
            text = read_all(folder, CONFIG, root / CONFIG, limit_bytes=1 << 20)
    except (FileNotFoundError, NotADirectoryError) as error:
        inner = root / ".zgstore"
        hint = f"name the folder in it: {inner}" if (inner / CONFIG).exists() else f"make one: `zgstore init {root}`"
        raise NotFound(f"there is no store at {root}", hint=hint) from error
    except OSError as error:
        hint = "ask whoever owns it; `zgstore init --policy group` makes stores that a group shares"
        raise NotFound(f"the store at {root} cannot be opened: {error.strerror}", hint=hint) from error
    try:
        value = foreign.parse_toml(text)
    except ValueError as error:
        raise _bad(root, str(error)) from error
    number, requires = value.get("format"), value.get("requires", [])
    if type(number) is not int or not isinstance(requires, list):
        raise _bad(root, "format is no number, or requires no list")
    check_features(f"store ({root})", number, requires)
    policy, store_id, index = value.get("policy"), value.get("id"), value.get("index")
    if not isinstance(store_id, str) or not isinstance(index, str | None) or policy not in tuple(POLICIES):
        raise _bad(root, "id, policy or index")
    if not _UUID.fullmatch(store_id) or (index is not None and not Path(index).is_absolute()):
        raise _bad(root, "id is no UUID, or index no absolute path")  # a path is built of them
    return Config(store_id, policy, Path(index) / store_id if index is not None else None)


def make_store(root: Path, policy: str) -> None:
    """Make a store at ``root``; what is there of one already stays.

    Raises:
        Invalid: for an unknown policy, or a place that cannot be written.
    """
    if policy not in POLICIES:
        raise Invalid(f"{policy!r} is not a policy", hint=f"one of {', '.join(POLICIES)}")
    modes = POLICIES[policy]
    text = f'format = {FORMAT}\nrequires = []\nid = "{uuid.uuid4()}"\npolicy = "{policy}"\n'
    with faults(f"making a store at {root}"):
        root.parent.mkdir(parents=True, exist_ok=True)
        make_directory(root, modes.folder)
        for name in (*_FANNED, *_FOLDERS):
            make_directory(root / name, modes.folder)
        for name in _FANNED:  # all 256, which are never removed
            with directory(root, name) as folder:
                for prefix in PREFIXES:
                    make_directory(prefix, modes.folder, dir_fd=folder)
        with directory(root, "locks") as folder:
            for name in _LOCKS:
                with contextlib.suppress(FileExistsError):
                    os.close(create(folder, name, modes.file))
        # Last, and without replacing: from here on it is a store, and of two that make it one is right.
        write_file(root, (), CONFIG, text.encode(), mode=modes.file, dir_mode=modes.folder, replace=False)


def _bad(root: Path, why: str) -> Corrupt:
    return Corrupt(
        f"{root / CONFIG} does not say what a store is: {why}",
        hint='it must have format = 1, requires = [], id = "UUID" and policy = "private", "group" or "world-read"',
        object=CONFIG,
        expected="format, requires, id, policy",
        actual=why,
        path=str(root / CONFIG),
    )
