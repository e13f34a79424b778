"""Users of one group on one store, umask 077: one builds, another reads, extends, points, collects."""

import os
import sys
from pathlib import Path

import pytest

from zgstore.format.digest import Digest
from zgstore.storage.store import Store

sys.path.insert(0, str(Path(__file__).parent.parent / "storage"))
from tiny import blobs_of, publish

GROUP, OTHER_USER = 54321, 54322
pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only the superuser can become two users")


def as_user(user, work):
    """Run ``work`` in a child of that user and the group; fails with what it says."""
    got, say = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(got)
        try:
            os.setgroups([GROUP])
            os.setgid(GROUP)
            os.setuid(user)
            os.umask(0o077)
            work()
        except BaseException as error:  # noqa: BLE001
            os.write(say, repr(error).encode()[:4000])
        finally:
            os._exit(0)
    os.close(say)
    with os.fdopen(got, "rb") as file:
        said = file.read().decode()
    os.waitpid(child, 0)
    assert not said, said


@pytest.fixture
def place(tmp_path):
    for parent in [tmp_path, *list(tmp_path.parents)[:-2]]:
        parent.chmod(parent.stat().st_mode | 0o011)
    folder = tmp_path / "shared"
    folder.mkdir()
    os.chown(folder, -1, GROUP)
    folder.chmod(0o2777)
    return folder / "store"


def test_what_one_user_of_the_group_builds_another_extends_and_collects(place):
    def build():
        publish(Store.init(place, policy="group"), "one", ref="team/main")

    def extend():
        store = Store.open(place)
        digest = store.resolve("team/main")
        for blob in blobs_of(store, digest):
            store.objects.rehash(blob.digest, "objects")
        publish(store, "one", ref="team/main", time_seconds=2.0)
        publish(store, "two", ref="team/main")
        store.point("v1", "tag", digest)
        store.hold("kept", digest)

    def collect():
        store = Store.open(place)
        digest = store.resolve("v1")
        store.refs.remove("v1", "tag")
        store.refs.unhold("kept")
        with store.leases.gc_lock(), store.leases.store_lock(exclusive=True):
            blob = blobs_of(store, digest)[0]
            store.objects.to_trash("1", blob.digest, "objects")
            store.objects.all_aside(store.objects.trashed(), "aside")
        store.objects.remove_aside("aside")
        store.objects.remove_epoch("1")
        store.memos.put_measurement(digest, {"seen": 1})
        assert store.objects.stat(blob.digest, "objects") is None

    as_user(OTHER_USER, build)
    as_user(OTHER_USER + 1, extend)
    as_user(OTHER_USER, lambda: publish(Store.open(place), "three", ref="team/main"))
    as_user(OTHER_USER + 1, collect)
    store = Store.open(place)
    assert len(store.refs.log("team/main")) == 3
    assert all(store.objects.rehash(Digest(raw), "meta") for raw in store.objects.names("meta"))
