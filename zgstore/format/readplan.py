"""What a reader needs of a snapshot, or of a build that is still growing, as a value."""

from __future__ import annotations

from dataclasses import dataclass

from zgstore.format.manifest import Column


@dataclass(frozen=True, slots=True)
class BlobPlan:
    """One blob as it lies on disk.

    Args:
        name: All 64 hex digits.
        size: Bytes of the file.
        stamp: (device, inode, size, mtime_ns, ctime_ns) when the plan was made: what a later stamp would say.
        verified: Whether a valid stamp was found: its bytes need no second look on this host.
    """

    name: str
    size: int
    stamp: tuple[int, int, int, int, int]
    verified: bool


@dataclass(frozen=True, slots=True)
class ColumnPlan:
    """One column: what it is, and its blobs, one for each shard."""

    column: Column
    blobs: tuple[BlobPlan, ...]


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """Everything a reader opens files by. Small, picklable, and free of the store.

    Args:
        objects: Absolute path of the store's ``objects`` folder; a blob is ``objects/NAME[:2]/NAME.safetensors``.
        snapshot: Text digest; empty while the build grows.
        data: Text digest of the data stream: what a sampler's order is a function of.
        shard_rows: Rows stored in each shard.
        masked: Stored positions (ascending) that are skipped.
        columns: The chosen columns, in the order asked for.
        constants: (name, dtype, shape, blob) of each constant.
        build: UUID of the growing build this plan follows; empty for a snapshot.
        pins: Text digest of the snapshot's pins; empty for a growing build.
    """

    objects: str
    snapshot: str
    data: str
    shard_rows: tuple[int, ...]
    masked: tuple[int, ...]
    columns: tuple[ColumnPlan, ...]
    constants: tuple[tuple[str, str, tuple[int, ...], BlobPlan], ...] = ()
    build: str = ""
    pins: str = ""
