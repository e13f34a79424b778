"""Builders, a tagger and a deleter beside a collector without any grace: nobody loses anything."""

import subprocess
import sys
import textwrap
from pathlib import Path

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


def test_what_a_ref_named_for_a_moment_of_a_collection_stays_with_its_entry(tmp_path, monkeypatch):
    store = Store.init(tmp_path / "store")
    publish(store, "main", [0])
    loose = publish(store, "other", [1])
    store.refs.remove("other", "head")
    forget = collector._Collection._expire_reflogs

    def then_main_moves_twice(collection):
        forget(collection)
        store.point("main", "head", loose)
        publish(store, "main", [2])

    monkeypatch.setattr(collector._Collection, "_expire_reflogs", then_main_moves_twice)
    collector.collect(store, now=True, keep_last=1)
    assert [entry.new for entry in store.refs.log("main")][1] == loose
    assert list(verify(store)) == []
