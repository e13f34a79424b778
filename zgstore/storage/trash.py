"""Objects on their way out: ``trash/EPOCH/FAMILY/NAME``, what is set aside to be unlinked, and quarantine."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from zgstore.format.digest import Digest
from zgstore.storage.files import Stat, directory, faults, listing, remove_tree, rename_new
from zgstore.storage.names import FAMILIES, names_in, parse_name


class Trashed(NamedTuple):
    """One object in the trash."""

    epoch: str
    family: str
    digest: Digest
    size: int


class Trash:
    """The ways out of a store, and the one way back. Only the collector removes anything.

    Args:
        root: The store.
        dir_mode: Permissions of folders.
    """

    def __init__(self, root: Path, *, dir_mode: int) -> None:
        self.root = root
        self._dir_mode = dir_mode

    def epochs(self) -> list[str]:
        """The names of the trash's folders, in order."""
        with faults("listing the trash"), directory(self.root) as root:
            return sorted(names_in(root, "trash"))

    def in_trash(self, digest: Digest, family: str) -> bool:
        """Whether the trash has it."""
        return self._epoch_of(digest, family) is not None

    def _epoch_of(self, digest: Digest, family: str) -> str | None:
        name = digest.hex + FAMILIES[family]
        for epoch in reversed(self.epochs()):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                (self.root / "trash" / epoch / family / name).lstat()
                return epoch
        return None

    def restore(self, digest: Digest, family: str) -> bool:
        """Move it back out of the trash; False if it is not there. The caller holds the store lock."""
        name = digest.hex + FAMILIES[family]
        while (epoch := self._epoch_of(digest, family)) is not None:
            with (
                faults(f"restoring {digest.short}"),
                contextlib.suppress(FileNotFoundError),  # another writer was quicker: look again
                directory(self.root, "trash", epoch, family) as trash,
                directory(self.root, family, name[:2], make=self._dir_mode) as folder,
            ):
                with contextlib.suppress(FileExistsError):
                    rename_new(trash, name, folder, name)
                return True
        return False

    def to_trash(self, epoch: str, digest: Digest, family: str) -> bool:
        """Move one object into ``trash/EPOCH/``; see ``all_to_trash``."""
        return bool(self.all_to_trash(epoch, [(family, digest)]))

    def all_to_trash(self, epoch: str, items: Iterable[tuple[str, Digest]]) -> list[tuple[str, Digest]]:
        """Move objects (family, digest) into ``trash/EPOCH/``; returns those that were there.

        The caller holds the store lock exclusively, so folders are opened once for all of them.
        """
        moved = []
        with contextlib.ExitStack() as stack, faults("moving objects to the trash"):
            handles: dict[str, tuple[int, int]] = {}
            for family, digest in items:
                if family not in handles:
                    places = (
                        directory(self.root, family),
                        directory(self.root, "trash", epoch, family, make=self._dir_mode),
                    )
                    handles[family] = stack.enter_context(places[0]), stack.enter_context(places[1])
                name = digest.raw.hex() + FAMILIES[family]
                with contextlib.suppress(FileNotFoundError):
                    os.rename(f"{name[:2]}/{name}", name, src_dir_fd=handles[family][0], dst_dir_fd=handles[family][1])
                    moved.append((family, digest))
        return moved

    def trashed(self) -> Iterator[Trashed]:
        """All that is in the trash, epoch by epoch."""
        for epoch in self.epochs():
            for family in FAMILIES:
                with (
                    contextlib.suppress(FileNotFoundError, NotADirectoryError),
                    directory(self.root, "trash", epoch, family) as folder,
                ):
                    for name in sorted(listing(folder)):
                        digest = parse_name(name, family)
                        if digest is not None:
                            with contextlib.suppress(FileNotFoundError):
                                size = os.stat(name, dir_fd=folder, follow_symlinks=False).st_size
                                yield Trashed(epoch, family, digest, size)

    def all_aside(self, items: Iterable[Trashed], folder_name: str) -> list[Trashed]:
        """Rename out of the trash into ``tmp/FOLDER_NAME``, to be unlinked outside the lock; returns those there."""
        moved = []
        with contextlib.ExitStack() as stack, faults("setting trash aside"):
            tmp = stack.enter_context(directory(self.root, "tmp", folder_name, make=self._dir_mode))
            handles: dict[tuple[str, str], int] = {}
            for item in items:
                place = (item.epoch, item.family)
                name = item.digest.raw.hex() + FAMILIES[item.family]
                with contextlib.suppress(FileNotFoundError):
                    if place not in handles:
                        handles[place] = stack.enter_context(directory(self.root, "trash", *place))
                    os.rename(name, f"{item.family}-{name}", src_dir_fd=handles[place], dst_dir_fd=tmp)
                    moved.append(item)
        return moved

    def folder_aside(self, name: str, folder_name: str) -> None:
        """Rename ``tmp/NAME`` to ``tmp/FOLDER_NAME``, which is not there; one that is gone is no fault."""
        with (
            faults(f"setting tmp/{name} aside"),
            directory(self.root, "tmp") as tmp,
            contextlib.suppress(FileNotFoundError),
        ):
            os.rename(name, folder_name, src_dir_fd=tmp, dst_dir_fd=tmp)

    def remove_aside(self, folder_name: str) -> None:
        """Unlink what ``all_aside`` set there, or a leftover of ``tmp/``; takes milliseconds a file: hold no lock."""
        with faults(f"removing tmp/{folder_name}"), directory(self.root, "tmp") as tmp:
            remove_tree(tmp, folder_name)

    def remove_epoch(self, epoch: str) -> None:
        """Remove an epoch's folders if nothing is left in them."""
        with contextlib.suppress(OSError), directory(self.root, "trash", epoch) as folder:
            for family in FAMILIES:
                with contextlib.suppress(OSError):
                    os.rmdir(family, dir_fd=folder)
        with contextlib.suppress(OSError), directory(self.root, "trash") as trash:
            os.rmdir(epoch, dir_fd=trash)

    def leftovers(self) -> Iterator[tuple[str, Stat]]:
        """What lies in ``tmp/``, by name: sessions of the living, and leftovers of the dead."""
        with faults("listing tmp"), directory(self.root, "tmp") as tmp:
            for name in sorted(listing(tmp)):
                with contextlib.suppress(FileNotFoundError):
                    yield name, Stat.of(os.stat(name, dir_fd=tmp, follow_symlinks=False))

    def quarantine(self, digest: Digest, family: str) -> Path:
        """Move what has the object's name out of the way, for people to look at; returns where to."""
        return self.quarantine_path(self.root / family / digest.hex[:2] / (digest.hex + FAMILIES[family]))

    def quarantine_path(self, path: Path) -> Path:
        """Move a file that is no object, or a bad one, out of its folder of the store."""
        parts = path.relative_to(self.root).parts
        name = f"{parts[-1]}.{uuid.uuid4().hex[:8]}"
        with (
            faults(f"moving {path} to quarantine"),
            directory(self.root, *parts[:-1]) as folder,
            directory(self.root, "quarantine", make=self._dir_mode) as quarantine,
            contextlib.suppress(FileNotFoundError),
        ):
            os.rename(parts[-1], name, src_dir_fd=folder, dst_dir_fd=quarantine)
        return self.root / "quarantine" / name
