"""Read plans: what is known of a snapshot's blobs, or a growing build's, before a reader opens one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import lt
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from zgstore.errors import Corrupt, Invalid, Missing, NotFound, Partial
from zgstore.format.digest import Digest
from zgstore.format.fields import all_digests, all_u64
from zgstore.format.manifest import Column, Constant, Snapshot
from zgstore.format.pages import MAX_ROWS, Blob
from zgstore.format.readplan import BlobPlan, ColumnPlan, ReadPlan
from zgstore.storage import partials
from zgstore.storage.builds import Build
from zgstore.storage.session import missing_parts

if TYPE_CHECKING:
    from zgstore.storage.store import Store


def read_plan(store: Store, digest: Digest, columns: Sequence[str] | None = None) -> ReadPlan:
    """All that a reader opens files by; presence and stamps are looked up here.

    Args:
        store: Where it is.
        digest: A snapshot.
        columns: The columns wanted, in the order wanted; None for all that the store means to have.

    Raises:
        Invalid: if the snapshot has no such column.
        Missing: naming the blobs that are not there.
        Corrupt: if one has another size than its page says.
        Partial: for a column of which this store means to have nothing.
    """
    snapshot = store.snapshot(digest)
    expected = partials.expected(store.path, digest)
    if columns is None:
        columns = [each.name for each in snapshot.columns if expected is None or each.name in expected]
    chosen = [snapshot.column(name) for name in columns]
    rows, blobs = _rows_and_blobs(store, snapshot, [place for place, _ in chosen])
    masked = store.dropped(snapshot).masked
    if not _are_rows(rows, masked):
        raise _contradiction(digest, f"it has {sum(rows)} rows, and masks others or not in their order")
    if snapshot.samples != sum(rows) - len(masked):
        raise _contradiction(digest, f"it says {snapshot.samples} samples, and has {sum(rows)} rows")
    data = store.rows_root_of(snapshot)
    grown = ReadPlan(
        objects=str(store.path / "objects"),
        snapshot=str(digest),
        data=str(data) if data else "",
        shard_rows=tuple(rows),
        masked=masked,
        columns=(),
        pins=str(snapshot.pins.digest()),
    )
    try:
        return _with_blobs(
            store, grown, digest, columns=[column for _, column in chosen], blobs=blobs, constants=snapshot.constants
        )
    except Missing as error:
        absent = [column.name for _, column in chosen if expected is not None and column.name not in expected]
        if not absent:
            raise
        raise Partial(
            f"this store has only a part of {digest.short}, without {', '.join(absent)}",
            hint=f"fetch the rest from a store with it: `zgstore copy {digest.short} --to {quote(str(store.path))}`",
            columns=sorted(expected or ()),
        ) from error


def _rows_and_blobs(store: Store, snapshot: Snapshot, places: Sequence[int]) -> tuple[list[int], list[list[Blob]]]:
    """Each shard's rows, and for each of these columns each shard's blob."""
    rows: list[int] = []
    blobs: list[list[Blob]] = [[] for _ in places]
    for leaf in store.leaves(snapshot):
        rows += all_u64(leaf.rows)
        for mine, place in zip(blobs, places, strict=True):
            mine.extend(map(Blob, all_digests(leaf.blobs[place]), all_u64(leaf.sizes[place])))
    return rows, blobs


def _are_rows(shard_rows: Sequence[int], masked: Sequence[int]) -> bool:
    """Whether the masked ones are among so many, in their order, each once."""
    count = sum(shard_rows)
    return count <= MAX_ROWS and all(map(lt, masked, masked[1:])) and (not masked or masked[-1] < count)


def build_plan(
    store: Store, build: str, columns: Sequence[str] | None = None, *, grown: Build | None = None
) -> tuple[ReadPlan, bool]:
    """The same of a build that is still growing, as far as it is, and whether it is done.

    Args:
        store: Where it is.
        build: Its UUID.
        columns: The columns wanted; None for all.
        grown: How far it is taken up: what a lease names; None for as far as it is by now.

    Raises:
        NotFound: if there is no such build.
        Invalid: if it has no such column.
        Missing, Corrupt: as for a snapshot.
    """
    grown = grown or store.memos.build(build)
    if grown is None:
        raise NotFound(
            f"no build {build!r} is known",
            hint="`zgstore lease ls --json` lists the UUIDs of those that run; one that has ended is read by its ref",
        )
    by_name = {column.name: at for at, column in enumerate(grown.columns)}
    unknown = [name for name in columns or () if name not in by_name]
    if unknown:
        raise Invalid(f"the build has no column {unknown[0]!r}", hint=f"its columns are {', '.join(by_name)}")
    places = [by_name[name] for name in (by_name if columns is None else columns)]
    data = grown.head.get("data")
    plan = ReadPlan(
        objects=str(store.path / "objects"),
        snapshot=str(grown.snapshot) if grown.snapshot else "",
        data=str(Digest(data)) if isinstance(data, bytes) else "",
        shard_rows=tuple(shard.rows for shard in grown.shards),
        masked=(),
        columns=(),
        build=build,
    )
    blobs = [[shard.blobs[place] for shard in grown.shards] for place in places]
    if grown.snapshot is not None:
        _see_it_became(store, grown, grown.snapshot, places)
    constants = [Constant.from_value(value) for value in grown.head.get("constants") or ()]
    chosen = [grown.columns[place] for place in places]
    plan = _with_blobs(store, plan, grown.snapshot, columns=chosen, blobs=blobs, constants=constants)
    return plan, grown.snapshot is not None


def _see_it_became(store: Store, grown: Build, digest: Digest, places: Sequence[int]) -> None:
    """Hold a build's file, which has no digest of its own, against what was published.

    Raises:
        Corrupt: if it tells of other shards.
    """
    try:
        snapshot = store.snapshot(digest)
        chosen = [snapshot.column(grown.columns[place].name)[0] for place in places]
        published = _rows_and_blobs(store, snapshot, chosen)
    except Missing:  # collected since: then its ref has moved on, and nothing is left to hold it against
        return
    told = [shard.rows for shard in grown.shards], [[shard.blobs[place] for shard in grown.shards] for place in places]
    if published != told:
        raise _contradiction(digest, "it is not what the file of its build tells")


def _contradiction(digest: Digest, why: str) -> Corrupt:
    return Corrupt(
        f"the snapshot {digest.short} contradicts itself: {why}",
        hint="run `zgstore verify` to see what it hurts and what mends it; read it by its ref",
        object=str(digest),
        actual=why,
    )


def _with_blobs(
    store: Store, plan: ReadPlan, snapshot: Digest | None, *, columns: Sequence[Column],
    blobs: Sequence[Sequence[Blob]], constants: Sequence[Constant],
) -> ReadPlan:  # fmt: skip
    wanted = [*(blob for each in blobs for blob in each), *(Blob(each.blob, each.size) for each in constants)]
    planned = iter(_blob_plans(store, snapshot, wanted))
    return replace(
        plan,
        columns=tuple(
            ColumnPlan(column, tuple(next(planned) for _ in each)) for column, each in zip(columns, blobs, strict=True)
        ),
        constants=tuple((each.name, each.dtype, each.shape, next(planned)) for each in constants),
    )


def _blob_plans(store: Store, snapshot: Digest | None, blobs: Sequence[Blob]) -> list[BlobPlan]:
    digests = [blob.digest for blob in blobs]
    stats = store.objects.stats(digests, "objects")
    absent = [digest for digest, stat in zip(digests, stats, strict=True) if stat is None]
    if absent:
        raise missing_parts(snapshot or absent[0], absent)
    stamps, now = store.index.stamps([digest.raw for digest in digests]), store.now()
    plans = []
    for blob, stat, stamp in zip(blobs, stats, stamps, strict=True):
        assert stat is not None
        if stat.size != blob.size:
            raise _wrong_size(store.objects.path(blob.digest, "objects"), blob, stat.size)
        verified = stamp is not None and stamp.fits(stat, now)
        plain = (stat.device, stat.inode, stat.size, stat.mtime_ns, stat.ctime_ns)  # workers know no class of ours
        plans.append(BlobPlan(blob.digest.hex, blob.size, plain, verified))
    return plans


def _wrong_size(path: Path, blob: Blob, size: int) -> Corrupt:
    return Corrupt(
        f"{path} has {size} bytes, but its page says {blob.size}",
        hint="make it anew: `zgstore verify --repair --recipe RECIPE`, or `--from STORE`",
        object=str(blob.digest),
        expected=blob.size,
        actual=size,
        path=str(path),
    )
