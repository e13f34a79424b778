"""A snapshot computed again on some of its shards: whether the teacher still gives the same bits. Nothing is stored."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from zgstore.building.execution import Captured, Run, Task, run_tasks
from zgstore.building.explanation import pin_changes
from zgstore.building.planner import BuildPlan
from zgstore.building.preparation import Options, Prepared, prepare, stream_rows
from zgstore.building.recipe import Recipe, load_recipe
from zgstore.errors import Invalid
from zgstore.format.digest import Digest
from zgstore.format.manifest import Snapshot
from zgstore.format.pages import Shard
from zgstore.storage.store import Store
from zgstore.upkeep.survey import Problem

# Pins that say what else is in a snapshot, and change no bit of a column.
_HARMLESS: Final = ("data.digest", "data.revision", "data.id", "teacher.id", "teacher.revision")


@dataclass(frozen=True, slots=True)
class RecomputeReport:
    """What a recomputation found.

    Args:
        shards: Shards that the teacher was run on.
        blobs: Blobs that were compared.
        problems: Those that came out otherwise.
        seconds: Wall time.
    """

    shards: int
    blobs: int
    problems: tuple[Problem, ...]
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """The JSON object."""
        return {
            "ok": not self.problems,
            "shards": self.shards,
            "blobs": self.blobs,
            "seconds": self.seconds,
            "problems": [problem.as_json() for problem in self.problems],
        }


def place_of(plan: BuildPlan, at: int, shard: Shard) -> int | None:
    """Which shard of a plan is shard ``at`` of a snapshot: the same inputs, at the same place if it can be."""
    if at < len(plan.shards) and plan.shards[at].inputs == shard.inputs:
        return at
    return next((each.index for each in plan.shards if each.inputs == shard.inputs), None)


def pins_that_differ(snapshot: Snapshot, prepared: Prepared) -> list[str]:
    """The pins that decide bits and are other ones in a plan than in a snapshot."""
    return [
        name
        for name in pin_changes(snapshot.pins, prepared.plan.pins)
        if name not in _HARMLESS and not name.startswith(("capture.boundaries", "capture.outputs", "data.pins"))
    ]


def platform_text(prepared: Prepared) -> str:
    """Why bits may differ although the pins do not."""
    here = ", ".join(f"{name} {value}" for name, value in sorted(prepared.plan.platform.items()))
    return f"another platform ({here}), or a teacher that is not reproducible"


def recompute(
    store: Store,
    rev: str | Digest,
    recipe: Recipe | str | Path,
    count: int,
    *,
    devices: Sequence[str] = (),
    progress: Callable[[int, int], None] | None = None,
) -> RecomputeReport:
    """Run the teacher again on some shards of a snapshot, spread over it, and compare bits. Nothing is stored.

    Args:
        store: Who has it.
        rev: The snapshot.
        recipe: What made it.
        count: How many shards; all if there are fewer.
        devices: Where the teacher runs.
        progress: Told (rows, bytes) as they are recomputed.

    Raises:
        Invalid: if the recipe makes another snapshot; the message names the pins.
    """
    recipe = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    began = time.perf_counter()
    digest = rev if isinstance(rev, Digest) else store.resolve(rev)
    snapshot = store.snapshot(digest)
    shards = list(store.shards(snapshot))
    chosen = _spread(len(shards), count)
    problems: list[Problem] = []
    with store.writing("recompute") as session:
        options = Options(devices=tuple(devices), limit=stream_rows(store, snapshot))
        prepared = prepare(store, recipe, options, session=session)
        _same_or_invalid(snapshot, prepared)
        prepared.source.load()
        plan = prepared.plan
        names = {column.name: at for at, column in enumerate(snapshot.columns)}
        wanted = tuple(each for each in plan.columns if each.name in names)
        places = {place_of(plan, at, shards[at]): at for at in chosen}
        tasks = [Task(plan.shards[place], wanted) for place in places if place is not None]
        if len(tasks) < len(chosen):
            raise Invalid("the recipe's data has not the shards of this snapshot", hint="use the data it was made of")

        def finish(captured: Captured) -> None:
            mine = shards[places[captured.shard.index]]
            for name, blob in captured.draft.keep_expected({}).items():
                expected = mine.blobs[names[name]].digest
                if blob.digest != expected:
                    came_out = f"{name} of shard {captured.shard.index} comes out as {blob.digest.short}"
                    problems.append(_differs(store, digest, expected, f"{came_out}: {platform_text(prepared)}"))

        run = Run(
            session=session, source=prepared.source, inputs=prepared.inputs, limit=options.limit, finish=finish,
            tick=progress or (lambda _rows, _bytes: None),
            constants={constant.name: constant.blob.raw for constant in prepared.constants},
        )  # fmt: skip
        run_tasks(run, tasks)
    return RecomputeReport(len(tasks), len(tasks) * len(wanted), tuple(problems), time.perf_counter() - began)


def _spread(total: int, count: int) -> list[int]:
    if count >= total:
        return list(range(total))
    if count == 1:
        return [total // 2]
    return sorted({round(at * (total - 1) / (count - 1)) for at in range(count)})


def _same_or_invalid(snapshot: Snapshot, prepared: Prepared) -> None:
    differ = pins_that_differ(snapshot, prepared)
    if differ:
        raise Invalid(
            f"this recipe makes another snapshot: {', '.join(differ)} differ",
            hint="give the recipe, the teacher and the data that the snapshot was made with",
        )


def _differs(store: Store, snapshot: Digest, expected: Digest, message: str) -> Problem:
    return Problem(
        kind="differs",
        object=str(expected),
        path=str(store.objects.path(expected, "objects")),
        snapshots=(str(snapshot),),
        refs=tuple(ref.name for ref in store.refs.list() if ref.snapshot == snapshot),
        hint="compare the platforms that `zgstore log` shows with this one; a teacher can be made reproducible by "
        "deterministic algorithms",
        message=message,
    )
