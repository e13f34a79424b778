"""What is killed, failed and cut off from power: each operation with the place it begins in, and what must hold.

An operation is a function of its place: run again after whatever befell it, it comes to what it would have come to.
Those that read or make a tensor are in ``tensor_operations``, so that a process that runs none is forked quickly.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.upkeep import bare_stores as bare
from zgstore.errors import Corrupt, NotFound
from zgstore.format.digest import Digest, digest_of
from zgstore.storage import partials
from zgstore.storage.config import CONFIG
from zgstore.storage.store import Store
from zgstore.upkeep import keeper
from zgstore.upkeep.collector import collect
from zgstore.upkeep.copier import copy
from zgstore.upkeep.verifier import verify

DAY = 86400.0


@dataclass(frozen=True, slots=True)
class Operation:
    """One thing that can be interrupted.

    Args:
        prepare: Lays out a place, a folder of its own with stores and whatever else.
        work: Does it; what it came to, the same each time that it is done in such a place.
        check: Sees what must hold of the place at any moment, beyond its stores.
        program: Whose command does it; all that ``zgstore`` raises is an error of ours.
        courtesies: Folders beyond the usual in which a file that cannot be written is no fault.
    """

    prepare: Callable[[Path], None]
    work: Callable[[Path], str]
    check: Callable[[Path], None] = lambda _place: None
    program: str = "zgstore"
    courtesies: tuple[str, ...] = ()


# ---- what must hold of every store, at any moment ----


@dataclass(frozen=True, slots=True)
class State:
    """What the stores of a place say.

    Args:
        names: What each ref, tag and hold names.
        problems: Objects that are not what they should be: those that something refers to, and orphans too.
    """

    names: dict[str, str]
    problems: frozenset[str]


def stores_in(place: Path) -> list[Store]:
    return [Store.open(config.parent) for config in sorted(place.glob(f"*/{CONFIG}"))]


def state_of(place: Path) -> State:
    """What the stores say now; raises if a name is torn."""
    names: dict[str, str] = {}
    problems: set[str] = set()
    for store in stores_in(place):
        at = store.path.name
        for ref in store.refs.list():
            names[f"{at} {ref.kind} {ref.name}"] = str(ref.snapshot)
            log = store.refs.log(ref.name, ref.kind)  # empty where it was being forgotten
            assert not log or log[0].new == ref.snapshot, f"{ref.name} is not what its log says"
        names |= {f"{at} hold {hold.name}": str(hold.snapshot) for hold in store.refs.holds()}
        problems |= {f"{at} {problem.object or problem.path}" for problem in verify(store)}
        for family in ("objects", "meta"):
            for raw in store.objects.names(family):
                try:
                    store.objects.rehash(Digest(raw), family)
                except Corrupt:
                    problems.add(f"{at} {Digest(raw)}")
    return State(names, frozenset(problems))


def sweep_up(place: Path) -> None:
    """Collect every store without any grace: what befell it leaves nothing behind."""
    with ahead(100 * DAY):
        for store in stores_in(place):
            for lease in (store.path / "leases").iterdir():  # one that does not say whose it is waits to be old
                os.utime(lease, (0, 0))
            collect(store, now=True, owner=True)
            left = [path for name in ("leases", "builds", "trash", "tmp") for path in (store.path / name).iterdir()]
            assert not left, f"{left} is left"


@contextlib.contextmanager
def ahead(seconds: float) -> Iterator[None]:
    """Let the stores' clock be ahead."""
    real = Store.now
    Store.now = lambda self: real(self) + seconds
    try:
        yield
    finally:
        Store.now = real


# ---- names, bytes ----


def _two_snapshots(place: Path) -> None:
    store = Store.init(place / "store")
    bare.publish(store, "main", [1, 2], masked=[2])
    bare.publish(store, "next", [2, 3])


def _publish(place: Path) -> str:
    return str(bare.publish(Store.open(place / "store"), "main", [2, 4], masked=[1]))


def _move_names(place: Path) -> str:
    """A ref moved, a tag made, a ref made, a snapshot held, and names taken away again."""
    store = Store.open(place / "store")
    came = keeper.set_ref(store, "main", "next" if store.refs.get("next") else "main")
    keeper.tag(store, "v/1", came)
    keeper.hold(store, "paper", came, "a reason")
    for forget in (lambda: keeper.forget(store, "next", "head"), lambda: keeper.unhold(store, "old")):
        with contextlib.suppress(NotFound):
            forget()
    return str(came)


def _held(place: Path) -> None:
    _two_snapshots(place)
    keeper.hold(Store.open(place / "store"), "old", "main")


# ---- garbage ----


def _garbage(place: Path) -> None:
    """All that a collection looks at: what nothing names any more, what the dead left, what is old, what is torn."""
    store = Store.init(place / "store")
    for fills in ([1, 5], [1, 6], [1, 2]):
        digest = bare.publish(store, "main", fills, masked=[2])
    partials.mark(store.path, bare.publish(store, "gone", [7, 2]), {"h.0:in"}, store.modes)
    keeper.forget(store, "gone", "head")
    blob = next(iter(store.shards(store.snapshot(store.resolve("main@{2}"))))).blobs[0]
    bare.put_action(store, blob, b"key")
    torn = digest_of("page", b"torn")
    store.objects.path(torn, "meta").write_bytes(b"torn")
    kept = next(iter(store.shards(store.snapshot(digest)))).blobs[1].digest
    with store.leases.store_lock(exclusive=True):
        store.objects.all_to_trash("1", [("objects", kept)])  # though something keeps it
    lease = store.leases.take("build")
    (store.path / "tmp" / lease.uuid).mkdir()
    (store.path / "tmp" / lease.uuid / "0").write_bytes(b"half a blob")
    store.memos.start_build(lease.uuid, {"columns": []}).close()


def _collected(place: Path, days: float) -> str:
    store = Store.open(place / "store")
    with ahead(days * DAY):
        collect(store, expire_reflog_seconds=0.0)
    return json.dumps(sorted({*bare.objects_in(store)} | {each.digest.hex for each in store.objects.trashed()}))


def _trashed(place: Path) -> None:
    _garbage(place)
    _collected(place, 10)


# ---- from elsewhere ----


def source_and_target(place: Path) -> None:
    source, target = Store.init(place / "source"), Store.init(place / "target")
    bare.publish(source, "main", [1, 2, 3], masked=[2])
    keeper.tag(source, "v1", "main")
    bare.publish(target, "main", [3, 4])


def _copy(place: Path) -> str:
    """A part, and then the whole, under the name and as a tag."""
    source, target = Store.open(place / "source"), Store.open(place / "target")
    copy(source, "main", to=target, columns=["h.0:in"])
    copy(source, "main", to=target)
    return str(copy(source, "v1", to=target).plan.snapshot)


OPERATIONS = {
    "publish": Operation(_two_snapshots, _publish),
    "names": Operation(_held, _move_names),
    "gc into the trash": Operation(_garbage, lambda place: _collected(place, 10)),
    "gc out of the trash": Operation(_trashed, lambda place: _collected(place, 20)),
    "copy": Operation(source_and_target, _copy),
    "init": Operation(lambda place: None, lambda place: Store.init(place / "store").policy),
}
