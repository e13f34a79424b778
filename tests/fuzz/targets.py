"""The surfaces that meet bytes from outside, each as a function of bytes that holds what must be true of any."""

from __future__ import annotations

import contextlib
import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from tests.fuzz import folders
from tests.fuzz.bounds import Target, require
from tests.fuzz.place import here, see_outside, store
from tests.fuzz.trees import (
    Choose,
    Pairs,
    Raw,
    as_json,
    as_msgpack,
    as_toml,
    bytes_changed,
    changed,
    from_msgpack,
    hostile,
    tree_of,
)
from zgstore.building import lockfile
from zgstore.building.recall import Found, _parts, recall, remember, shard_name
from zgstore.building.recipe import load_recipe
from zgstore.errors import Corrupt, Invalid, NotFound, ZgError
from zgstore.format import canonical, tensorfile
from zgstore.format.action import Action
from zgstore.format.blobheader import lay_out, read_header
from zgstore.format.digest import Digest, digest_of, digest_prefix
from zgstore.format.manifest import Column, Constant, Pins, Record, Snapshot
from zgstore.format.pages import Blob, Dropped, LeafPage, RootPage, RowsPage, RowsRoot, Shard, rows_tree
from zgstore.format.readplan import BlobPlan
from zgstore.reading.blobs import Blobs, stamp_of
from zgstore.storage import config, partials
from zgstore.storage.builds import parse_build
from zgstore.storage.leases import HEAD_BYTES, _head
from zgstore.storage.naming import check_name
from zgtrain import checkpoint
from zgtrain.jobfile import load_job

PROJECT = Path(__file__).parents[2]
DIGEST = digest_of("snapshot", b"one")


def by_tree(seeds: tuple[bytes, ...], read: Callable[[bytes], Any], write: Callable[[Any, int], bytes]) -> Any:
    """How real inputs are changed: mostly as values, else as bytes, or both."""

    def change(choose: Choose) -> bytes:
        body, way = seeds[choose(len(seeds))], choose(8)
        if way < 6:
            body = write(changed(read(body), choose), way)
        return bytes_changed(body, choose) if way >= 5 else body

    return change


def by_bytes(seeds: tuple[bytes, ...]) -> Callable[[Choose], bytes]:
    def change(choose: Choose) -> bytes:
        body = seeds[choose(len(seeds))]
        for _ in range(1 + choose(3)):
            body = bytes_changed(body, choose)
        return body

    return change


# ---- canonical msgpack, and what is written in it ----

COLUMNS = (
    Column("h.0:in", "boundary", "F32", "raw", (4,), 0), Column("h.1:in", "boundary", "BF16", "int8", (None, 8), 1),
    Column("id", "context", "I64", "raw", ()),
)  # fmt: skip
BLOB = Blob(digest_of(None, b"blob"), 4128)
LEAF = LeafPage.of([Shard(3, DIGEST, (BLOB,) * 3), Shard(2, DIGEST, (BLOB,) * 3)], columns=3)
VALUES = (
    Snapshot(
        Pins({"id": "t", "measured": bytes(32), "x": 1.5}, {"id": "d", "digest": bytes(32), "pins": {"n": 3}}, {}),
        COLUMNS, (Constant("w", "F32", (2, 3), DIGEST, 4120),), 16, 7, DIGEST, DIGEST,
    ),
    Record(DIGEST, 12.5, {"host": "h", "durations": {"teacher": 1.0}, "recipe": bytes(32)}),
    LEAF, RootPage.of([(DIGEST, LEAF)] * 2, columns=3), RowsPage(bytes(64)), rows_tree(bytes(96))[0],
    Dropped((1, 5), ("NaN", "Inf"), (9,), ("too short",)),
)  # fmt: skip
KINDS = {
    "snapshot": Snapshot, "record": Record, "leaf": LeafPage, "root": RootPage, "rows": RowsPage,
    "rows-root": RowsRoot, "dropped": Dropped,
}  # fmt: skip
ACTION = Action(
    DIGEST, BLOB, 64, "BF16", (None, 8), {"torch": "2"}, nonfinite=(3, 9), statistics={"rms": 0.5}, seconds=1.25
)
ENCODED = tuple(each.encode() for each in VALUES)
GENERIC = (
    canonical.encode([None, True, -5, 1 << 40, "text", b"bytes", 1.5, {"a": {"b": [1, 2]}}]),
    canonical.encode({"k": [[[[[[[[[[[[[[]]]]]]]]]]]]]]}),
)
STRANGE = (b"\xcb" + bytes(8), b"\xd4\x01\x00", b"\xcc\x05", b"\xdd\xff\xff\xff\xff", b"\xc7\x05\x01abcde")


def packed(tree: Any, way: int) -> bytes:
    """Canonical, but for maps in any order, or something that the format has no place for."""
    if way == 4 and isinstance(tree, list) and tree:
        strange = Raw(STRANGE[len(tree) % len(STRANGE)])
        tree[0] = (tree[0][0], strange) if isinstance(tree, Pairs) else strange
    return as_msgpack(tree, ordered=way != 3)


def read_canonical(body: bytes) -> None:
    require(canonical.encode(canonical.decode(body)) == body, "two encodings mean one value")


def read_metadata(body: bytes) -> None:
    was = canonical.decode(body)
    kind = was.get("kind") if isinstance(was, dict) else None
    value = KINDS.get(kind if isinstance(kind, str) else "", Snapshot).decode(body)
    again = value.encode()
    require(type(value).decode(again).encode() == again, "read back, it is another")
    require(within(canonical.decode(again), was), "what was taken is not written so")


def read_action(body: bytes) -> None:
    """Sealed as its maker would."""
    action = Action.decode(body + digest_of("action", body).raw)
    again = action.encode()
    require(Action.decode(again).encode() == again, "read back, it is another")
    require(within(canonical.decode(again[:-32]), canonical.decode(body)), "what was taken is not written so")


def within(small: Any, big: Any) -> bool:
    """The same, keys apart that this version does not know."""
    if isinstance(small, dict) and isinstance(big, dict):
        return all(key in big and within(each, big[key]) for key, each in small.items())
    if isinstance(small, list) and isinstance(big, list):
        return len(small) == len(big) and all(map(within, small, big))
    return canonical.encode(small) == canonical.encode(big)


# ---- blobs ----

BLOB_COLUMNS = (
    Column("x", "boundary", "F32", "raw", (2,), 0), Column("r", "boundary", "F16", "raw", (None, 3), 1),
    Column("q", "boundary", "BF16", "int8", (None, 70), 2), Column("i", "context", "I64", "raw", ()),
    Column("b", "context", "BOOL", "raw", (4,)), Column("e", "boundary", "F8_E4M3", "raw", (2, 0), 3),
)  # fmt: skip


def blob_of(column: Column) -> bytes:
    lengths = torch.tensor([2, 0, 1]) if column.ragged else None
    shape = (3, *(size for size in column.shape if size is not None))
    return tensorfile.encode(column, torch.ones(shape).to(tensorfile.TORCH_OF[column.dtype]), lengths)


BLOBS = tuple(map(blob_of, BLOB_COLUMNS))


def change_blob(choose: Choose) -> bytes:
    """Another header before the same data, its length told rightly or not; or other bytes."""
    body, way = BLOBS[choose(len(BLOBS))], choose(8)
    if way < 6:
        tree = json.loads(body[8:4096], object_pairs_hook=Pairs)
        text = as_json(changed(tree, choose)).encode("utf-8", "replace")
        size = 4088 if len(text) <= 4088 and choose(4) else len(text) + choose(9)
        length = hostile(choose) if way == 5 else size
        told = length % (1 << 64) if isinstance(length, int) else size
        body = told.to_bytes(8, "little") + text.ljust(size, b" ") + body[4096:]
    return bytes_changed(body, choose) if way >= 5 else body


def read_head(body: bytes) -> None:
    """The header alone, of a file of the size that it may mean, for data of terabytes are not written here."""
    refused = None
    ends = [int(end) for end in re.findall(rb",(\d{1,18})\]", body[:4096])]
    for size in {len(body), 4096 + max(ends, default=0)}:
        try:
            header = read_header(body[:4096], file_size=size, what="a blob")
        except Corrupt as error:
            refused = error
            continue
        require(header.encode() == body[:4096], "two headers mean one")
        require(header == lay_out({each.name: (each.dtype, each.shape) for each in header.tensors}), "another layout")
        return
    assert refused is not None
    raise refused


def read_blob(body: bytes) -> None:
    """As one of each column. What is taken is canonical, and means the same to the reference reader."""
    refused: list[Corrupt] = []
    for column in BLOB_COLUMNS:
        try:
            data, offsets = tensorfile.decode(body, column)
        except Corrupt as error:
            refused.append(error)
            continue
        if column.codec == "raw":
            again = tensorfile.encode(column, data, None if offsets is None else offsets.diff())
            require(again == body, "two files mean the same tensors")
            theirs = safetensors.torch.load(body)["data"]
            require(tensorfile.as_bytes(theirs) == tensorfile.as_bytes(data), "others read other values of it")
    require(len(refused) >= len(BLOB_COLUMNS) - 1, "it is a blob of two columns")
    if refused:
        raise refused[0]


def open_blob(body: bytes) -> None:
    """The same by the reader of files, which trusts a page for size and rows: all that a maker of pages chooses."""
    name = digest_of(None, body).hex
    path = here("objects", name[:2], f"{name}.safetensors")
    path.write_bytes(body)
    plan = BlobPlan(name, len(body), stamp_of(path.lstat()), verified=False)
    refused: list[ZgError] = []
    try:
        for column in BLOB_COLUMNS:
            blobs = Blobs(str(here("objects")), hint="make it again", verify=True)
            blobs.extend([(plan, column, 3)])
            try:
                with contextlib.closing(blobs), blobs.open(0) as file:
                    tensorfile.decode(body, column)
                    require(file.header.encode() == body[:4096], "another header")
            except Corrupt as error:
                refused.append(error)
    finally:
        path.unlink()
    if refused:
        raise refused[0]


# ---- names ----

REVS = (
    b"main", b"team/run-3", b"v1.0", DIGEST.hex.encode(), f"blake3:{DIGEST.hex}".encode(), DIGEST.hex[:6].encode(),
    b"main@{0}", b"main@{99}", b"lock:main", b"a.lock/b", b"../../outside/mine", b"a" * 129, b"A/b/C", b"x/../y",
)  # fmt: skip


def name_outside(body: bytes) -> None:
    """A text from outside as ref, tag, hold, digest, REV and locked name; one that may be a name is one file."""
    text = body.decode("utf-8", "surrogateescape")
    place = store()
    with contextlib.suppress(Invalid):
        require(Digest.parse(text).hex in text, "another digest")
    require(digest_prefix(text) is None or str(digest_prefix(text)) in text, "another prefix")
    for look in (place.resolve, lambda rev: lockfile.resolve(f"lock:{rev}", here()), place.find, place.refs.get):
        with contextlib.suppress(NotFound, Invalid):
            look(text)
    try:
        check_name(text)
        place.refs.hold(text, DIGEST, text)
        held = place.path / "holds" / text
        require(held.is_file() and held.resolve() == held, "a name led elsewhere")
        require([each.name for each in place.refs.holds()] == [text], "it is listed as another")
        place.refs.unhold(text)
    finally:
        require(not any((place.path / "holds").iterdir()), "something is left")
        see_outside()


# ---- small files of a store ----


def files_of_names(body: bytes) -> None:
    """Where a digest, a log entry, a hold, a marker should be."""
    place, name = store(), "torn"
    snapshot = Digest(bytes(32))
    paths = [
        place.path / "refs" / "heads" / name, place.path / "holds" / name, place.path / "partials" / snapshot.hex,
        place.path / "reflog" / "heads" / name / "000000000001",
    ]  # fmt: skip
    seal = digest_of("partial", body).raw
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(body + seal if path.parent.name == "partials" else body)
    looks = (
        lambda: place.refs.get(name), lambda: place.refs.log(name), place.refs.list, place.refs.holds,
        lambda: place.refs.last_logged(name, "head"), lambda: partials.expected(place.path, snapshot),
    )  # fmt: skip
    refused = []
    try:
        for look in looks:
            try:
                look()
            except Corrupt as error:
                refused.append(error)
        require(isinstance(place.refs.lost(), list), "")
    finally:
        for path in paths:
            path.unlink()
        paths[-1].parent.rmdir()
    if refused:
        raise refused[0]


LINES = (
    f"{DIGEST}\n".encode(), f"- {DIGEST} -\n".encode(), f"{DIGEST} {DIGEST} {DIGEST}\n".encode(),
    f"{DIGEST}\na reason\n".encode(),
    canonical.encode({"kind": "partial", "snapshot": bytes(32), "columns": ["a", "b"]}),
)  # fmt: skip


def read_lease(body: bytes) -> None:
    """The head as bytes; a lease that is torn in any way is one that only its age tells dead, and never an error."""
    place = store()
    path = place.path / "leases" / "0b5e55ed-0000-4000-8000-000000000001"
    path.write_bytes((len(body).to_bytes(4, "little") + body)[:HEAD_BYTES].ljust(HEAD_BYTES, b"\0") + bytes(40))
    try:
        (info,) = place.leases.all()
        require(len(info.digests) in {0, 32}, "digests that it does not name")
    finally:
        path.unlink()


LEASE = _head("read", 60)[4:]
LEASE = LEASE[: int.from_bytes(_head("read", 60)[:4], "little")]


def read_build(body: bytes) -> None:
    """A growing build: its head, sealed as its maker would, two shards if it has three columns, and a torn one."""
    build = parse_build(framed(body))
    for shard in build.shards:
        require(len(shard.blobs) == len(build.columns), "an entry of other columns")


def framed(body: bytes) -> bytes:
    sealed = body + digest_of("record", body).raw
    return len(sealed).to_bytes(8, "little") + sealed + bytes(2 * (40 + 3 * 40)) + body[:100]


BUILD = canonical.encode({"kind": "build", "columns": [each.as_value() for each in COLUMNS], "constants": []})
STEMS, TAGS, SHARDS = (bytes(32), b"\1" * 32), ("0123456789ab", "0123456789ab"), (shard_name(DIGEST, b"ids"),)
PLATFORM = {"torch": "2"}


def recall_body() -> bytes:
    """What is remembered of a plan, as its file has it."""
    place, found = store(), Found.of(ACTION)
    remember(place.memos, STEMS, TAGS, SHARDS, platforms=(PLATFORM,) * 2, found=[[found], [found]])
    value = place.memos.measurement(_parts(STEMS, TAGS, 1)[0][0])
    return canonical.encode(value)


def recall_any(body: bytes) -> None:
    """A memory of a plan that somebody sealed: it says what the actions would, or nothing."""
    place = store()
    ((key, _),) = _parts(STEMS, TAGS, 1)
    (place.path / "measurements" / f"{key.hex}.msgpack").write_bytes(body + digest_of("measurement", body).raw)
    for column in recall(place.memos, STEMS, TAGS, SHARDS):
        require(len(column) == 1 and isinstance(column[0], Found | None), "no column of one shard")


# ---- files that people write ----


def toml(tree: Any, way: int) -> bytes:
    return as_toml(tree).encode("utf-8", "replace")


def toml_tree(body: bytes) -> Any:
    return tree_of(tomllib.loads(body.decode()))


RECIPES = tuple(
    path.read_bytes() for path in sorted(PROJECT.glob("examples/*/*.toml")) if b"[teacher]" in path.read_bytes()
)
JOBS = tuple(
    path.read_bytes() for path in sorted(PROJECT.glob("examples/*/*.toml")) if b"[student]" in path.read_bytes()
)


def read_recipe(body: bytes) -> None:
    path = here("files", "cache.toml")
    path.write_bytes(body)
    recipe = load_recipe(path)
    require(canonical.encode(dict(recipe.teacher.args)) is not None, "")
    require(recipe.storage.batches_per_shard >= 1, "a cut of nothing")


def read_job(body: bytes) -> None:
    path = here("files", "job.toml")
    path.write_bytes(body)
    job = load_job(path)
    require(job.identity() == load_job(path).identity(), "two identities of one job")


def override(body: bytes) -> None:
    """What is typed after `--set`."""
    path = here("files", "job.toml")
    path.write_bytes(JOBS[0])
    load_job(path, [body.decode("utf-8", "surrogateescape")]).identity()


WORDS = (
    b"train.steps=8",
    b"train.lr=1e-4",
    b"train.order=sequential",
    b'student.args={ path = "x" }',
    b'train.optimizer."weight_decay" = 0',
)


def read_lockfile(body: bytes) -> None:
    path = here("files", "zgstore.lock")
    path.write_bytes(body)
    sections = lockfile.read(path)
    for name, locked in sections.items():
        lockfile.write(path, name, locked)
    require(lockfile.read(path) == sections, "read back, it is another")


LOCKED = f'''
[main]
snapshot = "{DIGEST}"
recipe = "{DIGEST}"
pins = "{DIGEST}"
["a b"]
snapshot = "{DIGEST.hex}"
pins = "{DIGEST}"
'''.encode()


def read_configuration(body: bytes) -> None:
    folder = here("configured")
    folder.mkdir(exist_ok=True)
    (folder / "zgstore.toml").write_bytes(body)
    found = config.read_config(folder)
    require(found.index is None or found.index.is_absolute(), "an index beside the store")
    require("/" not in found.id and ".." not in found.id, "an id that leads elsewhere")


CONFIG = (
    b'format = 1\nrequires = []\nid = "0b5e55ed-0000-4000-8000-000000000001"\npolicy = "private"\nindex = "/tmp/i"\n'
)


# ---- a checkpoint ----


def checkpoint_body() -> bytes:
    path = here("files", "c.pt")
    checkpoint.save(path, {"step": 3, "block_state": {"w": torch.ones(2, 3)}, "rng": [1, (2, None)], "loss": 0.5})
    return path.read_bytes()


def read_checkpoint(body: bytes) -> None:
    path = here("files", "checkpoint.pt")
    path.write_bytes(body)
    state = checkpoint.load(path)
    require(isinstance(state, dict), "no state")


# ---- all of them ----


def _target(
    name: str, rule: Callable[[bytes], None], refusals: tuple[type[ZgError], ...], seeds: tuple[bytes, ...] = (),
    change: Any = None, **more: Any,
) -> Target:  # fmt: skip
    return Target(name, rule, refusals, change or (by_bytes(seeds) if seeds else None), seeds, **more)


def _of_msgpack(seeds: tuple[bytes, ...]) -> Any:
    return by_tree(seeds, from_msgpack, packed)


def _of_toml(seeds: tuple[bytes, ...]) -> Any:
    return by_tree(seeds, toml_tree, toml)


def all_targets() -> dict[str, Target]:
    """By name."""
    recalled, saved = (recall_body(),), (checkpoint_body(),)
    values = (*GENERIC, *ENCODED)
    made = [
        _target("canonical", read_canonical, (Corrupt,), values, _of_msgpack(values)),
        _target("metadata", read_metadata, (Corrupt, Invalid), ENCODED, _of_msgpack(ENCODED)),
        _target("action", read_action, (Corrupt,), (ACTION.encode()[:-32],), _of_msgpack((ACTION.encode()[:-32],))),
        _target("header", read_head, (Corrupt,), tuple(body[:4096] for body in BLOBS), change_blob),
        _target("blob", read_blob, (Corrupt,), BLOBS, change_blob, cost=3),
        _target("blob file", open_blob, (Corrupt,), BLOBS, change_blob, cost=5),
        _target("name", name_outside, (Invalid,), REVS, cost=10, tight=False),
        _target("names' files", files_of_names, (Corrupt,), LINES, cost=10),
        _target("lease", read_lease, (), (LEASE,), _of_msgpack((LEASE,)), cost=5),
        _target("build", read_build, (Corrupt, Invalid), (BUILD,), _of_msgpack((BUILD,))),
        _target("recall", recall_any, (), recalled, _of_msgpack(recalled), cost=3),
        _target("recipe", read_recipe, (Invalid,), RECIPES, _of_toml(RECIPES), cost=3),
        _target("job", read_job, (Invalid,), JOBS, _of_toml(JOBS), cost=3),
        _target("override", override, (Invalid,), WORDS, cost=3),
        _target("lock file", read_lockfile, (Invalid,), (LOCKED,), _of_toml((LOCKED,)), cost=2),
        _target("configuration", read_configuration, (Corrupt, Invalid), (CONFIG,), _of_toml((CONFIG,))),
        _target("checkpoint", read_checkpoint, (Corrupt,), saved, cost=5),
        *folders.TARGETS,
    ]
    return {each.name: each for each in made}
