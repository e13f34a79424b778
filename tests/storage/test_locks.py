import fcntl
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from zgstore.errors import Busy
from zgstore.storage import locks

TAKE = """
import sys, time
from zgstore.storage.store import Store
with Store.open(sys.argv[1]).leases.gc_lock():
    print("held", flush=True)
    sys.stdin.read()
"""


def test_shared_holders_stand_beside_each_other_and_keep_an_exclusive_one_out(store):
    shared = store.leases.store_lock
    with shared(exclusive=False), shared(exclusive=False), pytest.raises(Busy):  # noqa: SIM117  (one is expected to fail)
        with store.leases.store_lock(exclusive=True, wait_seconds=0):
            pass
    with store.leases.store_lock(exclusive=True, wait_seconds=0):
        pass


def test_waiting_ends_when_the_holder_goes(store):
    entered = threading.Event()

    def hold():
        with store.leases.store_lock(exclusive=True):
            entered.set()
            time.sleep(0.1)

    thread = threading.Thread(target=hold)
    thread.start()
    entered.wait()
    with store.leases.store_lock(exclusive=True, wait_seconds=10):
        pass
    thread.join()


def test_busy_names_the_holder_s_host_process_and_age(store):
    with subprocess.Popen(
        [sys.executable, "-c", TAKE, str(store.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(Busy) as caught, store.leases.gc_lock():
            pass
        other.stdin.close()
    assert caught.value.fields["pid"] == other.pid
    assert caught.value.fields["host"]
    assert caught.value.fields["age_seconds"] >= 0
    assert str(other.pid) in caught.value.message
    with store.leases.gc_lock():
        pass


def test_a_forked_child_does_not_keep_the_lock(store):
    go, end = os.pipe()
    up, born = os.pipe()
    with store.leases.store_lock(exclusive=True):
        child = os.fork()
        if child == 0:
            os.close(end)
            os.write(born, b"x")
            os.read(go, 1)
            os._exit(0)
    try:
        assert os.read(up, 1) == b"x"
        with store.leases.store_lock(exclusive=True, wait_seconds=0):
            pass
    finally:
        for handle in (go, end, up, born):
            os.close(handle)
        os.waitpid(child, 0)


def test_locks_are_tested_with_a_second_process(store):
    assert store.leases.locks_work()
    assert list((store.path / "tmp").iterdir()) == []


def test_a_test_of_locks_that_is_swept_away_meanwhile_is_made_again(store, monkeypatch):
    real, swept = subprocess.run, []

    def run(command, **how):
        if not swept:  # as a collector does, an hour after it was begun
            swept.append(Path(command[-1]))
            swept[0].unlink()
        return real(command, **how)

    monkeypatch.setattr(locks.subprocess, "run", run)
    assert store.leases.locks_work()
    assert swept
    assert list((store.path / "tmp").iterdir()) == []


def test_locks_that_always_succeed_are_found_out(store, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", lambda _handle, _how: None)
    assert not store.leases.locks_work()


def test_where_there_are_no_locks_work_goes_on(store, monkeypatch):
    def unsupported(_handle, _how):
        raise OSError(locks.errno.ENOLCK, "no locks available")

    monkeypatch.setattr(locks.fcntl, "flock", unsupported)
    with store.leases.store_lock(exclusive=True, wait_seconds=0):
        pass
    assert not store.leases.locks_work()
