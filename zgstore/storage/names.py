"""What is called what: the two families of objects, their folders, and listings of them without a look inside."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from zgstore.format.digest import DIGEST_BYTES, Digest
from zgstore.storage.files import directory, faults, listing

FAMILIES: Final = {"objects": ".safetensors", "meta": ".msgpack"}
PREFIXES: Final = tuple(f"{byte:02x}" for byte in range(256))

_HEX = re.compile(r"[0-9a-f]{64}")
_FOLDERS = frozenset(PREFIXES)


def parse_name(name: str, family: str) -> Digest | None:
    """The digest that a file's name says; None if it is no object's name."""
    stem = name.removesuffix(FAMILIES[family])
    return Digest(bytes.fromhex(stem)) if stem + FAMILIES[family] == name and _HEX.fullmatch(stem) else None


def names_in(folder: int, name: str) -> list[str]:
    """The names in a folder below an open one; none where it is missing, or no folder."""
    try:
        inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    except OSError as error:
        if error.errno in {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}:
            return []  # a link or a file there is foreign, and named as such
        raise
    try:
        return listing(inner)
    finally:
        os.close(inner)


def packed_names(root: Path, family: str) -> Iterator[bytes]:
    """Raw digests of a family's objects, joined, folder by folder: a million names take half a second."""
    with faults(f"listing {family}"), directory(root, family) as folder:
        for prefix in PREFIXES:
            yield packed_names_in(folder, prefix, family)


def packed_names_in(folder: int, prefix: str, family: str) -> bytes:
    """The same of one of the family's folders."""
    extension, names = FAMILIES[family], names_in(folder, prefix)
    # All at once, as nearly always nothing else lies there: one name at a time takes three times as long. No name has a
    # slash, so that a file of another name shows in where they stand, or in what is left over.
    joined = "/".join([*names, ""])
    wide, stems = 2 * DIGEST_BYTES + len(extension) + 1, joined.replace(extension + "/", "")
    if joined[wide - 1 :: wide] == "/" * len(names) and len(stems) == 2 * DIGEST_BYTES * len(names):
        with suppress(ValueError):
            packed = bytes.fromhex(stems)
            if packed.hex() == stems and packed[::DIGEST_BYTES] == bytes.fromhex(prefix) * len(names):
                return packed
    digests = [parse_name(name, family) for name in names]
    return b"".join(digest.raw for digest in digests if digest is not None and digest.hex.startswith(prefix))


def foreign(root: Path) -> Iterator[Path]:
    """What lies in ``objects/`` and ``meta/`` and is no object: other names, links, folders, devices."""
    for family in FAMILIES:
        top = root / family
        with faults(f"listing {top}"), os.scandir(top) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
        for entry in found:
            if entry.name not in _FOLDERS or not entry.is_dir(follow_symlinks=False):
                yield Path(entry.path)
                continue
            with faults(f"listing {entry.path}"), os.scandir(entry.path) as inner:
                for each in inner:
                    digest = parse_name(each.name, family)
                    if digest is None or digest.hex[:2] != entry.name or not each.is_file(follow_symlinks=False):
                        yield Path(each.path)
