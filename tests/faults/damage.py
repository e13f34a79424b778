"""Every byte class of every kind of file in a store, damaged in every way; who finds it, and what they get instead.

``python -m tests.faults.damage`` damages each byte of what is small and many of what is not; the suite a few of each
class. What must hold of each damage is in ``judged``.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

import zgstore
from tests.upkeep import bare_stores as bare
from zgstore.errors import ZgError
from zgstore.format.blobheader import read_header
from zgstore.format.digest import Digest
from zgstore.format.pages import RowsRoot
from zgstore.reading.opening import follow
from zgstore.storage import partials
from zgstore.storage.leases import HEAD_BYTES
from zgstore.storage.store import Store
from zgstore.upkeep import collector, keeper
from zgstore.upkeep.verifier import verify
from zgtrain.trainer import train_block

sys.path[:0] = [str(Path(__file__).parents[1] / "zgtrain")]

from students import built, make_job  # noqa: E402

POINTS = ("layers.0:in", "layers.2:in")
PARTIAL = ("h.0:in",)

# Kinds of files that hold nothing of their own: what they say is found out again, or nobody asks.
DISPOSABLE = {"action", "measurement", "index", "lock", "left over"}
# What no check of ours can see, and why that is so; everything else must be found by a verification.
UNSEEN = {
    ("ref", "newline"): "it means the same",
    ("reflog", "newline"): "it means the same",
    ("reflog", "first entry gone"): "a collection forgets the oldest too",
    ("hold", "newline"): "it means the same",
    ("hold", "reason"): "a text for people",
    ("hold", "gone"): "it was let go",
    ("hold", "grown"): "what follows the digest is a text for people",
    ("hold", "exchanged"): "both still keep both",
    ("tag", "gone"): "one that never moved is as one that was not made yet; what it named stays for 30 days",
    ("tag", "newline"): "it means the same",
    ("partial", "gone"): "the snapshot counts as whole then, and what is not here as missing",
    ("lease", ""): "its holder finds that it is gone, or what it named",
    ("build", ""): "followers find it; the snapshot does not depend on it",
    ("configuration", "id"): "it names the folder of an index elsewhere, and nothing else",
    ("configuration", "requires"): "without it nothing is required",
    ("configuration", "newline"): "it means the same, or nothing",
    ("configuration", "policy"): "decides permissions of new files alone",
}


@dataclass(frozen=True, slots=True)
class Part:
    """A byte class of one file.

    Args:
        kind: Which kind of file.
        name: Which of its bytes.
        path: The file.
        start: Its first byte.
        stop: The byte after its last.
        other: A file of the same kind, to be exchanged with.
    """

    kind: str
    name: str
    path: Path
    start: int
    stop: int
    other: Path | None = None


@dataclass(frozen=True, slots=True)
class Damage:
    """One damage: of a byte class, or of its whole file (then ``part.name`` is what happened)."""

    part: Part
    how: str
    change: Callable[[bytes], bytes | None] = field(compare=False)


@dataclass(slots=True)
class Made:
    """A store with a real build, what was made by hand, and what they read, train and build as."""

    store: Store
    recipe: Path
    files: dict[Path, bytes]
    modes: dict[Path, int]
    values: str = ""
    trained: str = ""
    built: Digest | None = None
    follows: str = ""


# ---- the store ----


def make(folder: Path) -> Made:
    """A small build with an int8 column, and beside it constants, masked rows, a part, a history, a hold, a lease."""
    options = {"storage": 'columns."layers.2:in".codec = "int8"', "more": ""}
    job, store, _ = built(make_job(folder, ragged=True, rows=6, batch_size=2, **options))
    one = bare.publish(store, "bare", [1, 2], masked=[2])
    two = bare.publish(store, "bare", [1, 2, 3], masked=[2])
    bare.publish(store, "bare", [4])
    store.point("v1", "tag", two)
    store.point("v2", "tag", one)
    part = bare.publish(store, "part", [5])
    partials.mark(store.path, part, PARTIAL, mode=0o600, dir_mode=0o700)
    for blob in next(store.shards(store.snapshot(part))).blobs[1:]:
        if store.objects.path(blob.digest, "objects").exists():
            store.objects.path(blob.digest, "objects").unlink()
    for number, name in enumerate(("held", "also-held", "leased")):
        digest = bare.publish(store, name, [6 + number], constant=30 + number)
        if name == "leased":
            with store.leases.take("read") as lease:
                lease.add([digest])
                body, path = (store.path / "leases" / lease.uuid).read_bytes(), store.path / "leases" / lease.uuid
            path.write_bytes(body)
        else:
            keeper.hold(store, name, digest, "a reason")
        keeper.forget(store, name, "head")
    (store.path / "tmp" / "left").write_bytes(b"left over")
    collector.collect(store, grace_seconds=0, owner=True)  # what nothing keeps is gone
    verify(store).report  # noqa: B018  (it stamps)
    for family in ("objects", "meta", "actions"):
        for each in (store.path / family).iterdir():
            with contextlib.suppress(OSError):
                each.rmdir()
    made = Made(store, job.snapshot.recipe, {}, {})
    for path in sorted(store.path.rglob("*")):
        if path.is_file() and not path.is_relative_to(store.path / "locks"):
            made.files[path], made.modes[path] = path.read_bytes(), stat.S_IMODE(path.stat().st_mode)
    made.values, made.trained, made.built, made.follows = read(made), train(made), build(made), followed(made)
    return made


# ---- who looks ----


def read(made: Made) -> str:
    """All values of all columns of every snapshot that has a name, as one digest."""
    hasher = hashlib.sha256()
    store = Store.open(made.store.path)
    for rev, columns in (("cache", None), ("v1", None), ("v2", None), ("bare", None), ("part", [*PARTIAL])):
        with zgstore.read(store, rev, columns=columns) as reader:
            for name, tensor in sorted({**reader.batch(range(len(reader))), **reader.constants}.items()):
                hasher.update(f"{rev} {name} {tensor.shape}".encode())
                hasher.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


def forward(block: nn.Module, source: torch.Tensor, _context: object) -> torch.Tensor:
    return block(source)


def train(made: Made) -> str:
    """The state of a block after a few steps."""
    torch.manual_seed(0)
    block = nn.Linear(16, 16)
    with zgstore.read(Store.open(made.store.path), "cache") as reader:
        report = train_block(
            block, reader, source=POINTS[0], target=POINTS[1], optimizer=torch.optim.SGD(block.parameters(), lr=0.1),
            steps=3, batch_size=4, forward=forward, workers=0,
        )  # fmt: skip
    return report.state_digest


def build(made: Made) -> Digest:
    """What the recipe comes to."""
    return zgstore.build(Store.open(made.store.path), made.recipe).snapshot


def followed(made: Made) -> str:
    """What a follower of the build gets; of one that does not end, it is seen to be the beginning."""
    store = Store.open(made.store.path)
    (uuid,) = (path.name for path in made.files if path.parent.name == "builds")
    with follow(store, uuid, [*POINTS]) as reader:
        values = [reader[at][name].tolist() for at in range(len(reader)) for name in POINTS]
        told = f"{values}".removesuffix("]")
    if not reader.done and made.follows.startswith(told):
        return made.follows  # it waits for the rest, and is told that the builder is gone
    return told


# ---- byte classes ----


def parts(made: Made) -> list[Part]:
    """Each byte class of each kind of file."""
    store, found = made.store, list[Part]()
    snapshot = store.snapshot(store.resolve("cache"))
    shards = list(store.shards(snapshot))
    for column in (*POINTS, "input_ids"):
        place, _ = snapshot.column(column)
        paths = [store.objects.path(shard.blobs[place].digest, "objects") for shard in shards[:2]]
        found += _blob(f"blob of {column}", *paths)
    by_hand = store.snapshot(store.resolve("v1"))
    dense = [store.objects.path(shard.blobs[0].digest, "objects") for shard in store.shards(by_hand)][:2]
    found += _blob("blob of a dense column", *dense)
    found += _blob("constant", store.objects.path(by_hand.constants[0].blob, "objects"), dense[0])
    found += _metadata(store)
    found += _names(store)
    found += _memos(store)
    lines = {}
    for line in (store.path / "zgstore.toml").read_text().splitlines():
        lines[line.partition(" ")[0]] = line + "\n"
    found += _pieces("configuration", store.path / "zgstore.toml", lines)
    for name in ("data.mdb", "seal", "lock.mdb"):
        found += _pieces("index", store.path / "index" / "lmdb-1" / name, {"": None})
    for name in ("store", "gc", "refs"):
        found += _pieces("lock", store.path / "locks" / name, {"": None})
    found += _pieces("left over", store.path / "tmp" / "left", {"": None})
    return found


def _blob(kind: str, path: Path, other: Path) -> Iterator[Part]:
    body = path.read_bytes()
    header = read_header(body, file_size=len(body), what="it")
    end = body.index(b" ", 8) if b" " in body[: header.data_start] else header.data_start
    yield Part(kind, "header length", path, 0, 8, other)
    yield Part(kind, "header", path, 8, end, other)
    yield Part(kind, "padding", path, end, header.data_start, other)
    for tensor in header.tensors:
        yield Part(kind, tensor.name, path, tensor.start, tensor.start + tensor.size, other)


def _metadata(store: Store) -> Iterator[Part]:
    one, two = (store.resolve(rev) for rev in ("v1", "bare"))
    for digest, other in ((one, two),):
        mine, theirs = store.snapshot(digest), store.snapshot(other)
        rows, other_rows = store.rows_root_of(mine), store.rows_root_of(theirs)
        page_of = [
            Digest(RowsRoot.decode(store.objects.read_meta(each, "page")).pages[:32]) for each in (rows, other_rows)
        ]
        pairs = {
            "snapshot": (digest, other),
            "root page": (mine.root, theirs.root),
            "leaf page": tuple(Digest(store.root(each).leaves[:32]) for each in (mine, theirs)),
            "rows root": (rows, other_rows),
            "rows page": tuple(page_of),
            "dropped page": (mine.dropped, theirs.root),
            "record": tuple(store.refs.log("bare")[at].record for at in (1, 0)),
        }
        for kind, (first, second) in pairs.items():
            path = store.objects.path(first, "meta")
            yield Part(kind, "", path, 0, path.stat().st_size, store.objects.path(second, "meta"))


def _names(store: Store) -> Iterator[Part]:
    def text(kind: str, path: str, other: str, names: Sequence[str]) -> Iterator[Part]:
        words = (store.path / path).read_text().replace("\n", " \n ").split(" ")
        at, fields = 0, iter(names)
        for word in words:
            size = len(word.encode())
            if word == "\n":
                yield Part(kind, "newline", store.path / path, at, at + 1, store.path / other)
                at += 1
            elif size:
                yield Part(kind, next(fields), store.path / path, at, at + size, store.path / other)
                at += size + ((store.path / path).read_bytes()[at + size : at + size + 1] == b" ")

    yield from text("ref", "refs/heads/bare", "refs/heads/cache", ["digest"])
    yield from text("tag", "refs/tags/v1", "refs/tags/v2", ["digest"])
    for number in (1, 2, 3):
        entry, other = (f"reflog/heads/bare/{each:012d}" for each in (number, number % 3 + 1))
        yield from text("reflog", entry, other, ["old", "new", "record"])
    yield from text("hold", "holds/held", "holds/also-held", ["digest", "reason", "reason"])


def _memos(store: Store) -> Iterator[Part]:
    def first_two(pattern: str) -> list[Path]:
        return sorted(store.path.glob(pattern))[:2]

    for kind, pattern in (("action", "actions/??/*"), ("measurement", "measurements/*"), ("partial", "partials/*")):
        path, *other = first_two(pattern)
        size = path.stat().st_size
        yield Part(kind, "body", path, 0, size - 32, *other)
        yield Part(kind, "seal", path, size - 32, size, *other)
    (path,) = first_two("builds/*")
    head = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    size, entry = path.stat().st_size, (path.stat().st_size - head) // 4
    bounds = {"length": (0, 8), "head": (8, head)}
    bounds |= {
        "rows": (head, head + 8), "inputs": (head + 8, head + 40), "digest": (head + 40, head + 72),
        "size": (head + 72, head + 80), "end": (size - entry, size - entry + 8),
        "snapshot": (size - entry + 8, size - entry + 40), "tail": (size - 8, size),
    }  # fmt: skip
    for name, (start, stop) in bounds.items():
        yield Part("build", name, path, start, stop)
    (path,) = first_two("leases/*")
    head = 4 + int.from_bytes(path.read_bytes()[:4], "little")
    for name, start, stop in (
        ("length", 0, 4), ("head", 4, head), ("padding", head, HEAD_BYTES), ("digests", HEAD_BYTES, HEAD_BYTES + 32),
    ):  # fmt: skip
        yield Part("lease", name, path, start, stop)


def _pieces(kind: str, path: Path, pieces: dict[str, str | None]) -> Iterator[Part]:
    at = 0
    for name, text in pieces.items():
        size = path.stat().st_size if text is None else len(text)
        stop = at + size - (text is not None and text.endswith("\n"))
        yield Part(kind, name, path, at, stop)
        if text is not None and text.endswith("\n"):
            yield Part(kind, "newline", path, stop, stop + 1)
        at += size


# ---- damages ----


def damages(parts: Sequence[Part], *, at_most: int, bits: Sequence[int]) -> Iterator[Damage]:
    """Of each class some bytes flipped and all zeroed; each file cut at each class, grown, exchanged, and removed."""
    for part in parts:
        size = part.stop - part.start
        count = min(size, at_most)
        for number in range(count):
            at = part.start + (number * (size - 1) // max(count - 1, 1))
            bit = bits[number % len(bits)]
            yield Damage(part, f"bit {bit} of byte {at} flipped", _flip(at, bit))
        yield Damage(part, "zeroed", _zero(part.start, part.stop))
        yield Damage(part, f"cut at {part.start}", _cut(part.start))
    for part in {each.path: each for each in reversed(parts)}.values():
        whole = Part(part.kind, "grown", part.path, 0, 0)
        for tail in (b"\0", b"\xff" * 4096):
            yield Damage(whole, f"grown by {len(tail)} bytes", _grow(tail))
        yield Damage(Part(part.kind, "gone", part.path, 0, 0), "removed", _remove)
        if part.other is not None:
            exchanged = Part(part.kind, "exchanged", part.path, 0, 0, part.other)
            yield Damage(exchanged, f"exchanged with {part.other.name[:12]}", _as(part.other.read_bytes()))


def _flip(at: int, bit: int) -> Callable[[bytes], bytes]:
    return lambda body: body[:at] + bytes([body[at] ^ 1 << bit]) + body[at + 1 :]


def _zero(start: int, stop: int) -> Callable[[bytes], bytes]:
    return lambda body: body[:start] + bytes(stop - start) + body[stop:]


def _cut(at: int) -> Callable[[bytes], bytes]:
    return lambda body: body[:at]


def _grow(tail: bytes) -> Callable[[bytes], bytes]:
    return lambda body: body + tail


def _as(other: bytes) -> Callable[[bytes], bytes]:
    return lambda _body: other


def _remove(_body: bytes) -> None:
    return None


def changes(damage: Damage, made: Made) -> bool:
    """Whether it changes anything: bytes that are zero already are not zeroed."""
    body = damage.part.path.read_bytes()
    return damage.change(body) != body


@contextlib.contextmanager
def applied(damage: Damage, made: Made) -> Iterator[None]:
    """The damage done, its times kept; afterwards all is as it was."""
    _put(damage.part.path, damage.change(damage.part.path.read_bytes()))
    if damage.part.name == "exchanged" and damage.part.other is not None:
        _put(damage.part.other, made.files[damage.part.path])
    try:
        yield
    finally:
        for path, body in made.files.items():
            if path.parent.parent.name != "index" and (not path.exists() or path.read_bytes() != body):
                _put(path, body)
                path.chmod(made.modes[path])
        for path in set(made.store.path.rglob("*")) - made.files.keys():
            if path.is_file() and path.relative_to(made.store.path).parts[0] not in {"index", "locks"}:
                path.unlink()


def _put(path: Path, body: bytes | None) -> None:
    if body is None:
        path.unlink(missing_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    before = path.stat() if path.exists() else None
    if before is not None:
        path.chmod(0o600)
    path.write_bytes(body)
    if before is not None:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


# ---- judgement ----


def judged(damage: Damage, made: Made, counts: Counter[str]) -> Iterator[str]:
    """Do it, let everybody look, and say what does not hold."""
    kind = damage.part.kind
    with applied(damage, made):
        quick, full = (_outcome(lambda quick=quick: _problems(made, quick=quick)) for quick in (True, False))
        seen = {
            "read": _outcome(lambda: read(made)) or "",
            "train": _outcome(lambda: train(made)) or "",
            "follow": _outcome(lambda: followed(made)) if kind in {"build", "measurement"} else made.follows,
        }
        gone = _outcome(lambda: _collected(made, damage))
        seen["build"] = _outcome(lambda: build(made)) if kind in DISPOSABLE | {"build", "configuration"} else made.built
    right = {"read": made.values, "train": made.trained, "follow": made.follows, "build": made.built}
    counts["damages"] += 1
    counts["found by verify --quick"] += bool(quick)
    counts["found by verify"] += bool(full)
    counts["found by a reader"] += isinstance(seen["read"], ZgError)
    counts["found by a training"] += isinstance(seen["train"], ZgError)
    for who, got in {**seen, "verify": full, "verify --quick": quick, "gc": gone}.items():
        if isinstance(got, Exception) and not isinstance(got, ZgError):
            yield f"{who} raised {got!r}"
        elif who in right and got != right[who] and not isinstance(got, ZgError) and not _means_another(damage):
            yield f"{who} gave something else"
    if isinstance(gone, list) and gone and not (kind in {"lease", "hold"} or _is_unseen(damage)):
        yield f"gc lost {gone[:3]}"
    if kind in DISPOSABLE and any(isinstance(seen[who], ZgError) for who in right):
        yield f"what is disposable stopped {[who for who in right if isinstance(seen[who], ZgError)]}"
    is_found = bool(full)
    if not is_found and kind not in DISPOSABLE and not _is_unseen(damage):
        yield "nobody finds it"
    counts["right answers without a word"] += not is_found


def _is_unseen(damage: Damage) -> bool:
    kind, name = damage.part.kind, damage.part.name
    if kind == "reflog" and damage.part.path.name.endswith("1") and name in {"gone", "exchanged", "record"}:
        return (kind, "first entry gone") in UNSEEN and name == "gone"
    return (kind, name) in UNSEEN or (kind, "") in UNSEEN


def _means_another(damage: Damage) -> bool:
    """A name is what its file says: exchanged, each reads as the other, and `verify` holds them against their logs."""
    return damage.part.kind in {"ref", "tag"} and damage.part.name == "exchanged"


def _outcome(work: Callable[[], object]) -> object:
    try:
        return work()
    except Exception as error:  # noqa: BLE001  (that is what is looked at)
        return error


def _problems(made: Made, *, quick: bool) -> list[str]:
    return [problem.path for problem in verify(Store.open(made.store.path), quick=quick)]


def _collected(made: Made, damage: Damage) -> list[str]:
    """Collect without any grace: which objects went, but for what is damaged itself."""
    collector.collect(Store.open(made.store.path), grace_seconds=0, owner=True)
    there = {damage.part.path, damage.part.other}
    folders = {made.store.path / family for family in ("objects", "meta")}
    objects = [path for path in made.files if path.parent.parent in folders]
    return [path.name[:12] for path in objects if path not in there and not path.exists()]


def main() -> int:
    """All of it, or of the kinds that are named: what was damaged, and who found it."""
    kinds = [word for word in sys.argv[1:] if word != "--few"]
    at_most = 2 if "--few" in sys.argv else 64
    begun, counts, bad = time.monotonic(), Counter[str](), 0
    root = Path(tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    try:
        made = make(root)
        chosen = [part for part in parts(made) if part.kind in (kinds or part.kind)]
        for damage in damages(chosen, at_most=at_most, bits=range(8)):
            if changes(damage, made):
                for finding in judged(damage, made, counts):
                    part = damage.part
                    print(f"{part.kind}, {part.name} ({part.path.name[:12]}), {damage.how}: {finding}", flush=True)
                    bad += 1
    finally:
        shutil.rmtree(root)
    told = ", ".join(f"{count} {what}" for what, count in counts.items())
    print(f"{told}; {bad} findings; {time.monotonic() - begun:.0f} s")
    return min(bad, 1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
