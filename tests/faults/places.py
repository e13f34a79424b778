"""Where the hands of a stress work: recipes that overlap, what they come to undisturbed, and the stores of a run."""

from __future__ import annotations

import hashlib
import random
import shutil
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from tests.faults import steps
from zgstore.building.builder import build
from zgstore.format.digest import Digest
from zgstore.reading.opening import read
from zgstore.storage.store import Store
from zgstore.upkeep import keeper
from zgstore.upkeep.copier import copy

sys.path[:0] = [str(Path(__file__).parents[1] / "building")]

from projects import make_project, write_recipe, write_rows  # noqa: E402

LIMITS = (None, 9, 5)  # the last batch cut, whole batches and all of it
KEPT = 2  # snapshots that are held from the beginning to the end


@dataclass(frozen=True, slots=True)
class Project:
    """The recipes that are built, and what they come to when nothing disturbs them.

    Args:
        recipes: Their files.
        snapshots: (recipe, limit) → the snapshot's digest.
        contents: Digest → a digest of all that a reader gives.
    """

    recipes: tuple[Path, ...]
    snapshots: Mapping[tuple[int, int | None], str] = field(default_factory=dict)
    contents: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Place:
    """Where the hands work.

    Args:
        project: What is built.
        store: The store that all work on.
        target: Another one that snapshots are carried to, and back from.
        index: The folder of the store's index.
    """

    project: Project
    store: Path
    target: Path
    index: Path

    @property
    def kept(self) -> tuple[str, ...]:
        """The digests that nobody lets go."""
        return tuple(dict.fromkeys(self.project.snapshots.values()))[:KEPT]

    def rev(self, chance: random.Random) -> str:
        """Anything that may name a snapshot: a name that is there now, a past one, a digest."""
        names = [ref.name for ref in Store.open(self.store).refs.list()]
        lot = chance.random()
        if lot < 0.3 or not names:
            return chance.choice([*self.project.snapshots.values()])
        return chance.choice(names) + ("@{1}" if lot < 0.4 else "")


# ---- the project ----


def make_recipes(folder: Path) -> Project:
    """Recipes that overlap: in columns, in rows, in teacher and data; one is ragged."""
    first, module = make_project(folder / "a", rows=13, name="r0", boundaries=("layers.0:in", "norm:in"))
    more = write_recipe(first.parent, module, name="r1", boundaries=("layers.0:in", "layers.2:in", "norm:in"))
    bf16 = write_recipe(
        first.parent, module, name="r2", boundaries=("norm:in",), storage='batches_per_shard = 2\ndtype = "bfloat16"'
    )
    capture = 'lengths = "attention_mask"\nsequence = ["input_ids", "labels"]'
    ragged, _ = make_project(folder / "b", name="r3", boundaries=("layers.1:in", "norm:in"), capture=capture)
    write_rows(folder / "b", 13, ragged=True, ids=True)
    return Project((first, more, bf16, ragged))


def references(project: Project, folder: Path) -> dict[str, Any]:
    """What each recipe comes to, each in a store of its own; as JSON can have it."""
    snapshots, contents = [], {}
    for at, recipe in enumerate(project.recipes):
        for limit in LIMITS:
            store = Store.init(folder / f"{at}-{limit}")
            digest = str(build(store, recipe, limit=limit, ref=None).snapshot)
            contents[digest] = content_of(store, digest)
            snapshots.append([at, limit, digest])
            shutil.rmtree(store.path)
    return {"snapshots": snapshots, "contents": contents}


def content_of(store: Store, rev: str, *, workers: int = 0) -> str:
    """A digest of every row that a reader gives, in order, by column."""
    with read(store, Digest.parse(rev) if ":" in rev else rev) as reader:
        found = {name: hashlib.sha256() for name in reader.columns}
        batches: Iterable[Sequence[Mapping[str, torch.Tensor]]] = [reader.__getitems__(list(range(len(reader))))]
        if workers:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of more workers than cores
                batches = DataLoader(reader, batch_size=3, num_workers=workers, collate_fn=list)
        for batch in batches:
            for row in batch:
                for name, each in found.items():
                    each.update(row[name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return " ".join([reader.snapshot, *(f"{name} {each.hexdigest()[:16]}" for name, each in found.items())])


# ---- the stores ----


def prepared(folder: Path) -> Project:
    """The project, what its recipes come to, and the stores as each run begins with them."""
    project = make_recipes(folder)
    (folder / "references").mkdir()
    found = steps.alone(lambda: references(project, folder / "references"))
    snapshots = {(at, limit): digest for at, limit, digest in found["snapshots"]}
    project = replace(project, snapshots=snapshots, contents=found["contents"])
    steps.alone(lambda: _begin(place_in(project, folder / "begin")))
    return project


def place_in(project: Project, folder: Path) -> Place:
    """The place whose stores lie in a folder."""
    return Place(project, folder / "store", folder / "target", folder / "store" / "index" / "lmdb-1")


def _begin(place: Place) -> None:
    """Everything is there and nothing names it, but what is kept from the beginning to the end, in both stores."""
    store, target = Store.init(place.store), Store.init(place.target)
    for at, limit in place.project.snapshots:
        build(store, place.project.recipes[at], limit=limit, ref=None)
    for at, digest in enumerate(place.kept):
        keeper.hold(store, f"kept/{at}", digest, "from the beginning to the end")
        keeper.tag(store, f"kept/{at}", digest)
        copy(store, f"kept/{at}", to=target)
