"""Why something is missing: the pin that changed since the snapshot that the ref names now."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from zgstore.building.planner import BuildPlan, ShardInputs, Wanted
from zgstore.format import canonical
from zgstore.format.digest import Digest
from zgstore.format.manifest import Pins, Record, Snapshot
from zgstore.storage.store import Store


@dataclass(frozen=True, slots=True)
class Why:
    """One line of ``--explain``.

    Args:
        column: Its name.
        shard: Its index.
        hit: Whether the store has it.
        reason: Why not; empty for a hit.
    """

    column: str
    shard: int
    hit: bool
    reason: str


def explain(store: Store, plan: BuildPlan, before: Digest | None, *, known: bool = True) -> tuple[Why, ...]:
    """Hit or miss for each column and shard, compared with what a ref names now.

    Args:
        store: Where that is.
        plan: What would be done.
        before: The snapshot that the ref names; None if there is none.
        known: Whether the teacher is known.
    """
    snapshot = store.snapshot(before) if before and store.objects.stat(before, "meta") else None
    record = store.record_of(before) if before and snapshot else None
    inputs = [shard.inputs for shard in store.shards(snapshot)] if snapshot else []
    lines = lines_of(plan, snapshot, record, inputs)
    if known:
        return tuple(lines)
    by_teacher = {wanted.name for wanted in plan.columns if wanted.source == "teacher"}
    reason = "new teacher, or its files or code changed"
    return tuple(replace(why, reason=reason) if why.column in by_teacher else why for why in lines)


def pin_changes(before: Pins, after: Pins) -> dict[str, tuple[Any, Any]]:
    """Each pin (dotted) that differs, with both values."""
    flat_before, flat_after = dict(_flat(before)), dict(_flat(after))
    return {
        name: (flat_before.get(name), flat_after.get(name))
        for name in sorted({*flat_before, *flat_after})
        if flat_before.get(name) != flat_after.get(name)
    }


def _flat(pins: Pins) -> Iterator[tuple[str, Any]]:
    for name in ("teacher", "data", "capture"):
        yield from _flatten(name, getattr(pins, name))


def _flatten(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key in value:
            yield from _flatten(f"{name}.{key}", value[key])
    else:
        yield name, list(value) if isinstance(value, tuple) else value


def lines_of(
    plan: BuildPlan, before: Snapshot | None, record: Record | None, inputs_before: Sequence[Digest]
) -> Iterator[Why]:
    """Hit or miss for each column and shard, and for a miss the pin that changed.

    Args:
        plan: What would be done.
        before: The snapshot that the ref names now, if any.
        record: Its record, which keeps what its keys were made of.
        inputs_before: The digests of its shards' inputs.
    """
    keys = (record.fields.get("keys") if record else None) or {}
    for wanted, actions in zip(plan.columns, plan.found, strict=True):
        changed = _column_change(wanted, before, keys.get(wanted.name))
        for shard, action in zip(plan.shards, actions, strict=True):
            reason = "" if action else changed or _shard_change(plan, shard, before, inputs_before)
            yield Why(wanted.name, shard.index, action is not None, reason)


def _column_change(wanted: Wanted, before: Snapshot | None, keys: Any) -> str:
    if before is None:
        return "never built"
    if wanted.name not in {column.name for column in before.columns}:
        return "new column"
    if not isinstance(keys, Mapping):
        return ""
    now = dict(_flatten("", canonical.decode(canonical.encode(wanted.parts))))
    then = dict(_flatten("", keys))
    changed = [name.lstrip(".") for name in sorted({*now, *then}) if now.get(name) != then.get(name)]
    return f"changed: {', '.join(_PART_NAMES.get(name, name) for name in changed)}" if changed else ""


_PART_NAMES: Final = {
    "teacher": "teacher.measured",
    "sources": "source code of the teacher's classes",
    "ragged": "ragged rule",
    "point": "hook point",
    "inputs": "capture.inputs",
}


def _shard_change(plan: BuildPlan, shard: ShardInputs, before: Snapshot | None, inputs: Sequence[Digest]) -> str:
    if before is None:
        return "never built"
    if shard.index < len(inputs) and inputs[shard.index] == shard.inputs:
        return "its blob or its action is gone, or was made on another platform"
    changes = pin_changes(before.pins, plan.pins)
    named = [name for name in changes if name.startswith("data.") and name != "data.digest"]
    if named:
        return f"changed: {', '.join(named)}"
    if "data.digest" in changes:
        return "new rows" if shard.index >= len(inputs) - 1 else "changed: rows (data.digest)"
    cut = plan.shards[0].batches  # of a single shard perhaps less than the cut
    if before.cut < cut or (before.cut > cut and len(plan.shards) > 1):
        return "changed: cut"
    return "changed: batches (their size, order or padding)"
