"""What is known before anything is captured: the stream, which data and teacher, what is there and what is missing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from zgstore.building.execution import Task, TeacherSource, first_sample, outline_of
from zgstore.building.identity import DataMemo, data_memo
from zgstore.building.inputs import Inputs, read_inputs
from zgstore.building.planner import (
    ANY_PLATFORM,
    BuildPlan,
    Outline,
    ShardInputs,
    TeacherIdentity,
    capture_pin,
    columns_of,
    left_out_key,
    make_plan,
    shards_of,
)
from zgstore.building.publication import keep_constants
from zgstore.building.recall import of_many_cells
from zgstore.building.recipe import Recipe
from zgstore.errors import Invalid
from zgstore.format import canonical
from zgstore.format.digest import Digest, digest_of
from zgstore.format.fields import all_u64
from zgstore.format.manifest import Constant, Pins, Snapshot
from zgstore.storage.store import Session, Store

UNKNOWN: Final = TeacherIdentity(bytes(32), bytes(32), {}, ANY_PLATFORM, "unknown")


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a build is.

    Args:
        stage: ``inputs``, ``teacher``, ``shards`` or ``publishing``.
        rows: Rows captured so far.
        total_rows: Rows that are to be captured.
        new_bytes: Bytes handed to the writer so far.
        build: The build's UUID, by which it can be followed; empty until its first shard is durable.
    """

    stage: str
    rows: int = 0
    total_rows: int = 0
    new_bytes: int = 0
    build: str = ""


@dataclass(frozen=True, slots=True)
class Options:
    """How a build goes about it, as `build` says."""

    ref: str | None = None
    limit: int | None = None
    worker: tuple[int, int] | None = None
    devices: tuple[str, ...] = ()
    check_teacher: bool = False
    on_nonfinite: str = "error"
    explain: bool = False
    progress: Callable[[Progress], None] = lambda _: None
    stop: Callable[[], bool] = lambda: False
    circumstance: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Prepared:
    """All that is known before anything is captured.

    Args:
        inputs: The stream.
        data: Which data it is.
        source: The teacher.
        plan: What is there and what is missing.
        constants: Of the batches, or of the trajectory; kept already, if there is a session.
        trajectory: (key, value) of an extractor's measurement; None without one.
    """

    inputs: Inputs
    data: DataMemo
    source: TeacherSource
    plan: BuildPlan
    constants: tuple[Constant, ...]
    trajectory: tuple[Digest, Mapping[str, Any]] | None


def prepare(store: Store, recipe: Recipe, options: Options, *, session: Session | None) -> Prepared:
    """Read the inputs, find out which teacher it is, and look everything up.

    Args:
        store: Where actions are.
        recipe: What is wanted.
        options: ``limit``, ``devices`` and ``check_teacher`` are looked at.
        session: Reserves what is found, and may load the teacher where it must; None only plans.
    """
    options.progress(Progress("inputs"))
    inputs = read_inputs(recipe, limit=options.limit)
    data = data_memo(store, recipe, inputs)
    source = TeacherSource(store, recipe, devices=options.devices)
    if session is not None and (options.check_teacher or source.identity is None):
        options.progress(Progress("teacher"))
        source.load()
    prepared = look(store, source, inputs, data, options=options, session=session)
    if session is not None and not source.loaded and _needs_teacher(prepared.plan, options.worker):
        options.progress(Progress("teacher"))
        known = source.identity
        assert known is not None
        found = source.load()
        if replace(found, certainty=known.certainty) != known:
            prepared = look(store, source, inputs, data, options=options, session=session)
    return prepared


def stream_rows(store: Store, snapshot: Snapshot) -> int:
    """Rows of the stream that a snapshot was made over: the limit under which it is planned again.

    Raises:
        Invalid: if its pins name none.
    """
    root = store.rows_root(snapshot)
    if root is None:
        raise Invalid("the snapshot names no rows", hint="it was not made by a recipe: read it instead")
    return root.count


def _needs_teacher(plan: BuildPlan, worker: tuple[int, int] | None) -> bool:
    return any(task.by_teacher for task in tasks_of(plan, worker))


def tasks_of(plan: BuildPlan, worker: tuple[int, int] | None = None) -> list[Task]:
    """The shards that lack something, and what; of one worker, or of all."""
    return [
        Task(shard, tuple(plan.columns[c] for c in missing))
        for shard, missing in plan.tasks()
        if worker is None or shard.index % worker[1] == worker[0]
    ]


def look(
    store: Store, source: TeacherSource, inputs: Inputs, data: DataMemo, *, options: Options, session: Session | None
) -> Prepared:
    """Look everything up, for the teacher as far as it is known."""
    recipe = source.recipe
    identity = source.identity or UNKNOWN
    shards = shards_of(inputs, recipe.storage.batches_per_shard)
    pins = Pins(
        teacher={"id": recipe.teacher.id, "revision": recipe.teacher.revision, "measured": identity.measured},
        data=data.pin,
        capture=capture_pin(recipe, identity, source.extractor),
    )
    trajectory: tuple[Digest, Mapping[str, Any]] | None = None
    constants: tuple[Constant, ...] = ()
    if source.extractor is not None:
        trajectory, constants = _trajectory(store, source, inputs, identity, options=options, session=session)
        identity = source.identity or identity
    elif session is not None:
        constants = keep_constants(session, inputs.constants)
    columns = columns_of(
        recipe, inputs, identity, extractor=source.extractor,
        outline=_as_outline(trajectory[1]) if trajectory else None,
    )  # fmt: skip
    plan = make_plan(store, pins, columns, shards, identity.platform)
    plan = _only_present(store, plan, session, source)
    return Prepared(inputs, data, source, plan, constants, trajectory)


def _trajectory(
    store: Store, source: TeacherSource, inputs: Inputs, identity: TeacherIdentity, *, options: Options,
    session: Session | None,
) -> tuple[tuple[Digest, Mapping[str, Any]] | None, tuple[Constant, ...]]:  # fmt: skip
    """What the extractor gives: as it was found before, else by asking it for the first batch."""
    capture = source.recipe.capture
    key = digest_of(
        "measurement",
        canonical.encode(
            {
                "kind": "trajectory", "extractor": source.extractor, "teacher": identity.measured,
                "sources": identity.sources, "arithmetic": identity.arithmetic, "context": list(capture.context),
                "ragged": [capture.lengths, sorted(capture.sequence)], "constants": list(capture.constants),
            }
        ),
    )  # fmt: skip
    value = store.memos.measurement(key)
    if value is not None:
        constants = tuple(Constant.from_value(each) for each in value["constants"])
        if session is None or all(session.reserve([constant.blob for constant in constants])):
            return (key, value), constants
    if session is None:
        return None, ()
    sample = first_sample(source, inputs, limit=options.limit)
    lacking = [name for name in capture.constants if name not in sample.constants]
    if lacking:
        raise Invalid(f"the trajectory has no constant {lacking[0]!r}", hint="give it, or take it off the recipe")
    outline = outline_of(sample)
    constants = keep_constants(session, sample.constants)
    value = {
        "kind": "trajectory",
        "columns": [list(each) for each in outline.columns],
        "constants": [constant.as_value() for constant in constants],
    }
    return (key, value), constants


def _as_outline(value: Mapping[str, Any]) -> Outline:
    columns = tuple((name, role, depth) for name, role, depth in value["columns"])
    return Outline(columns, tuple(each["name"] for each in value["constants"]))


@of_many_cells
def _only_present(store: Store, plan: BuildPlan, session: Session | None, source: TeacherSource) -> BuildPlan:
    """The plan without the hits whose blobs are gone, or whose left out rows are no longer known."""
    blobs = [action.blob for actions in plan.found for action in actions if action is not None]
    if session is not None:
        there = session.reserve(blobs) if blobs else []
    else:
        stats = store.objects.stats([blob.digest for blob in blobs], "objects")
        there = [
            (stat is not None and stat.size == blob.size) or store.objects.in_trash(blob.digest, "objects")
            for blob, stat in zip(blobs, stats, strict=True)
        ]
    answers = iter(there)
    found = [[a if a is not None and next(answers) else None for a in actions] for actions in plan.found]
    if source.extractor is not None:
        for shard in plan.shards:
            rows = [mine[shard.index].rows for mine in found if mine[shard.index] is not None]  # type: ignore[union-attr]
            if rows and min(rows) < shard.rows and left_out_of(store, plan, shard) is None:
                for mine in found:
                    mine[shard.index] = None
    return replace(plan, found=tuple(tuple(mine) for mine in found))


def left_out_of(store: Store, plan: BuildPlan, shard: ShardInputs) -> dict[int, str] | None:
    """The rows that an extractor left out of a shard: stream index → reason; None if that is not known."""
    value = store.memos.measurement(left_out_key(extractor_stem(plan), shard))
    if value is None:
        return None
    return {shard.first_row + row: reason for row, reason in zip(all_u64(value["rows"]), value["reasons"], strict=True)}


def extractor_stem(plan: BuildPlan) -> bytes:
    """32 bytes over what decides which rows are left out: teacher and extractor, but no column."""
    parts = plan.columns[0].parts
    shared = {name: parts[name] for name in ("teacher", "sources", "arithmetic", "extractor")}
    return digest_of("action", canonical.encode(shared)).raw
