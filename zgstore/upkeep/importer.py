"""Caches made elsewhere, brought in: their own digests checked first, one batch in memory at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from zgstore.building.rows import ID, SampleBatch, lengths_of, row_digests, strip
from zgstore.building.writer import writer
from zgstore.errors import Invalid
from zgstore.format.digest import Digest
from zgstore.format.manifest import Pins
from zgstore.storage.store import Store
from zgstore.upkeep import plainfiles, zerograph

# A blob of 16 to 64 MiB reads best: that many bytes of the widest column go into a shard.
SHARD_BYTES: Final = 32 << 20
MASK: Final = "attention_mask"
START: Final = "start"
BOUNDARY: Final = "boundary"
UNDECLARED: Final = "undeclared"
# Rows without context are known by nothing else than their place in their cache.
SOURCE_ROW: Final = "source_row"


@dataclass(frozen=True, slots=True)
class ImportReport:
    """What was brought in.

    Args:
        snapshot: The new snapshot.
        ref: The head that was moved; None if none.
        samples: Rows that readers see.
        columns: Names, boundaries first.
        files: Files read.
        bytes: Their bytes.
        seconds: How long it took.
    """

    snapshot: Digest
    ref: str | None
    samples: int
    columns: tuple[str, ...]
    files: int
    bytes: int
    seconds: float

    def as_json(self) -> dict[str, Any]:
        return {
            "snapshot": str(self.snapshot),
            "ref": self.ref,
            "samples": self.samples,
            "columns": list(self.columns),
            "files": self.files,
            "bytes": self.bytes,
            "seconds": self.seconds,
        }


@dataclass(frozen=True, slots=True)
class _Source:
    """A cache that was checked: what it declares, and its batches."""

    pins: Pins
    cut: int
    batches: Iterator[SampleBatch]
    files: int
    bytes: int


def import_zerograph(
    store: Store,
    directory: str | Path,
    *,
    ref: str | None = None,
    cut: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> ImportReport:
    """Bring in a cache of kind ``zerograph_clean_teacher_boundaries_v1``.

    Every file is held against its own SHA-256 before the first is loaded, and as tensors alone. Boundary k becomes
    the column ``boundary.k``; context keeps its names. Where batches are of unequal length, sequences lose their
    padding. What the cache says of its teacher and data was not measured here: the pins say ``declared``.

    Args:
        store: Where to.
        directory: The folder with ``manifest.json``.
        ref: The head to move; None moves none.
        cut: Batches for each shard; None for shards of about 32 MiB a column.
        progress: Told the bytes read, as they are; each file is read twice.

    Raises:
        Missing, Corrupt: naming the file that is not as the cache says.
        Invalid, Partial: if it is no such cache, or not a whole one.
    """
    cache = zerograph.read_manifest(Path(directory))
    zerograph.check(cache, progress=progress)
    return _bring(store, _from_zerograph(cache, cut), ref=ref)


def import_safetensors(
    store: Store,
    directory: str | Path,
    *,
    ref: str | None = None,
    cut: int | None = None,
    teacher_id: str | None = None,
    teacher_revision: str | None = None,
    data_id: str | None = None,
    progress: Callable[[int], None] | None = None,
) -> ImportReport:
    """Bring in a folder of safetensors files: one of our exports, or plain files of equal keys.

    An export is held against its manifest's digests first, and keeps its columns, roles and pins, the teacher marked
    ``declared``; int8 columns come in as the values they stand for, masked rows stay away. In plain files each key is
    a column (floating: boundaries in the order of their names; else context) and each file is some rows, in the order
    of the files' names.

    Args:
        store: Where to.
        directory: The folder.
        ref: The head to move; None moves none.
        cut: Files for each shard; None for one.
        teacher_id: What made the states of plain files.
        teacher_revision: Which of it; None for the digest of the files.
        data_id: What they were made over.
        progress: Told the bytes read, as they are.

    Raises:
        Missing, Corrupt: naming the file that is not as the manifest says, or no safetensors file.
        Invalid: if the files are no table.
    """
    table = plainfiles.read_table(Path(directory))
    digest = plainfiles.check(table, progress=progress)
    if table.exported is not None:
        pins = _exported_pins(table.exported)
    else:
        revision = str(digest) if teacher_revision is None else teacher_revision
        pins = _declared_pins(teacher_id or UNDECLARED, revision, data_id or UNDECLARED, "safetensors", digest)
    return _bring(store, _from_table(table, pins, 1 if cut is None else cut), ref=ref)


def _bring(store: Store, source: _Source, *, ref: str | None) -> ImportReport:
    if ref is not None:
        store.refs.check(ref)
    started = time.monotonic()
    with writer(store, source.pins, cut=source.cut) as into:
        for batch in source.batches:
            into.add(batch)
        digest = into.commit(ref=ref)
    snapshot = store.snapshot(digest)
    columns = tuple(column.name for column in snapshot.columns)
    seconds = time.monotonic() - started
    return ImportReport(digest, ref, snapshot.samples, columns, source.files, source.bytes, seconds)


def _declared_pins(teacher_id: str, revision: str, data_id: str, kind: str, digest: Digest) -> Pins:
    # The digest of the files is what tells this cache from another that declares the same: nothing was measured.
    return Pins(
        teacher={"id": teacher_id, "revision": revision, "declared": True},
        data={"id": data_id, "revision": UNDECLARED, "declared": True, "pins": {}},
        capture={"imported": kind, "files": digest.raw},
    )


# -- ZeroGraph -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Axes:
    """Which tensors of a batch have which axes, by what holds in every batch.

    Args:
        constant: Context without a row axis.
        sequence: Tensors with the sequence axis, where sequences are of unequal lengths; else empty: all is dense.
    """

    constant: frozenset[str]
    sequence: frozenset[str]


def _from_zerograph(cache: zerograph.Cache, cut: int | None) -> _Source:
    pins = _declared_pins(cache.teacher_id, cache.teacher_revision, cache.data_id, "zerograph", cache.digest())
    largest = max(member.size // max(cache.boundaries, 1) for member in cache.members)
    chosen = max(1, SHARD_BYTES // max(largest, 1)) if cut is None else cut
    return _Source(pins, chosen, _zerograph_batches(cache), len(cache.members), cache.size)


def _zerograph_batches(cache: zerograph.Cache) -> Iterator[SampleBatch]:
    axes = _axes(_all_shapes(cache))
    first = 0
    for batch in zerograph.load(cache):
        columns = _named(batch.boundaries)
        rows = len(batch.boundaries[0])
        context = {name: tensor for name, tensor in batch.context.items() if name not in axes.constant}
        constants = {name: tensor for name, tensor in batch.context.items() if name in axes.constant}
        yield replace(_sample_batch(columns, context, first=first, sequence=axes.sequence), constants=constants)
        first += rows


def _named(boundaries: Sequence[Any]) -> dict[str, Any]:
    return {f"{BOUNDARY}.{depth}": value for depth, value in enumerate(boundaries)}


def _all_shapes(cache: zerograph.Cache) -> list[dict[str, tuple[int, ...]]]:
    """The shapes of every batch: as the manifest says them, else by a look into the files."""
    found = []
    for member in cache.members:
        if member.boundaries is None or member.context is None:
            return [
                {name: tuple(tensor.shape) for name, tensor in (_named(batch.boundaries) | dict(batch.context)).items()}
                for batch in zerograph.load(cache)
            ]
        described = _named(member.boundaries) | dict(member.context)
        found.append({name: shape for name, (shape, _) in described.items()})
    return found


def _axes(batches: Sequence[Mapping[str, tuple[int, ...]]]) -> _Axes:
    (lead,) = _named([None])
    shared = frozenset(name for name in batches[0] if all(name in batch for batch in batches))
    rows_of = [batch[lead][0] if batch[lead] else 0 for batch in batches]
    constant = frozenset(
        name
        for name in shared
        if not all(batch[name][:1] == (rows,) for batch, rows in zip(batches, rows_of, strict=True))
    )
    lengths = [batch[lead][1:2] for batch in batches]
    if len(set(lengths)) == 1:
        return _Axes(constant, frozenset())
    sequence = frozenset(
        name
        for name in shared - constant
        if all(length and batch[name][1:2] == length for batch, length in zip(batches, lengths, strict=True))
    )
    return _Axes(constant, sequence)


def _sample_batch(
    columns: Mapping[str, Tensor], context: Mapping[str, Tensor], *, first: int, sequence: frozenset[str]
) -> SampleBatch:
    """A batch with its rows' digests; sequences without their padding, if ``sequence`` names any."""
    lead = next(iter(columns.values()))
    rows = len(lead)
    context = context or {SOURCE_ROW: torch.arange(first, first + rows, device="cpu")}
    if not sequence:
        return SampleBatch(columns=columns, context=context, digests=_digests(context))
    masked = MASK in sequence and context[MASK].dim() == 2
    if masked:
        lengths, starts = lengths_of(context, MASK)
    else:
        lengths, starts = (
            torch.full((rows,), lead.shape[1], device="cpu"),
            torch.zeros(rows, dtype=torch.int64, device="cpu"),
        )
    digests = _digests(context, lengths=MASK if masked else None, sequence=sequence)
    packed = {
        name: strip(tensor, lengths, starts, what=f"the batch's {name!r}") if name in sequence else tensor
        for name, tensor in (*columns.items(), *context.items())
    }
    return SampleBatch(
        columns={name: packed[name] for name in columns},
        context={name: packed[name] for name in context},
        lengths=lengths,
        starts=starts,
        digests=digests,
        packed=sequence,
    )


def _digests(context: Mapping[str, Tensor], *, lengths: str | None = None, sequence: Collection[str] = ()) -> bytes:
    return b"".join(digest.raw for digest in row_digests(context, lengths=lengths, sequence=sequence))


# -- safetensors ---------------------------------------------------------------------------------------------------


def _exported_pins(manifest: Mapping[str, Any]) -> Pins:
    """The pins of an export, as declared: what was measured there was not measured here."""
    teacher = {name: value for name, value in manifest["teacher"].items() if name != "measured"}
    data = {name: value for name, value in manifest["data"].items() if name != "digest"}
    return Pins({**teacher, "declared": True}, data, {**manifest["capture"], "imported": "export"})


def _from_table(table: plainfiles.Table, pins: Pins, cut: int) -> _Source:
    sizes = [table.root.joinpath(*file.parts).stat().st_size for file in table.all_files()]
    return _Source(pins, cut, _table_batches(table), len(sizes), sum(sizes))


def _table_batches(table: plainfiles.Table) -> Iterator[SampleBatch]:
    constants = plainfiles.load_constants(table)
    first = 0
    for shard in plainfiles.load(table):
        rows = _rows_of(shard)
        kept = [row for row in range(rows) if first + row not in table.masked]
        if kept:
            yield replace(_shard_batch(table, _only(shard, kept), first=first), constants=constants)
        first += rows


def _rows_of(shard: plainfiles.Shard) -> int:
    name, tensor = next(iter(shard.columns.items()))
    return len(shard.lengths.get(name, tensor))


def _only(shard: plainfiles.Shard, rows: Sequence[int]) -> plainfiles.Shard:
    """The shard with these rows alone."""
    if len(rows) == _rows_of(shard):
        return shard
    columns: dict[str, Tensor] = {}
    for name, tensor in shard.columns.items():
        if name in shard.lengths:
            pieces = _pieces(tensor, shard.lengths[name])
            columns[name] = torch.cat([pieces[row] for row in rows])
        else:
            columns[name] = tensor[list(rows)]
    return plainfiles.Shard(columns, {name: lengths[list(rows)] for name, lengths in shard.lengths.items()})


def _pieces(tensor: Tensor, lengths: Tensor) -> list[Tensor]:
    """Each row's part of a tensor without padding."""
    ends = torch.cumsum(lengths, 0).tolist()
    return [tensor[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def _shard_batch(table: plainfiles.Table, shard: plainfiles.Shard, *, first: int) -> SampleBatch:
    by_role = {
        role: {name: shard.columns[name] for name, each in table.columns if each == role and name in shard.columns}
        for role in ("boundary", "output", "context")
    }
    context = by_role["context"]
    ids, starts = (context.pop(name, None) for name in (ID, START))
    if not by_role["boundary"] and not by_role["output"]:
        raise Invalid("no column is a boundary or an output", hint="import floating tensors, with context if any")
    lengths = next(iter(shard.lengths.values()), None)
    if lengths is not None and any(not torch.equal(each, lengths) for each in shard.lengths.values()):
        raise Invalid("ragged columns have rows of unequal lengths", hint="import them as separate snapshots")
    if not context:
        context = {SOURCE_ROW: torch.arange(first, first + _rows_of(shard), device="cpu")}
    return SampleBatch(
        columns=by_role["boundary"],
        context=context,
        outputs=by_role["output"],
        lengths=lengths,
        starts=starts,
        ids=ids,
        digests=_packed_digests(context, shard.lengths),
        packed=frozenset(shard.lengths),
    )


def _packed_digests(context: Mapping[str, Tensor], lengths: Mapping[str, Tensor]) -> bytes:
    """Row digests where some context has no padding any more: row by row they are dense."""
    if not lengths.keys() & context.keys():
        return _digests(context)
    pieces = {
        name: _pieces(
            tensor, lengths[name] if name in lengths else torch.ones(len(tensor), dtype=torch.int64, device="cpu")
        )
        for name, tensor in context.items()
    }
    rows = len(next(iter(pieces.values())))
    return b"".join(
        _digests({name: each[row].unsqueeze(0) if name in lengths else each[row] for name, each in pieces.items()})
        for row in range(rows)
    )
