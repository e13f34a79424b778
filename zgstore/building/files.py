"""Digests of files outside the store: a teacher's weights on disk, data files, the source code of classes.

Nothing is imported to find them: a package's files are found through its top-level spec.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from zgstore.errors import Missing
from zgstore.format.digest import Digest, Hasher, digest_of

PACKAGE: Final = "package:"
_PIECE_BYTES: Final = 4 << 20
_THREADS: Final = 8

# Digests of many files at once; the store's is one that looks at stat stamps first.
FileDigests = Callable[[Sequence[Path]], Sequence[Digest]]


def file_digest(path: Path) -> Digest:
    """The plain BLAKE3 digest of a file, as `b3sum` prints it.

    Raises:
        Missing: if it cannot be read.
    """
    hasher = Hasher(threads=_THREADS)
    piece = bytearray(_PIECE_BYTES)
    view = memoryview(piece)
    try:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(view):
                hasher.update(view[:count])
    except OSError as error:
        raise Missing(f"{path} cannot be read: {error.strerror}", hint="see that it is there and may be read",
                      path=str(path)) from error  # fmt: skip
    return hasher.digest()


def file_digests(paths: Sequence[Path]) -> list[Digest]:
    """The digests of files, each read whole."""
    return [file_digest(path) for path in paths]


@dataclass(frozen=True, slots=True)
class ListedFile:
    """A file under the name that its digest is taken with: where it lies is no part of it."""

    name: str
    path: Path


def list_files(paths: Sequence[str], *, base: Path) -> list[ListedFile]:
    """The files that a recipe's ``files`` name.

    Args:
        paths: Files and folders, relative to ``base``; ``package:NAME`` is an installed package's folder. Hidden
            entries, ``__pycache__`` and compiled Python are left out.
        base: The recipe's folder.

    Returns:
        In order of the paths, then of names. A name begins with its path's number, and does not say where it lies.

    Raises:
        Missing: if a file, folder or package is not there.
    """
    listed: list[ListedFile] = []
    for number, text in enumerate(paths):
        root = package_folder(text.removeprefix(PACKAGE)) if text.startswith(PACKAGE) else base / text
        if root.is_dir():
            found = [ListedFile(f"{number}/{path.relative_to(root).as_posix()}", path) for path in _walk(root)]
        elif root.is_file():
            found = [ListedFile(f"{number}/{root.name}", root)]
        else:
            found = []
        if not found:
            raise Missing(f"{text!r} names no file", hint=f"paths are relative to {base}; packages are `package:NAME`",
                          path=str(root))  # fmt: skip
        listed += found
    return listed


def files_digest(paths: Sequence[str], *, base: Path, digests: FileDigests = file_digests) -> Digest:
    """The digest of files and folders: of relative names and bytes.

    Args:
        paths: As in `list_files`.
        base: The folder that they are relative to.
        digests: How a file's digest is had.

    Raises:
        Missing: if one is not there.
    """
    listed = list_files(paths, base=base)
    chunks = []
    for file, digest in zip(listed, digests([file.path for file in listed]), strict=True):
        name = file.name.encode()
        chunks += [len(name).to_bytes(8, "little"), name, digest.raw]
    return digest_of("files", *chunks)


def _walk(root: Path, above: frozenset[Path] = frozenset()) -> Iterator[Path]:
    """The files below, by name; links are followed, as hubs' caches consist of them, but not round in circles."""
    above |= {root.resolve()}
    for path in sorted(root.iterdir(), key=lambda path: path.name):
        if path.name.startswith(".") or path.name == "__pycache__" or path.suffix == ".pyc":
            continue
        if path.is_dir():
            if path.resolve() not in above:
                yield from _walk(path, above)
        elif path.is_file():
            yield path


def package_folder(name: str) -> Path:
    """The folder of an installed package, which is not imported.

    Raises:
        Missing: if there is none.
    """
    folders = _top_level(name.split(".", maxsplit=1)[0])[1]
    for folder in folders:
        found = folder.joinpath(*name.split(".")[1:])
        if found.is_dir():
            return found
    raise Missing(f"no package {name!r} is installed", hint="install it into the environment that builds")


def _top_level(name: str) -> tuple[Path | None, list[Path]]:
    """A top-level module's file and the folders of its submodules. Finding a top-level spec imports nothing."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return None, []
    if spec is None:
        return None, []
    origin = Path(spec.origin) if spec.has_location and spec.origin else None
    return origin, [Path(folder) for folder in spec.submodule_search_locations or ()]


def source_file(module: str, *, search: Sequence[Path] = ()) -> Path | None:
    """The source file of a module by its dotted name, found without importing it.

    Args:
        module: As ``transformers.models.llama.modeling_llama``.
        search: Folders to look in first: the recipe's.

    Returns:
        None if no file is found.
    """
    first, *rest = module.split(".")
    for folder in search:
        found = _below(folder, [first, *rest])
        if found is not None:
            return found
    origin, folders = _top_level(first)
    if not rest:
        return origin
    return next((found for folder in folders if (found := _below(folder, rest)) is not None), None)


def _below(folder: Path, parts: Sequence[str]) -> Path | None:
    whole = folder.joinpath(*parts)
    if not re.fullmatch(r"\w+(\.\w+)*", ".".join(parts)):
        return None
    for candidate in (whole.with_name(f"{whole.name}.py"), whole / "__init__.py"):
        if candidate.is_file():
            return candidate
    return None


@dataclass(frozen=True, slots=True)
class SourcePin:
    """The code that a teacher is: source files by the names of their modules.

    Args:
        classes: Module name → digest of its source file, for the classes of the module tree and their bases, torch's
            and the builtins left out. None where a module has no file: such a pin can never be found again.
        factory: The module of the factory → the same; kept apart, for it is code that only fetches the teacher.
    """

    classes: Mapping[str, Digest | None]
    factory: Mapping[str, Digest | None]

    def digest(self) -> Digest:
        """Of the classes' sources: the part of an action's key. A changed line is a miss."""
        chunks = []
        for name in sorted(self.classes):
            found = self.classes[name]
            text = f"{name}\n".encode()
            chunks += [len(text).to_bytes(8, "little"), text, found.raw if found else b""]
        return digest_of("files", *chunks)

    def as_value(self) -> dict[str, dict[str, bytes | None]]:
        """As a canonical value."""
        return {
            part: {name: digest.raw if digest else None for name, digest in sorted(pin.items())}
            for part, pin in (("classes", self.classes), ("factory", self.factory))
        }

    @classmethod
    def from_value(cls, value: Mapping[str, Mapping[str, bytes | None]]) -> SourcePin:
        """The pin of `as_value`."""
        parts = {
            part: {name: Digest(raw) if raw else None for name, raw in value[part].items()}
            for part in ("classes", "factory")
        }
        return cls(parts["classes"], parts["factory"])


def source_digests(
    modules: Sequence[str], *, search: Sequence[Path] = (), digests: FileDigests = file_digests
) -> dict[str, Digest | None]:
    """Module name → digest of its source file now, without importing; None where there is no file."""
    found = {name: source_file(name, search=search) for name in modules}
    paths = [path for path in found.values() if path is not None]
    known = dict(zip(paths, digests(paths), strict=True))
    return {name: None if path is None else known[path] for name, path in found.items()}


def changed_sources(pin: SourcePin, *, search: Sequence[Path] = (), digests: FileDigests = file_digests) -> list[str]:
    """The modules whose source is no longer what was measured, or cannot be found again; empty: all is as it was.

    Nothing is imported.

    Args:
        pin: What was measured.
        search: Folders to look in first: the recipe's.
        digests: How a file's digest is had.
    """
    pinned = {**pin.classes, **pin.factory}
    now = source_digests(sorted(pinned), search=search, digests=digests)
    return [name for name in sorted(pinned) if now[name] is None or now[name] != pinned[name]]
