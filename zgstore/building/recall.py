"""The actions of a whole plan in one file, so that finding everything again does not open a file for each.

A very large plan has several such files, each of some shards. They say nothing that the actions do not say: where one
is torn, or knows less, the actions are asked one by one. Shards are found by the digest of their inputs, from which,
with a column's stem, its key follows.
"""

from __future__ import annotations

import functools
import gc
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, ParamSpec, Self, TypeVar

from zgstore.errors import Corrupt
from zgstore.format import canonical
from zgstore.format.action import Action
from zgstore.format.digest import DIGEST_BYTES, Digest, digest_of
from zgstore.format.fields import all_u64, checked_fields, fixed_width, many_u64, pack_u64, shape_of, texts_of
from zgstore.format.pages import Blob
from zgstore.storage.memos import Memos

_STATISTICS: Final = ("rms", "min", "max", "error")
_NUMBERS: Final = struct.Struct("<4d")
NAME_BYTES: Final = 2 * DIGEST_BYTES
MAX_CELLS: Final = 1 << 19  # in one file: more would leave the bound of a canonical value

Given = ParamSpec("Given")
Result = TypeVar("Result")


def of_many_cells(work: Callable[Given, Result]) -> Callable[Given, Result]:
    """Mark what makes some objects for each column and shard, none of them garbage, and calls nobody else's code.

    Python looks through all objects there are each time so many have been added; with a hundred thousand cells that
    takes a quarter of the time of a build that has nothing to do. So it does not look meanwhile.
    """

    @functools.wraps(work)
    def undisturbed(*args: Given.args, **named: Given.kwargs) -> Result:
        if not gc.isenabled():
            return work(*args, **named)
        gc.disable()
        try:
            return work(*args, **named)
        finally:
            gc.enable()

    return undisturbed


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


def shard_name(inputs: Digest, joined_ids: bytes) -> bytes:
    """What a shard is found by: the digests of its inputs and of its ids."""
    return inputs.raw + digest_of("batch", joined_ids).raw


def _parts(stems: Sequence[bytes], tags: Sequence[str], shards: int) -> list[tuple[Digest, slice]]:
    """The files of a plan of so many shards: each one's key, and its shards."""
    each = max(1, MAX_CELLS // max(1, len(stems)))
    parts = []
    for number, first in enumerate(range(0, shards, each)):
        value = {"kind": "actions", "columns": b"".join(stems), "tags": list(tags), "part": number}
        parts.append((digest_of("measurement", canonical.encode(value)), slice(first, first + each)))
    return parts


def recall(
    memos: Memos, stems: Sequence[bytes], tags: Sequence[str], shards: Sequence[bytes]
) -> list[list[Found | None]]:
    """What is known together, by column and shard; None where something is not.

    Args:
        memos: Where the file is.
        stems: Each column's.
        tags: Each column's platform tag.
        shards: Each shard's `shard_name`.
    """
    result: list[list[Found | None]] = [[None] * len(shards) for _ in stems]
    place: dict[bytes, tuple[list[_Cells], int]] = {}
    for key, _ in _parts(stems, tags, len(shards)):
        value = memos.measurement(key)
        try:
            fields = checked_fields("memory of a plan", value, shards=bytes, columns=list)
            names, count = fields["shards"], len(fields["shards"]) // NAME_BYTES
            cells = [_Cells(each, count) for each in fields["columns"]]
        except Corrupt:
            continue
        for at in range(count) if len(cells) == len(stems) else ():
            place[names[at * NAME_BYTES : (at + 1) * NAME_BYTES]] = cells, at
    for shard, name in enumerate(shards):
        if name in place:
            cells, at = place[name]
            for column, mine in enumerate(cells):
                result[column][shard] = mine.found(at)
    return result


def remember(
    memos: Memos, stems: Sequence[bytes], tags: Sequence[str], shards: Sequence[bytes], *,
    platforms: Sequence[Mapping[str, str]], found: Sequence[Sequence[Found | None]],
) -> None:  # fmt: skip
    """Keep what was found, or made, of a whole plan together: the shards that are all of their columns' own platforms.

    Args:
        memos: Where the file goes.
        stems: Each column's.
        tags: Each column's platform tag.
        shards: Each shard's `shard_name`.
        platforms: Each column's platform.
        found: By column and shard.
    """
    for key, part in _parts(stems, tags, len(shards)):
        whole: list[tuple[bytes, list[Found]]] = []
        for shard in range(*part.indices(len(shards))):
            row = [each for mine in found if (each := mine[shard]) is not None]
            own = (dict(each.platform) == dict(platform) for each, platform in zip(row, platforms, strict=False))
            if len(row) == len(found) and all(own):
                whole.append((shards[shard], row))
        if whole:
            _keep(memos, key, whole, columns=len(stems))


def _keep(memos: Memos, key: Digest, whole: Sequence[tuple[bytes, Sequence[Found]]], *, columns: int) -> None:
    value = {
        "kind": "actions",
        "shards": b"".join(name for name, _ in whole),
        "columns": [_packed([row[column] for _, row in whole]) for column in range(columns)],
    }
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
    """One column's part of the file, of so many shards.

    Raises:
        Corrupt: if it is of another number, or of no column.
    """

    def __init__(self, value: Any, count: int) -> None:
        what = "memory of a column"
        fields = checked_fields(
            what, value, blobs=bytes, sizes=bytes, rows=bytes, dtype=str, shape=list, platform=dict,
            nonfinite_at=bytes, nonfinite=list, statistics=bytes,
        )  # fmt: skip
        self.blobs = fixed_width(what, fields["blobs"], count)
        self.sizes = all_u64(fixed_width(what, fields["sizes"], count, each=8))
        self.rows = all_u64(fixed_width(what, fields["rows"], count, each=8))
        self.dtype: str = fields["dtype"]
        self.shape = shape_of(what, fields["shape"])
        self.platform: Mapping[str, str] = texts_of(what, fields["platform"])
        bad = all_u64(fixed_width(what, fields["nonfinite_at"], len(fields["nonfinite"]), each=8))
        self.nonfinite = {at: many_u64(what, rows) for at, rows in zip(bad, fields["nonfinite"], strict=True)}
        self.statistics = fixed_width(what, fields["statistics"], count, each=_NUMBERS.size)

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
