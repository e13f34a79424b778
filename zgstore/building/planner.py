"""The plan of a build, a value: its shards, their keys, and which of them the store already holds.

Each column of each shard is a function of what its key is made of. The part of a key that a column's shards share is
hashed once (its *stem*); a shard adds the digests of its batches. Planning reads no blob and loads no teacher.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from zgstore.building.inputs import START, Inputs
from zgstore.building.recall import Found, of_many_cells, recall, shard_name
from zgstore.building.recipe import Recipe
from zgstore.building.rows import ID
from zgstore.format import canonical
from zgstore.format.action import Action
from zgstore.format.digest import Digest, digest_of
from zgstore.format.manifest import Column, Pins
from zgstore.storage.memos import platform_tag
from zgstore.storage.store import Store

Source = Literal["teacher", "inputs"]

# A column that is a function of the inputs alone is the same on every platform.
ANY_PLATFORM: Final[Mapping[str, str]] = {}


@dataclass(frozen=True, slots=True)
class TeacherIdentity:
    """Which teacher it is, as far as a key needs to know.

    Args:
        measured: 32 bytes over what it is made of.
        sources: 32 bytes over the sources of its classes.
        arithmetic: How it computes.
        platform: What it computes on.
        certainty: ``measured``, or ``declared`` where only its pins and sources were found again.
    """

    measured: bytes
    sources: bytes
    arithmetic: Mapping[str, Any]
    platform: Mapping[str, str]
    certainty: str


@dataclass(frozen=True, slots=True)
class Outline:
    """The names of what an extractor gives, as its first batch showed them.

    Args:
        columns: (name, role, depth) in the snapshot's order.
        constants: Names.
    """

    columns: tuple[tuple[str, str, int | None], ...]
    constants: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Wanted:
    """A column that the recipe asks for.

    Args:
        name: Its name; the hook point where there is one.
        role: ``boundary``, ``output`` or ``context``.
        depth: Order among the boundaries; None for other roles.
        dtype: Safetensors name of what is stored; None: as it comes.
        codec: ``raw`` or ``int8``.
        source: ``teacher``, or ``inputs`` where it is a function of the batches alone.
        known: The column, where it is known before anything has run.
        parts: What its keys are made of beside the batches.
        stem: 32 bytes over ``parts``.
    """

    name: str
    role: str
    depth: int | None
    dtype: str | None
    codec: str
    source: Source
    known: Column | None
    parts: Mapping[str, Any]
    stem: bytes

    def column(self, dtype: str, shape: tuple[int | None, ...]) -> Column:
        """The column, once its dtype and shape are known."""
        return Column(self.name, self.role, dtype, self.codec, shape, self.depth)


@dataclass(frozen=True, slots=True)
class ShardInputs:
    """A shard as the inputs define it.

    Args:
        index: Its place in the snapshot.
        first_batch: Its first batch.
        batches: How many it has; ``cut`` except perhaps in the last.
        rows: Their rows; an extractor may leave some out.
        tokens: Sum of their lengths; 0 without a ragged rule.
        first_row: Stream index of its first row.
        joined: The batches' digests, 32 bytes each.
        joined_ids: The digests of their ids, 32 bytes each.
        inputs: Digest of ``joined``: the row of the leaf page.
    """

    index: int
    first_batch: int
    batches: int
    rows: int
    tokens: int
    first_row: int
    joined: bytes
    joined_ids: bytes
    inputs: Digest


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """What a build would do.

    Args:
        pins: Of the snapshot that comes out.
        columns: In the snapshot's order.
        shards: In the stream's order.
        found: By column and shard: what the store has of it; None: a miss.
        platform: The teacher's.
        recalled: Whether all of it was found in one file, so that no action was opened.
    """

    pins: Pins
    columns: tuple[Wanted, ...]
    shards: tuple[ShardInputs, ...]
    found: tuple[tuple[Found | None, ...], ...]
    platform: Mapping[str, str]
    recalled: bool = False

    def key(self, column: int, shard: int) -> Digest:
        """The action key of a column of a shard."""
        return key_of(self.columns[column], self.shards[shard])

    def stems(self) -> list[bytes]:
        """Each column's stem."""
        return [wanted.stem for wanted in self.columns]

    def names(self) -> list[bytes]:
        """What each shard is found by."""
        return [shard_name(shard.inputs, shard.joined_ids) for shard in self.shards]

    def tags(self) -> list[str]:
        """Each column's platform tag."""
        return [platform_tag(platform) for platform in self.platforms()]

    def platforms(self) -> list[Mapping[str, str]]:
        """Each column's platform."""
        return [self.platform if wanted.source == "teacher" else ANY_PLATFORM for wanted in self.columns]

    def missing(self, shard: int) -> tuple[int, ...]:
        """The columns (by place) that shard ``shard`` lacks."""
        return tuple(c for c, actions in enumerate(self.found) if actions[shard] is None)

    def tasks(self) -> Iterator[tuple[ShardInputs, tuple[int, ...]]]:
        """The shards that lack something, and what."""
        for shard in self.shards:
            if missing := self.missing(shard.index):
                yield shard, missing

    def needs_teacher(self) -> bool:
        """Whether anything is missing that only the teacher can make."""
        return any(
            None in actions for wanted, actions in zip(self.columns, self.found, strict=True)
            if wanted.source == "teacher"
        )  # fmt: skip

    def known_columns(self) -> list[Column | None]:
        """Each column as inputs or actions tell it; None where nothing has been stored yet."""
        result: list[Column | None] = []
        for wanted, actions in zip(self.columns, self.found, strict=True):
            action = next((action for action in actions if action is not None), None)
            result.append(wanted.known or (wanted.column(action.dtype, action.shape) if action else None))
        return result


def shards_of(inputs: Inputs, cut: int) -> tuple[ShardInputs, ...]:
    """The stream cut into shards of ``cut`` whole batches."""
    result: list[ShardInputs] = []
    for first in range(0, len(inputs.batches), cut):
        batches = inputs.batches[first : first + cut]
        joined = b"".join(batch.digest for batch in batches)
        result.append(
            ShardInputs(
                index=len(result),
                first_batch=first,
                batches=len(batches),
                rows=sum(batch.rows for batch in batches),
                tokens=sum(batch.tokens for batch in batches),
                first_row=batches[0].first,
                joined=joined,
                joined_ids=b"".join(batch.ids for batch in batches),
                inputs=digest_of("batch", joined),
            )
        )
    return tuple(result)


def ragged_pin(recipe: Recipe) -> dict[str, Any] | None:
    """The ragged rule as the pins hold it."""
    capture = recipe.capture
    return None if capture.lengths is None else {"lengths": capture.lengths, "sequence": sorted(capture.sequence)}


def columns_of(
    recipe: Recipe, inputs: Inputs, teacher: TeacherIdentity, *, extractor: Mapping[str, Any] | None = None,
    outline: Outline | None = None,
) -> tuple[Wanted, ...]:  # fmt: skip
    """The columns in the snapshot's order: boundaries by depth, outputs, context, ``id`` and ``start``.

    Args:
        recipe: Who asks.
        inputs: For the context columns.
        teacher: Who answers.
        extractor: The extractor's pin; None for hook points.
        outline: What the extractor gives.
    """
    capture = recipe.capture
    by_teacher = {"teacher": teacher.measured, "sources": teacher.sources, "arithmetic": teacher.arithmetic}
    if extractor is None:
        listed: list[tuple[str, str, int | None]] = [(n, "boundary", at) for at, n in enumerate(capture.boundaries)]
        listed += [(name, "output", None) for name in capture.outputs]
    else:
        listed = list(outline.columns) if outline else []
    result: list[Wanted] = []
    for name, role, depth in listed:
        stored = recipe.storage.of(name)
        dtype = stored.dtype if role == "boundary" or name in recipe.storage.columns else None
        parts: dict[str, Any] = {
            **by_teacher, "name": name, "dtype": dtype, "codec": stored.codec, "ragged": ragged_pin(recipe),
            **({"extractor": extractor} if extractor else {"point": name, "inputs": _inputs_pin(recipe)}),
        }  # fmt: skip
        if extractor is None:
            # A boundary always has the sequence axis: which context has it too is no part of its key.
            parts["ragged"] = capture.lengths if role == "boundary" else [capture.lengths, name in capture.sequence]
        result.append(_wanted(Wanted(name, role, depth, dtype, stored.codec, "teacher", None, parts, b"")))
    for column in inputs.context:
        ragged = capture.lengths if column.ragged or column.name == START else None
        parts = {"name": column.name, "context": True, "ragged": ragged}
        result.append(_wanted(Wanted(column.name, "context", None, None, "raw", "inputs", column, parts, b"")))
    return tuple(result)


def _wanted(wanted: Wanted) -> Wanted:
    """The column with its stem."""
    return replace(wanted, stem=digest_of("action", canonical.encode(wanted.parts)).raw)


def _inputs_pin(recipe: Recipe) -> list[str] | None:
    return None if recipe.capture.inputs is None else list(recipe.capture.inputs)


def key_of(wanted: Wanted, shard: ShardInputs) -> Digest:
    """The action key of a column of a shard."""
    value = {"column": wanted.stem, "batches": _batches_part(wanted, shard)}
    return digest_of("action", canonical.encode(value))


def _batches_part(wanted: Wanted, shard: ShardInputs) -> bytes:
    # Ids are in the key of the column `id` alone: the states do not depend on what a row is called.
    if wanted.name != ID or wanted.role != "context":
        return shard.joined
    return shard.joined_ids if wanted.source == "inputs" else shard.joined + shard.joined_ids


def capture_pin(recipe: Recipe, teacher: TeacherIdentity, extractor: Mapping[str, Any] | None) -> dict[str, Any]:
    """The capture as the snapshot pins it."""
    pin: dict[str, Any] = {"ragged": ragged_pin(recipe), "arithmetic": dict(teacher.arithmetic)}
    if extractor is not None:
        pin["extractor"] = dict(extractor)
        return pin
    pin |= {"boundaries": list(recipe.capture.boundaries), "outputs": list(recipe.capture.outputs)}
    if recipe.capture.inputs is not None:
        pin["inputs"] = list(recipe.capture.inputs)
    return pin


@of_many_cells
def make_plan(
    store: Store, pins: Pins, columns: tuple[Wanted, ...], shards: tuple[ShardInputs, ...], platform: Mapping[str, str]
) -> BuildPlan:
    """Look every key up.

    An action of this platform is taken first; for the shards that are then missing, another platform's, if it has
    them all: two platforms may round differently, so they are mixed as little as can be.
    """
    plan = BuildPlan(pins, columns, shards, (), platform)
    tags = plan.tags()
    found = recall(store.memos, plan.stems(), tags, plan.names())
    recalled = all(None not in mine for mine in found)
    for wanted, own, mine in zip(columns, tags, found, strict=True):
        missing = [at for at, each in enumerate(mine) if each is None]
        keys = [key_of(wanted, shards[at]) for at in missing]
        for at, action in zip(missing, look_up(store, keys, own), strict=True):
            mine[at] = None if action is None else Found.of(action)
    return replace(plan, found=tuple(tuple(mine) for mine in found), recalled=recalled)


def look_up(store: Store, keys: Sequence[Digest], own: str) -> tuple[Action | None, ...]:
    """The actions under ``keys``: those of platform tag ``own``, the rest from one other that has all of it."""
    memos = store.memos
    actions = [memos.action(key, own) for key in keys]
    missing = [at for at, action in enumerate(actions) if action is None]
    others: set[str] = set(memos.action_platforms(keys[missing[0]])) - {own} if missing else set()
    for at in missing[1:]:
        if not others:
            break
        others &= set(memos.action_platforms(keys[at]))
    for tag in sorted(others):
        theirs = [memos.action(keys[at], tag) for at in missing]
        if all(action is not None for action in theirs):
            for at, action in zip(missing, theirs, strict=True):
                actions[at] = action
            break
    return tuple(actions)


def recipe_digest(
    pins: Pins, columns: Sequence[Column], *, cut: int, on_nonfinite: str, limit: int | None, constants: Sequence[str]
) -> Digest:
    """The recipe digest: pins, columns, cut, drop policy, limit and constants."""
    value = {
        "pins": pins.digest().raw,
        "columns": [column.as_value() for column in columns],
        "cut": cut,
        "drop": on_nonfinite == "drop",
        "limit": limit,
        "constants": sorted(constants),
    }
    return digest_of("recipe", canonical.encode(value))


def left_out_key(extractor_stem: bytes, shard: ShardInputs) -> Digest:
    """Where it is kept which rows an extractor left out of a shard."""
    value = {"kind": "left-out", "extractor": extractor_stem, "batches": shard.joined}
    return digest_of("measurement", canonical.encode(value))
