import errno
import fcntl
import gc
import os
import subprocess
import sys
import threading
import time

import pytest

from zgstore.errors import Invalid, NoSpace
from zgstore.format.digest import digest_of
from zgstore.storage import leases as leases_module
from zgstore.storage import locks
from zgstore.storage.leases import HEAD_BYTES

A, B = digest_of(None, b"a"), digest_of(None, b"b")

HOLD = """
import sys
from zgstore.storage.store import Store
from zgstore.format.digest import Digest
lease = Store.open(sys.argv[1]).leases.take("hold")
lease.add([Digest(bytes(32))])
print(lease.uuid, flush=True)
sys.stdin.read()
import os
os._exit(0) if sys.argv[2] == "killed" else None
"""


@pytest.fixture
def leases(store):
    return store.leases


def run_holder(store, end):
    return subprocess.Popen(
        [sys.executable, "-c", HOLD, str(store.path), end], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_a_lease_says_whose_it_is_and_what_it_needs(leases):
    with leases.take("build") as lease:
        lease.add([A])
        lease.add([B])
        (seen,) = leases.all()
    assert seen.uuid == lease.uuid
    assert (seen.pid, seen.purpose, seen.alive) == (os.getpid(), "build", True)
    assert seen.digests == A.raw + B.raw
    assert abs(seen.start - time.time()) < 60
    assert leases.all() == []


def test_a_torn_tail_is_ignored(leases):
    with leases.take("build") as lease:
        lease.add([A])
        with (leases.root / "leases" / lease.uuid).open("ab") as file:
            file.write(B.raw[:31])
        assert leases.all()[0].digests == A.raw


def test_a_torn_head_keeps_what_it_names_until_it_is_old(leases):
    path = leases.root / "leases" / "00000000-0000-0000-0000-000000000000"
    path.write_bytes(b"\xff" * HEAD_BYTES + A.raw)
    (young,) = leases.all()
    assert (young.alive, young.digests) == (True, A.raw)
    os.utime(path, (1, 1))
    (old,) = leases.all()
    assert (old.alive, old.digests) == (False, b"")


def test_a_holder_lives_as_long_as_its_process_whatever_the_lease_s_age(store):
    with run_holder(store, "ends") as other:
        uuid = other.stdout.readline().strip()
        os.utime(store.path / "leases" / uuid, (1, 1))
        (seen,) = store.leases.all()
        assert (seen.uuid, seen.pid, seen.alive, seen.digests) == (uuid, other.pid, True, bytes(32))
        other.stdin.close()
    assert store.leases.all() == []  # a process that ends gives its leases back


def test_a_killed_holder_is_dead_at_once_on_this_host(store):
    with run_holder(store, "killed") as other:
        uuid = other.stdout.readline().strip()
        other.stdin.close()
    (seen,) = store.leases.all()
    assert (seen.uuid, seen.alive, seen.digests) == (uuid, False, b"")
    store.leases.remove(uuid)
    assert store.leases.all() == []


def test_a_look_at_a_lease_in_its_first_moment_does_not_leave_it_unlocked(leases, monkeypatch):
    opened = leases_module.locks.open_owned
    looks = []

    def looked_at(name, flags, *, mode, dir_fd):
        handle = opened(name, flags, mode=mode, dir_fd=dir_fd)
        look = os.open(name, os.O_RDONLY, dir_fd=dir_fd)
        fcntl.flock(look, fcntl.LOCK_SH)
        looks.append(threading.Timer(0.05, os.close, [look]))
        looks[-1].start()
        return handle

    monkeypatch.setattr(leases_module.locks, "open_owned", looked_at)
    with (
        leases.take("build") as lease,
        (leases.root / "leases" / lease.uuid).open("rb") as other,
        pytest.raises(BlockingIOError),
    ):
        fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
    looks[0].join()


def test_on_the_same_boot_a_free_lock_is_not_enough(leases, monkeypatch):
    with leases.take("build"):
        monkeypatch.setattr(leases_module, "_lock_is_free", lambda _handle: True)
        assert leases.all()[0].alive  # its process lives
        monkeypatch.setattr(leases_module, "_process_gone", lambda _pid, _start: True)
        assert not leases.all()[0].alive


def test_on_the_same_boot_a_process_gone_is_not_enough(leases, monkeypatch):
    with leases.take("build"):
        monkeypatch.setattr(leases_module, "_process_gone", lambda _pid, _start: True)
        assert leases.all()[0].alive  # a child may hold the lock


def test_a_process_number_used_again_is_not_the_holder(monkeypatch):
    assert not leases_module._process_gone(os.getpid(), leases_module._process_start(os.getpid()))
    assert leases_module._process_gone(os.getpid(), 1)
    assert not leases_module._process_gone(os.getpid(), 0)


def test_a_holder_elsewhere_is_dead_an_hour_after_its_last_refresh(leases, monkeypatch):
    monkeypatch.setattr(leases_module, "_boot", lambda: "another boot")
    lease = leases.take("build")
    monkeypatch.undo()
    now = (leases.root / "leases" / lease.uuid).stat().st_mtime
    assert leases.all(now=now + 3599)[0].alive
    assert not leases.all(now=now + 3601)[0].alive
    lease.refresh()
    assert leases.all()[0].alive
    lease.close()


def test_a_lease_is_refreshed_while_it_is_held(leases, monkeypatch):
    monkeypatch.setattr(leases_module, "REFRESH_SECONDS", 0.01)
    with leases.take("build") as lease:
        path = leases.root / "leases" / lease.uuid
        os.utime(path, (1, 1))
        for _ in range(500):
            if path.stat().st_mtime > 1:
                break
            time.sleep(0.01)
        assert path.stat().st_mtime > 1


def test_a_holder_notices_that_its_lease_was_taken_and_says_again_what_it_named(leases):
    with leases.take("build") as lease:
        lease.add([A])
        assert leases.see_linked(lease)
        before = leases.all()
        leases.remove(lease.uuid)
        assert not lease.linked()
        with leases.store_lock(exclusive=False):
            assert not leases.see_linked(lease)
        assert lease.linked()
        (after,) = leases.all()
        assert (after.uuid, after.start, after.digests) == (lease.uuid, before[0].start, A.raw)
        assert not locks_free(leases, lease.uuid)
        lease.add([B])
        assert leases.all()[0].digests == A.raw + B.raw
    assert leases.all() == []


def locks_free(leases, uuid):
    with (leases.root / "leases" / uuid).open("rb") as file:
        return locks.try_lock(file.fileno(), exclusive=False)


def test_a_reader_that_slept_names_all_of_it_again(leases):
    with leases.take("follow") as lease:
        leases.name(lease, [A])
        leases.remove(lease.uuid)
        leases.name(lease, [B])
        assert leases.all()[0].digests == A.raw + B.raw


def test_what_is_named_after_a_write_that_a_full_disk_cut_short_is_read(leases, monkeypatch):
    def cut_short(handle, data):
        os.write(handle, bytes(data)[:40])
        raise OSError(errno.ENOSPC, "no space left on device")

    with leases.take("follow") as lease:
        lease.add([A])
        with monkeypatch.context() as full:
            full.setattr(leases_module, "write_all", cut_short)
            with pytest.raises(NoSpace):
                lease.add([B, A])
        lease.add([B])
        assert leases.all()[0].digests == A.raw + B.raw


def test_a_forked_child_holds_nothing_and_takes_nothing(leases):
    with leases.take("build") as lease:
        child = os.fork()
        if child == 0:
            refused = False
            try:
                lease.add([A])
            except Invalid:
                refused = True
            lease.close()
            os._exit(0 if refused and lease.closed else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert lease.linked()
        lease.add([A])


def test_the_descriptor_is_closed_on_exec(leases):
    with leases.take("build") as lease:
        assert not os.get_inheritable(lease._handle)


def test_a_lease_that_is_forgotten_closes_itself(leases):
    lease = leases.take("build")
    uuid = lease.uuid
    del lease
    gc.collect()
    assert not (leases.root / "leases" / uuid).exists()


def test_where_nothing_can_be_written_a_reader_goes_on_without(leases, monkeypatch):
    def refuse(*_args, **_options):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(leases_module.locks, "open_owned", refuse)
    assert leases.try_take("read") is None
    with pytest.raises(Invalid):
        leases.take("build")


def test_what_is_no_lease_is_passed_over(leases, tmp_path):
    (leases.root / "leases" / "link").symlink_to(tmp_path)
    (leases.root / "leases" / "folder").mkdir()
    assert leases.all() == []
