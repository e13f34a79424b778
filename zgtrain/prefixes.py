"""What a block of a relay learns from: the student's own states, joined by row with the teacher's.

Trained on the teacher's states, a block meets its predecessor's errors only at assembly. In a relay its source is what
the blocks before it make of the data: a snapshot of its own, whose teacher is that prefix.

N rows of a batch, T their longest length, D width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

import zgstore
from zgtrain.files import read_json, write_json
from zgtrain.job import Job
from zgtrain.noise import without_target
from zgtrain.source import CACHED, RELAY, Rows, Source, interrupted, micro_batches

FOLDER: Final = "relay"
_SETTINGS: Final = "relay.json"
CAPTURE_ROWS: Final = 16
_SHARD_BYTES: Final = 32 << 20


def relayed(job: Job, *, steps: int | None = None) -> Job:
    """The relay of a job, as a job of its own beside it.

    Args:
        job: The job.
        steps: Of each block; default what an earlier relay was given, else the job's.
    """
    output = job.output / FOLDER
    if steps is None:
        steps = (remembered(output) or {"steps": job.train.steps})["steps"]
    return replace(job, output=output, relay=True, train=replace(job.train, steps=steps))


def remembered(output: Path) -> dict[str, Any] | None:
    """What a relay said of itself when it was last run: ``job``, ``steps``, ``from_scratch``, ``begun``; None before.

    Raises:
        zgstore.Corrupt: if its file says something else.
    """
    kinds = {"job": str, "steps": int, "from_scratch": bool, "begun": list}
    return read_json(output / _SETTINGS, kinds, remedy="begin anew: `zgtrain relay JOB --fresh`")


def remember(output: Path, value: Mapping[str, Any]) -> None:
    """Say it."""
    write_json(output / _SETTINGS, value)


def prefix_pins(job: Job, snapshot: zgstore.Snapshot, boundary: str, before: Sequence[str]) -> zgstore.Pins:
    """The pins of the states that a prefix of the student gives at a boundary.

    Args:
        job: The relay.
        snapshot: The teacher's, whose rows it is given.
        boundary: Its column's name.
        before: The blocks' state digests, in depth order.
    """
    revision = zgstore.digest_of(None, *(digest.encode() for digest in before))
    forward = job.train.forward
    return zgstore.Pins(
        teacher={
            "id": f"student prefix of {len(before)} blocks",
            "revision": str(revision),
            "blocks": list(before),
            "inputs": snapshot.pins.digest().raw,
        },
        data=snapshot.pins.data,
        capture={
            "boundary": boundary,
            "rows": CAPTURE_ROWS,
            "block": job.student.block.text,
            "forward": None if forward is None else forward.text,
        },
    )


def joined(
    store: zgstore.Store, snapshot: zgstore.Digest, prefix: zgstore.Digest | None, source: str, target: str,
    *, context: Sequence[str],
) -> Source:  # fmt: skip
    """The student's states at a boundary, with the teacher's at the next, row by row.

    Args:
        store: Where both are.
        snapshot: The teacher's.
        prefix: The student's; None before the first block, which reads the teacher's own.
        source: Column of boundary b.
        target: Column of boundary b + 1.
        context: Context columns.

    Raises:
        zgstore.Refused: if the two are not of the same rows.
    """
    pins = str(store.snapshot(snapshot).pins.digest())
    reader = zgstore.read(store, snapshot, [*dict.fromkeys((source, target, *context))])
    if prefix is None:
        return Source(CACHED, reader, source, target, pins=pins)
    try:
        student = zgstore.read(store, prefix, [source])
    except BaseException:
        reader.close()
        raise
    if student.data_digest != reader.data_digest or len(student) != len(reader):
        reader.close()
        student.close()
        raise zgstore.Refused(
            "the student's states and the teacher's are not of the same data",
            hint="relay a student on the snapshot that its prefix was captured on",
            expected=reader.data_digest,
            actual=student.data_digest,
        )

    def rows(indices: Rows) -> Mapping[str, Sequence[Tensor]]:
        return {source: student.batch(indices, layout="list")[source]}

    pins = str(store.snapshot(prefix).pins.digest())
    return Source(RELAY, reader, source, target, given=rows, pins=pins, beside=(student,))


@torch.no_grad()
def capture_prefix(
    job: Job,
    store: zgstore.Store,
    snapshot: zgstore.Digest,
    data: Source,
    block: nn.Module,
    *,
    before: Sequence[str],
    device: torch.device,
    stop: Callable[[], bool] = lambda: False,
    progress: Callable[[int, int], None] = lambda _done, _rows: None,
) -> zgstore.Digest:
    """What a block makes of its source, as a snapshot; resumed where an earlier capture was ended.

    Args:
        job: The relay.
        store: Where it goes.
        snapshot: The teacher's.
        data: The block's source; its target names the new column.
        block: Trained.
        before: State digests of the prefix, the block's the last of them.
        device: Where it runs.
        stop: Asked between batches whether to give up.
        progress: Told rows done and rows in all.

    Raises:
        zgstore.Interrupted: if asked to stop; what is durable is found again.
        zgstore.Invalid: if readers skip rows of the snapshot.
    """
    head = store.snapshot(snapshot)
    pins = prefix_pins(job, head, data.target, before)
    ref = f"relay/{zgstore.Digest.parse(job.identity()).short}/{len(before)}"
    found = _published(store, ref, pins)
    if found is not None:
        return found
    digests, count = store.row_digests(head), len(data.reader)
    if len(digests) != 32 * count:
        raise zgstore.Invalid(
            f"readers skip {len(digests) // 32 - count} rows of the snapshot, so that it cannot be joined by row",
            hint="build one without rows that are not finite",
        )
    forward = without_target(None if job.train.forward is None else job.train.forward.resolve())
    column: zgstore.Column = head.column(data.target)[1]
    sizes = {facts.column.name: facts.bytes for facts in zgstore.show(store, snapshot).columns}
    size = max(1, sizes[data.target] * CAPTURE_ROWS // max(1, count))
    with zgstore.writer(store, pins, cut=max(1, math.ceil(_SHARD_BYTES / size)),
                        codecs={column.name: column.codec}) as writer:  # fmt: skip
        for rows in micro_batches(range(count), CAPTURE_ROWS):
            if stop():
                raise interrupted()
            each = [zgstore.Digest(digests[32 * row : 32 * row + 32]) for row in rows]
            todo = [rows[at] for at in writer.missing(each)]
            if todo:
                batch = data.batch(todo)
                at = batch.to(device, dtype=next(block.parameters()).dtype)
                states = forward(block, at.source, at.context).to(batch.target.dtype).cpu()
                own = b"".join(digests[32 * row : 32 * row + 32] for row in todo)
                writer.add(_sample(column, states, batch.context, own))
            progress(rows[-1] + 1, count)
        return writer.commit(ref=ref)


def _published(store: zgstore.Store, ref: str, pins: zgstore.Pins) -> zgstore.Digest | None:
    try:
        digest = store.resolve(ref)
    except zgstore.NotFound:
        return None
    return digest if store.snapshot(digest).pins.digest() == pins.digest() else None


def _sample(
    column: zgstore.Column, states: Tensor, context: Mapping[str, Any], digests: bytes
) -> zgstore.SampleBatch:  # fmt: skip
    if not column.ragged:
        return zgstore.SampleBatch(columns={column.name: states}, digests=digests)
    lengths = context["lengths"]
    mask = torch.arange(states.shape[1]) < lengths[:, None]
    positions = context["positions"]
    return zgstore.SampleBatch(
        columns={column.name: states[mask]}, lengths=lengths, starts=positions[:, 0] * 0, digests=digests,
        packed=frozenset({column.name}),
    )  # fmt: skip
