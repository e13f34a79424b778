"""The byte classes of each kind of file in a store: what can be damaged in a way of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from zgstore.format.blobheader import read_header
from zgstore.format.digest import Digest
from zgstore.format.pages import RowsRoot
from zgstore.storage.leases import HEAD_BYTES
from zgstore.storage.store import Store

POINTS = ("layers.0:in", "layers.2:in")


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


def parts(store: Store) -> list[Part]:
    """Each byte class of each kind of file, in the store that ``damage`` makes."""
    found = list[Part]()
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
