"""What a build would cost, and what a teacher offers, before anything is stored."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from zgstore.building.capture import Point
from zgstore.building.capture import points as points_of
from zgstore.building.execution import TeacherSource, columns_beside, first_sample, outline_of
from zgstore.building.inputs import is_ragged
from zgstore.building.planner import BuildPlan, Wanted, columns_of
from zgstore.building.preparation import Options, Prepared, look, prepare
from zgstore.building.recall import Found
from zgstore.building.recipe import Recipe, load_recipe
from zgstore.building.rows import Batch, SampleBatch, check_batch
from zgstore.errors import Invalid
from zgstore.format.blobheader import layout_of_column
from zgstore.format.manifest import Column
from zgstore.format.tensorfile import NAME_OF, TORCH_OF
from zgstore.storage.store import Store

GOOD_BLOB_BYTES: Final = 32 << 20


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a build would store.

    Args:
        samples: Rows of the stream.
        shards: How many.
        columns: Bytes of each column, in the snapshot's order.
        new_bytes: What is not there yet.
        free_bytes: Of the store's disk.
        teacher: How shapes were found: ``known`` (from earlier actions), ``skeleton`` or ``loaded``.
        batches_per_shard: What would make the largest column's blobs about 32 MiB.
    """

    samples: int
    shards: int
    columns: Mapping[str, int]
    new_bytes: int
    free_bytes: int
    teacher: str
    batches_per_shard: int

    def as_value(self) -> dict[str, Any]:
        """The JSON object."""
        return {
            "samples": self.samples,
            "shards": self.shards,
            "columns": dict(self.columns),
            "bytes": {"new": self.new_bytes, "total": sum(self.columns.values()), "free": self.free_bytes},
            "teacher": self.teacher,
            "teacher_loaded": self.teacher == "loaded",
            "batches_per_shard": self.batches_per_shard,
        }


@dataclass(frozen=True, slots=True)
class Offer:
    """The hook points of a teacher for its first batch, and how they were found: ``skeleton`` or ``loaded``."""

    points: tuple[Point, ...]
    teacher: str

    def as_value(self) -> dict[str, Any]:
        """The JSON object."""
        return {
            "points": [
                {"name": p.name, "shape": list(p.shape), "dtype": p.dtype, "calls": p.calls} for p in self.points
            ],
            "teacher": self.teacher,
            "teacher_loaded": self.teacher == "loaded",
        }


def estimate(store: Store, recipe: Recipe | str | Path, *, limit: int | None = None) -> Estimate:
    """What a build would store; without weights if the recipe has a skeleton or was built before.

    Args:
        store: Where it would go.
        recipe: A recipe, or the path of one.
        limit: As for `build`.
    """
    recipe = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    options = Options(limit=limit)
    prepared = prepare(store, recipe, options, session=None)
    columns, how = prepared.plan.known_columns(), "known"
    if not columns or None in columns:
        if recipe.teacher.skeleton is not None and prepared.source.extractor is None:
            columns, how = _by_skeleton(recipe, prepared), "skeleton"
        else:
            prepared, columns = _by_loading(store, prepared, options)
            how = "loaded"
    whole = [column for column in columns if column is not None]
    plan = prepared.plan
    sizes = {
        column.name: [layout_of_column(column, rows=shard.rows, tokens=shard.tokens).file_size for shard in plan.shards]
        for column in whole
    }
    new_bytes = sum(sizes[plan.columns[c].name][shard.index] for shard, missing in plan.tasks() for c in missing)
    disk = os.statvfs(store.path)
    return Estimate(
        samples=prepared.inputs.rows,
        shards=len(plan.shards),
        columns={name: sum(mine) for name, mine in sizes.items()},
        new_bytes=new_bytes,
        free_bytes=disk.f_bavail * disk.f_frsize,
        teacher=how,
        batches_per_shard=_advice(plan, whole),
    )


def _advice(plan: BuildPlan, columns: Sequence[Column]) -> int:
    first = plan.shards[0]
    largest = max(layout_of_column(c, rows=first.rows, tokens=first.tokens).file_size for c in columns)
    return max(1, round(GOOD_BLOB_BYTES * first.batches / largest))


def points(recipe: Recipe | str | Path) -> Offer:
    """The hook points that the teacher offers for its first batch, with shapes; without weights if there is a skeleton.

    Args:
        recipe: A recipe, or the path of one.
    """
    recipe = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    batch = _first_batch(recipe)
    if recipe.teacher.skeleton is not None:
        return Offer(tuple(_fake_points(recipe, batch)), "skeleton")
    module = recipe.teacher.load()
    if not isinstance(module, torch.nn.Module):
        raise Invalid(
            f"the teacher is a {type(module).__name__}, not a torch.nn.Module", hint="return the model itself"
        )
    return Offer(tuple(points_of(module.eval(), batch)), "loaded")


def _first_batch(recipe: Recipe) -> Batch:
    for batch in recipe.data.batches():
        check_batch(batch, constants=recipe.capture.constants, what=repr(recipe.data.factory.text))
        return batch  # type: ignore[no-any-return]
    raise Invalid("the data factory gave no rows", hint="see that its files are there and not empty")


def _fake_points(recipe: Recipe, batch: Batch) -> list[Point]:
    """The points of the skeleton: shapes are computed and no value is."""
    with FakeTensorMode() as mode:
        module = recipe.teacher.load_skeleton()
        fake = {key: mode.from_tensor(v) if isinstance(v, Tensor) else v for key, v in batch.items()}
        return points_of(module, fake)


def _by_skeleton(recipe: Recipe, prepared: Prepared) -> list[Column | None]:
    batch = _first_batch(recipe)
    found = {point.name: point for point in _fake_points(recipe, batch)}
    result: list[Column | None] = []
    for wanted in prepared.plan.columns:
        if wanted.known is not None:
            result.append(wanted.known)
            continue
        if wanted.name not in found:
            raise Invalid(f"the skeleton has no point {wanted.name!r}", hint="see `zgstore points`")
        result.append(_of_point(recipe, batch, wanted, found[wanted.name]))
    return result


def _of_point(recipe: Recipe, batch: Batch, wanted: Wanted, point: Point) -> Column:
    capture, shape = recipe.capture, point.shape
    ragged = False
    if capture.lengths is not None:
        positions = batch[capture.lengths].shape[1:]
        ragged = wanted.role == "boundary" or wanted.name in capture.sequence
        ragged = ragged or (len(shape) > 2 and shape[1:2] == positions)
    floating = point.dtype in TORCH_OF and TORCH_OF[point.dtype].is_floating_point
    dtype = wanted.dtype if wanted.dtype and floating else point.dtype
    return wanted.column(dtype, (None, *shape[2:]) if ragged else tuple(shape[1:]))


def _by_loading(store: Store, prepared: Prepared, options: Options) -> tuple[Prepared, list[Column | None]]:
    """Load the teacher and run it over the first batch; what is found to be there by now is counted."""
    source = prepared.source
    sample = first_sample(source, prepared.inputs, limit=options.limit)
    again = look(store, source, prepared.inputs, prepared.data, options=options, session=None)
    if source.extractor is not None and not again.plan.columns and source.identity is not None:
        columns = columns_of(
            source.recipe, prepared.inputs, source.identity, extractor=source.extractor,
            outline=outline_of(sample),
        )  # fmt: skip
        found: tuple[tuple[Found | None, ...], ...] = tuple((None,) * len(again.plan.shards) for _ in columns)
        again = replace(again, plan=replace(again.plan, columns=columns, found=found))
    return again, [_of_sample(source, wanted, sample) for wanted in again.plan.columns]


def _of_sample(source: TeacherSource, wanted: Wanted, sample: SampleBatch) -> Column:
    if wanted.known is not None:
        return wanted.known
    tensor = {**sample.columns, **sample.outputs, **columns_beside(sample)}[wanted.name]
    dtype = wanted.dtype if wanted.dtype and tensor.is_floating_point() else NAME_OF[tensor.dtype]
    capture = source.recipe.capture
    ragged = wanted.name in sample.packed or (
        wanted.role == "context" and wanted.name not in sample.context and is_ragged(wanted.name, tensor, capture)
    )
    return wanted.column(dtype, (None, *tensor.shape[1:]) if ragged else tuple(tensor.shape[1:]))
