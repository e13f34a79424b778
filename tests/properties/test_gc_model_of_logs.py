"""The model of names and their logs does what the store does: with each that it meets, moved, removed, collected."""

import os
import shutil

import pytest

from tests.properties.gc_model import Protocol, all_scenarios, search
from tests.properties.gc_model.logs import (
    ANOTHER,
    LAST,
    MONTH,
    NONE,
    NOTHING,
    THIS,
    Entry,
    Ref,
    Rules,
    expired,
    history,
    keeps,
    logged,
    moved,
    oldest_forgotten,
    taken_back,
)
from tests.upkeep.bare_stores import publish
from zgstore.errors import Missing
from zgstore.format.digest import digest_of
from zgstore.storage.store import Store
from zgstore.upkeep.reachability import RETENTION_SECONDS, Retention, roots

MONTHS = (1e9, 1e9 + RETENTION_SECONDS)  # the model's two, in seconds
EVERY_RULE = [Rules(MONTH, 0), *(Rules(keeps, 1) for keeps in (MONTH, NONE, LAST))]


class Names:
    """A store whose one head is a model's, and back again."""

    def __init__(self, path):
        self.store = Store.init(path)
        this = publish(self.store, "main", [1])
        self.store.refs.remove("main", "head")
        self.digests = {NOTHING: None, THIS: this, ANOTHER: digest_of("snapshot", b"another")}
        self.name, self.log = (path / top / "heads" / "main" for top in ("refs", "reflog"))

    def write(self, ref):
        self.name.unlink(missing_ok=True)
        shutil.rmtree(self.log, ignore_errors=True)
        if ref.means:
            self.name.write_text(f"{self.digests[ref.means]}\n")
        for number, entry in enumerate(reversed(ref.log), 1):
            self.log.mkdir(exist_ok=True)
            path = self.log / f"{number:012d}"
            path.write_text(f"{self.digests[entry.old] or '-'} {self.digests[entry.new]} -\n")
            os.utime(path, (MONTHS[entry.month],) * 2)

    def read(self):
        """What was logged by now is of the second month."""
        means = {digest: value for value, digest in self.digests.items()}
        log = self.store.refs._entries("main", "head")
        return Ref(
            means[self.store.refs.get("main", "head")],
            tuple(Entry(means[each.old], means[each.new], int(each.time_seconds > MONTHS[0])) for each in log),
        )

    def kept(self, rules, *, whole):
        """Whether the snapshot is kept by the rules, and the number of the newest entry past retention: so many go."""
        retention = Retention() if rules.keeps == MONTH else Retention.chosen(seconds=None, keep_last=rules.keeps)
        found = roots(self.store, retention=retention, now=MONTHS[rules.month] + 1, expired=whole)
        this = self.digests[THIS]
        is_kept = any(root.digest == this for root in found.named) or any(this.raw == raw for _, raw in found.leased)
        return is_kept, sum(entry.number for _, entry in found.past)


@pytest.fixture(scope="module")
def met():
    """Every head that the scenario of moves comes to, where months pass."""
    heads = set()
    scenario = all_scenarios()["moves"]
    starts = [start for start in scenario.starts if start.keeps == MONTH]
    search(scenario._replace(starts=starts, violation=lambda state: heads.add(state.store.head)), Protocol())
    assert max(len(head.log) for head in heads) >= 6
    return sorted(heads)


@pytest.fixture
def short(met):
    """Those with a short log, which are what the others are made of."""
    chosen = [head for head in met if len(head.log) <= 3]
    assert len(chosen) > 80
    return chosen


@pytest.fixture
def names(tmp_path):
    return Names(tmp_path / "store")


def test_the_moves_that_took_place_are_the_same_and_always_follow(met, names):
    for head in met:
        names.write(head)
        if head.means == NOTHING:
            continue
        found, modelled = names.store.refs.history("main"), history(head)
        assert found.breaks == ()
        assert [len(head.log) - entry.number for entry in found.entries] == list(modelled.taken), head
        assert (found.coming is not None) == modelled.coming, head


def test_the_same_is_kept_and_the_same_is_past_retention(short, names):
    for head in short:
        names.write(head)
        for rules in EVERY_RULE:
            past = expired(head, rules, Protocol())
            for whole, goes in ((False, past), (True, 0)):
                modelled = keeps(head, rules, Protocol(), expired=whole, name_keeps=True)
                assert names.kept(rules, whole=whole) == (modelled, goes), (head, rules, whole)


def killed():
    raise KeyboardInterrupt


def gone():
    raise Missing("gone", hint="", object="")


def test_a_move_leaves_the_same(short, names):
    refs, protocol = names.store.refs, Protocol()
    for head in short:
        for new in (THIS, ANOTHER):
            names.write(head)
            refs.move("main", "head", names.digests[new])
            assert names.read() == moved(head, new, 1, protocol), head
            if head.means == new:
                continue
            after = logged(head, new, 1, protocol)
            names.write(head)
            with pytest.raises(KeyboardInterrupt):
                refs.move("main", "head", names.digests[new], last_look=killed)
            assert names.read() == after, head
            names.write(head)
            with pytest.raises(Missing):
                refs.move("main", "head", names.digests[new], last_look=gone)
            assert names.read() == taken_back(after), head


def test_a_removal_and_a_collection_leave_the_same(short, names):
    for head in short:
        for count in range(len(head.log) + 1):
            names.write(head)
            names.store.refs.forget("main", "head", through=count)
            assert names.read() == oldest_forgotten(head, count), head
        if head.means != NOTHING:
            names.write(head)
            names.store.refs.remove("main", "head")
            assert names.read() == Ref()
