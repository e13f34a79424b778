"""The canonical header of a blob, strictly read and written. Bytes only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

TENSOR_NAMES: Final = ("data", "offsets", "scale")
ALIGNMENT: Final = 4096
MAX_HEADER_BYTES: Final = 16 << 20
MAX_DIMENSIONS: Final = 8


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a blob.

    Args:
        name: ``data``, ``offsets`` or ``scale``.
        dtype: safetensors name.
        shape: Sizes.
        start: First byte, counted from the beginning of the *file*.
        size: Bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class BlobHeader:
    """All tensors of a blob in the order of their bytes, and the file's size."""

    tensors: tuple[TensorSpec, ...]
    data_start: int
    file_size: int

    def tensor(self, name: str) -> TensorSpec:
        """The tensor of that name; KeyError if there is none."""
        raise NotImplementedError

    def encode(self) -> bytes:
        """The header's bytes, length field and padding included: ``data_start`` bytes."""
        raise NotImplementedError


def lay_out(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> BlobHeader:
    """The one layout for tensors given as name → (dtype, shape).

    Raises:
        Invalid: for a name outside TENSOR_NAMES, an unknown dtype, more than 8 dimensions.
    """
    raise NotImplementedError


def read_header(prefix: bytes, *, file_size: int, what: str) -> BlobHeader:
    """Read a header strictly.

    Args:
        prefix: The file's first bytes: at least 8; as many as the header has, else ``header_size`` says how many.
        file_size: The file's size in bytes; bounds the header before anything is allocated.
        what: What it is, for the message.

    Raises:
        Corrupt: if it is not the canonical header of a file of that size.
    """
    raise NotImplementedError


def header_size(first8: bytes, *, file_size: int, what: str) -> int:
    """Bytes up to the data section, from the file's first 8 bytes; bounded by the file's size and 16 MiB.

    Raises:
        Corrupt: if the length is out of bounds, or does not end on a 4096-byte boundary.
    """
    raise NotImplementedError
