"""Several users on one store, under umask 077 and 002: what each policy lets them do, and what it keeps from them."""

import json
import os
import stat
import sys
from pathlib import Path

import pytest
from two_users import ADA, BEN, GROUP, STRANGER, as_user, command, interpreter, warm

from zgstore.building import sections
from zgstore.storage import files
from zgstore.storage.index import Stamp
from zgstore.storage.store import Store

sys.path.insert(0, str(Path(__file__).parent.parent / "cli"))
sys.path.insert(0, str(Path(__file__).parent.parent / "building"))
from made import publish
from projects import make_project, write_recipe

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only the superuser can become two users")


WARM = (
    ("build", "--ref", "main"), ("verify", "--repair", "--from", "warm"), ("show", "main"), ("diff", "main", "main"),
    ("tag", "v1", "main"), ("hold", "h", "main"), ("unhold", "h"), ("tag", "rm", "v1"), ("ref", "set", "o", "main"),
    ("log", "o"), ("ls",), ("du",), ("lease", "ls"), ("lease", "run", "o", "--", "true"), ("gc", "--now"), ("reindex",),
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _loaded(tmp_path_factory):
    """Every command once by who we are."""
    folder = tmp_path_factory.mktemp("warm")
    recipe, _ = make_project(folder, rows=4)
    lines = [(*line[:1], recipe, *line[1:]) if line[0] == "build" else line for line in WARM]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", list(sys.path))
        patch.setattr(sections, "_directories", [])
        warm(("init", "warm"), *(("--store", "warm", *line) for line in lines))


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder of the group: what is made in it is the group's, whoever makes it."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sections, "_directories", [])
    for parent in [tmp_path, *list(tmp_path.parents)[:-2]]:
        parent.chmod(parent.stat().st_mode | 0o011)
    folder = tmp_path / "shared"
    folder.mkdir()
    os.chown(folder, -1, GROUP)
    folder.chmod(0o2777)
    return folder


@pytest.fixture
def project(tmp_path):
    """A recipe, and one over more rows."""
    folder = tmp_path / "project"
    recipe, module = make_project(folder, rows=8)
    more = write_recipe(folder, module, name="more", storage="batches_per_shard = 1")
    folder.chmod(0o755)
    for path in folder.iterdir():
        path.chmod(0o644)
    return recipe, more


def blobs_of(store, digest):
    return [blob for shard in store.shards(store.snapshot(digest)) for blob in shard.blobs]


def everything(store):
    return sorted(path for path in store.rglob("*") if "index" not in path.relative_to(store).parts[:1])


def strange_permissions(store, folders=0o2770, changing=0o660, group=GROUP):
    """What in a store has other permissions or another group than its policy says."""
    found = []
    for path in [store, *store.rglob("*")]:
        looks = path.lstat()
        mode = stat.S_IMODE(looks.st_mode)
        right = mode == folders if path.is_dir() else mode in (changing, 0o444)
        if not right or group not in (None, looks.st_gid):
            found.append((str(path.relative_to(store)), oct(mode), looks.st_gid))
    return found


@pytest.mark.parametrize("umask", [0o077, 0o002], ids=oct)
def test_members_build_read_extend_name_lease_collect_and_repair_each_others_work(place, project, umask):
    recipe, more = project
    store = place / "store"
    if not interpreter():
        pytest.skip("no interpreter here that another user may run, and gc tests the locks by one")
    lines = [
        (ADA, "init", "--policy", "group"),
        (ADA, "build", recipe, "--ref", "team/main"),
        (BEN, "verify"),
        (BEN, "show", "team/main"),
        (BEN, "lease", "run", "team/main", "--", "true"),
        (BEN, "build", more, "--ref", "team/main"),
        (ADA, "diff", "team/main", "team/main@{1}"),
        (ADA, "tag", "v1", "team/main@{1}"),
        (BEN, "tag", "v1", "team/main", "--force"),
        (BEN, "hold", "kept/v1", "v1", "--reason", "a paper"),
        (ADA, "unhold", "kept/v1"),
        (ADA, "tag", "rm", "v1"),
        (BEN, "ref", "set", "team/other", "team/main@{1}"),
        (ADA, "ref", "rm", "team/main"),
        (BEN, "gc", "--now"),
        (ADA, "gc", "--now"),
        (ADA, "verify"),
        (ADA, "reindex"),
    ]
    for user, *line in lines if umask == 0o077 else lines[:5]:
        ran = command(user, "--store", store, *line, umask=umask)
        assert ran.code == 0, (line, ran.text)
        assert not strange_permissions(store), line
    (blob,) = list((store / "objects").rglob("*.safetensors"))[:1]
    blob.chmod(0o644)
    blob.write_bytes(blob.read_bytes()[:-1] + b"\7")
    blob.chmod(0o444)
    assert command(BEN, "--store", store, "verify", umask=umask).code == 20
    ran = command(BEN, "--store", store, "verify", "--repair", "--recipe", recipe, umask=umask)
    assert ran.code == 0, ran.text
    assert command(ADA, "--store", store, "verify", umask=umask).code == 0
    assert not strange_permissions(store)


def test_two_members_who_build_at_once_agree_and_a_stranger_is_refused(place, project):
    store = place / "store"
    command(ADA, "--store", store, "init", "--policy", "group")
    child = os.fork()
    if child == 0:
        os._exit(command(ADA, "--store", store, "build", project[0], "--ref", "ada").code)
    assert command(BEN, "--store", store, "build", project[0], "--ref", "ben").code == 0
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    opened = Store.open(store)
    assert opened.resolve("ada") == opened.resolve("ben")
    assert command(STRANGER, "--store", store, "ls").code == 10


@pytest.mark.parametrize("renames", ["as here", "as where renameat2 is refused"])
def test_what_one_member_put_in_the_trash_another_takes_out(place, monkeypatch, renames):
    if renames != "as here":
        monkeypatch.setattr(files, "libc", object)  # links to another user's files are refused too

    def build():
        publish(Store.init(place / "store", policy="group"), "main", 1.0)

    def collect():
        store = Store.open(place / "store")
        digest = store.resolve("main")
        store.refs.remove("main", "head")
        with store.leases.gc_lock(), store.leases.store_lock(exclusive=True):
            store.objects.all_to_trash(
                "1", [("meta", digest), *(("objects", b.digest) for b in blobs_of(store, digest))]
            )
        print(digest)

    assert as_user(ADA, build).code == 0
    said = as_user(BEN, collect)
    assert said.code == 0, said.text
    back = command(BEN, "--store", place / "store", "tag", "back", said.text.strip())
    assert back.code == 0, back.text
    assert command(ADA, "--store", place / "store", "verify").code == 0
    assert not strange_permissions(place / "store")


def test_what_a_killed_member_left_another_collects(place):
    if not interpreter():
        pytest.skip("no interpreter here that another user may run, and gc tests the locks by one")

    def killed():
        store = Store.init(place / "store", policy="group")
        with store.writing("build") as session:
            session.keep_me = session.draft()
            session.keep_me.write(b"half of a blob")
            session.put_meta("page", b"\x80")
            os._exit(9)

    assert as_user(ADA, killed).code == 9
    assert list((place / "store" / "tmp").iterdir())
    ran = command(BEN, "--store", place / "store", "gc", "--now")
    assert ran.code == 0, ran.text
    for folder in ("tmp", "leases", "meta", "trash"):
        assert not [path for path in (place / "store" / folder).rglob("*") if path.is_file()], folder


def stamp(store, digest):
    """As if two seconds had passed since its blobs were written."""
    stats = [(blob.digest, store.objects.stat(blob.digest, "objects")) for blob in blobs_of(store, digest)]
    store.index.put_stamps([(each.raw, Stamp(looks, looks.ctime_ns / 1e9 + 2)) for each, looks in stats])


def test_what_one_member_verified_is_verified_for_all(place):
    def build():
        store = Store.init(place / "store", policy="group")
        stamp(store, publish(store, "main", 1.0))

    def look():
        store = Store.open(place / "store")
        plan = store.read_plan("main")
        assert all(blob.verified for column in plan.columns for blob in column.blobs)
        other = publish(store, "other", 2.0)
        stamp(store, other)
        assert all(blob.verified for column in store.read_plan("other").columns for blob in column.blobs)

    assert as_user(ADA, build).code == 0
    for user in (BEN, ADA):
        ran = as_user(user, look)
        assert ran.code == 0, ran.text
        assert not strange_permissions(place / "store")


LOOKS = (("ls",), ("show", "main"), ("log", "main"), ("du",), ("diff", "main", "main"), ("lease", "ls"), ("verify",))
CHANGES = (
    ("tag", "v1", "main"), ("ref", "set", "other", "main"), ("ref", "rm", "main"), ("hold", "h", "main"), ("gc",),
    ("gc", "--now"), ("reindex",),
)  # fmt: skip


def test_a_private_store_refuses_everybody_else_and_says_what_to_do(place, project):
    def build():
        publish(Store.init(place / "store"), "main", 1.0)

    assert as_user(ADA, build, umask=0o002).code == 0
    assert not [path for path in (place / "store").rglob("*") if path.lstat().st_mode & 0o033]
    for line in (*LOOKS, *CHANGES, ("build", project[0]), ("init",)):
        said = command(BEN, "--store", place / "store", "--json", *line)
        error = json.loads(said.text)["error"]
        assert (said.code, error["kind"]) == (10, "not_found"), (line, said.text)
        assert "Permission denied" in error["message"], line
        assert "--policy group" in error["hint"], line
    assert command(ADA, "--store", place / "store", "verify").code == 0


def test_a_world_read_store_is_read_by_all_and_changed_by_its_owner(place, project):
    store = place / "store"

    def build():
        made = Store.init(store, policy="world-read")
        stamp(made, publish(made, "main", 1.0))

    assert as_user(ADA, build).code == 0
    assert not strange_permissions(store, 0o755, 0o644, None)
    before = everything(store)
    for user in (BEN, STRANGER):
        for line in LOOKS:
            said = command(user, "--store", store, *line)
            assert said.code == 0, (line, said.text)
        for line in (*CHANGES, ("build", project[0])):
            said = command(user, "--store", store, "--json", *line)
            error = json.loads(said.text)["error"]
            assert (said.code, error["kind"]) == (2, "invalid"), (line, said.text)
            assert "check who owns it" in error["hint"], line
    assert everything(store) == before
    assert command(ADA, "--store", store, "gc").code == 0 or not interpreter()


def test_who_cannot_lease_is_told_so_unless_the_snapshot_is_held(place):
    def build():
        publish(Store.init(place / "store", policy="world-read"), "main", 1.0)

    assert as_user(ADA, build).code == 0
    for held in (False, True):
        said = command(BEN, "--store", place / "store", "lease", "run", "main", "--", "true")
        assert (said.code, "no lease keeps" in said.text) == (0, not held), said.text
        assert command(ADA, "--store", place / "store", "hold", "kept", "main").code == 0


@pytest.mark.parametrize(
    "unreadable",
    [
        "refs/heads/team/main",
        "refs/tags/v1",
        "holds/kept",
        "reflog/heads/team/main/000000000001",
        "leases/*",
        "meta/*/*",
    ],
)
def test_a_name_that_a_member_cannot_read_stops_its_collection_and_hides_nothing(place, unreadable):
    """A copy made under another umask: some files are another's alone. What they keep is not known."""
    if not interpreter():
        pytest.skip("no interpreter here that another user may run, and gc tests the locks by one")

    def build():
        store = Store.init(place / "store", policy="group")
        digest = publish(store, "team/main", 1.0)
        if "tags" in unreadable:
            store.point("v1", "tag", digest)
        if "holds" in unreadable:
            store.hold("kept", digest)
        if "heads" not in unreadable and "meta" not in unreadable:
            store.refs.remove("team/main", "head")
        if "leases" in unreadable:
            lease = store.leases.take("read")
            lease.add([digest])
            os._exit(0)

    assert as_user(ADA, build).code == 0
    for path in (place / "store").glob(unreadable):
        os.chown(path, 0, 0)
        path.chmod(0o600)
    before = everything(place / "store")
    ran = command(BEN, "--store", place / "store", "gc", "--now")
    assert (ran.code, "Permission denied" in ran.text) == (2, True), ran.text
    assert everything(place / "store") == before
    if "leases" not in unreadable:
        ran = command(BEN, "--store", place / "store", "verify")
        assert (ran.code, "unreadable" in ran.text) == (20, True), ran.text
