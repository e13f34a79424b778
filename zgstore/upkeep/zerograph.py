"""A ZeroGraph cache of clean teacher boundaries: its manifest read strictly, its files checked, then loaded one by one.

The folder holds ``manifest.json`` of kind ``zerograph_clean_teacher_boundaries_v1``, ``manifest.sha256.json`` with the
manifest's SHA-256, and one ``batch_NNNNNNNN.pt`` for each batch: a dict of ``boundaries`` (a list of tensors, the
embedding's state first) and ``context`` (a dict of tensors).
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from zgstore.errors import Corrupt, Invalid, Missing, Partial, ZgError
from zgstore.format.digest import Digest, digest_of
from zgstore.format.foreign import parse_json
from zgstore.format.tensorfile import dtype_name
from zgstore.storage.files import directory, fault, open_regular, read_all
from zgstore.upkeep import torcharchive

KIND: Final = "zerograph_clean_teacher_boundaries_v1"
MANIFEST: Final = "manifest.json"
SUM: Final = "manifest.sha256.json"
MAX_MANIFEST_BYTES: Final = 256 << 20
PIECE_BYTES: Final = 1 << 20

_MEMBER: Final = re.compile(r"batch_([0-9]{8})\.pt")
_SHA256: Final = re.compile(r"(?:sha256:)?([0-9a-fA-F]{64})")
_AGAIN: Final = "make the cache again, or fetch it again from where it is whole"

Tensors = Mapping[str, tuple[tuple[int, ...], str | None]]


@dataclass(frozen=True, slots=True)
class Member:
    """One batch file as the manifest describes it.

    Args:
        name: Its file name.
        size: Its bytes.
        sha256: Its SHA-256, 64 hex digits.
        boundaries: Shape and dtype of each boundary, where the manifest says them.
        context: The same by name, where the manifest says them.
    """

    name: str
    size: int
    sha256: str
    boundaries: tuple[tuple[tuple[int, ...], str | None], ...] | None
    context: Tensors | None


@dataclass(frozen=True, slots=True)
class Cache:
    """What the manifest says.

    Args:
        root: The folder.
        teacher_id: As declared.
        teacher_revision: As declared.
        data_id: As declared.
        boundaries: Boundaries in every batch.
        members: The batch files in order.
    """

    root: Path
    teacher_id: str
    teacher_revision: str
    data_id: str
    boundaries: int
    members: tuple[Member, ...]

    @property
    def size(self) -> int:
        """Bytes of all batch files."""
        return sum(member.size for member in self.members)

    def digest(self) -> Digest:
        """A digest of what the files hold; the manifest's own would hold how long the cache took to make."""
        return digest_of("files", *(bytes.fromhex(member.sha256) for member in self.members))


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch, loaded: boundaries in depth order, and the context by name."""

    boundaries: tuple[Tensor, ...]
    context: Mapping[str, Tensor]


def read_manifest(root: Path) -> Cache:
    """The manifest, checked against its SHA-256.

    Raises:
        NotFound, Missing: if the folder or one of its two manifests is not there.
        Corrupt: if the manifest is not what its SHA-256 says, or its table is inconsistent.
        Partial: if it says that it was not completed.
        Invalid: if it is of another kind, or its states are not clean (sigma is not 0).
    """
    body = _file(root, MANIFEST)
    said = _json(_file(root, SUM), SUM).get("sha256")
    actual = hashlib.sha256(body).hexdigest()
    if _hex(said) != actual:
        raise _corrupt(root, MANIFEST, f"SHA-256 {said}", f"SHA-256 {actual}")
    manifest = _json(body, MANIFEST)
    if manifest.get("kind") != KIND:
        raise Invalid(
            f"{root / MANIFEST} is of kind {manifest.get('kind')!r}, not {KIND!r}",
            hint="use `zgstore import safetensors` for a folder of safetensors files",
        )
    sigma = manifest.get("sigma")
    if isinstance(sigma, bool) or not isinstance(sigma, int | float) or sigma != 0:
        raise Invalid(f"the cache has sigma {sigma!r}: its states are not clean", hint="import a cache with sigma 0")
    if manifest.get("status", "completed") != "completed":
        raise Partial(f"the cache's status is {manifest['status']!r}: it was not completed", hint=_AGAIN)
    members = _members(root, manifest)
    return Cache(root, *_declared(root, manifest), _boundaries(root, manifest, members), members)


def check(cache: Cache, *, progress: Callable[[int], None] | None = None) -> None:
    """Read every file and compare its size and SHA-256.

    Raises:
        Missing, Corrupt: naming the first file that is not as the manifest says.
    """
    for member in cache.members:
        with os.fdopen(_open(cache.root, member.name), "rb", buffering=0) as file:
            _check_member(cache, member, file, progress)


def load(cache: Cache) -> Iterator[Batch]:
    """The batches in order; one is in memory at a time.

    Each file is checked again as it is loaded: it may have changed since.

    Raises:
        Missing, Corrupt: if a file is not as the manifest says.
        Invalid: if a file holds anything but tensors, or not those that the manifest says.
    """
    for member in cache.members:
        with os.fdopen(_open(cache.root, member.name), "rb") as file:
            _check_member(cache, member, file, None)
            file.seek(0)
            try:
                value = torcharchive.load(file)
            except torcharchive.Unlike as error:
                raise _unlike(member, f"it cannot be loaded as tensors alone: {error}") from error
        yield _batch(cache, member, value)


def _file(root: Path, name: str) -> bytes:
    try:
        with directory(root) as folder:
            return read_all(folder, name, root / name, limit_bytes=MAX_MANIFEST_BYTES)
    except FileNotFoundError as error:
        raise _missing(root, name) from error
    except OSError as error:
        raise fault(error, f"reading {root / name}") from error


def _open(root: Path, name: str) -> int:
    try:
        with directory(root) as folder:
            return open_regular(folder, name, root / name)
    except FileNotFoundError as error:
        raise _missing(root, name) from error
    except OSError as error:
        raise fault(error, f"reading {root / name}") from error


def _missing(root: Path, name: str) -> Missing:
    return Missing(f"{root} has no {name}", hint=f"name the folder that holds it, or {_AGAIN}", path=str(root / name))


def _corrupt(root: Path, name: str, expected: str, actual: str) -> Corrupt:
    return Corrupt(
        f"{name} is not what the cache says: {actual} where {expected} was expected",
        hint=_AGAIN,
        object=name,
        expected=expected,
        actual=actual,
        path=str(root / name),
    )


def _json(body: bytes, name: str) -> dict[str, Any]:
    try:
        value = parse_json(body)
    except ValueError as error:
        raise Invalid(f"{name} is no JSON: {error}", hint=_AGAIN) from error
    if not isinstance(value, dict):
        raise Invalid(f"{name} holds no object", hint=_AGAIN)
    return value


def _hex(value: Any) -> str | None:
    match = _SHA256.fullmatch(value) if isinstance(value, str) else None
    return match[1].lower() if match else None


def _declared(root: Path, manifest: Mapping[str, Any]) -> tuple[str, str, str]:
    """Teacher id, teacher revision, data id: nested as the first writers did, or flat."""
    teacher, data = (manifest.get(part) for part in ("teacher", "data"))
    nested = teacher if isinstance(teacher, dict) else {}
    found = {
        "teacher id": nested.get("id", manifest.get("teacher_id")),
        "teacher revision": nested.get("revision", manifest.get("teacher_revision")),
        "data id": manifest.get("data_id", data.get("id") if isinstance(data, dict) else None),
    }
    for name, value in found.items():
        if not isinstance(value, str) or not value:
            raise _corrupt(root, MANIFEST, f"a {name}", repr(value))
    return found["teacher id"], found["teacher revision"], found["data id"]


def _members(root: Path, manifest: Mapping[str, Any]) -> tuple[Member, ...]:
    table = manifest.get("files")
    if not isinstance(table, list) or not table:
        raise _corrupt(root, MANIFEST, "a table of batch files", f"files = {table!r:.40}")
    count = manifest.get("batch_count", len(table))
    if count != len(table):
        raise _corrupt(root, MANIFEST, f"{count} batch files", f"{len(table)} of them")
    return tuple(_member(root, number, row) for number, row in enumerate(table))


def _member(root: Path, number: int, row: Any) -> Member:
    """One row of the table; the file is named by ``path``, as written first, or ``file`` or ``name``."""
    if not isinstance(row, dict):
        raise _corrupt(root, MANIFEST, "a table of objects", f"row {number} is {row!r:.40}")
    name = next((row[key] for key in ("path", "file", "name") if key in row), None)
    match = _MEMBER.fullmatch(name) if isinstance(name, str) else None
    if match is None:  # no path is built from it: a name of that pattern alone is no way out of the folder
        raise Invalid(
            f"row {number} of {MANIFEST} names the file {name!r:.80}", hint="batch files are named batch_NNNNNNNN.pt"
        )
    if int(match[1]) != number or row.get("index", number) != number:
        raise _corrupt(root, MANIFEST, f"batch_{number:08d}.pt at row {number}", f"{name}, index {row.get('index')!r}")
    size, sha256 = row.get("bytes"), _hex(row.get("sha256"))
    if type(size) is not int or size < 0 or sha256 is None:
        raise _corrupt(root, MANIFEST, f"bytes and sha256 of {name}", f"{size!r:.40} and {row.get('sha256')!r:.80}")
    boundaries, context = row.get("boundaries"), row.get("context")
    return Member(
        match[0],
        size,
        sha256,
        tuple(_described(root, each) for each in boundaries) if isinstance(boundaries, list) else None,
        {key: _described(root, each) for key, each in context.items()} if isinstance(context, dict) else None,
    )


def _described(root: Path, value: Any) -> tuple[tuple[int, ...], str | None]:
    """A tensor's shape and dtype: ``{"shape": […], "dtype": "torch.bfloat16"}``, or the shape alone."""
    shape = value.get("shape") if isinstance(value, dict) else value
    dtype = value.get("dtype") if isinstance(value, dict) else None
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise _corrupt(root, MANIFEST, "the shape of a tensor", f"{value!r:.80}")
    return tuple(shape), dtype if isinstance(dtype, str) else None


def _boundaries(root: Path, manifest: Mapping[str, Any], members: tuple[Member, ...]) -> int:
    """How many boundaries each batch has: the blocks and one more. 0 where the manifest does not say."""
    counts = {len(member.boundaries) for member in members if member.boundaries is not None}
    blocks = manifest.get("block_count")
    if type(blocks) is int:
        counts.add(blocks + 1)
    if len(counts) > 1 or any(count < 2 for count in counts):
        raise _corrupt(root, MANIFEST, "one number of boundaries, at least 2", " and ".join(map(str, sorted(counts))))
    return counts.pop() if counts else 0


def _check_member(cache: Cache, member: Member, file: Any, progress: Callable[[int], None] | None) -> None:
    size = os.fstat(file.fileno()).st_size
    if size != member.size:
        raise _corrupt(cache.root, member.name, f"{member.size} bytes", f"{size} bytes")
    hasher, piece = hashlib.sha256(), memoryview(bytearray(PIECE_BYTES))
    while count := file.readinto(piece):
        hasher.update(piece[:count])
        if progress is not None:
            progress(count)
    if hasher.hexdigest() != member.sha256:
        raise _corrupt(cache.root, member.name, f"SHA-256 {member.sha256}", f"SHA-256 {hasher.hexdigest()}")


def _batch(cache: Cache, member: Member, value: Any) -> Batch:
    """What was loaded, held against the manifest."""
    boundaries = value.get("boundaries") if isinstance(value, dict) else None
    context = value.get("context", {}) if isinstance(value, dict) else None
    if not isinstance(boundaries, list | tuple) or not isinstance(context, dict):
        raise _unlike(member, "it holds no dict of `boundaries` (a list) and `context` (a dict)")
    if len(boundaries) < 2 or len(boundaries) != (cache.boundaries or len(boundaries)):
        raise _unlike(member, f"it holds {len(boundaries)} boundaries where {cache.boundaries or 'more'} were expected")
    if member.context is not None and member.context.keys() != context.keys():
        raise _unlike(
            member, f"its context is {sorted(map(str, context))}, and the manifest's {sorted(member.context)}"
        )
    for number, tensor in enumerate(boundaries):
        said = member.boundaries[number] if member.boundaries else None
        _check_tensor(member, f"boundary {number}", tensor, said)
    for name, tensor in context.items():
        if not isinstance(name, str):
            raise _unlike(member, f"its context has the key {name!r:.40}")
        _check_tensor(member, f"context {name!r}", tensor, member.context[name] if member.context else None)
    rows = {len(tensor) if tensor.dim() else None for tensor in boundaries}
    if len(rows) != 1 or None in rows or 0 in rows:
        raise _unlike(member, f"its boundaries disagree about the number of samples, or have none: {rows}")
    return Batch(tuple(boundaries), context)


def _check_tensor(member: Member, what: str, value: Any, said: tuple[tuple[int, ...], str | None] | None) -> None:
    if not isinstance(value, Tensor):
        raise _unlike(member, f"{what} is a {type(value).__name__}, not a tensor")
    try:
        dtype_name(value, what=what)
    except ZgError as error:
        raise _unlike(member, error.message) from error
    if not value.is_contiguous():  # a few bytes can claim to be a tensor of any size
        raise _unlike(member, f"{what} is not contiguous")
    if said is None:
        return
    shape, dtype = said
    if tuple(value.shape) != shape or (dtype is not None and dtype.removeprefix("torch.") != str(value.dtype)[6:]):
        raise _unlike(
            member, f"{what} is {value.dtype} {list(value.shape)}, and the manifest says {dtype} {list(shape)}"
        )


def _unlike(member: Member, why: str) -> Invalid:
    return Invalid(f"{member.name} is no batch of such a cache: {why}", hint=_AGAIN, file=member.name)
