"""Every byte class of every kind of file in a store, damaged in every way; who finds it, and what they get instead.

``make damage`` damages each byte of what is small and many of what is not; the suite each class once. What must hold of
each damage is in ``_looked_at``.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import json
import os
import shutil
import signal
import stat
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import torch
from torch import nn

import zgstore
from tests.faults import steps
from tests.faults.byte_classes import POINTS, Part, parts
from tests.upkeep import bare_stores as bare
from zgstore.errors import ZgError
from zgstore.format.digest import Digest
from zgstore.reading.opening import follow
from zgstore.storage import partials
from zgstore.storage.files import SETTLE_SECONDS
from zgstore.storage.store import Store
from zgstore.upkeep import collector, keeper
from zgstore.upkeep.verifier import verify
from zgtrain.trainer import train_block

sys.path[:0] = [str(Path(__file__).parents[1] / "zgtrain")]

from students import built, make_job  # noqa: E402

PARTIAL = ("h.0:in",)
STUCK_SECONDS = 120

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
    partials.mark(store.path, part, PARTIAL, store.modes)
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
    time.sleep(SETTLE_SECONDS + 0.1)  # a younger file gets no stamp, and a store without stamps has no index
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


# ---- damages ----


def damages(parts: Sequence[Part], *, at_most: int) -> Iterator[Damage]:
    """Of each class some bytes flipped and all zeroed; each file cut at each class, grown, exchanged, and removed."""
    for part in parts:
        size = part.stop - part.start
        count = min(size, at_most)
        for number in range(count):
            at = part.start + (number * (size - 1) // max(count - 1, 1))
            yield _flipped(part, at, number % 8)
        yield from _class_lost(part)
    for part in {each.path: each for each in reversed(parts)}.values():
        yield from _file_lost(part)


def sampled(parts: Sequence[Part]) -> Iterator[Damage]:
    """Each class flipped once; of each kind one class zeroed or cut off, and one file grown, gone or exchanged."""
    for at, part in enumerate({(each.kind, each.name): each for each in reversed(parts)}.values()):
        if part.stop > part.start:
            yield _flipped(part, (part.start + part.stop) // 2, at % 8)
    for at, part in enumerate({each.kind: each for each in parts}.values()):
        ways = [*_file_lost(part)]
        yield [*_class_lost(part)][at % 2]
        yield ways[at % len(ways)]


def _flipped(part: Part, at: int, bit: int) -> Damage:
    return Damage(part, f"bit {bit} of byte {at} flipped", _flip(at, bit))


def _class_lost(part: Part) -> Iterator[Damage]:
    yield Damage(part, "zeroed", _zero(part.start, part.stop))
    yield Damage(part, f"cut at {part.start}", _cut(part.start))


def _file_lost(part: Part) -> Iterator[Damage]:
    for tail in (b"\0", b"\xff" * 4096):
        yield Damage(Part(part.kind, "grown", part.path, 0, 0), f"grown by {len(tail)} bytes", _grow(tail))
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


def changes(damage: Damage) -> bool:
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


@dataclass(slots=True)
class Seen:
    """What came of one damage.

    Args:
        tellers: Who told of it.
        silent: Why no verification needs to tell of it; "" where one does.
        wrong: What does not hold.
    """

    tellers: list[str]
    silent: str = ""
    wrong: list[str] = field(default_factory=list)


def judged(damage: Damage, made: Made) -> Seen:
    """Do it, and let everybody look, in a process of its own: one that a signal ends is told of too."""

    def look() -> dict[str, object]:
        signal.alarm(STUCK_SECONDS)
        return asdict(_looked_at(damage, made))

    with applied(damage, made):
        try:
            return Seen(**steps.alone(look))
        except AssertionError as error:
            return Seen([], wrong=[f"a process that looked at it: {error}"])


def _looked_at(damage: Damage, made: Made) -> Seen:
    kind = damage.part.kind
    told = {
        "--quick": _outcome(lambda: _problems(made, quick=True)),
        "verify": _outcome(lambda: _problems(made, quick=False)),
        "read": _outcome(lambda: read(made)),
        "train": _outcome(lambda: train(made)),
        "follow": _outcome(lambda: followed(made)) if kind in {"build", "measurement"} else made.follows,
        "gc": _outcome(lambda: _collected(made, damage)),
        "build": _outcome(lambda: build(made)) if kind in DISPOSABLE | {"build", "configuration"} else made.built,
    }
    right = {"read": made.values, "train": made.trained, "follow": made.follows, "build": made.built}
    seen = Seen([who for who, got in told.items() if isinstance(got, ZgError) or (who not in {*right, "gc"} and got)])
    for who, got in told.items():
        if isinstance(got, Exception) and not isinstance(got, ZgError):
            seen.wrong.append(f"{who} raised {got!r}")
        elif who in right and got != right[who] and not isinstance(got, ZgError) and not _means_another(damage):
            seen.wrong.append(f"{who} gave something else")
    if isinstance(told["gc"], list) and told["gc"] and not (kind in {"lease", "hold"} or _why_unseen(damage)):
        seen.wrong.append(f"gc lost {told['gc'][:3]}")
    if kind in DISPOSABLE and not right.keys().isdisjoint(seen.tellers):
        seen.wrong.append(f"what is disposable stopped {seen.tellers}")
    if not told["verify"]:
        seen.silent = "it holds nothing of its own" if kind in DISPOSABLE else _why_unseen(damage)
        if not seen.silent:
            seen.wrong.append("no verification finds it")
    return seen


def _why_unseen(damage: Damage) -> str:
    kind, name = damage.part.kind, damage.part.name
    if kind == "reflog" and damage.part.path.name.endswith("1") and name in {"gone", "exchanged", "record"}:
        return UNSEEN[kind, "first entry gone"] if name == "gone" else ""
    return UNSEEN.get((kind, name)) or UNSEEN.get((kind, "")) or ""


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
    there = {damage.part.path, damage.part.other, *_goes_with(damage, made)}
    folders = {made.store.path / family for family in ("objects", "meta")}
    objects = [path for path in made.files if path.parent.parent in folders]
    return [path.name[:12] for path in objects if path not in there and not path.exists()]


def _goes_with(damage: Damage, made: Made) -> Iterator[Path]:
    """The record that a lost reflog entry alone named: it tells who moved the name, and when, as the entry did."""
    if damage.part.kind == "reflog" and damage.part.name == "gone":
        record = made.files[damage.part.path].split()[2].decode()
        yield made.store.objects.path(Digest.parse(record), "meta")


# ---- the command ----


@dataclass(slots=True)
class Tally:
    """Of one kind of file: how often it was damaged, and who told of how many; of flipped bits apart.

    Args:
        damages: How many.
        flips: How many of them flipped one bit.
        tellers: Who told of how many damages.
        flip_tellers: And of how many flips.
        silent: Why no verification told, and of how many damages.
        findings: What does not hold.
    """

    damages: int = 0
    flips: int = 0
    tellers: Counter[str] = field(default_factory=Counter)
    flip_tellers: Counter[str] = field(default_factory=Counter)
    silent: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)

    def count(self, damage: Damage, seen: Seen) -> None:
        part, is_flip = damage.part, "flipped" in damage.how
        self.damages += 1
        self.flips += is_flip
        self.tellers.update(seen.tellers)
        self.flip_tellers.update(seen.tellers if is_flip else [])
        self.silent.update([seen.silent] if seen.silent else [])
        what = f"{part.kind}, {part.name} ({part.path.name[:12]}), {damage.how}"
        self.findings += [f"{what}: {each}" for each in seen.wrong]

    def add(self, other: Tally) -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


TELLERS = ("--quick", "verify", "read", "train", "follow", "gc", "build")


def _line(kind: str, tally: Tally) -> str:
    told = " ".join(f"{tally.tellers[who]:>5}/{tally.flip_tellers[who]:<5}" for who in TELLERS)
    return f"{kind:24}{tally.damages:>6}/{tally.flips:<5} {told} {tally.silent.total():>6}"


def main() -> int:
    """What was damaged, and who told of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help="of files; all of them")
    parser.add_argument("--sample", action="store_true", help="each class once, of each kind a few more")
    parser.add_argument("--bytes", type=int, default=64, help="how many of each class are flipped, at most")
    parser.add_argument("--json", action="store_true", help="a JSON object for each kind of file, on a line")
    asked = parser.parse_args()
    begun, tallies = time.monotonic(), dict[str, Tally]()
    root = Path(tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    try:
        made = make(root)
        gc.freeze()  # what every process that looks has in common
        chosen = [part for part in parts(made.store) if part.kind in (asked.kinds or part.kind)]
        for damage in sampled(chosen) if asked.sample else damages(chosen, at_most=asked.bytes):
            if changes(damage):
                tallies.setdefault(damage.part.kind, Tally()).count(damage, judged(damage, made))
    finally:
        shutil.rmtree(root)
    return _tell(tallies, time.monotonic() - begun, as_json=asked.json)


def _tell(tallies: dict[str, Tally], seconds: float, *, as_json: bool) -> int:
    whole = Tally()
    for tally in tallies.values():
        whole.add(tally)
    if as_json:
        for kind, tally in tallies.items():
            print(json.dumps({"kind": kind, **{each.name: getattr(tally, each.name) for each in fields(tally)}}))
        return min(len(whole.findings), 1)
    print(f"{'damages/bits flipped':>36} {' '.join(f'{who:^11}' for who in TELLERS)} silent")
    for kind, tally in (*tallies.items(), ("all", whole)):
        print(_line(kind, tally))
    for why, count in whole.silent.most_common():
        print(f"silent {count} times: {why}")
    for finding in whole.findings:
        print(f"--- {finding}")
    what = f"{whole.damages} damages, {whole.flips} of them one bit"
    print(f"all: {what}; {len(whole.findings)} findings; {seconds:.0f} s")
    return min(len(whole.findings), 1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
