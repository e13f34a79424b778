"""Things in the places of a store's files and folders that do not belong there, and all that is done with a store.

``python -m tests.faults.hostile`` tries every thing in every place; the suite a part of it, each thing and each place.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import stat
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zgstore
from tests.upkeep import bare_stores as bare
from zgstore.errors import ZgError
from zgstore.format.digest import Digest, digest_of
from zgstore.format.pages import Blob
from zgstore.reading.opening import follow
from zgstore.storage import partials
from zgstore.storage.files import directory, remove_tree
from zgstore.storage.store import Store
from zgstore.upkeep import accounts, collector, copier, differ, inspector, keeper
from zgstore.upkeep.verifier import verify

BUILD = "0b5e55ed-0000-4000-8000-000000000001"
KEY, MEASURED = digest_of("action", b"key"), digest_of("measurement", b"what")
BOUND_BYTES = 128 << 20  # twice the largest metadata

# One place of each kind: the first that the pattern finds.
FOLDERS = (
    "objects", "objects/??", "meta", "meta/??", "actions", "actions/??", "measurements", "builds", "partials", "refs",
    "refs/heads", "refs/heads/team", "refs/tags", "reflog", "reflog/heads", "reflog/heads/team",
    "reflog/heads/team/main", "holds", "leases", "tmp", "tmp/dead", "trash", "trash/5", "trash/5/meta", "quarantine",
    "locks", "index", "index/lmdb-1",
)  # fmt: skip
FILES = (
    "zgstore.toml", "objects/??/*", "meta/??/*", "actions/??/*", "measurements/*", "builds/*", "partials/*",
    "refs/heads/team/main", "refs/tags/v1", "reflog/heads/team/main/*1", "holds/paper", "leases/*", "tmp/dead/0",
    "trash/5/meta/*", "quarantine/*", "locks/store", "locks/gc", "locks/refs", "locks/partials",
    "index/lmdb-1/data.mdb", "index/lmdb-1/lock.mdb", "index/lmdb-1/seal",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Made:
    """A store that has something of everything, and one to copy from and to.

    Args:
        path: The store.
        first: The snapshot that its tag names.
        rows: What its ref reads as: column 0 of each row.
        good: Another, sound store.
        target: One to copy to.
    """

    path: Path
    first: Digest
    rows: list[bytes]
    good: Path
    target: Path


def make(folder: Path) -> Made:
    """Something in every folder; the empty ones of its families left out, as copies often do."""
    store = Store.init(folder / "store")
    first = bare.publish(store, "team/main", [1, 2, 3], masked=[2])
    bare.publish(store, "team/main", [1, 2])
    store.point("v1", "tag", first)
    store.hold("paper", first, "a reason")
    part = bare.publish(store, "part", [7])
    partials.mark(store.path, part, ["h.0:in"], store.modes)
    shards = list(store.shards(store.snapshot(first)))
    bare.put_action(store, shards[0].blobs[0], b"key")
    store.memos.put_measurement(MEASURED, {"kind": "data", "count": 9})
    head = {"kind": "build", "columns": [column.as_value() for column in bare.COLUMNS], "constants": []}
    with store.memos.start_build(BUILD, head) as growing:
        for shard in shards:
            growing.append(shard)
    gone = bare.publish(store, "gone", [20])
    store.refs.remove("gone", "head")
    store.objects.to_trash("5", gone, "meta")
    with store.leases.take("read") as lease:
        lease.add([first])
        body = (store.path / "leases" / lease.uuid).read_bytes()
    (store.path / "leases" / lease.uuid).write_bytes(body)  # as one that is dead, or of another host
    (store.path / "tmp" / "dead").mkdir()
    for name in ("tmp/dead/0", "quarantine/bad"):
        (store.path / name).write_bytes(b"left")
    verify(store)
    store.index.put_stamps([(first.raw, zgstore.storage.index.Stamp(zgstore.storage.files.Stat(1, 2, 3, 4, 5), 9e9))])
    good = Store.init(folder / "good")
    copier.copy(store, "v1", to=good)
    bare.publish(good, "other", [1, 40])
    for root in (store.path, good.path):
        for family in ("objects", "meta", "actions"):
            for each in (root / family).iterdir():
                with contextlib.suppress(OSError):
                    each.rmdir()
    Store.init(folder / "target")
    return Made(store.path, first, read_rows(store), good.path, folder / "target")


def read_rows(store: Store) -> list[bytes]:
    """The values of a column, as a reader gives them."""
    with zgstore.read(store, "team/main", columns=["h.0:in"]) as reader:
        return [struct.pack("<4f", *reader[at]["h.0:in"].tolist()) for at in range(len(reader))]


# ---- what does not belong there ----


def _aside(path: Path, outside: Path) -> Path:
    moved = outside / path.name
    shutil.move(path, moved)
    return moved


def a_link(path: Path, outside: Path) -> None:
    """To what was there: all that is written through it would lie outside."""
    path.symlink_to(_aside(path, outside))


def a_dangling_link(path: Path, outside: Path) -> None:
    _aside(path, outside)
    path.symlink_to(outside / "nowhere" / "to-be-made")


def a_hard_link(path: Path, outside: Path) -> None:
    os.link(_aside(path, outside), path)


def a_fifo(path: Path, outside: Path) -> None:
    _aside(path, outside)
    os.mkfifo(path)


def a_socket(path: Path, outside: Path) -> None:
    _aside(path, outside)
    with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as made:  # a path of at most 108 bytes
        made.bind(path.name)


def a_device(path: Path, outside: Path) -> None:
    """Zeros without end."""
    _aside(path, outside)
    os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 5))


def the_other_kind(path: Path, outside: Path) -> None:
    """A file in the place of a folder, a folder in that of a file."""
    if _aside(path, outside).is_dir():
        path.write_bytes(b"no folder")
    else:
        path.mkdir()


def a_terabyte(path: Path, outside: Path) -> None:
    """Of holes, after what was there."""
    shutil.copy(path, outside / path.name)
    path.chmod(0o600)
    os.truncate(path, 1 << 40)


def folders_without_end(path: Path, outside: Path) -> None:
    """Deeper than any stack, and than any path."""
    handle = os.open(path, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("d", dir_fd=handle)
        below = os.open("d", os.O_RDONLY, dir_fd=handle)
        os.close(handle)
        handle = below
    os.close(handle)


def names_that_are_no_text(path: Path, outside: Path) -> None:
    for name in (b"\xff\xfe", b"\x1b[31mred\n\r", b"-rf", b"..\\..", b" ", b"x" * 255, b"CON", b"~"):
        with open(os.path.join(os.fsencode(path), name), "wb") as file:  # noqa: PTH118, PTH123  (paths as bytes)
            file.write(b"mine")


EITHER = (a_link, a_dangling_link, a_fifo, a_socket, a_device, the_other_kind)
THINGS: dict[Callable[[Path, Path], None], tuple[str, ...]] = {
    **dict.fromkeys(EITHER, FOLDERS + FILES),
    a_hard_link: FILES,
    a_terabyte: FILES,
    folders_without_end: FOLDERS,
    names_that_are_no_text: FOLDERS,
}


# ---- what is done with a store ----


def _read(made: Made, path: Path) -> None:
    assert read_rows(Store.open(path)) == made.rows, "a reader gave other values"


def _follow(_made: Made, path: Path) -> None:
    with follow(Store.open(path), BUILD) as reader:
        reader.batch(range(len(reader)))


def _of(store: Callable[[Store], Any]) -> Callable[[Made, Path], Any]:
    return lambda _made, path: store(Store.open(path))


OPERATIONS: dict[str, Callable[[Made, Path], Any]] = {
    "verify --quick": _of(lambda store: verify(store, quick=True).report),
    "verify": _of(lambda store: verify(store).report),
    "ls": _of(lambda store: (store.refs.list(), store.refs.holds())),
    "log": _of(lambda store: store.refs.log("team/main")),
    "show": _of(lambda store: inspector.show(store, "team/main")),
    "du": _of(accounts.usage),
    "why": lambda made, path: accounts.why(Store.open(path), made.first.hex[:12]),
    "diff": _of(lambda store: differ.diff(store, "team/main", "v1")),
    "lease ls": _of(lambda store: store.leases.all()),
    "read": _read,
    "follow": _follow,
    "memos": _of(lambda store: ([*map(store.memos.read_action, store.memos.actions())], [*store.memos.measurements()])),
    "an action": _of(lambda store: store.memos.action(KEY, bare.TAG)),
    "copy from it": lambda made, path: copier.copy(Store.open(path), "team/main", to=Store.open(made.target)),
    "gc --dry-run": _of(lambda store: collector.collect(store, dry_run=True)),
    "tag": lambda made, path: keeper.tag(Store.open(path), "team/v2", made.first),
    "ref set": lambda made, path: keeper.set_ref(Store.open(path), "team/x/y", made.first),
    "hold": lambda made, path: keeper.hold(Store.open(path), "another", made.first),
    "publish": _of(lambda store: bare.publish(store, "new", [1, 30])),
    "put an action": lambda made, path: bare.put_action(Store.open(path), Blob(made.first, 1), b"key"),
    "put a measurement": _of(lambda store: store.memos.put_measurement(MEASURED, {"kind": "data"})),
    "copy to it": lambda made, path: copier.copy(Store.open(made.good), "other", to=Store.open(path)),
    "unhold": _of(lambda store: keeper.unhold(store, "paper")),
    "ref rm": _of(lambda store: keeper.forget(store, "team/main", "head")),
    "reindex": _of(lambda store: store.index.clear()),
    "gc --now": _of(lambda store: collector.collect(store, now=True, owner=True)),
    "verify again": _of(lambda store: verify(store).report),
}


def seen(root: Path) -> dict[str, tuple[int, int, bytes]]:
    """All that lies in a folder: kinds and permissions, times, content."""
    found = {}
    for each in [root, *sorted(root.rglob("*"))]:
        entry = each.lstat()
        content = each.read_bytes() if stat.S_ISREG(entry.st_mode) else b""
        found[str(each.relative_to(root))] = (entry.st_mode, entry.st_mtime_ns, content)
    return found


def begin_peak() -> int:
    """Count this process's memory anew: what it has now."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


def peak_bytes() -> int:
    """The most memory that this process had since."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


def place_of(store: Path, pattern: str) -> Path:
    """The first file or folder of that kind."""
    return min(store.glob(pattern))


def tried(made: Made, pattern: str, thing: Callable[[Path, Path], None], folder: Path) -> Iterator[str]:
    """Put the thing there, do everything, and say what should not have happened; how often each outcome came last."""
    outside, store = folder / "outside", folder / "store"
    outside.mkdir()
    shutil.copytree(made.path, store, symlinks=True)
    thing(place_of(store, pattern), outside)
    before = seen(outside)
    for name, operation in OPERATIONS.items():
        base = begin_peak()
        try:
            operation(made, store)
        except ZgError as error:
            if not (error.message and error.hint):
                yield f"{name}: {error.kind} without a remedy"
        except Exception as error:  # noqa: BLE001  (that is what is looked for)
            yield f"{name}: {error!r}"
        if peak_bytes() - base > BOUND_BYTES:
            yield f"{name}: {peak_bytes() - base >> 20} MiB of memory"
        if (after := seen(outside)) != before:
            changed = [path for path in before.keys() | after.keys() if before.get(path) != after.get(path)]
            yield f"{name}: changed {sorted(changed)[:3]} outside"
            before = after
    left = {each.name for each in folder.iterdir()} - {"outside", "store"}
    if left:
        yield f"left {left} beside the store"
    with directory(folder) as handle:
        remove_tree(handle, "store")  # no other that Python has gets to the end of folders without end


def can(thing: Callable[[Path, Path], None]) -> bool:
    """Whether this user may make such a thing."""
    return thing is not a_device or os.getuid() == 0


def main() -> int:
    """Everything in every place, or of it what is named; what was tried and found."""
    begun, counts, found = time.monotonic(), Counter[str](), 0
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as root:
        (Path(root) / "made").mkdir()
        made = make(Path(root) / "made")
        for thing in [each for each in THINGS if can(each) and each.__name__ in (sys.argv[1:] or each.__name__)]:
            for pattern in THINGS[thing]:
                with tempfile.TemporaryDirectory(dir=root) as folder:
                    for finding in tried(made, pattern, thing, Path(folder)):
                        print(f"{thing.__name__} at {pattern}: {finding}", flush=True)
                        found += 1
                counts[thing.__name__] += 1
    places = sum(counts.values())
    print(f"{places} stores, {places * len(OPERATIONS)} operations, {found} findings, {time.monotonic() - begun:.0f} s")
    return min(found, 1)


if __name__ == "__main__":
    sys.exit(main())
