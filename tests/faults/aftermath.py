"""After a stress: every name is whole, every byte accounted for, and what nothing needs can be collected."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from tests.faults.operations import DAY, ahead
from tests.faults.places import Project, content_of
from zgstore.building.builder import build
from zgstore.errors import Corrupt, Missing
from zgstore.format.digest import Digest
from zgstore.format.fields import all_digests
from zgstore.format.pages import RowsRoot
from zgstore.storage.names import FAMILIES, PREFIXES, parse_name
from zgstore.storage.store import Store
from zgstore.upkeep.accounts import usage
from zgstore.upkeep.collector import GcReport, collect
from zgstore.upkeep.verifier import verify

#: Folders whose files are no objects, each with what it may have.
PLAIN = (
    "actions", "measurements", "builds", "partials", "refs", "reflog", "holds", "leases", "tmp", "trash", "quarantine",
    "locks", "index", "zgstore.toml",
)  # fmt: skip
SWEPT = ("leases", "builds", "tmp", "trash", "quarantine")


def settle(path: Path, project: Project) -> dict[str, Any]:
    """What lies there, by what it is: files and bytes; and what does not hold."""
    after = _Aftermath(Store.open(path), project)
    after.run()
    return {"files": after.files, "findings": after.findings}


class _Aftermath:
    def __init__(self, store: Store, project: Project) -> None:
        self.store, self.project = store, project
        self.files: dict[str, tuple[int, int]] = {}
        self.findings: list[str] = []

    def run(self) -> None:
        self.names_are_whole()
        self.everything_is_known()
        self.sums_are_right()
        self.what_nothing_needs_goes()
        self.names_are_whole()
        self.builds_come_to_the_same()

    def expect(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.findings.append(otherwise)

    # -- names --

    def names(self) -> dict[str, Digest]:
        found = {f"{ref.kind} {ref.name}": ref.snapshot for ref in self.store.refs.list()}
        return found | {f"hold {hold.name}": hold.snapshot for hold in self.store.refs.holds()}

    def names_are_whole(self) -> None:
        """Each names a snapshot that an undisturbed build gives, and a reader gets all of it."""
        for problem in verify(self.store):
            self.findings.append(f"not sound: {problem}")
        read: dict[str, str] = {}
        for name, digest in self.names().items():
            due = self.project.contents.get(str(digest))
            self.expect(due is not None, f"{name} is {digest}, which no undisturbed build gives")
            if str(digest) not in read:
                read[str(digest)] = content_of(self.store, str(digest))
            self.expect(read[str(digest)] == due, f"{name} reads as {read[str(digest)]}, and should as {due}")
            if name.startswith("head r"):
                mine = [value for (at, _), value in self.project.snapshots.items() if f"head r{at}" == name]
                self.expect(str(digest) in mine, f"{name} is {digest}, and no build of that recipe")

    # -- accounts --

    def everything_is_known(self) -> None:
        """Each file is an object that something refers to, a sound orphan, or lies where its kind belongs."""
        wanted = self.referenced(reflog=True)
        for path in _files_below(self.store.path):
            family, *rest = path.relative_to(self.store.path).parts
            if family in FAMILIES:
                digest = parse_name(path.name, family) if len(rest) == 2 else None
                if digest is None or rest[0] not in PREFIXES:
                    self.findings.append(f"{path} is no object")
                    continue
                referenced = (family, digest) in wanted
                self._count(f"{family} {'referenced' if referenced else 'orphans'}", path)
                with self._told():
                    self.store.objects.rehash(digest, family)
            else:
                self._count(family, path)
                self.expect(family in PLAIN, f"{path} is nothing of a store")

    def referenced(self, *, reflog: bool) -> set[tuple[str, Digest]]:
        """Every object that a name needs, and that a memo of the data does, walked without the collector's code."""
        found: set[tuple[str, Digest]] = set()
        store, named = self.store, set(self.names().values())
        for ref in store.refs.list():
            for entry in store.refs.log(ref.name, ref.kind)[: None if reflog else 1]:
                named.add(entry.new)
                if entry.record is not None:
                    found.add(("meta", entry.record))
        for digest in named:
            with self._told():
                snapshot = store.snapshot(digest)
                metadata = [digest, snapshot.root, *all_digests(store.root(snapshot).leaves)]
                metadata += [each for each in (snapshot.dropped, store.rows_root_of(snapshot)) if each is not None]
                rows = store.rows_root(snapshot)
                metadata += all_digests(rows.pages) if rows is not None else []
                blobs = chain.from_iterable(shard.blobs for shard in store.shards(snapshot))
                found.update(("meta", each) for each in metadata)
                found.update(("objects", blob.digest) for blob in blobs)
                found.update(("objects", constant.blob) for constant in snapshot.constants)
        for value in store.memos.measurements():
            if value.get("kind") == "data":
                with contextlib.suppress(Missing):  # a memo's page may be gone: then a build measures anew
                    root = RowsRoot.decode(store.objects.read_meta(Digest(value["rows"]), "page"))
                    found.update(("meta", each) for each in (Digest(value["rows"]), *all_digests(root.pages)))
        return found

    def sums_are_right(self) -> None:
        """What ``du`` says, and what a collection would keep and take, is what lies on the disk."""
        size = {family: self._bytes(family) for family in (*FAMILIES, "trash")}
        told = usage(self.store)
        says = {
            "objects": told.total_bytes + told.other_bytes, "meta": told.metadata_bytes, "trash": told.trash_bytes,
        }  # fmt: skip
        self.expect(says == size, f"du says {says}, and there are {size}")
        with ahead(100 * DAY):
            dry = collect(self.store, dry_run=True, now=True)
        parts = (dry.live, dry.freed, dry.quarantined, dry.restored)
        split = sum(part.bytes for part in parts)
        self.expect(split == sum(size.values()), f"a collection tells of {split} bytes, and there are {size}: {dry}")

    # -- what is left in the end --

    def what_nothing_needs_goes(self) -> None:
        """Two collections without any grace, long after, leave what is referenced; the first does what it said."""
        for lease in (self.store.path / "leases").iterdir():  # of hands that were elsewhere
            os.utime(lease, (0, 0))
        with ahead(100 * DAY):
            said = collect(self.store, dry_run=True, now=True)
            did = collect(self.store, now=True, owner=True)
            self.expect(_plain(said) == _plain(did), f"a dry run said {said}, and then came {did}")
            again = collect(self.store, now=True, owner=True)
        moved = (again.trashed, again.restored, again.quarantined)
        self.expect(not any(part.objects for part in moved), f"a second collection still did something: {again}")
        left = [str(path) for name in SWEPT for path in (self.store.path / name).iterdir()]
        self.expect(not left, f"left behind: {left}")
        there = {(f, Digest(raw)) for f in FAMILIES for raw in self.store.objects.names(f)}
        wanted = self.referenced(reflog=False)
        self.expect(there == wanted, f"nothing needs {there - wanted}; gone is {wanted - there}")
        for file in self.store.memos.actions():
            action = self.store.memos.read_action(file)
            gone = action is None or ("objects", action.blob.digest) not in there
            self.expect(not gone, f"{file.path} tells of a blob that is gone")

    def builds_come_to_the_same(self) -> None:
        for at, recipe in enumerate(self.project.recipes):
            came, due = build(self.store, recipe, ref=None).snapshot, self.project.snapshots[at, None]
            self.expect(str(came) == due, f"r{at} comes to {came} now, and undisturbed to {due}")

    # -- sums --

    def _bytes(self, family: str) -> int:
        return sum(size for name, (_, size) in self.files.items() if name.split()[0] == family)

    def _count(self, name: str, path: Path) -> None:
        files, size = self.files.get(name, (0, 0))
        self.files[name] = files + 1, size + path.lstat().st_size

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except (Corrupt, Missing) as error:
            self.findings.append(error.message)


def _files_below(top: Path) -> Iterator[Path]:
    for folder, _, names in os.walk(top):
        yield from (Path(folder, name) for name in names)


def _plain(report: GcReport) -> dict[str, Any]:
    return {name: value for name, value in report.as_json().items() if name != "dry_run"}
