"""The teacher run again for chosen rows of a snapshot: bitwise what a reader gives, and nothing stored.

The unit of a teacher's work is the capture batch, with its rows, their order and their padding: another padding gives
other bits. So whole batches are run as the build ran them, cast and coded as the columns are, and only then are rows
taken from them. The teacher ends at the deepest of the columns.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from zgstore.building.execution import TeacherSource
from zgstore.building.identity import data_memo
from zgstore.building.inputs import Replay, read_inputs
from zgstore.building.pool import Pool
from zgstore.building.preparation import stream_rows
from zgstore.building.recipe import Recipe, load_recipe
from zgstore.building.rows import SampleBatch
from zgstore.errors import Invalid, Refused
from zgstore.format.digest import Digest
from zgstore.format.manifest import Column, Snapshot
from zgstore.format.tensorfile import TORCH_OF, int8_decode, int8_encode
from zgstore.storage.store import Store

KEPT_BATCHES: Final = 8

Places = NDArray[np.int64]


class Recapture:
    """Columns of a snapshot, computed instead of read. Close it, or use it as a context, to let the teacher go.

    Args:
        store: Who has the snapshot.
        rev: The snapshot.
        recipe: What made it.
        columns: Boundaries or outputs.
        devices: Where the teacher runs; empty: where its factory puts it.

    Raises:
        Refused: if the recipe's teacher or data are not the snapshot's.
        Invalid: for a column that the teacher does not make.
    """

    def __init__(
        self, store: Store, rev: str | Digest, recipe: Recipe | str | Path, columns: Sequence[str],
        *, devices: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self.recipe = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
        digest = rev if isinstance(rev, Digest) else store.resolve(rev)
        snapshot = store.snapshot(digest)
        self._columns: dict[str, Column] = {name: snapshot.column(name)[1] for name in columns}
        for column in self._columns.values():
            if column.role == "context":
                raise Invalid(f"column {column.name!r} is of the batch, not of the teacher", hint="read it instead")
        limit = stream_rows(store, snapshot)
        self._inputs = inputs = read_inputs(self.recipe, limit=limit)
        self._source = TeacherSource(store, self.recipe, devices=devices)
        _refuse_others(snapshot, self._source, data_memo(store, self.recipe, inputs).pin["digest"])
        dropped = store.dropped(snapshot)
        stored = np.delete(np.arange(inputs.rows, dtype=np.int64), np.array(dropped.left_out, np.int64))
        # Stream index of every row that readers see.
        self._stream: Places = np.delete(stored, np.array(dropped.masked, np.int64))
        self._ends: Places = np.cumsum([info.rows for info in inputs.batches])
        self._replay = Replay(self.recipe, inputs, limit=limit)
        self._capturer = self._source.capturer(self._source.modules[0], tuple(self._columns), Pool())
        self._kept: OrderedDict[int, dict[int, dict[str, Tensor]]] = OrderedDict()
        self._lock = threading.Lock()
        self.seconds = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let the teacher go."""
        self._capturer.close()
        self._source.close()
        self._kept.clear()

    @property
    def teacher(self) -> nn.Module:
        """The loaded teacher."""
        return self._source.modules[0]

    def __len__(self) -> int:
        return len(self._stream)

    def rows(self, indices: Sequence[int]) -> dict[str, list[Tensor]]:
        """The columns' rows at these places: each as a sample has it, for `Reader.batch(…, given=…)`.

        Args:
            indices: Rows as a reader of the snapshot counts them.

        Returns:
            Name → one tensor a row, ``[length, …]`` of a ragged column.
        """
        with self._lock:
            stream = self._stream[np.asarray(indices, np.int64)].tolist()
            batches = np.searchsorted(self._ends, stream, side="right").tolist()
            # Forward through the stream, so that a factory that must be asked again is asked once.
            held = {batch: self._batch(batch) for batch in sorted(set(batches))}
            found = [held[batch][row] for batch, row in zip(batches, stream, strict=True)]
        return {name: [row[name] for row in found] for name in self._columns}

    def _batch(self, index: int) -> dict[int, dict[str, Tensor]]:
        """Stream index → column → row, of one whole capture batch."""
        if index in self._kept:
            self._kept.move_to_end(index)
            return self._kept[index]
        began = time.perf_counter()
        info, batch = self._inputs.batches[index], self._replay.batch(index)
        sample = self._capturer(batch, first=info.first).wait()
        columns = {name: self._as_stored(column, sample) for name, column in self._columns.items()}
        places = range(info.rows) if sample.rows is None else sample.rows
        rows = {info.first + row: {name: columns[name][at] for name in columns} for at, row in enumerate(places)}
        self._kept[index] = rows
        while len(self._kept) > KEPT_BATCHES:
            self._kept.popitem(last=False)
        self.seconds += time.perf_counter() - began
        return rows

    def _as_stored(self, column: Column, sample: SampleBatch) -> Sequence[Tensor]:
        """A column's rows, once through its dtype and codec."""
        tensor = {**sample.columns, **sample.outputs}[column.name]
        tensor = tensor.to(TORCH_OF[column.dtype])
        if column.codec == "int8":
            encoded = int8_encode(tensor, what=f"column {column.name!r}")
            tensor = int8_decode(encoded.data, encoded.scale, TORCH_OF[column.dtype])
        if column.ragged and column.name in sample.packed and sample.lengths is not None:
            return torch.split(tensor, sample.lengths.tolist())
        return tuple(tensor)


def _refuse_others(snapshot: Snapshot, source: TeacherSource, data: bytes) -> None:
    """See that rows and teacher are the snapshot's; the data first, for they cost no loading."""
    pins = snapshot.pins
    for what, expected, actual in (
        ("data", pins.data["digest"], data),
        ("teacher", pins.teacher["measured"], source.load().measured),
    ):
        if expected != actual:
            raise Refused(
                f"the recipe's {what} is not the one that the snapshot was made of",
                hint="give the recipe, the teacher and the data that the snapshot was made with, or build a new one",
                expected=str(Digest(expected)),
                actual=str(Digest(actual)),
            )
