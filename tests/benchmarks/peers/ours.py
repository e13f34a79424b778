"""This project, by its public names, given the same arrays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

import zgstore
from tests.benchmarks.peers.boundaries import COLUMNS, SHAPE, Piece
from tests.benchmarks.peers.peer import Peer, Unsound
from zgstore.reading.layouts import Buffers

PINS = zgstore.Pins({"id": "bench", "revision": "1"}, {"id": "bench", "revision": "1"}, {})


class Zgstore(Peer):
    """A writer that is asked what is missing, as a build asks; a reader that reads into the same memory, as a step."""

    name = "zgstore"

    @classmethod
    def absent(cls) -> str:
        return ""

    def prepare(self) -> None:
        self.store = zgstore.Store.init(self.kept())
        self.readers: dict[str, zgstore.Reader] = {}
        self.memory = Buffers()

    def forget(self) -> None:
        for reader in self.readers.values():
            reader.close()
        self.readers = {}

    def ingest(self) -> None:
        self._write(self.data.first)

    def grow(self) -> None:
        self._write(self.data.all)

    def _write(self, pieces: list[Piece]) -> None:
        with zgstore.writer(self.store, PINS, cut=self.data.cut) as writer:
            for number in range(len(pieces) // COLUMNS):
                mine = pieces[number * COLUMNS : (number + 1) * COLUMNS]
                ids = torch.arange(number * SHAPE[0], (number + 1) * SHAPE[0])[:, None]
                if writer.missing(zgstore.row_digests({"input_ids": ids})):
                    columns = {f"h.{at}": _bf16(piece) for at, piece in enumerate(mine)}
                    writer.add(zgstore.SampleBatch(columns=columns, context={"input_ids": ids}))
            writer.commit(ref="main")

    def verify(self) -> None:
        report = zgstore.verify(self.store).report
        if not report.ok:
            raise Unsound(report.problems[0].message)

    def read(self, piece: int) -> Piece:
        column, first = f"h.{piece % COLUMNS}", piece // COLUMNS * SHAPE[0]
        if column not in self.readers:
            self.readers[column] = zgstore.read(self.store, "main", columns=[column])
        batch = self.readers[column].batch(range(first, first + SHAPE[0]), out=self.memory)
        return batch[column].view(torch.int16).numpy().view(np.uint16)

    def kept(self) -> Path:
        return self.folder / "kept"


def _bf16(piece: Piece) -> torch.Tensor:
    return torch.from_numpy(piece.view(np.int16)).view(torch.bfloat16)
