"""Files that are named by a key and hold no identity: actions, measurements, and builds that are still growing."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from zgstore.errors import Corrupt, Invalid, ZgError
from zgstore.format import canonical
from zgstore.format.action import Action, decode_sealed, encode_sealed
from zgstore.format.digest import Digest, digest_of
from zgstore.storage.builds import Build, BuildFile, parse_build, start_build_file
from zgstore.storage.files import Modes, directory, faults, listing, read_all, write_file
from zgstore.storage.names import PREFIXES

TAG_DIGITS: Final = 12
_MAX_ACTION_BYTES: Final = 16 << 20
_MAX_BUILD_BYTES: Final = 1 << 29  # 13 million blobs: it is read whole
_ACTION = re.compile(r"([0-9a-f]{64})\.([0-9a-f]{12})\.msgpack")
_MEASUREMENT = re.compile(r"[0-9a-f]{64}\.msgpack")
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def platform_tag(platform: Mapping[str, str]) -> str:
    """What a platform's actions end in: 12 digits of the digest of its description."""
    return digest_of("action", canonical.encode(dict(platform))).hex[:TAG_DIGITS]


class ActionFile(NamedTuple):
    """An action as a file."""

    path: Path
    key_hex: str
    tag: str
    mtime_seconds: float
    size: int


def _file(folder: int, path: Path, name: re.Match[str]) -> ActionFile:
    found = os.stat(path.name, dir_fd=folder, follow_symlinks=False)
    return ActionFile(path, name[1], name[2], found.st_mtime, found.st_size)


class Memos:
    """The actions, measurements and builds of one store.

    Args:
        root: The store.
        modes: Permissions.
    """

    def __init__(self, root: Path, modes: Modes) -> None:
        self.root = root
        self._modes = modes

    # -- actions ---------------------------------------------------------------------------------------------------

    def action(self, key: Digest, tag: str) -> Action | None:
        """What a column of a shard came out as on a platform; None for a miss.

        A torn action, or one that is not about this key, is a miss, and dropped.
        """
        name = f"{key.hex}.{tag}.msgpack"
        action = self._action(key.hex[:2], name)
        if action is None or action.key == key:
            return action
        self.remove(self.root / "actions" / key.hex[:2] / name)
        return None

    def action_platforms(self, key: Digest) -> list[str]:
        """The tags of all platforms that have an action of this key."""
        with self._listed("actions", key.hex[:2]) as names:
            return sorted(m[2] for name in names if (m := _ACTION.fullmatch(name)) and m[1] == key.hex)

    def put_action(self, action: Action, tag: str) -> None:
        """Keep an action, whole but not synced: it is one blob's worth of work, and a torn one is a miss."""
        hexed = action.key.hex
        write_file(
            self.root, ("actions", hexed[:2]), f"{hexed}.{tag}.msgpack", action.encode(),
            mode=self._modes.file, dir_mode=self._modes.folder, durable=False,
        )  # fmt: skip

    def actions(self) -> Iterator[ActionFile]:
        """Every action's file."""
        for folder, path, name in self._actions():
            with contextlib.suppress(FileNotFoundError):
                yield _file(folder, path, name)

    def _actions(self) -> Iterator[tuple[int, Path, re.Match[str]]]:
        """Of each the handle of its folder, its path, and the parts of its name."""
        for prefix in PREFIXES:
            with contextlib.suppress(FileNotFoundError), directory(self.root, "actions", prefix) as folder:
                place = self.root / "actions" / prefix
                for name in sorted(listing(folder)):
                    match = _ACTION.fullmatch(name)
                    if match is not None:
                        yield folder, place / name, match

    def read_action(self, file: ActionFile) -> Action | None:
        """The action in a file; None, and dropped, if it is torn."""
        return self._action(file.path.parent.name, file.path.name)

    def actions_of(self, blob: Digest) -> Iterator[tuple[ActionFile, Action]]:
        """The actions that a blob came out of; the others, of which there may be a million, are not parsed."""
        for folder, path, name in self._actions():
            with contextlib.suppress(Corrupt, FileNotFoundError):  # left to a build or a collection, which drop it
                if blob.raw in read_all(folder, path.name, path, limit_bytes=_MAX_ACTION_BYTES):
                    file = _file(folder, path, name)
                    action = self.read_action(file)
                    if action is not None and action.blob.digest == blob:
                        yield file, action

    def _action(self, prefix: str, name: str) -> Action | None:
        path = self.root / "actions" / prefix / name
        try:
            content = self._content(path)
            return None if content is None else Action.decode(content)
        except (Corrupt, Invalid):
            self.remove(path)
            return None

    def _content(self, path: Path) -> bytes | None:
        with (
            contextlib.suppress(FileNotFoundError),
            directory(self.root, "actions", path.parent.name) as folder,
        ):
            return read_all(folder, path.name, path, limit_bytes=_MAX_ACTION_BYTES)
        return None

    def remove(self, path: Path) -> None:
        """Remove an action, a measurement or a build; what cannot be removed stays, and is a miss again."""
        *folders, name = path.relative_to(self.root).parts
        with contextlib.suppress(OSError, ZgError), directory(self.root, *folders) as folder:
            os.unlink(name, dir_fd=folder)

    # -- measurements ----------------------------------------------------------------------------------------------

    def measurement(self, key: Digest) -> dict[str, Any] | None:
        """What was measured under a key; None if nothing was, or if what was kept is torn or about another key."""
        return self._measurement(f"{key.hex}.msgpack")

    def _measurement(self, name: str) -> dict[str, Any] | None:
        path = self.root / "measurements" / name
        try:
            with directory(self.root, "measurements") as folder:
                content = read_all(folder, name, path, limit_bytes=canonical.MAX_BYTES + 32)
            value = decode_sealed("measurement", content)
        except (FileNotFoundError, Corrupt):
            return None
        mine = bytes.fromhex(name.partition(".")[0])
        if not isinstance(value, dict) or value.pop("key", mine) != mine:  # the oldest stores have none
            return None
        return value

    def put_measurement(self, key: Digest, value: Mapping[str, Any]) -> None:
        """Keep what was measured under a key, in place of what was there; durable when it returns."""
        write_file(
            self.root, ("measurements",), f"{key.hex}.msgpack", encode_sealed("measurement", {**value, "key": key.raw}),
            mode=self._modes.file, dir_mode=self._modes.folder,
        )  # fmt: skip

    def measurements(self) -> Iterator[dict[str, Any]]:
        """All that was measured."""
        with self._listed("measurements") as names:
            for name in sorted(filter(_MEASUREMENT.fullmatch, names)):
                value = self._measurement(name)
                if value is not None:
                    yield value

    # -- builds ----------------------------------------------------------------------------------------------------

    def start_build(self, uuid: str, head: Mapping[str, Any]) -> BuildFile:
        """Begin a build's file, for followers.

        Args:
            uuid: The lease's: the file is kept while that lives.
            head: ``columns`` (column values, in order); else what the builder likes: ``data``, ``constants``, pins.
        """
        with faults(f"starting the build {uuid}"), directory(self.root, "builds", make=self._modes.folder) as folder:
            return start_build_file(folder, uuid, head, mode=self._modes.file)

    def builds(self) -> list[str]:
        """The UUIDs of all builds' files."""
        with self._listed("builds") as names:
            return sorted(filter(_UUID.fullmatch, names))

    def build(self, uuid: str) -> Build | None:
        """A build as far as it is; None if there is none of that name.

        Raises:
            Corrupt: if its head is torn.
        """
        if not _UUID.fullmatch(uuid):
            return None
        path = self.root / "builds" / uuid
        try:
            with directory(self.root, "builds") as folder:
                return parse_build(read_all(folder, uuid, path, limit_bytes=_MAX_BUILD_BYTES))
        except FileNotFoundError:
            return None

    def build_bytes(self, uuid: str) -> int:
        """How far a build's file has grown: that nothing was added shows without a parse; 0 if there is none."""
        try:
            with directory(self.root, "builds") as folder:
                return os.stat(uuid, dir_fd=folder, follow_symlinks=False).st_size if _UUID.fullmatch(uuid) else 0
        except FileNotFoundError:
            return 0

    def remove_build(self, uuid: str) -> None:
        """Remove a build's file: published long ago, or its lease dead."""
        if _UUID.fullmatch(uuid):
            self.remove(self.root / "builds" / uuid)

    # -- folders ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _listed(self, *parts: str) -> Iterator[Sequence[str]]:
        try:
            with directory(self.root, *parts) as folder:
                names = listing(folder)
        except FileNotFoundError:
            names = []
        yield names
