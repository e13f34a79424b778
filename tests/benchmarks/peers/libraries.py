"""Python libraries that keep versions of arrays or tables: Icechunk, Lance, Hugging Face's datasets."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from tests.benchmarks.peers.boundaries import COLUMNS, SHAPE, Piece
from tests.benchmarks.peers.peer import Peer

# ruff: noqa: PLC0415 - what is imported in functions here is of the peers' environment


class Library(Peer):
    """A peer that is given arrays, and has no check of its own."""

    packages: ClassVar[tuple[str, ...]]
    verifies: ClassVar[bool] = False

    @classmethod
    def absent(cls) -> str:
        lacking = [name for name in cls.packages if importlib.util.find_spec(name) is None]
        return f"the package {lacking[0]} is not installed" if lacking else ""

    def kept(self) -> Path:
        return self.folder / "kept"

    def columns(self, pieces: list[Piece]) -> dict[str, list[Piece]]:
        """Its pieces by column, batch after batch."""
        return {f"h{at}": pieces[at::COLUMNS] for at in range(COLUMNS)}


class Icechunk(Library):
    """One array a column, one chunk a piece, uncompressed."""

    name, packages = "Icechunk", ("icechunk", "zarr")

    def prepare(self) -> None:
        import icechunk

        icechunk.set_logs_filter("error")
        storage = icechunk.local_filesystem_storage(str(self.kept()))
        self.repository = icechunk.Repository.create(storage)
        self.opened: Any = None

    def forget(self) -> None:
        self.opened = None

    def ingest(self) -> None:
        self._write(self.data.first)

    def grow(self) -> None:
        """The chunks that are there stay; the array is made longer."""
        self._write(self.data.all, since=len(self.data.first))

    def _write(self, pieces: list[Piece], *, since: int = 0) -> None:
        import zarr

        session = self.repository.writable_session("main")
        group, first = zarr.open_group(session.store, mode="a"), since // COLUMNS * SHAPE[0]
        for name, mine in self.columns(pieces).items():
            shape = (len(mine) * SHAPE[0], *SHAPE[1:])
            if name not in group:
                group.create_array(name, shape=shape, chunks=SHAPE, dtype="uint16", compressors=None)
            group[name].resize(shape)
            group[name][first:] = np.concatenate(mine[since // COLUMNS :])
        session.commit("boundaries")

    def read(self, piece: int) -> Piece:
        import zarr

        if self.opened is None:
            self.opened = zarr.open_group(self.repository.readonly_session("main").store, mode="r")
        at = piece // COLUMNS * SHAPE[0]
        return self.opened[f"h{piece % COLUMNS}"][at : at + SHAPE[0]]


class Lance(Library):
    """A row a batch, a binary column a boundary."""

    name, packages = "Lance", ("lance", "pyarrow")

    def forget(self) -> None:
        import lance

        self.dataset = lance.dataset(str(self.kept()))

    def ingest(self) -> None:
        self._write(self.data.first, mode="overwrite")

    def grow(self) -> None:
        self._write(self.data.more, mode="append")

    def _write(self, pieces: list[Piece], *, mode: str) -> None:
        import lance
        import pyarrow as pa

        columns = {
            name: pa.array([memoryview(piece).cast("B") for piece in mine], type=pa.large_binary())
            for name, mine in self.columns(pieces).items()
        }
        lance.write_dataset(pa.table(columns), str(self.kept()), mode=mode)
        self.forget()

    def read(self, piece: int) -> memoryview:
        found = self.dataset.take([piece // COLUMNS], columns=[f"h{piece % COLUMNS}"])
        return memoryview(found.column(0)[0].as_buffer())


class Datasets(Library):
    """A row a batch, an array column a boundary; bf16 has no type there, so its bits stand as whole numbers."""

    name, packages = "HF datasets", ("datasets",)

    def prepare(self) -> None:
        import datasets

        datasets.disable_progress_bars()

    def forget(self) -> None:
        import datasets

        self.dataset = datasets.load_from_disk(str(self.kept())).with_format("numpy")

    def ingest(self) -> None:
        self._write(self.data.first)

    def grow(self) -> None:
        """It cannot add to what is saved: all is written anew."""
        self._write(self.data.all)

    def _write(self, pieces: list[Piece]) -> None:
        import datasets

        array = datasets.Array3D(SHAPE, "uint16")
        features = datasets.Features({f"h{at}": array for at in range(COLUMNS)})
        shutil.rmtree(self.kept(), ignore_errors=True)
        datasets.Dataset.from_dict(self.columns(pieces), features=features).save_to_disk(str(self.kept()))
        self.forget()

    def read(self, piece: int) -> Piece:
        column = f"h{piece % COLUMNS}"
        return self.dataset.select_columns([column])[piece // COLUMNS][column].astype(np.uint16)
