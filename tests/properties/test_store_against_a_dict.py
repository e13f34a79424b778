"""A store and a dict, told the same things in any order: they must agree about everything."""

import shutil
import sys
import tempfile
from pathlib import Path

import hypothesis.strategies as some
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from zgstore.errors import Conflict, Corrupt, Missing, NotFound
from zgstore.format.digest import digest_of
from zgstore.storage.store import ANY, Store

sys.path.insert(0, str(Path(__file__).parent.parent / "storage"))
from tiny import publish, write

NAMES = some.sampled_from(["main", "team/a", "team/b", "v1"])
KINDS = some.sampled_from(["head", "tag"])
TEXTS = some.sampled_from(["one", "two", "three", "four"])


class StoreAgainstADict(RuleBasedStateMachine):
    """Blobs, snapshots, refs, tags and holds; trash, damage, a deleted index and reopening in between."""

    blobs = Bundle("blobs")
    snapshots = Bundle("snapshots")

    @initialize()
    def begin(self):
        self.folder = Path(tempfile.mkdtemp(prefix="zgstore-"))
        self.store = Store.init(self.folder / "store")
        self.contents = {}  # blob → its bytes
        self.damaged = set()
        self.named = {}  # (name, kind) → what it has named, newest first
        self.held = {}

    def teardown(self):
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder)

    # -- blobs

    @rule(target=blobs, content=some.binary(min_size=1, max_size=40), pieces=some.integers(1, 5))
    def put(self, content, pieces):
        with self.store.writing("test") as session:
            draft = session.draft()
            for at in range(0, len(content), pieces):
                draft.write(content[at : at + pieces])
            blob = session.keep(draft)
            assert session.reserve([blob]) == [True]
        self.contents[blob.digest] = content
        self.damaged.discard(blob.digest)
        return blob.digest

    @rule(digest=blobs)
    def trash_and_need_again(self, digest):
        if self.store.objects.stat(digest, "objects") is not None:
            self.store.objects.to_trash("1", digest, "objects")
        with self.store.writing("test") as session:
            assert session.reserve([digest]) == [True]

    @rule(digest=blobs)
    def damage(self, digest):
        path = self.store.objects.path(digest, "objects")
        path.chmod(0o644)
        path.write_bytes(b"\xff" + self.contents[digest])
        self.damaged.add(digest)

    @rule(digest=blobs)
    def stamp(self, digest):
        if digest not in self.damaged:
            self.store.stamp([(digest, "objects", self.store.objects.rehash(digest, "objects"))])

    # -- snapshots and names

    @rule(target=snapshots, text=TEXTS, name=NAMES, kind=KINDS, expect=some.sampled_from(["any", "right", "wrong"]))
    def publish(self, text, name, kind, expect):
        history = self.named.get((name, kind), [])
        now = history[0] if history else None
        expected = {"any": ANY, "right": now, "wrong": digest_of("snapshot", b"wrong")}[expect]
        try:
            digest = publish(self.store, text, ref=name, kind=kind, expect=expected)
        except Conflict:
            assert expect == "wrong"
            return publish(self.store, text, ref=None)
        assert expect != "wrong"
        self._moved(name, kind, digest)
        return digest

    @rule(digest=snapshots, name=NAMES, kind=KINDS, force=some.booleans())
    def point(self, digest, name, kind, force):
        history = self.named.get((name, kind), [])
        may = kind == "head" or force or not history or history[0] == digest
        try:
            self.store.point(name, kind, digest, force=force)
        except Conflict:
            assert not may
            return
        assert may
        self._moved(name, kind, digest)

    @rule(digest=snapshots, name=NAMES)
    def hold(self, digest, name):
        try:
            self.store.hold(name, digest, "because")
        except Conflict:
            assert self.held[name] != digest
            return
        assert self.held.setdefault(name, digest) == digest

    @rule(name=NAMES, kind=KINDS)
    def remove(self, name, kind):
        if (name, kind) not in self.named:
            with pytest.raises(NotFound):
                self.store.refs.remove(name, kind)
            return
        assert self.store.refs.remove(name, kind) == self.named.pop((name, kind))[0]

    @rule(name=NAMES)
    def unhold(self, name):
        if name in self.held:
            assert self.store.refs.unhold(name) == self.held.pop(name)
        else:
            with pytest.raises(NotFound):
                self.store.refs.unhold(name)

    def _moved(self, name, kind, digest):
        history = self.named.setdefault((name, kind), [])
        if not history or history[0] != digest:
            history.insert(0, digest)

    # -- circumstance

    @rule()
    def reopen(self):
        self.store = Store.open(self.store.path)

    @rule()
    def delete_the_index(self):
        shutil.rmtree(self.store.path / "index", ignore_errors=True)

    @rule()
    def move_the_store(self):
        other = self.folder / ("other" if self.store.path.name == "store" else "store")
        self.store.path.rename(other)
        self.store = Store.open(other)

    @rule(text=TEXTS)
    def die_before_publishing(self, text):
        with self.store.writing("test") as session:
            write(session, text + " unpublished")
            session.draft().write(b"half")

    # -- agreement

    @invariant()
    def names_agree(self):
        if not hasattr(self, "store"):
            return
        assert {(ref.name, ref.kind): ref.snapshot for ref in self.store.refs.list()} == {
            key: history[0] for key, history in self.named.items()
        }
        assert {hold.name: hold.snapshot for hold in self.store.refs.holds()} == self.held
        for (name, kind), history in self.named.items():
            assert [entry.new for entry in self.store.refs.log(name, kind)] == history
            assert self.store.resolve(history[0].hex[:12]) == history[0]
            assert len(self.store.read_plan(history[0]).columns) == 2
        for name in {name for name, _ in self.named}:
            first = self.named.get((name, "head")) or self.named[name, "tag"]
            assert self.store.resolve(name) == first[0]
            assert self.store.resolve(f"{name}@{{{len(first) - 1}}}") == first[-1]

    @invariant()
    def blobs_agree(self):
        if not hasattr(self, "store"):
            return
        listed = set(self.store.objects.names("objects"))
        for digest, content in self.contents.items():
            assert digest.raw in listed
            if digest in self.damaged:
                with pytest.raises(Corrupt):
                    self.store.objects.rehash(digest, "objects")
            else:
                assert self.store.objects.rehash(digest, "objects").size == len(content)
        with pytest.raises(Missing):
            self.store.objects.open(digest_of(None, b"never put"), "objects")

    @invariant()
    def nothing_is_left_over(self):
        if hasattr(self, "store"):
            assert self.store.leases.all() == []
            assert list(self.store.objects.leftovers()) == []


TestStoreAgainstADict = StoreAgainstADict.TestCase
TestStoreAgainstADict.settings = settings(
    max_examples=12, stateful_step_count=18, deadline=None, suppress_health_check=list(HealthCheck)
)
