"""A snapshot as plain safetensors files and a manifest that need no zgstore."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Final

from zgstore.errors import Corrupt, Invalid, NoSpace
from zgstore.format.digest import Digest, Hasher, digest_of
from zgstore.format.manifest import Column, Snapshot
from zgstore.format.pages import Blob
from zgstore.storage.files import faults
from zgstore.storage.store import Store
from zgstore.upkeep.copier import columns_here
from zgstore.upkeep.differ import plain

KIND: Final = "zgstore_export"
VERSION: Final = 1
MANIFEST: Final = "manifest.json"
SUMS: Final = "B3SUMS"
CONSTANTS: Final = "constants"
PIECE_BYTES: Final = 1 << 20
LONGEST_NAME: Final = 80
# Room that the manifest and the sums take, per file.
BYTES_PER_FILE: Final = 512

ABOUT: Final = (
    "A table: rows are samples, columns are tensors captured from a teacher or given with its input. Each column is a "
    "folder of safetensors files; the files of all columns hold the same rows in the same order. `data` holds the "
    "rows along its first axis; in a ragged column row r of a file is data[offsets[r]:offsets[r + 1]]. Rows listed "
    "under `masked` are counted over all files from 0 and are to be skipped. Digests are BLAKE3 of whole files."
)
INT8_NOTE: Final = (
    "codec int8: the value of data[…, c] is data[…, c] · scale[…, c // 64], computed in fp32 and rounded to dtype"
)


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What was written.

    Args:
        snapshot: What was exported.
        directory: Where.
        columns: Names of the columns exported.
        files: Files written, manifest and sums included.
        bytes: Their bytes.
    """

    snapshot: Digest
    directory: str
    columns: tuple[str, ...]
    files: int
    bytes: int

    def as_json(self) -> dict[str, Any]:
        return {
            "snapshot": str(self.snapshot),
            "directory": self.directory,
            "columns": list(self.columns),
            "files": self.files,
            "bytes": self.bytes,
        }


def export(
    store: Store,
    rev: str | Digest,
    directory: str | Path,
    *,
    columns: Sequence[str] | None = None,
    decode: bool = False,
    progress: Callable[[int], None] | None = None,
) -> ExportReport:
    """Write a snapshot's columns as plain files: ``COLUMN/SHARD.safetensors``, bit for bit, and ``manifest.json``.

    Every blob is verified as it is copied. The manifest is written last: a folder without one is not whole.

    Args:
        store: Where the snapshot is.
        rev: Which.
        directory: A folder that is empty or not there.
        columns: Only these.
        decode: Write int8 columns as the values that they stand for.
        progress: Told the bytes written, as they are.

    Raises:
        Invalid: if the folder is not empty, or a column unknown.
        NoSpace: before anything is written, where the disk cannot hold it.
        Corrupt, Missing: if a blob is not what its name says, or not there.
    """
    target = Path(directory)
    digest = rev if isinstance(rev, Digest) else store.resolve(rev)
    with store.using(digest, purpose="export"):
        snapshot = store.snapshot(digest)
        chosen = columns_here(store, digest, snapshot, columns)
        kept = [(at, each) for at, each in enumerate(snapshot.columns) if chosen is None or each.name in chosen]
        _make_empty(target)
        _check_space(target, store, snapshot, [at for at, _ in kept])
        out = _Folder(store, target, decode=decode, progress=progress)
        described = [out.column(snapshot, at, column) for at, column in kept]
        constants = list(out.constants(snapshot))
        manifest = {**_head(store, digest, snapshot), "columns": described, "constants": constants}
        out.text(MANIFEST, json.dumps(manifest, indent=2, ensure_ascii=False) + "\n")
        out.text(SUMS, "".join(f"{each.hex}  {name}\n" for name, each in out.digests.items()))
    names = tuple(column.name for _, column in kept)
    return ExportReport(digest, str(target), names, len(out.digests), out.written)


def _make_empty(target: Path) -> None:
    with faults(f"making {target}"):
        if target.is_symlink() or (target.exists() and not target.is_dir()):
            raise Invalid(f"{target} is no folder", hint="name a folder that is empty or not there yet")
        target.mkdir(parents=True, exist_ok=True)
        if any(target.iterdir()):
            raise Invalid(f"{target} is not empty", hint="name another folder, or empty this one first")


def _check_space(target: Path, store: Store, snapshot: Snapshot, places: Sequence[int]) -> None:
    sizes = [shard.blobs[at].size for shard in store.shards(snapshot) for at in places]
    sizes += [constant.size for constant in snapshot.constants]
    needed, free = sum(sizes) + BYTES_PER_FILE * (len(sizes) + 8), shutil.disk_usage(target).free
    if needed > free:
        raise NoSpace(
            f"the export needs {needed} bytes and {target} has {free}",
            hint="export fewer columns with --columns, or elsewhere",
            needed_bytes=needed,
            free_bytes=free,
        )


def _head(store: Store, digest: Digest, snapshot: Snapshot) -> dict[str, Any]:
    dropped = store.dropped(snapshot)
    return {
        "kind": KIND,
        "version": VERSION,
        "about": ABOUT,
        "snapshot": str(digest),
        "samples": snapshot.samples,
        "rows": sum(shard.rows for shard in store.shards(snapshot)),
        "cut": snapshot.cut,
        "masked": [
            {"row": row, "reason": why} for row, why in zip(dropped.masked, dropped.masked_reasons, strict=True)
        ],
        "left_out": [
            {"stream_index": row, "reason": why}
            for row, why in zip(dropped.left_out, dropped.left_out_reasons, strict=True)
        ],
        "teacher": plain(snapshot.pins.teacher),
        "data": plain(snapshot.pins.data),
        "capture": plain(snapshot.pins.capture),
    }


class _Folder:
    """The folder being filled."""

    def __init__(self, store: Store, target: Path, *, decode: bool, progress: Callable[[int], None] | None) -> None:
        self.store, self.target, self.decode, self.progress = store, target, decode, progress
        self.digests: dict[str, Digest] = {}
        self.written = 0
        self._names = {CONSTANTS, MANIFEST, SUMS.lower()}

    def column(self, snapshot: Snapshot, at: int, column: Column) -> dict[str, Any]:
        """Write one column; what the manifest says of it."""
        folder = self._name(column.name)
        (self.target / folder).mkdir()
        decoded = self.decode and column.codec != "raw"
        files, first = [], 0
        for number, shard in enumerate(self.store.shards(snapshot)):
            name = f"{folder}/{number:06d}.safetensors"
            blob = self._decoded(name, shard.blobs[at], column) if decoded else self._copied(name, shard.blobs[at])
            files.append({"file": name, "first_row": first, "rows": shard.rows, **_described(blob)})
            first += shard.rows
        codec = "raw" if decoded else column.codec
        return {
            **column.as_value(),
            "codec": codec,
            "ragged": column.ragged,
            "tensors": ["data", *(["scale"] if codec == "int8" else []), *(["offsets"] if column.ragged else [])],
            **({"note": INT8_NOTE} if codec == "int8" else {}),
            "folder": folder,
            "files": files,
        }

    def constants(self, snapshot: Snapshot) -> Iterator[dict[str, Any]]:
        """Write the constants; what the manifest says of each."""
        if snapshot.constants:
            (self.target / CONSTANTS).mkdir()
        for constant in snapshot.constants:
            name = f"{CONSTANTS}/{self._name(constant.name, within=CONSTANTS)}.safetensors"
            blob = self._copied(name, Blob(constant.blob, constant.size))
            yield {
                "name": constant.name,
                "dtype": constant.dtype,
                "shape": list(constant.shape),
                "file": name,
                **_described(blob),
            }

    def text(self, name: str, content: str) -> None:
        """Write a small file."""
        body = content.encode("utf-8")
        with faults(f"writing {self.target / name}"), self._new(name) as file:
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
        self.digests[name] = digest_of(None, body)
        self.written += len(body)

    def _name(self, name: str, *, within: str = "") -> str:
        """A readable file name for a column, unlike all others even where case does not count."""
        stem = re.sub(r"[^A-Za-z0-9._-]+", "_", name).strip("._-")[:LONGEST_NAME] or "column"
        found, number = stem, 1
        while f"{within}/{found}".lower().lstrip("/") in self._names:
            number += 1
            found = f"{stem}-{number}"
        self._names.add(f"{within}/{found}".lower().lstrip("/"))
        return found

    def _new(self, name: str) -> BinaryIO:
        return (self.target / name).open("xb")

    def _copied(self, name: str, blob: Blob) -> Blob:
        """One blob, hashed as it is copied."""
        hasher, size = Hasher(), 0
        source = self.store.objects.open(blob.digest, "objects", size=blob.size)
        piece = memoryview(bytearray(PIECE_BYTES))
        with (
            faults(f"writing {self.target / name}"),
            os.fdopen(source, "rb", buffering=0) as file,
            self._new(name) as out,
        ):
            while count := file.readinto(piece):
                hasher.update(piece[:count])
                out.write(piece[:count])
                size += count
                if self.progress is not None:
                    self.progress(count)
        if hasher.digest() != blob.digest:
            (self.target / name).unlink()
            raise _corrupt(self.store, blob, hasher.digest())
        return self._note(name, Blob(blob.digest, size))

    def _decoded(self, name: str, blob: Blob, column: Column) -> Blob:
        """The values that one int8 blob stands for, as a raw one."""
        from zgstore.format import tensorfile  # noqa: PLC0415 - torch is loaded only where values are decoded

        source = self.store.objects.open(blob.digest, "objects", size=blob.size)
        with faults(f"reading {name}"), os.fdopen(source, "rb") as file:
            body = file.read(blob.size + 1)
        if digest_of(None, body) != blob.digest:
            raise _corrupt(self.store, blob, digest_of(None, body))
        data, offsets = tensorfile.decode(body, column, what=f"blob {blob.digest.short}")
        lengths = None if offsets is None else offsets.diff()
        raw = tensorfile.encode(replace(column, codec="raw"), data, lengths)
        with faults(f"writing {self.target / name}"), self._new(name) as out:
            out.write(raw)
        if self.progress is not None:
            self.progress(len(raw))
        return self._note(name, Blob(digest_of(None, raw), len(raw)))

    def _note(self, name: str, blob: Blob) -> Blob:
        self.digests[name] = blob.digest
        self.written += blob.size
        return blob


def _described(blob: Blob) -> dict[str, Any]:
    return {"bytes": blob.size, "digest": str(blob.digest)}


def _corrupt(store: Store, blob: Blob, actual: Digest) -> Corrupt:
    return Corrupt(
        f"blob {blob.digest.short} is not what its name says",
        hint="run `zgstore verify --repair --recipe RECIPE`, then export again into an empty folder",
        object=str(blob.digest),
        expected=str(blob.digest),
        actual=str(actual),
        path=str(store.objects.path(blob.digest, "objects")),
    )
