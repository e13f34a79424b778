"""Folders from outside: a store whose digests are all right, and the caches that `import` takes. Bytes are choices."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

import zgstore
from tests.fuzz.bounds import Target, require, see_refusal
from tests.fuzz.place import empty, here, root, see_outside, store
from tests.fuzz.trees import Choices, Choose, as_json, as_msgpack, bytes_changed, changed, from_msgpack, tree_of
from tests.upkeep import bare_stores as bare
from tests.upkeep import small_stores as small
from tests.upkeep import zerograph_cache as made
from zgstore.cli.console import Screen
from zgstore.cli.main import main
from zgstore.errors import ZgError
from zgstore.format.digest import Digest, digest_of
from zgstore.format.manifest import Column
from zgstore.format.pages import Dropped, RowsRoot
from zgstore.storage.store import Store
from zgstore.upkeep import accounts, collector, copier, differ, exporter, inspector
from zgstore.upkeep.importer import import_safetensors, import_zerograph
from zgstore.upkeep.verifier import verify

# ---- a store received from elsewhere: whoever made it named everything rightly ----

REF, SOUND = "main", "sound"


@functools.cache
def _published() -> dict[str, Any]:
    """A store with two snapshots, and the objects of one of them by what they are."""
    place = store("received")
    first = bare.publish(place, REF, [1, 2, 3], masked=[2])
    bare.publish(place, SOUND, [1, 4])
    snapshot = place.snapshot(first)
    root_page = place.root(snapshot)
    data = Digest(snapshot.pins.data["digest"])
    (record,) = [entry.record for entry in place.refs.log(REF)]
    leaves = [Digest(root_page.leaves[at : at + 32]) for at in (0, 32)]
    meta = {"snapshot": first, "root": snapshot.root, "dropped": snapshot.dropped, "rows root": data, "record": record}
    meta |= {f"leaf {at}": leaf for at, leaf in enumerate(leaves)}
    meta["rows"] = Digest(RowsRoot.decode(_body(place, data, "meta")).pages)
    blobs = [blob for shard in place.shards(snapshot) for blob in shard.blobs]
    objects = {f"blob {at}": blob.digest for at, blob in enumerate(blobs)} | {"constant": snapshot.constants[0].blob}
    bodies = {name: _body(place, digest, "meta") for name, digest in meta.items()}
    bodies |= {name: _body(place, digest, "objects") for name, digest in objects.items()}
    return {"store": place, "digests": meta | objects, "bodies": bodies}


def _body(place: Store, digest: Digest, family: str) -> bytes:
    return place.objects.path(digest, family).read_bytes()


KINDS = {"snapshot": "snapshot", "record": "record"}  # what the digests of other metadata are of: pages
# What names what: an object that is another one is another name above it.
ABOVE = {
    "rows": ("rows root",), "rows root": ("snapshot",), "dropped": ("snapshot",), "root": ("snapshot",),
    "leaf 0": ("root",), "leaf 1": ("root",), "constant": ("snapshot",), "snapshot": ("record",),
}  # fmt: skip


class Received:
    """The store with one or two objects changed, all digests above them right, and the ref on what came of it."""

    def __init__(self, choose: Choose) -> None:
        published = _published()
        self.store: Store = published["store"]
        self.digests, self.bodies = dict(published["digests"]), dict(published["bodies"])
        self.added: list[Path] = []
        for _ in range(0 if choose.used_up else 1 + choose(2)):
            names = [*self.bodies]
            name = names[choose(len(names))] if choose(3) else names[choose(8)]
            self._put(name, self._changed(name, choose))
        self.ref = self.store.path / "refs" / "heads" / REF
        self.was = self.ref.read_bytes()
        log = self.store.path / "reflog" / "heads" / REF / "000000000001"
        self.log, self.logged = log, log.read_bytes()
        self.ref.write_text(f"{self.digests['snapshot']}\n")
        self.log.write_text(f"- {self.digests['snapshot']} {self.digests['record']}\n")

    def _changed(self, name: str, choose: Choose) -> bytes:
        body = self.bodies[name]
        if not name.startswith(("blob", "constant")) and choose(8):
            with contextlib.suppress(ValueError):  # one that was changed already may be none any more
                return as_msgpack(changed(from_msgpack(body), choose))
        return bytes_changed(body, choose)

    def _put(self, name: str, body: bytes) -> None:
        """Another object under that name, and all that name it."""
        old, size = self.digests[name], len(self.bodies[name])
        family = "objects" if name.startswith(("blob", "constant")) else "meta"
        digest = digest_of(None if family == "objects" else KINDS.get(name, "page"), body)
        self.digests[name], self.bodies[name] = digest, body
        path = self.store.objects.path(digest, family)
        if not path.exists():
            path.write_bytes(body)
            self.added.append(path)
        above = ABOVE.get(name, ("leaf 0", "leaf 1") if name.startswith("blob") else ())
        for each in above:
            if old.raw in self.bodies[each]:
                told = self.bodies[each].replace(old.raw, digest.raw)
                if family == "objects":
                    told = told.replace(size.to_bytes(8, "little"), len(body).to_bytes(8, "little"), 1)
                self._put(each, told)

    def close(self) -> None:
        for path in self.added:
            path.unlink(missing_ok=True)
        self.ref.write_bytes(self.was)
        self.log.write_bytes(self.logged)


def _read(place: Store) -> None:
    with zgstore.read(place, REF) as reader:
        require(len(reader.batch(range(len(reader)))) >= 0, "")
        dict(reader.constants)


UNFORESEEN = "run it again with --debug to see the traceback"  # the hint of an exception that is none of ours


class _Kept(Screen):
    """What is said, kept."""

    is_terminal = False

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def divert(self) -> None:
        pass

    def write(self, text: str) -> None:
        self.said.append(text)


def _command(place: Store, *words: str) -> None:
    """Typed: whatever comes, one JSON object or a page of text, and an exit code of ours."""
    kept, screen = io.StringIO(), _Kept()
    with contextlib.redirect_stderr(kept):
        code = main(["--store", str(place.path), *words], screen)
    said = "".join(screen.said) + kept.getvalue()
    require(UNFORESEEN not in said, f"{words}: {said[-600:]}")
    require(not set(said) & set("\x1b\r\x07\x00\u202e"), f"{words}: what a terminal would act on")
    if "--json" in words:
        require(said.count("\n") == 1, f"{words[0]} said {said.count(chr(10))} lines")
        value = json.loads(said, parse_constant=lambda name: require(False, f"{name} is no JSON"))
        require(value["ok"] is (code == 0), "an exit code")


def _into(place: Store) -> None:
    target = store("target")
    copier.copy(place, REF, to=target)
    if [*verify(place)] == []:
        require([*verify(target, [REF])] == [], "a copy of a sound store is not sound")


OPERATIONS: dict[str, Callable[[Store], Any]] = {
    "read": _read,
    "export": lambda place: exporter.export(place, REF, empty("exported"), decode=True),
    "show": lambda place: inspector.show(place, REF).as_json(),
    "log": lambda place: place.refs.log(REF),
    "du": accounts.usage,
    "diff": lambda place: differ.diff(place, REF, SOUND),
    "diff --values": lambda place: differ.diff(place, REF, SOUND, values=True),
    "gc": lambda place: collector.collect(place, dry_run=True, now=True, owner=True),
    "copy": _into,
    **{
        " ".join(words): functools.partial(lambda words, place: _command(place, *words), words)
        for command in (("show", REF), ("log", REF), ("ls",), ("du",), ("diff", REF, SOUND), ("verify",))
        for words in (command, (*command, "--json"))
    },
}
# Where nothing is wrong with a store, these do what they are for; of the rest, all says something of two snapshots.
WHOLE = {"read", "export", "show", "log", "du", "gc", "copy"}


def receive(body: bytes) -> None:
    """Verification ends and says what is wrong; where it says nothing, all can be used; else there is a typed error."""
    received = Received(Choices(body))
    place, choose = received.store, Choices(body[::-1])
    try:
        problems = list(verify(place, quick=choose(2) == 0))
        names = [*OPERATIONS]
        for name in {names[choose(len(names))] for _ in range(4)}:
            try:
                OPERATIONS[name](place)
            except ZgError as error:
                see_refusal(error)
                newer = "newer zgstore" in str(error.hint)
                require(bool(problems) or newer or name not in WHOLE, f"{name} of a sound store: {error.message}")
        see_outside()
    finally:
        received.close()


# ---- folders that are imported ----


def _bring(body: bytes, make: Callable[[Path, Choose], None], bring: Callable[..., Any]) -> None:
    """What is taken is a snapshot that reads; what is not leaves nothing that a ref names."""
    folder, place = empty("cache"), store("imported")
    make(folder, Choices(body))
    report = bring(place, folder)
    with zgstore.read(place, report.snapshot) as reader:
        require(len(reader) == report.samples, "other rows than it says")
        reader.batch(range(len(reader)))
    see_outside()


def _tensors() -> dict[str, torch.Tensor]:
    return {
        "h.0": torch.ones(3, 4), "h.1": torch.zeros(3, 4, dtype=torch.bfloat16), "labels": torch.arange(3),
    }  # fmt: skip


def _safetensors_changed(body: bytes, choose: Choose) -> bytes:
    """Another header before the same data, or other bytes."""
    if choose(4) == 0:
        return bytes_changed(body, choose)
    size = int.from_bytes(body[:8], "little")
    tree = tree_of(json.loads(body[8 : 8 + size]))
    text = as_json(changed(tree, choose)).encode("utf-8", "replace")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + body[8 + size :]


def make_plain(folder: Path, choose: Choose) -> None:
    bodies = {f"{name}.safetensors": save(_tensors()) for name in ("a", "b")}
    if not choose.used_up:
        name = [*bodies][choose(2)]
        bodies[name] = _safetensors_changed(bodies[name], choose)
    for each, body in bodies.items():
        (folder / each).write_bytes(body)
    _other_things(folder, choose)


def _other_things(folder: Path, choose: Choose) -> None:
    """Now and then a link, a device, a fifo or a folder where a file should be, or another file beside."""
    outside, names = root() / "outside" / "mine", sorted(each.name for each in folder.iterdir())
    path = folder / names[choose(len(names))]
    what = choose(24)
    if what in {1, 2, 3, 4}:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        [
            lambda: path.symlink_to(outside), lambda: os.mkfifo(path), path.mkdir,
            lambda: path.symlink_to(folder),
        ][what - 1]()  # fmt: skip
    elif what == 5:
        os.link(outside, folder / "c.safetensors")
    elif what == 6:
        (folder / "\x1b[31m\n.safetensors").write_bytes(save(_tensors()))
    elif what == 7:
        os.truncate(path, 1 << 40) if path.is_file() else None


@functools.cache
def _exported() -> tuple[dict[str, bytes], dict[str, Any]]:
    """An export's files, and its manifest."""
    place = store("to export")
    lengths = torch.tensor([2, 3])
    columns = {
        small.boundary("h.0", 0): [small.values(at, 2) for at in range(2)],
        small.boundary("h.1", 1, codec="int8"): [small.values(9 + at, 2) for at in range(2)],
        Column("ids", "context", "I64", "raw", (None,)): [(torch.arange(5) + at, lengths) for at in range(2)],
    }
    dropped = Dropped((1,), ("x",), (9,), ("y",))
    small.publish(place, columns, ref=REF, constants={"rope": torch.ones(3)}, dropped=dropped)
    exporter.export(place, REF, empty("an export"))
    files = {
        str(path.relative_to(here("an export"))): path.read_bytes()
        for path in here("an export").rglob("*") if path.is_file() and path.name != "manifest.json"
    }  # fmt: skip
    return files, json.loads((here("an export") / "manifest.json").read_text())


def make_export(folder: Path, choose: Choose) -> None:
    """With digests that are right, for its maker knows them."""
    files, manifest = _exported()
    files = dict(files)
    manifest = json.loads(json.dumps(manifest))
    columns = manifest["columns"]
    if choose(2):
        described = columns[choose(len(columns))]["files"]
        told = described[choose(len(described))]
        files[told["file"]] = body = bytes_changed(files[told["file"]], choose)
        told["bytes"], told["digest"] = len(body), str(digest_of(None, body))
    tree = tree_of(manifest)
    if choose(4):
        tree = changed(tree, choose)
    for name, body in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(body)
    (folder / "manifest.json").write_text(as_json(tree), encoding="utf-8", errors="replace")
    _other_things(folder, choose)


class _Call:
    """Unpickled by the common way, it does what it says."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.made = (function, args)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.made


BOMB = 1 << 30


def _hostile_payload(choose: Choose) -> Any:
    """A payload with something in it that is no plain tensor."""
    payload = made.payload_of(choose(4), rows=2)
    things = (
        lambda: _Call(bytearray, BOMB), lambda: _Call(print, "run"), lambda: _Call(torch.FloatStorage, BOMB),
        lambda: torch.zeros(1).expand(1 << 20, 1 << 10), lambda: torch.eye(3).to_sparse(), lambda: torch.ones(2, 9),
        lambda: torch.ones(2, 3, dtype=torch.complex64), lambda: torch.nn.Parameter(torch.ones(2, 6, 8)),
        lambda: torch.ones(4, 6, 8)[::2], lambda: torch.zeros(2, 0), lambda: torch.tensor(1.0), lambda: [payload],
        lambda: {1, 2}, lambda: "text", lambda: None, lambda: torch.ones(2, 6, 8, dtype=torch.uint16),
        lambda: torch.ones(2, 6, 8, device="meta"), lambda: _Call(torch.Tensor, BOMB),
        lambda: torch.full((2, 6, 8), torch.nan),
    )  # fmt: skip
    thing = things[choose(len(things))]()
    place = choose(5)
    if place == 0:
        payload["boundaries"][choose(3)] = thing
    elif place == 1:
        payload["context"]["input_ids"] = thing
    elif place == 2:
        payload["context"][("more", 3, "\0", "../x")[choose(4)]] = thing
    elif place == 3:
        payload["more"] = thing
    else:
        payload = thing
    return payload


def make_zerograph(folder: Path, choose: Choose) -> None:
    """With digests that are right, for its maker knows them."""
    manifest = made.make(folder, [made.payload_of(seed, rows=2) for seed in range(2)])
    path, row = folder / "batch_00000001.pt", manifest["files"][1]
    if choose(2):
        torch.save(_hostile_payload(choose), path)
    if choose(2):
        path.write_bytes(bytes_changed(path.read_bytes(), choose))
    body = path.read_bytes()
    row["bytes"], row["sha256"] = len(body), hashlib.sha256(body).hexdigest()
    if choose(3) == 1:
        for each in manifest["files"]:
            del each["boundaries"], each["context"]
    tree = tree_of(manifest)
    if choose(2):
        tree = changed(tree, choose)
    text = as_json(tree).encode("utf-8", "replace")
    (folder / "manifest.json").write_bytes(text)
    (folder / "manifest.sha256.json").write_text(json.dumps({"sha256": hashlib.sha256(text).hexdigest()}))
    _other_things(folder, choose)


def _target(name: str, rule: Callable[[bytes], None], refusals: tuple[type[ZgError], ...]) -> Target:
    return Target(name, rule, refusals, tight=False, cost=50)


TARGETS = (
    _target("received store", receive, ()),
    _target("plain files", lambda body: _bring(body, make_plain, import_safetensors), (ZgError,)),
    _target("export", lambda body: _bring(body, make_export, import_safetensors), (ZgError,)),
    _target("zerograph cache", lambda body: _bring(body, make_zerograph, import_zerograph), (ZgError,)),
)
