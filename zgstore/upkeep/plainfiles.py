"""A folder of safetensors files read as a table: one of our own exports, or plain files of equal keys.

The only importer of safetensors: files that others wrote are laid out in ways that our strict reader refuses.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open
from torch import Tensor

from zgstore.errors import Corrupt, Invalid, Missing
from zgstore.format.digest import Digest, Hasher, digest_of
from zgstore.format.fields import natural
from zgstore.format.foreign import parse_json
from zgstore.format.manifest import Column
from zgstore.format.tensorfile import TORCH_OF, decode
from zgstore.storage.files import directory, fault, open_regular, read_all
from zgstore.upkeep.exporter import KIND, MANIFEST, VERSION

SUFFIX: Final = ".safetensors"
MAX_MANIFEST_BYTES: Final = 256 << 20
PIECE_BYTES: Final = 1 << 20
_DIGITS: Final = re.compile(r"(\d+)")
_PART: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_AGAIN: Final = "export it again, or fetch it again from where it is whole"


@dataclass(frozen=True, slots=True)
class File:
    """One file: components below the folder, and what it should be where a manifest says so."""

    parts: tuple[str, ...]
    size: int | None = None
    digest: Digest | None = None

    @property
    def name(self) -> str:
        return "/".join(self.parts)


@dataclass(frozen=True, slots=True)
class Shard:
    """Some rows.

    Args:
        columns: By name: ``[R, …]``, or ``[S, …]`` where ``lengths`` has the name.
        lengths: int64 ``[R]`` of ragged columns, by name.
    """

    columns: Mapping[str, Tensor]
    lengths: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Table:
    """A folder as a table.

    Args:
        root: The folder.
        columns: (name, role), boundaries in depth order.
        files: The files of each shard: one for all columns, or one for each.
        exported: Our own manifest; None for plain files.
        described: The columns as our own manifest has them; empty for plain files.
        constants: Files of constants by name.
        masked: Rows of an export that readers skip, counted over all its shards.
    """

    root: Path
    columns: tuple[tuple[str, str], ...]
    files: tuple[tuple[File, ...], ...]
    exported: Mapping[str, Any] | None = None
    described: tuple[Column, ...] = ()
    constants: Mapping[str, File] = field(default_factory=dict)
    masked: frozenset[int] = frozenset()

    def all_files(self) -> Iterator[File]:
        yield from self.constants.values()
        for files in self.files:
            yield from files


def read_table(root: Path) -> Table:
    """What the folder holds, by its manifest if it is one of our exports, else by its files' keys.

    Raises:
        Missing: if there is no such folder.
        Invalid: if its files are no table: none, unequal keys, no row axis, a manifest that makes no sense.
        Corrupt: if something in it is a link.
    """
    try:
        names = sorted(path.name for path in root.iterdir())
    except FileNotFoundError as error:
        raise Missing(f"there is no folder {root}", hint="name the folder that holds the files") from error
    except OSError as error:
        raise fault(error, f"reading {root}") from error
    if MANIFEST in names:
        return _exported(root)
    found = sorted((name for name in names if name.endswith(SUFFIX)), key=in_order)
    if not found:
        raise Invalid(f"{root} holds no {SUFFIX} files", hint="name a folder of safetensors files, or of an export")
    files = tuple((File((name,)),) for name in found)
    return Table(root, _plain_columns(root, [file.parts[0] for (file,) in files]), files)


def check(table: Table, *, progress: Callable[[int], None] | None = None) -> Digest:
    """Read every file; compare size and digest where the manifest says them.

    Returns:
        A digest of all files, in the table's order.

    Raises:
        Missing, Corrupt: naming the first file that is not as the manifest says.
    """
    digests = []
    for file in table.all_files():
        hasher, size = Hasher(), 0
        piece = memoryview(bytearray(PIECE_BYTES))
        with os.fdopen(_open(table.root, file), "rb", buffering=0) as source:
            length = os.fstat(source.fileno()).st_size
            if file.size not in {None, length}:  # need not be read to its end to be seen
                raise _other(table.root, file, f"{length} bytes")
            while count := source.readinto(piece):
                hasher.update(piece[:count])
                size += count
                if progress is not None:
                    progress(count)
        _held_against(table.root, file, size, hasher.digest())
        digests.append(hasher.digest().raw)
    return digest_of("files", *digests)


def load(table: Table) -> Iterator[Shard]:
    """The shards in order; one is in memory at a time.

    Raises:
        Missing, Corrupt, Invalid: if a file is not as the manifest, or the first file, says.
    """
    for files in table.files:
        yield _load_exported(table, files) if table.exported is not None else _load_plain(table, files[0])


def load_constants(table: Table) -> dict[str, Tensor]:
    """The constants of an export."""
    found = {}
    for name, file in table.constants.items():
        tensors = _tensors(table.root, file)
        if tensors.keys() != {"data"}:
            raise Invalid(f"{file.name} holds {sorted(tensors)}, not `data` alone", hint=_AGAIN)
        found[name] = tensors["data"]
    return found


def in_order(name: str) -> list[tuple[int, str]]:
    """A sort key under which ``h.2`` comes before ``h.10``."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in _DIGITS.split(name)]


def _plain_columns(root: Path, names: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Floating tensors are boundaries, in the order of their names; all others are context."""
    first: dict[str, _Spec] = {}
    for name in names:
        found = _described(root, File((name,)))
        if not first:
            first = found
        unlike = [key for key in first.keys() | found.keys() if not _fits(first.get(key), found.get(key))]
        if unlike or not found:
            raise Invalid(
                f"{name} does not have the tensors of {names[0]}: {', '.join(sorted(unlike)) or 'it has none'} differ",
                hint="give every file the same keys, dtypes and shapes; only the first axis, the rows, may differ",
            )
    roles = {key: "boundary" if spec.dtype.startswith(("F", "BF")) else "context" for key, spec in first.items()}
    return tuple(sorted(roles.items(), key=lambda item: (item[1], in_order(item[0]))))


@dataclass(frozen=True, slots=True)
class _Spec:
    """A tensor without its values."""

    dtype: str
    shape: tuple[int, ...]


def _fits(a: _Spec | None, b: _Spec | None) -> bool:
    if a is None or b is None or not a.shape or not b.shape:
        return False
    return a.dtype == b.dtype and a.shape[1:] == b.shape[1:]


def _described(root: Path, file: File) -> dict[str, _Spec]:
    """Shape and dtype of a plain file's tensors; the data is not read."""
    with _opened(root, file) as source:
        slices = {key: source.get_slice(key) for key in source.keys()}  # noqa: SIM118 - it is no mapping
        return {key: _Spec(str(each.get_dtype()), tuple(each.get_shape())) for key, each in slices.items()}


def _tensors(root: Path, file: File) -> dict[str, Tensor]:
    with _opened(root, file) as source:
        return {key: source.get_tensor(key) for key in source.keys()}  # noqa: SIM118 - it is no mapping


@contextlib.contextmanager
def _opened(root: Path, file: File) -> Iterator[Any]:
    """A safetensors file; opened through a descriptor, so that no link is followed."""
    handle = _open(root, file)
    try:
        with safe_open(f"/proc/self/fd/{handle}", framework="pt") as source:
            yield source
    except SafetensorError as error:
        raise Corrupt(
            f"{file.name} is no safetensors file: {error}",
            hint=_AGAIN,
            object=file.name,
            expected="a safetensors file",
            actual=str(error),
            path=str(root.joinpath(*file.parts)),
        ) from error
    finally:
        os.close(handle)


def _load_plain(table: Table, file: File) -> Shard:
    tensors = _tensors(table.root, file)
    rows = {key: len(tensor) for key, tensor in tensors.items()}
    if len(set(rows.values())) != 1 or 0 in rows.values():
        said = ", ".join(f"{key} {count}" for key, count in sorted(rows.items()))
        raise Invalid(
            f"the tensors of {file.name} disagree about the number of rows, or have none: {said}",
            hint="give all tensors of a file the same first axis",
        )
    return Shard(tensors, {})


def _load_exported(table: Table, files: Sequence[File]) -> Shard:
    columns: dict[str, Tensor] = {}
    lengths: dict[str, Tensor] = {}
    for column, file in zip(table.described, files, strict=True):
        with os.fdopen(_open(table.root, file), "rb") as source:
            body = bytearray(source.read(-1 if file.size is None else file.size + 1))  # it may have grown since
        _held_against(table.root, file, len(body), digest_of(None, body))
        data, offsets = decode(body, column, what=file.name)
        columns[column.name] = data
        if offsets is not None:
            lengths[column.name] = offsets.diff()
    counts = {len(lengths.get(name, data)) for name, data in columns.items()}
    if len(counts) != 1:
        raise Invalid(f"the columns of {files[0].name} disagree about the number of rows", hint=_AGAIN)
    return Shard(columns, lengths)


def _exported(root: Path) -> Table:
    """A folder that we exported."""
    try:
        with directory(root) as folder:
            body = read_all(folder, MANIFEST, root / MANIFEST, limit_bytes=MAX_MANIFEST_BYTES)
        manifest = parse_json(body)
    except ValueError as error:
        raise Invalid(f"{root / MANIFEST} is no JSON: {error}", hint=_AGAIN) from error
    except OSError as error:
        raise fault(error, f"reading {root / MANIFEST}") from error
    if not isinstance(manifest, dict) or manifest.get("kind") != KIND or manifest.get("version") != VERSION:
        kind = manifest.get("kind") if isinstance(manifest, dict) else None
        raise Invalid(
            f"{root / MANIFEST} is of kind {kind!r}, not {KIND!r} version {VERSION}",
            hint="use `zgstore import zerograph` for a ZeroGraph cache; remove the manifest to import plain files",
        )
    try:
        described = tuple(Column.from_value(value) for value in manifest["columns"])
        by_column = [tuple(_file(each) for each in value["files"]) for value in manifest["columns"]]
        constants = {value["name"]: _file(value) for value in manifest["constants"]}
        masked = frozenset(natural("manifest", "a masked row", each["row"]) for each in manifest.get("masked", ()))
        pins = [manifest[name] for name in ("teacher", "data", "capture")]
    except (KeyError, TypeError, Corrupt) as error:
        raise Invalid(f"{root / MANIFEST} is no manifest of an export: {error}", hint=_AGAIN) from error
    unknown = [column.name for column in described if column.dtype not in TORCH_OF]
    twice = len({column.name for column in described}) != len(described)
    if (
        unknown
        or twice
        or len({len(files) for files in by_column}) != 1
        or not all(isinstance(each, dict) for each in pins)
    ):
        raise Invalid(f"{root / MANIFEST} describes columns that make no table", hint=_AGAIN)
    roles = tuple((column.name, column.role) for column in described)
    return Table(root, roles, tuple(zip(*by_column, strict=True)), manifest, described, constants, masked)


def _file(value: Mapping[str, Any]) -> File:
    """A file of the manifest; no path is built from a name that could lead elsewhere."""
    parts = tuple(value["file"].split("/")) if isinstance(value["file"], str) else ()
    if len(parts) != 2 or not all(_PART.fullmatch(part) for part in parts):
        raise Invalid(f"{MANIFEST} names the file {value['file']!r:.80}", hint="files lie in FOLDER/FILE below it")
    if type(value["bytes"]) is not int:
        raise Invalid(f"{MANIFEST} says no size of {value['file']}", hint=_AGAIN)
    return File(parts, value["bytes"], Digest.parse(str(value["digest"])))


def _open(root: Path, file: File) -> int:
    path = root.joinpath(*file.parts)
    try:
        with directory(root, *file.parts[:-1]) as folder:
            return open_regular(folder, file.parts[-1], path)
    except FileNotFoundError as error:
        raise Missing(f"{root} has no {file.name}", hint=_AGAIN, path=str(path)) from error
    except OSError as error:
        raise fault(error, f"reading {path}") from error


def _held_against(root: Path, file: File, size: int, digest: Digest) -> None:
    if (file.size is not None and size != file.size) or (file.digest is not None and digest != file.digest):
        raise _other(root, file, f"{size} bytes, {digest}")


def _other(root: Path, file: File, actual: str) -> Corrupt:
    return Corrupt(
        f"{file.name} is not what {MANIFEST} says: {actual}",
        hint=_AGAIN,
        object=file.name,
        expected=f"{file.size} bytes, {file.digest}",
        actual=actual,
        path=str(root.joinpath(*file.parts)),
    )
