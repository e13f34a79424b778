"""What a build did, or would do, as a value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zgstore.building.explanation import Why
from zgstore.format.digest import Digest


@dataclass(frozen=True, slots=True)
class BuildReport:
    """What a build did, or would do.

    Args:
        snapshot: What came out; None for a worker and a dry run.
        recipe: The recipe digest; None while columns are unknown.
        pins: The pins digest; None where the teacher is not known without loading it.
        ref: The ref that names it now; None if none does.
        samples: Rows that readers see; of a dry run, rows of the stream.
        teacher: ``measured`` or ``declared``; ``unknown`` in a dry run that would have to load it.
        teacher_loaded: Whether it was.
        shards_built: Shards of which something was captured.
        shards_reused: The others.
        columns_built: Columns of which something was captured.
        columns_reused: The others.
        new_bytes: Of new blobs; of a dry run as far as shapes are known.
        total_bytes: Of all its blobs.
        seconds: ``inputs``, ``teacher``, ``store``, ``total``.
        explain: Hit or miss for each column and shard, if asked for.
        locked: With a lock file: ``present``, ``same``, or why it differs.
        dropped: Rows that are masked or were left out.
        unsized: In a dry run, missing columns whose shape is not known before the teacher runs: not in ``new_bytes``.
    """

    snapshot: Digest | None
    recipe: Digest | None
    pins: Digest | None
    ref: str | None
    samples: int
    teacher: str
    teacher_loaded: bool
    shards_built: int
    shards_reused: int
    columns_built: int
    columns_reused: int
    new_bytes: int
    total_bytes: int
    seconds: Mapping[str, float]
    explain: tuple[Why, ...] = ()
    locked: str | None = None
    dropped: int = 0
    unsized: tuple[str, ...] = ()

    def as_value(self) -> dict[str, Any]:
        """The JSON object."""
        value: dict[str, Any] = {
            "snapshot": _text(self.snapshot),
            "recipe": _text(self.recipe),
            "pins": _text(self.pins),
            "ref": self.ref,
            "samples": self.samples,
            "teacher": self.teacher,
            "teacher_loaded": self.teacher_loaded,
            "shards": {"built": self.shards_built, "reused": self.shards_reused},
            "columns": {"built": self.columns_built, "reused": self.columns_reused},
            "bytes": {"new": self.new_bytes, "total": self.total_bytes},
            "seconds": dict(self.seconds),
            "dropped": self.dropped,
        }
        if self.locked is not None:
            value["locked"] = self.locked
        if self.unsized:
            value["unsized"] = list(self.unsized)
        if self.explain:
            value["explain"] = [
                {"column": each.column, "shard": each.shard, "hit": each.hit, "reason": each.reason}
                for each in self.explain
            ]
        return value


def _text(digest: Digest | None) -> str | None:
    return None if digest is None else str(digest)
