"""Builders, a tagger and a deleter beside a collector without any grace: nobody loses anything."""

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.upkeep.bare_stores import publish
from zgstore.storage.store import Store
from zgstore.upkeep import collector
from zgstore.upkeep.verifier import verify

ROOT = Path(__file__).resolve().parents[2]
WRITER = """
    import contextlib, sys
    sys.path.insert(0, {root!r})
    from tests.upkeep.bare_stores import publish
    from zgstore.errors import Conflict, Missing
    from zgstore.storage.store import Store
    store, me = Store.open({path!r}), sys.argv[1]
    for turn in range(12):
        # The same blobs as the others', so that each finds what another has just dropped.
        digest = publish(store, me, [turn % 3, turn % 2], record=False)
        if turn % 4 == 1:
            store.point(f"v-{{me}}-{{turn}}", "tag", digest, force=True)
        if turn % 4 == 3:
            store.refs.remove(me, "head")
            with contextlib.suppress(Missing):  # refused, where the collector was first
                store.point(f"late-{{me}}-{{turn}}", "tag", digest)
"""


def test_a_collector_without_grace_beside_writers_loses_nothing(tmp_path):
    store = Store.init(tmp_path / "store")
    publish(store, "main", [0, 1, 2])
    code = textwrap.dedent(WRITER.format(root=str(ROOT), path=str(store.path)))
    writers = [
        subprocess.Popen([sys.executable, "-c", code, name], stderr=subprocess.PIPE, text=True) for name in ("a", "b")
    ]
    freed = 0
    while any(writer.poll() is None for writer in writers):
        freed += collector.collect(store, now=True).freed.objects
        assert list(verify(store, quick=True)) == []
    for writer in writers:
        _, errors = writer.communicate()
        assert writer.returncode == 0, errors
    assert freed, "the collector never got in between"
    assert list(verify(store)) == []
    assert {ref.kind for ref in store.refs.list()} == {"head", "tag"}


@pytest.fixture
def store(tmp_path):
    store = Store.init(tmp_path / "store")
    publish(store, "main", [0])
    return store


@pytest.fixture
def loose(store):
    """A snapshot that nothing names."""
    digest = publish(store, "other", [1])
    store.refs.remove("other", "head")
    return digest


def move_twice(store, loose):
    store.point("main", "head", loose)
    return publish(store, "main", [2])


def test_what_a_ref_named_for_a_moment_of_a_collection_stays_with_its_entry(store, loose, monkeypatch):
    forget = collector._Collection._expire_reflogs

    def then_main_moves_twice(collection):
        forget(collection)
        move_twice(store, loose)

    monkeypatch.setattr(collector._Collection, "_expire_reflogs", then_main_moves_twice)
    collector.collect(store, now=True, keep_last=1)
    assert [entry.new for entry in store.refs.log("main")][1] == loose
    assert list(verify(store)) == []


def test_what_was_logged_since_the_roots_were_read_is_not_forgotten_by_a_clock_that_was_set_back(store, loose):
    a_year_ago = time.time() - 365 * 86400

    def set_back(since):
        for entry in sorted((store.path / "reflog" / "heads" / "main").iterdir())[since:]:
            os.utime(entry, (a_year_ago, a_year_ago))

    def moves_a_year_ago(planned):
        assert planned.expire
        move_twice(store, loose)
        set_back(since=2)

    second = publish(store, "main", [3])
    set_back(since=0)
    collector.collect(store, now=True, before=moves_a_year_ago)
    assert [entry.new for entry in store.refs.log("main")][1:] == [loose, second]
    assert list(verify(store)) == []


def test_what_was_past_retention_is_not_forgotten_of_a_name_that_was_given_anew(store):
    publish(store, "main", [1])

    def given_anew(_):
        store.refs.remove("main", "head")
        for fill in (2, 3, 4):
            publish(store, "main", [fill])

    collector.collect(store, now=True, keep_last=1, before=given_anew)
    assert [entry.number for entry in store.refs.log("main")] == [3, 2, 1]
    assert list(verify(store)) == []
