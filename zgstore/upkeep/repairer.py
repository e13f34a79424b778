"""What is corrupt or gone, made anew: from the recipe or from another store, the same digest or nothing.

A blob is a function of pinned inputs, so bit rot heals without a replica. What this host cannot make again (another
platform, another teacher) is left, and it is said why.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from zgstore.building.builder import build
from zgstore.building.execution import Captured, Run, Task, run_tasks
from zgstore.building.preparation import Options, Prepared, prepare
from zgstore.building.recipe import Recipe, load_recipe
from zgstore.errors import Corrupt, Invalid, Missing, NoSpace, Transient, ZgError
from zgstore.format.digest import Digest
from zgstore.format.manifest import Snapshot
from zgstore.format.pages import Blob, Shard
from zgstore.storage.store import Session, Store
from zgstore.upkeep.copier import carry
from zgstore.upkeep.recomputer import pins_that_differ, place_of, platform_text
from zgstore.upkeep.survey import Problem


@dataclass(frozen=True, slots=True)
class Mended:
    """An object that is as it should be again, and where it came from: ``recipe``, ``store`` or ``trash``.

    A record that nothing makes again is ``forgotten``: its snapshot is whole without it.
    """

    object: str
    source: str


@dataclass(frozen=True, slots=True)
class RepairReport:
    """What a repair did.

    Args:
        mended: Objects that are there again.
        left: Problems that remain; ``message`` says why.
        quarantined: Where corrupt files were put.
        seconds: Wall time.
    """

    mended: tuple[Mended, ...]
    left: tuple[Problem, ...]
    quarantined: tuple[str, ...]
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """The JSON object."""
        return {
            "mended": [{"object": each.object, "source": each.source} for each in self.mended],
            "left": [problem.as_json() for problem in self.left],
            "quarantined": list(self.quarantined),
            "seconds": self.seconds,
        }


@dataclass(slots=True)
class _Work:
    """A repair in the middle of it."""

    session: Session
    open: dict[tuple[str, Digest], Problem] = field(default_factory=dict)
    why: dict[Digest, tuple[str, str]] = field(default_factory=dict)
    mended: list[Mended] = field(default_factory=list)
    quarantined: list[str] = field(default_factory=list)

    @property
    def store(self) -> Store:
        return self.session.store

    def settle(self, family: str, digest: Digest, source: str) -> None:
        del self.open[family, digest]
        self.mended.append(Mended(str(digest), source))


def repair(
    store: Store,
    problems: Iterable[Problem],
    *,
    recipe: Recipe | str | Path | None = None,
    source: Store | None = None,
    devices: Sequence[str] = (),
    progress: Callable[[int, int], None] | None = None,
) -> RepairReport:
    """Set aside what is corrupt, and make it and what is missing anew.

    Args:
        store: Whose problems.
        problems: From ``verify``.
        recipe: Makes objects anew by running the teacher.
        source: A store that may have them.
        devices: Where the teacher runs.
        progress: Told (rows, bytes) as they are recomputed.

    Returns:
        What was mended, and what is left and why. Nothing but the same digest is accepted.
    """
    if recipe is None and source is None:
        raise Invalid("a repair needs something to repair from", hint="give a recipe, or another store")
    if recipe is not None and not isinstance(recipe, Recipe):
        recipe = load_recipe(recipe)
    began = time.perf_counter()
    left: list[Problem] = []
    with store.writing("repair") as session:
        work = _Work(session)
        for problem in problems:
            found = _object_of(problem)
            if found is None:
                left.append(problem)
            elif _set_aside(work, problem, *found):
                work.open[found] = problem
            else:
                left.append(replace(problem, message=f"{problem.message}; its bytes are what its name says"))
        _from_trash(work)
        if source is not None:
            _from_store(work, source)
        if recipe is not None and work.open:
            _from_recipe(work, recipe, devices, progress or (lambda _rows, _bytes: None))
        _forget_records(work)
        session.sync()
        left += [_explained(work, digest, problem) for (_, digest), problem in work.open.items()]
    return RepairReport(tuple(work.mended), tuple(left), tuple(work.quarantined), time.perf_counter() - began)


def _forget_records(work: _Work) -> None:
    """Who built a snapshot and when is no function of anything: what cannot be fetched, the reflog names no more."""
    for family, digest in list(work.open):
        if family == "meta":
            with work.store.leases.store_lock(exclusive=False):
                if work.store.refs.forget_record(digest):
                    work.settle(family, digest, "forgotten")


def _explained(work: _Work, digest: Digest, problem: Problem) -> Problem:
    if digest not in work.why:
        return replace(problem, message=f"{problem.message}; nothing given here makes it")
    message, hint = work.why[digest]
    return replace(problem, message=f"{problem.message}; not mended: {message}", hint=hint)


def _object_of(problem: Problem) -> tuple[str, Digest] | None:
    """(family, digest) of the object that a problem is about; None if it is about something else."""
    if problem.kind not in {"corrupt", "missing"}:
        return None
    try:
        digest = Digest.parse(problem.object)
    except Invalid:
        return None
    family = Path(problem.path).parent.parent.name
    return (family, digest) if family in {"objects", "meta"} else None


def _set_aside(work: _Work, problem: Problem, family: str, digest: Digest) -> bool:
    """Put a corrupt file into quarantine; False if its bytes are right after all."""
    if problem.kind == "missing":
        return True
    objects = work.store.objects
    try:
        if family == "meta":
            sound = objects.kind_of(digest) is not None
        else:
            objects.rehash(digest, family)
            sound = True
    except Missing:
        return True
    except Corrupt:
        sound = False
    if not sound:
        work.quarantined.append(str(objects.quarantine(digest, family)))
        work.store.index.drop([digest.raw])
    return not sound


def _from_trash(work: _Work) -> None:
    """What a collection put into the trash comes back when it is reserved, if it is still right."""
    for family in ("objects", "meta"):
        mine = [digest for each, digest in work.open if each == family]
        for digest, there in zip(mine, work.session.reserve(mine, family), strict=True):
            if there and work.store.objects.is_sound(digest, family):
                work.settle(family, digest, "trash")


# ---- from another store ----


def _from_store(work: _Work, source: Store) -> None:
    for family, digest in list(work.open):
        try:
            if family == "meta":
                _copy_meta(work, source, digest)
            else:
                _copy_blob(work, source, digest)
        except (Missing, Corrupt) as error:
            work.why[digest] = (f"{source.path}: {error.message}", error.hint)
        else:
            work.settle(family, digest, "store")


def _copy_meta(work: _Work, source: Store, digest: Digest) -> None:
    kind = source.objects.kind_of(digest)
    if kind is None:
        raise source.objects.missing(digest, "meta")
    work.session.put_meta(kind, source.objects.read_meta(digest, kind))


def _copy_blob(work: _Work, source: Store, digest: Digest) -> None:
    found = source.objects.stat(digest, "objects")
    if found is None:
        raise source.objects.missing(digest, "objects")
    carry(source, work.session, Blob(digest, found.size))


# ---- from the recipe ----


def _from_recipe(work: _Work, recipe: Recipe, devices: Sequence[str], progress: Callable[[int, int], None]) -> None:
    options = Options(devices=tuple(devices))
    snapshots = _snapshots(work)
    for limit in _limits(work.store, snapshots):
        prepared = prepare(work.store, recipe, replace(options, limit=limit), session=work.session)
        _settle_present(work)
        cells = _cells(work, prepared, snapshots)
        if cells:
            _make(work, prepared, limit, cells, progress)
        if not work.open:
            return
    if any(family == "meta" for family, _ in work.open) and not any(f == "objects" for f, _ in work.open):
        _rebuild_meta(work, recipe, snapshots, devices)


def _snapshots(work: _Work) -> dict[Digest, Snapshot]:
    """The snapshots that are hurt and can be read."""
    result: dict[Digest, Snapshot] = {}
    named = {text for problem in work.open.values() for text in problem.snapshots}
    for text in sorted(named):
        try:
            result[Digest.parse(text)] = work.store.snapshot(Digest.parse(text))
        except (Missing, Corrupt):
            continue
    return result


def _limits(store: Store, snapshots: Mapping[Digest, Snapshot]) -> list[int | None]:
    """The whole stream, then as many rows as each hurt snapshot had: a last shard depends on where the stream ended."""
    limits: list[int | None] = [None]
    for snapshot in snapshots.values():
        try:
            rows = store.rows_root(snapshot)
        except (Missing, Corrupt):
            continue
        if rows is not None and rows.count not in limits:
            limits.append(rows.count)
    return limits


def _settle_present(work: _Work) -> None:
    """Constants are stored by preparing; they are no column's."""
    for digest in [digest for family, digest in work.open if family == "objects"]:
        if work.store.objects.stat(digest, "objects") is not None:
            work.settle("objects", digest, "recipe")


def _readable_shards(store: Store, snapshot: Snapshot) -> Iterable[Shard]:
    """The shards of a snapshot whose pages can be read."""
    try:
        yield from store.shards(snapshot)
    except (Missing, Corrupt):
        return


def _cells(work: _Work, prepared: Prepared, snapshots: Mapping[Digest, Snapshot]) -> dict[int, dict[str, Digest]]:
    """Shard of the plan → column → the digest that is wanted of it."""
    wanted = {digest for family, digest in work.open if family == "objects"}
    names = {column.name for column in prepared.plan.columns}
    cells: dict[int, dict[str, Digest]] = {}
    for snapshot in snapshots.values():
        refused = pins_that_differ(snapshot, prepared)
        for at, shard in enumerate(_readable_shards(work.store, snapshot)):
            place = place_of(prepared.plan, at, shard)
            for column, blob in zip(snapshot.columns, shard.blobs, strict=True):
                if blob.digest not in wanted:
                    continue
                if column.name not in names:
                    work.why[blob.digest] = (
                        f"the recipe has no column {column.name!r}", "give the recipe that the snapshot was made with",
                    )  # fmt: skip
                elif place is None:
                    work.why.setdefault(blob.digest, (
                        "the recipe's data has no such shard: other rows, batches or cut",
                        "give the recipe and the data that the snapshot was made with",
                    ))  # fmt: skip
                elif refused:
                    work.why[blob.digest] = (
                        f"the recipe makes something else: {', '.join(refused)} differ",
                        "give the recipe, the teacher and the data that the snapshot was made with",
                    )  # fmt: skip
                else:
                    cells.setdefault(place, {})[column.name] = blob.digest
    return cells


def _make(
    work: _Work, prepared: Prepared, limit: int | None, cells: Mapping[int, Mapping[str, Digest]],
    progress: Callable[[int, int], None],
) -> None:  # fmt: skip
    """Capture the cells, and keep what comes out as wanted."""
    plan = prepared.plan
    tasks = [
        Task(plan.shards[shard], tuple(wanted for wanted in plan.columns if wanted.name in names))
        for shard, names in sorted(cells.items())
    ]
    if any(task.by_teacher for task in tasks):
        prepared.source.load()

    def finish(captured: Captured) -> None:
        expected = cells[captured.shard.index]
        came = captured.draft.keep_expected(expected)
        work.session.sync()
        for name, blob in came.items():
            if blob.digest == expected[name]:
                if ("objects", blob.digest) in work.open:
                    work.settle("objects", blob.digest, "recipe")
            else:
                came_out = f"{name} of shard {captured.shard.index} comes out as {blob.digest.short} here"
                work.why[expected[name]] = (
                    f"{came_out}: {platform_text(prepared)}",
                    "repair it on the platform that the record names (`zgstore log`), or `--from` another store",
                )

    run = Run(
        session=work.session, source=prepared.source, inputs=prepared.inputs, limit=limit, finish=finish,
        tick=progress, constants={constant.name: constant.blob.raw for constant in prepared.constants},
    )  # fmt: skip
    run_tasks(run, tasks)


def _rebuild_meta(work: _Work, recipe: Recipe, snapshots: Mapping[Digest, Snapshot], devices: Sequence[str]) -> None:
    """Pages and snapshots are functions of what they list: a build that finds everything writes them again."""
    for limit in _limits(work.store, snapshots):
        for policy in ("error", "drop"):
            try:
                build(work.store, recipe, ref=None, limit=limit, devices=devices, on_nonfinite=policy)
            except (NoSpace, Transient):  # of the disk, and not of what it should hold
                raise
            except ZgError as error:
                for family, digest in work.open:
                    if family == "meta":
                        work.why.setdefault(digest, (error.message, error.hint))
                continue
            for family, digest in list(work.open):
                if family == "meta" and work.store.objects.stat(digest, "meta") is not None:
                    work.settle("meta", digest, "recipe")
            if not work.open:
                return
