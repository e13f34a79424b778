"""A store received from elsewhere may hold anything: typed errors, bounded memory, and nothing outside it touched."""

import json
import os
import stat
import subprocess
import sys

import pytest

from tests.faults import hostile
from zgstore.errors import Corrupt, Invalid
from zgstore.storage import files, leases, locks
from zgstore.storage.store import Store
from zgstore.upkeep import collector, copier
from zgstore.upkeep.verifier import verify

# Where something was once written, read or removed through what lies there.
OFTEN = {
    hostile.a_link: ("actions", "actions/??", "index", "refs/heads/team"),
    hostile.a_hard_link: ("locks/store", "locks/gc", "locks/refs"),
    hostile.a_terabyte: ("objects/??/*", "leases/*", "builds/*", "index/lmdb-1/seal"),
    hostile.folders_without_end: ("tmp", "refs/heads", "holds"),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return hostile.make(tmp_path_factory.mktemp("made"))


def sample(thing):
    """Every second place has one of the things that can be anywhere, beside what is always looked at."""
    places, number = hostile.THINGS[thing], [*hostile.THINGS].index(thing)
    if thing in hostile.EITHER:
        return (*places[2 * number :: 2 * len(hostile.EITHER)], *OFTEN.get(thing, ()))
    return OFTEN.get(thing, places[::9])


@pytest.mark.parametrize("thing", hostile.THINGS, ids=lambda thing: thing.__name__)
def test_whatever_lies_in_a_store_is_a_typed_error_and_nothing_outside_is_touched(made, thing, tmp_path):
    if not hostile.can(thing):
        pytest.skip("only the superuser makes devices")
    for number, place in enumerate(sample(thing)):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert [*hostile.tried(made, place, thing, folder)] == [], f"{thing.__name__} at {place}"


def test_a_lock_with_another_link_is_held_and_not_written(tmp_path):
    store, mine = Store.init(tmp_path / "store"), tmp_path / "mine"
    mine.write_text("a letter")
    mine.chmod(0o640)
    lock = store.path / "locks" / "store"
    lock.unlink()
    os.link(mine, lock)
    with store.leases.store_lock(exclusive=True):
        with (mine).open() as other, pytest.raises(BlockingIOError):
            locks.fcntl.flock(other, locks.fcntl.LOCK_SH | locks.fcntl.LOCK_NB)
        assert mine.read_text() == "a letter"
    assert (mine.read_text(), stat.S_IMODE(mine.stat().st_mode)) == ("a letter", 0o640)


def test_a_lease_too_long_to_be_read_stops_a_collection_and_is_not_passed_over(tmp_path):
    store = Store.init(tmp_path / "store")
    with store.leases.take("read") as lease:
        path = store.path / "leases" / lease.uuid
        os.truncate(path, leases.MAX_LEASE_BYTES + 1)
        with pytest.raises(Corrupt, match="what it keeps is not known"):
            collector.collect(store, now=True)


def test_a_lease_names_no_more_than_others_would_read(tmp_path, monkeypatch):
    monkeypatch.setattr(leases, "MAX_LEASE_BYTES", leases.HEAD_BYTES + 64)
    with Store.init(tmp_path / "store").leases.take("read") as lease:
        lease.add_raw(bytes(64))
        with pytest.raises(Invalid, match="at most"):
            lease.add_raw(bytes(32))


def test_a_blob_longer_than_its_page_says_is_neither_copied_nor_kept(made, tmp_path):
    source = Store.open(made.good)
    copier.copy(source, "other", to=Store.init(tmp_path / "source"))
    store, target = Store.open(tmp_path / "source"), Store.init(tmp_path / "target")
    blob = next(store.shards(store.snapshot(store.resolve("other")))).blobs[0]
    path = store.objects.path(blob.digest, "objects")
    path.chmod(0o600)
    os.truncate(path, 1 << 40)
    with pytest.raises(Corrupt, match="its page says"):
        copier.copy(store, "other", to=target)
    assert target.objects.stat(blob.digest, "objects") is None
    assert target.refs.list() == []
    # Brought again it takes the place of the long one, which is set aside without being read to its end.
    copier.copy(source, "other", to=store)
    assert [*verify(store)] == []


def test_folders_without_end_are_removed_with_few_descriptors_and_no_recursion(tmp_path):
    (tmp_path / "top").mkdir()
    hostile.folders_without_end(tmp_path / "top", tmp_path)
    (tmp_path / "top" / "d" / "file").write_text("x")
    (tmp_path / "top" / "link").symlink_to(tmp_path)
    with files.directory(tmp_path) as folder:
        files.remove_tree(folder, "top")
        files.remove_tree(folder, "top")
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("config", [
    'id = "../../elsewhere"', 'id = "x"', 'index = "relative"', "index = 3", 'policy = ["group"]', "policy = 3",
    "requires = 3", 'requires = [["x"]]', 'format = "1"', "format = true", "format = 2",
    'requires = ["teleport"]',
])  # fmt: skip
def test_a_configuration_leads_nowhere_else(tmp_path, config):
    store = Store.init(tmp_path / "store")
    path = store.path / "zgstore.toml"
    key = config.partition(" ")[0]
    kept = [line for line in path.read_text().splitlines() if not line.startswith(key)]
    path.write_text("\n".join([*kept, config]))
    with pytest.raises((Corrupt, Invalid)):
        Store.open(store.path)


def test_names_that_are_no_text_can_be_printed(tmp_path):
    store = Store.init(tmp_path / "store")
    for place in ("objects", "meta/00", "refs", "leases", "tmp"):
        hostile.names_that_are_no_text(store.path / place, tmp_path)
    for words in (["verify"], ["verify", "--json"], ["lease", "ls"]):
        ran = subprocess.run(
            [sys.executable, "-m", "zgstore.cli.main", "--store", str(store.path), *words], check=False,
            capture_output=True,
        )  # fmt: skip
        assert ran.returncode == (20 if words[0] == "verify" else 0), ran.stderr
        assert b"\x1b" not in ran.stdout + ran.stderr
        assert b"Traceback" not in ran.stderr
        if "--json" in words:
            assert json.loads(ran.stdout)["ok"] is False
