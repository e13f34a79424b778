"""The memo of one column of one shard as a value, and the seal of files that are named by a key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from zgstore.format import canonical
from zgstore.format.digest import DIGEST_BYTES, Digest, digest_of
from zgstore.format.fields import (
    broken,
    checked_fields,
    fixed_width,
    many_u64,
    natural,
    of_kind,
    pack_u64,
    shape_of,
    texts_of,
)
from zgstore.format.pages import Blob


@dataclass(frozen=True, slots=True)
class Action:
    """The memo of one column of one shard.

    Args:
        key: Digest of everything the blob is a function of.
        blob: What came out.
        rows: Rows in the blob.
        dtype: The column's dtype, as in ``Column``.
        shape: The column's shape, as in ``Column``.
        platform: torch version, device model, CPU capability.
        nonfinite: Rows of the blob (ascending) that hold NaN or Inf where numbers were promised.
        statistics: ``rms``, ``min``, ``max`` and, under int8, ``error``: floats. Not part of any identity.
        seconds: Teacher time spent on it.
    """

    KIND: ClassVar[str] = "action"
    key: Digest
    blob: Blob
    rows: int
    dtype: str
    shape: tuple[int | None, ...]
    platform: Mapping[str, str]
    nonfinite: tuple[int, ...] = ()
    statistics: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    def encode(self) -> bytes:
        """The body and, after it, its own digest: actions are not synced, and a torn one must be seen."""
        return encode_sealed(
            "action",
            {
                "kind": "action",
                "key": self.key.raw,
                "blob": self.blob.digest.raw,
                "size": self.blob.size,
                "rows": self.rows,
                "dtype": self.dtype,
                "shape": list(self.shape),
                "platform": self.platform,
                "nonfinite": pack_u64(self.nonfinite),
                "statistics": self.statistics,
                "seconds": float(self.seconds),
            },
        )

    @classmethod
    def decode(cls, content: bytes) -> Self:
        value = of_kind("action", decode_sealed("action", content))
        fields = checked_fields(
            "action", value, key=bytes, blob=bytes, size=int, rows=int, dtype=str, shape=list, platform=dict,
            nonfinite=bytes, statistics=dict, seconds=float,
        )  # fmt: skip
        return cls(
            key=Digest(fixed_width("action", fields["key"], 1)),
            blob=Blob(Digest(fixed_width("action", fields["blob"], 1)), natural("action", "size", fields["size"])),
            rows=natural("action", "rows", fields["rows"]),
            dtype=fields["dtype"],
            shape=shape_of("action", fields["shape"]),
            platform=texts_of("action", fields["platform"]),
            nonfinite=many_u64("action", fields["nonfinite"]),
            statistics=checked_fields("action", fields["statistics"], **dict.fromkeys(fields["statistics"], float)),
            seconds=fields["seconds"],
        )


def encode_sealed(kind: str, value: Mapping[str, Any]) -> bytes:
    """Canonical bytes followed by their own digest: for files that are named by a key and not by their content."""
    body = canonical.encode(value)
    return body + digest_of(kind, body).raw


def decode_sealed(kind: str, content: bytes) -> Any:
    """The value of a sealed file.

    Raises:
        Corrupt: if it is torn, or not canonical.
    """
    body, seal = content[:-DIGEST_BYTES], content[-DIGEST_BYTES:]
    if len(content) <= DIGEST_BYTES or digest_of(kind, body).raw != seal:
        raise broken(kind, "its bytes do not match its own digest")
    return canonical.decode(body, what=kind)
