"""A build: from a recipe to a snapshot, doing only what is missing.

The way of the data, and the module that does each step::

    recipe ─ inputs ──→ the stream read ahead: digests, lengths and ids of every batch
             identity → which data (refused if a row changed under the same pins),
                        which teacher (found again by its files and code, else loaded and measured)
             planner ─→ shards × columns → keys → actions: hits and misses; a hit's blob is reserved, then looked for
             execution → for each shard with a miss: hooks at the missing points, batch by batch …
             shards ──→ … to two threads that hash and write
                        durable first the shard's blobs, then its actions, then the entry that followers read
             publication → pages, snapshot, record, ref

Resume, append, no-op, new columns, workers and repair are this one way: they differ in what is missing. The teacher is
loaded when one of its columns is missing, and at no other time. What was measured is kept once something made with it
is durable, so that a build that fails at its first batch binds nobody to its pins.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from zgstore.building import lockfile
from zgstore.building.execution import Captured, Run, Task, run_tasks
from zgstore.building.explanation import Why
from zgstore.building.explanation import explain as explain_plan
from zgstore.building.planner import ANY_PLATFORM, BuildPlan, left_out_key, recipe_digest
from zgstore.building.preparation import (
    Options,
    Prepared,
    Progress,
    extractor_stem,
    left_out_of,
    prepare,
    tasks_of,
)
from zgstore.building.publication import Assembled, assemble, nonfinite_error, publish, record_of
from zgstore.building.recall import Found, remember
from zgstore.building.recipe import Recipe, load_recipe
from zgstore.building.rehearsal import already_there, compare, is_of, known_bytes, lock_of, rehearse
from zgstore.building.report import BuildReport
from zgstore.errors import Invalid, NoSpace
from zgstore.format.action import Action
from zgstore.format.digest import Digest
from zgstore.format.fields import pack_u64
from zgstore.format.manifest import Column, Record, Snapshot
from zgstore.format.pages import Shard
from zgstore.storage.builds import BuildFile
from zgstore.storage.memos import platform_tag
from zgstore.storage.store import Session, Store

DEFAULT_REF: Final = ""
POLICIES: Final = ("error", "drop")


def build(
    store: Store,
    recipe: Recipe | str | Path,
    *,
    ref: str | None = DEFAULT_REF,
    limit: int | None = None,
    worker: tuple[int, int] | None = None,
    devices: Sequence[str] = (),
    check_teacher: bool = False,
    on_nonfinite: str = "error",
    locked: bool = False,
    dry_run: bool = False,
    explain: bool = False,
    progress: Callable[[Progress], None] | None = None,
    stop: Callable[[], bool] | None = None,
    circumstance: Mapping[str, Any] | None = None,
) -> BuildReport:
    """Run the teacher where something is missing, publish the snapshot and move the ref.

    Args:
        store: Where it goes.
        recipe: A recipe, or the path of one.
        ref: The ref to move; the recipe's stem if not given (with ``limit`` none); None moves none.
        limit: Exactly so many rows, the last batch cut.
        worker: (I, N): only the shards whose number is I modulo N; no snapshot, and no ref whatever ``ref`` says.
        devices: Where the teacher runs; a replica on each. Empty: where its factory puts it.
        check_teacher: Load and measure the teacher even if nothing is missing.
        on_nonfinite: ``error``, or ``drop``: mask rows whose boundaries are not finite.
        locked: Compare with the lock file beside the recipe; see ``BuildReport.locked``.
        dry_run: Only plan.
        explain: Fill ``BuildReport.explain``.
        progress: Called as the build goes on; with several devices from several threads.
        stop: Asked before each shard whether to end.
        circumstance: Further fields of the record: ``command``, ``ci``, ``message``, …

    Returns:
        What was done.

    Raises:
        Invalid: for a recipe, a batch or a capture that makes no sense.
        Refused: if the data or the teacher is not what an earlier build measured under the same pins.
        NonFinite, NoSpace, Conflict, Interrupted: as they say; what is durable stays, and a rerun goes on from there.
    """
    if not isinstance(recipe, Recipe):
        recipe = load_recipe(recipe)
    if on_nonfinite not in POLICIES:
        raise Invalid(f"on_nonfinite is {on_nonfinite!r}", hint=f"one of {', '.join(POLICIES)}")
    if worker is not None and not 0 <= worker[0] < worker[1]:
        raise Invalid(f"there is no worker {worker[0]} of {worker[1]}", hint="workers count from 0: 0/4 … 3/4")
    if ref == DEFAULT_REF:
        ref = recipe.name if limit is None else None
    options = Options(
        ref=ref if worker is None else None, limit=limit, worker=worker, devices=tuple(devices),
        check_teacher=check_teacher, on_nonfinite=on_nonfinite, explain=explain,
        progress=progress or (lambda _: None), stop=stop or (lambda: False), circumstance=dict(circumstance or {}),
    )  # fmt: skip
    if options.ref is not None:
        store.refs.check(options.ref)
    lock = lock_of(recipe, ref) if locked else None
    if lock is not None and store.objects.stat(lock.snapshot, "meta") is not None:
        return already_there(store, lock, ref)
    if dry_run:
        return rehearse(store, recipe, options)
    with store.writing(f"build {recipe.name}"[:100]) as session:
        return _Build(session, recipe, options, lock).run()


# ---- doing ----


class _Build:
    """One build, from plan to ref; what it is in the middle of."""

    def __init__(self, session: Session, recipe: Recipe, options: Options, lock: lockfile.Locked | None) -> None:
        self.session = session
        self.store = session.store
        self.recipe = recipe
        self.options = options
        self.lock = lock
        self.began = time.perf_counter()
        # The ref as it is now: if it has moved when this build publishes, somebody else's work would be hidden.
        self.expect = self.store.refs.get(options.ref, "head") if options.ref else None
        self.found: list[list[Found | None]] = []
        self.built: set[tuple[int, int]] = set()
        self.rows = 0
        self.follow: BuildFile | None = None
        self.followed = 0
        self.telling = threading.Lock()
        self.remembered = False
        self.prepared: Prepared

    def run(self) -> BuildReport:
        self.prepared = prepared = prepare(self.store, self.recipe, self.options, session=self.session)
        plan = prepared.plan
        why = explain_plan(self.store, plan, self.expect) if self.options.explain else ()
        self.found = [list(actions) for actions in plan.found]
        tasks = tasks_of(plan, self.options.worker)
        run = Run(
            session=self.session, source=prepared.source, inputs=prepared.inputs, limit=self.options.limit,
            finish=self._durable, refresh=self._adopt, stop=self.options.stop, tick=self._tick(tasks),
            constants={constant.name: constant.blob.raw for constant in prepared.constants},
            columns=tuple(wanted.name for wanted in plan.columns) if self.recipe.capture.extractor else (),
        )  # fmt: skip
        try:
            if tasks:
                self.store.check_space(known_bytes(plan, tasks))
                run_tasks(run, tasks)
            prepared.source.close()
            self._remember()
            if self.options.worker is not None:
                return self._report(run, None, why)
            self.options.progress(Progress("publishing"))
            return self._publish(run, why)
        except NoSpace as error:
            if "needed_bytes" not in error.fields:  # a disk that fills up meanwhile does not say what is needed
                self.store.check_space(self._still_needed(run))
            raise
        finally:
            if self.follow is not None:
                self.follow.close()

    def _still_needed(self, run: Run) -> int:
        """Bytes of the blobs that are not there yet: as what is there shows them, else as the first batch did."""
        plan = replace(self.prepared.plan, found=tuple(map(tuple, self.found)))
        return max(known_bytes(plan, tasks_of(plan, self.options.worker)), run.needed_bytes - self.session.new_bytes)

    def _tick(self, tasks: Sequence[Task]) -> Callable[[int, int], None]:
        total = sum(task.shard.rows for task in tasks)
        handed = 0

        def tick(rows: int, size: int) -> None:
            nonlocal handed
            self.rows += rows
            handed += size
            build = self.session.uuid if self.follow is not None else ""
            self.options.progress(Progress("shards", self.rows, total, handed, build))

        return tick

    def _tag(self, column: int) -> str:
        plan = self.prepared.plan
        return platform_tag(plan.platform if plan.columns[column].source == "teacher" else ANY_PLATFORM)

    def _places(self, task: Task | Captured) -> list[int]:
        place = {wanted.name: at for at, wanted in enumerate(self.prepared.plan.columns)}
        return [place[wanted.name] for wanted in task.wanted]

    def _adopt(self, task: Task) -> Task:
        """What another build has made of this shard since the plan is taken from it."""
        plan, shard, left = self.prepared.plan, task.shard.index, []
        for column in self._places(task):
            action = self.store.memos.action(plan.key(column, shard), self._tag(column))
            if action is not None and self.session.reserve([action.blob]) == [True]:
                self.found[column][shard] = Found.of(action)
            else:
                left.append(plan.columns[column])
        if not left:
            self._tell()
        return Task(task.shard, tuple(left))

    def _durable(self, captured: Captured) -> None:
        """A whole shard: first its blobs in one go, then its actions, then the entry for followers."""
        shard, plan = captured.shard, self.prepared.plan
        self._refuse_nonfinite(captured)
        # 1. blobs: finished, reserved, placed
        stored = captured.draft.keep()
        # 2. their names
        self.session.sync()
        # 3. what they were made with and of
        self._remember()
        if captured.left_out:
            rows = sorted(captured.left_out)
            value = {
                "kind": "left-out",
                "rows": pack_u64([row - shard.first_row for row in rows]),
                "reasons": [captured.left_out[row] for row in rows],
            }
            self.store.memos.put_measurement(left_out_key(extractor_stem(plan), shard), value)
        by_teacher = sum(wanted.source == "teacher" for wanted in captured.wanted) or 1
        for column, each in zip(self._places(captured), stored, strict=True):
            teachers = plan.columns[column].source == "teacher"
            action = Action(
                key=plan.key(column, shard.index),
                blob=each.blob,
                rows=each.rows,
                dtype=each.column.dtype,
                shape=each.column.shape,
                platform=plan.platform if teachers else ANY_PLATFORM,
                nonfinite=each.nonfinite,
                statistics=each.statistics,
                seconds=captured.seconds / by_teacher if teachers else 0.0,
            )
            self._settle(column, shard.index, action)
        # 4. followers
        self._tell()

    def _settle(self, column: int, shard: int, action: Action) -> None:
        """Keep the action; a builder that loses a race adopts the winner's, after reserving it."""
        winner = self.store.memos.action(action.key, self._tag(column))
        lost = winner is not None and winner.blob != action.blob and self.session.reserve([winner.blob]) == [True]
        if winner is None or not lost:
            self.store.memos.put_action(action, self._tag(column))
            winner = action
        self.found[column][shard] = Found.of(winner)
        self.built.add((column, shard))

    def _refuse_nonfinite(self, captured: Captured) -> None:
        if self.options.on_nonfinite == "drop":
            return
        bad = captured.draft.check()
        for wanted in captured.wanted:
            if wanted.name in bad:
                rows, shown = bad[wanted.name]
                captured.draft.discard()
                first = captured.shard.first_row
                raise nonfinite_error({first + row: f"{wanted.name} is not finite" for row in rows}, shown=shown)

    def _remember(self) -> None:
        """Keep what was measured: rows, teacher, trajectory."""
        if self.remembered:
            return
        prepared, memos = self.prepared, self.store.memos
        if prepared.data.grows(self.store):
            for page in prepared.data.pages:
                self.session.put_meta("page", page.encode())
            self.session.put_meta("page", prepared.data.root.encode())
            self.session.sync()
            memos.put_measurement(prepared.data.key, prepared.data.value())
        if prepared.source.measurement is not None:
            memos.put_measurement(prepared.source.memo.key, prepared.source.measurement)
        if prepared.trajectory is not None:
            key, value = prepared.trajectory
            if memos.measurement(key) is None:
                memos.put_measurement(key, value)
        self.remembered = True

    def _tell(self) -> None:
        """Tell followers of each shard that is durable with all before it."""
        if self.options.worker is None:
            # Both the writing thread and one that adopts another build's shard come here.
            with self.telling:
                self._tell_in_order()

    def _tell_in_order(self) -> None:
        plan = self.prepared.plan
        while self.followed < len(plan.shards):
            actions = [mine[self.followed] for mine in self.found]
            if None in actions:
                return
            whole = [action for action in actions if action is not None]
            if self.follow is None:
                columns = [
                    wanted.column(action.dtype, action.shape)
                    for wanted, action in zip(plan.columns, whole, strict=True)
                ]
                self.follow = self.store.memos.start_build(self.session.uuid, self._head(columns))
            shard = plan.shards[self.followed]
            self.follow.append(Shard(whole[0].rows, shard.inputs, tuple(action.blob for action in whole)))
            self.followed += 1

    def _head(self, columns: Sequence[Column]) -> dict[str, Any]:
        plan = self.prepared.plan
        return {
            "kind": "build",
            "pins": {"teacher": plan.pins.teacher, "data": plan.pins.data, "capture": plan.pins.capture},
            "data": plan.pins.data["digest"],
            "columns": [column.as_value() for column in columns],
            "constants": [constant.as_value() for constant in self.prepared.constants],
            "cut": self.recipe.storage.batches_per_shard,
            "total_rows": self.prepared.inputs.rows,
            "total_shards": len(plan.shards),
        }

    def _publish(self, run: Run, why: tuple[Why, ...]) -> BuildReport:
        prepared = self.prepared
        plan = replace(prepared.plan, found=tuple(tuple(mine) for mine in self.found))
        cut = self.recipe.storage.batches_per_shard
        left_out = left_out_rows(self.store, plan) if prepared.source.extractor is not None else {}
        assembled = assemble(
            plan, prepared.data.tree, prepared.constants, left_out, cut=cut, on_nonfinite=self.options.on_nonfinite
        )
        recipe = digest_of_recipe(self.recipe, assembled.snapshot, self.options)
        locked = compare(self.store, self.lock, assembled, recipe) if self.lock else None
        # A build that was to reproduce a locked snapshot and did not moves no ref.
        ref = self.options.ref if locked in {None, "same"} else None
        circumstance = {
            **self.options.circumstance,
            "drop": self.options.on_nonfinite == "drop",
            "devices": max(1, len(self.options.devices)),
        }

        def record() -> Record:
            durations: Mapping[str, float] = self._seconds(run)
            before = None if self.built else self.store.record_of(assembled.digest)
            if before is not None:  # it took what it took: that all of it was there again costs it nothing
                durations = before.fields.get("durations", {})
                circumstance["devices"] = before.fields.get("devices", 1)
            return record_of(
                self.store, assembled, plan, recipe, parent=self.expect, durations=durations, circumstance=circumstance
            )

        if self.built or not plan.recalled:
            remember(
                self.store.memos, plan.stems(), plan.tags(), plan.names(), platforms=plan.platforms(), found=plan.found
            )
        publish(self.session, assembled, ref=ref, expect=self.expect, record=record)
        if self.follow is not None:
            self.follow.finish(assembled.digest)
        report = self._report(run, assembled, why)
        return replace(report, recipe=recipe, ref=ref, locked=locked)

    def _seconds(self, run: Run) -> dict[str, float]:
        return {
            "inputs": self.prepared.inputs.seconds,
            "teacher": run.teacher_seconds + run.source.seconds,
            "store": run.store_seconds,
            "total": time.perf_counter() - self.began,
        }

    def _report(self, run: Run, assembled: Assembled | None, why: tuple[Why, ...]) -> BuildReport:
        plan, source = self.prepared.plan, self.prepared.source
        shards = [s.index for s in plan.shards if self.options.worker is None or is_of(self.options.worker, s)]
        built_shards, built_columns = {s for _, s in self.built}, {c for c, _ in self.built}
        total = assembled.total_bytes if assembled else sum(
            action.blob.size for mine in self.found for action in mine if action is not None
        )  # fmt: skip
        samples = assembled.snapshot.samples if assembled else sum(plan.shards[s].rows for s in shards)
        return BuildReport(
            snapshot=assembled.digest if assembled else None,
            recipe=None,
            pins=plan.pins.digest(),
            ref=None,
            samples=samples,
            teacher=source.identity.certainty if source.identity else "unknown",
            teacher_loaded=source.loaded,
            shards_built=len(built_shards),
            shards_reused=len(shards) - len(built_shards),
            columns_built=len(built_columns),
            columns_reused=len(plan.columns) - len(built_columns),
            new_bytes=self.session.new_bytes,
            total_bytes=total,
            seconds=self._seconds(run),
            explain=why,
            dropped=len(assembled.dropped.masked) + len(assembled.dropped.left_out) if assembled else 0,
        )


def left_out_rows(store: Store, plan: BuildPlan) -> dict[int, str]:
    """All rows that the extractor left out: stream index → reason."""
    result: dict[int, str] = {}
    for shard in plan.shards:
        action = plan.found[0][shard.index]
        if action is not None and action.rows < shard.rows:
            result |= left_out_of(store, plan, shard) or {}
    return result


def digest_of_recipe(recipe: Recipe, snapshot: Snapshot, options: Options) -> Digest:
    """The recipe digest of a snapshot that a recipe gave."""
    return recipe_digest(
        snapshot.pins, snapshot.columns, cut=recipe.storage.batches_per_shard, on_nonfinite=options.on_nonfinite,
        limit=options.limit, constants=recipe.capture.constants,
    )  # fmt: skip
