"""A build that only plans, and one that a lock file makes unnecessary."""

from __future__ import annotations

import time
from collections.abc import Sequence

from zgstore.building import lockfile
from zgstore.building.execution import Task
from zgstore.building.explanation import explain, pin_changes
from zgstore.building.planner import BuildPlan, ShardInputs
from zgstore.building.preparation import Options, prepare, tasks_of
from zgstore.building.publication import Assembled
from zgstore.building.recipe import Recipe
from zgstore.building.report import BuildReport
from zgstore.format.blobheader import layout_of_column
from zgstore.format.digest import Digest
from zgstore.format.fields import all_u64
from zgstore.storage.store import Store


def rehearse(store: Store, recipe: Recipe, options: Options) -> BuildReport:
    """What a build would do; nothing is loaded and nothing written."""
    began = time.perf_counter()
    prepared = prepare(store, recipe, options, session=None)
    plan, source = prepared.plan, prepared.source
    before = store.refs.get(options.ref, "head") if options.ref else None
    tasks = tasks_of(plan, options.worker)
    built = len(tasks) if plan.columns else len(plan.shards)  # what an extractor gives is not known before it has run
    shards = [s for s in plan.shards if options.worker is None or is_of(options.worker, s)]
    columns = {wanted.name for task in tasks for wanted in task.wanted}
    seconds = time.perf_counter() - began
    kept = sum(action.blob.size for mine in plan.found for action in mine if action is not None)
    new = known_bytes(plan, tasks)
    return BuildReport(
        snapshot=None, recipe=None, pins=plan.pins.digest() if source.identity else None, ref=options.ref,
        samples=prepared.inputs.rows, teacher=source.identity.certainty if source.identity else "unknown",
        teacher_loaded=False, shards_built=built, shards_reused=len(shards) - built,
        columns_built=len(columns), columns_reused=len(plan.columns) - len(columns), new_bytes=new,
        total_bytes=kept + new, explain=explain(store, plan, before, known=source.identity is not None)
        if options.explain else (), unsized=unsized_columns(plan, tasks),
        seconds={"inputs": prepared.inputs.seconds, "teacher": 0.0, "store": 0.0, "total": seconds},
    )  # fmt: skip


def is_of(worker: tuple[int, int], shard: ShardInputs) -> bool:
    """Whether a shard is a worker's."""
    return shard.index % worker[1] == worker[0]


def known_bytes(plan: BuildPlan, tasks: Sequence[Task]) -> int:
    """Bytes that the missing blobs will have, as far as their columns are known."""
    known = dict(zip((wanted.name for wanted in plan.columns), plan.known_columns(), strict=True))
    total = 0
    for task in tasks:
        for wanted in task.wanted:
            column = known[wanted.name]
            if column is not None:
                total += layout_of_column(column, rows=task.shard.rows, tokens=task.shard.tokens).file_size
    return total


def unsized_columns(plan: BuildPlan, tasks: Sequence[Task]) -> tuple[str, ...]:
    """The missing columns that ``known_bytes`` leaves out, in their order: nobody knows their shape yet."""
    missing = {wanted.name for task in tasks for wanted in task.wanted}
    known = zip(plan.columns, plan.known_columns(), strict=True)
    return tuple(wanted.name for wanted, column in known if column is None and wanted.name in missing)


def lock_of(recipe: Recipe, ref: str | None) -> lockfile.Locked:
    """The section of the lock file beside the recipe."""
    return lockfile.section(recipe.directory / lockfile.FILE_NAME, ref or recipe.name, recipe.directory)


def already_there(store: Store, lock: lockfile.Locked, ref: str | None) -> BuildReport:
    """The report of a build that stops at the locked snapshot."""
    snapshot = store.snapshot(lock.snapshot)
    root = store.root(snapshot)
    total = sum(sum(all_u64(packed)) for packed in root.column_bytes) + sum(each.size for each in snapshot.constants)
    named = ref if ref is not None and store.refs.get(ref, "head") == lock.snapshot else None
    return BuildReport(
        snapshot=lock.snapshot, recipe=lock.recipe, pins=snapshot.pins.digest(), ref=named, samples=snapshot.samples,
        teacher="measured", teacher_loaded=False, shards_built=0, shards_reused=sum(all_u64(root.shards)),
        columns_built=0, columns_reused=len(snapshot.columns), new_bytes=0, total_bytes=total,
        seconds={"inputs": 0.0, "teacher": 0.0, "store": 0.0, "total": 0.0}, locked="present",
    )  # fmt: skip


def compare(store: Store, lock: lockfile.Locked, assembled: Assembled, recipe: Digest) -> str:
    """Whether the locked snapshot came out, and why not."""
    if assembled.digest == lock.snapshot:
        return "same"
    if assembled.snapshot.pins.digest() != lock.pins:
        before = store.snapshot(lock.snapshot) if store.objects.stat(lock.snapshot, "meta") else None
        names = ", ".join(pin_changes(before.pins, assembled.snapshot.pins)) if before else ""
        return f"other pins than the locked ones{': ' + names if names else ''}"
    if lock.recipe is not None and lock.recipe != recipe:
        return "the same pins, another recipe: columns, cut, limit, drop policy or constants"
    return "the same pins and recipe, other bytes: another platform, or a teacher that is not reproducible"
