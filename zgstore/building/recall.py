"""The actions of a whole plan in one file, so that finding everything again does not open a file for each.

It says nothing that the actions do not say: where it is torn, or knows less, they are asked one by one. Shards are
found by the digest of their inputs, from which, with a column's stem, its key follows.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from zgstore.errors import Corrupt, Invalid
from zgstore.format import canonical
from zgstore.format.digest import DIGEST_BYTES, Digest, digest_of
from zgstore.format.manifest import Action, Blob, all_u64, pack_u64
from zgstore.storage.memos import Memos

if TYPE_CHECKING:
    from zgstore.building.planner import BuildPlan, ShardInputs, Wanted

_STATISTICS: Final = ("rms", "min", "max", "error")
_NUMBERS: Final = struct.Struct("<4d")
_MAX_CELLS: Final = 1 << 19  # beyond it the file would leave the bound of a canonical value


class Found(NamedTuple):
    """A column of a shard that the store has: what its action says.

    Args:
        blob: Its bytes.
        rows: Its rows.
        dtype: The column's.
        shape: The column's.
        platform: What it was computed on.
        nonfinite: Rows with NaN or Inf.
        statistics: As the action has them.
    """

    blob: Blob
    rows: int
    dtype: str
    shape: tuple[int | None, ...]
    platform: Mapping[str, str]
    nonfinite: tuple[int, ...]
    statistics: Mapping[str, float]

    @classmethod
    def of(cls, action: Action) -> Self:
        """What an action says."""
        return cls(
            action.blob, action.rows, action.dtype, action.shape, action.platform, action.nonfinite, action.statistics
        )


def _key(columns: Sequence[Wanted], tags: Sequence[str]) -> Digest:
    value = {"kind": "actions", "columns": b"".join(wanted.stem for wanted in columns), "tags": list(tags)}
    return digest_of("measurement", canonical.encode(value))


def _name(shard: ShardInputs) -> bytes:
    return shard.inputs.raw + digest_of("batch", shard.joined_ids).raw


def recall(
    memos: Memos, columns: Sequence[Wanted], tags: Sequence[str], shards: Sequence[ShardInputs]
) -> list[list[Found | None]]:
    """The actions that are known together, by column and shard; None where one is not.

    Args:
        memos: Where the file is.
        columns: Whose actions.
        tags: Each column's platform tag.
        shards: Of the plan.
    """
    value = memos.measurement(_key(columns, tags))
    nothing: list[list[Found | None]] = [[None] * len(shards) for _ in columns]
    if value is None:
        return nothing
    try:
        names, cells = value["shards"], [_Cells(each) for each in value["columns"]]
    except (KeyError, TypeError, struct.error, Corrupt, Invalid):
        return nothing
    width = 2 * DIGEST_BYTES
    place = {names[at : at + width]: at // width for at in range(0, len(names), width)}
    found = [(shard.index, place.get(_name(shard))) for shard in shards]
    for column, mine in enumerate(cells):
        for shard, at in found:
            if at is not None:
                nothing[column][shard] = mine.found(at)
    return nothing


def remember(memos: Memos, plan: BuildPlan, tags: Sequence[str], platforms: Sequence[Mapping[str, str]]) -> None:
    """Keep a complete plan's actions together: those of its own platforms.

    Args:
        memos: Where the file goes.
        plan: With an action for each column and shard.
        tags: Each column's platform tag.
        platforms: Each column's platform.
    """
    shards = [
        shard
        for shard in plan.shards
        if all(
            (action := mine[shard.index]) is not None and dict(action.platform) == dict(platform)
            for mine, platform in zip(plan.found, platforms, strict=True)
        )
    ]
    if not shards or len(shards) * len(plan.columns) > _MAX_CELLS:
        return
    value = {
        "kind": "actions",
        "shards": b"".join(_name(shard) for shard in shards),
        "columns": [
            _packed([action for shard in shards if (action := mine[shard.index]) is not None]) for mine in plan.found
        ],
    }
    key = _key(plan.columns, tags)
    if memos.measurement(key) != value:
        memos.put_measurement(key, value)


def _packed(actions: Sequence[Found]) -> dict[str, Any]:
    bad = [at for at, action in enumerate(actions) if action.nonfinite]
    return {
        "blobs": b"".join(action.blob.digest.raw for action in actions),
        "sizes": pack_u64([action.blob.size for action in actions]),
        "rows": pack_u64([action.rows for action in actions]),
        "dtype": actions[0].dtype,
        "shape": list(actions[0].shape),
        "platform": dict(actions[0].platform),
        "nonfinite_at": pack_u64(bad),
        "nonfinite": [pack_u64(actions[at].nonfinite) for at in bad],
        "statistics": b"".join(
            _NUMBERS.pack(*(action.statistics.get(name, math.nan) for name in _STATISTICS)) for action in actions
        ),
    }


class _Cells:
    """One column's part of the file."""

    def __init__(self, value: Mapping[str, Any]) -> None:
        self.blobs: bytes = value["blobs"]
        self.sizes = all_u64(value["sizes"])
        self.rows = all_u64(value["rows"])
        self.dtype: str = value["dtype"]
        self.shape = tuple(value["shape"])
        self.platform: Mapping[str, str] = value["platform"]
        self.nonfinite = {
            at: all_u64(rows) for at, rows in zip(all_u64(value["nonfinite_at"]), value["nonfinite"], strict=True)
        }
        self.statistics: bytes = value["statistics"]

    def found(self, at: int) -> Found:
        numbers = _NUMBERS.unpack_from(self.statistics, at * _NUMBERS.size)
        return Found(
            blob=Blob(Digest(self.blobs[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES]), self.sizes[at]),
            rows=self.rows[at],
            dtype=self.dtype,
            shape=self.shape,
            platform=self.platform,
            nonfinite=self.nonfinite.get(at, ()),
            statistics={n: x for n, x in zip(_STATISTICS, numbers, strict=True) if x == x},  # noqa: PLR0124 - no NaN
        )
