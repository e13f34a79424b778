"""A writer killed before each of its steps: what is published is whole, and a rerun finishes."""

import os
import sys
from pathlib import Path

from zgstore.format.digest import Digest
from zgstore.storage import files, locks, objects
from zgstore.storage.store import Store

sys.path.insert(0, str(Path(__file__).parent.parent / "storage"))
from tiny import publish

STEPS = ("write", "fdatasync", "fsync", "rename", "unlink", "mkdir", "ftruncate")


def killed_before(step, work):
    """Run ``work`` in a child that dies before its step number ``step``; whether it died."""
    child = os.fork()
    if child == 0:
        left = [step]

        def counted(real):
            def call(*args, **options):
                left[0] -= 1
                if left[0] == 0:
                    os._exit(9)
                return real(*args, **options)

            return call

        for name in STEPS:
            setattr(os, name, counted(getattr(os, name)))
        objects.rename_new = files.rename_new = counted(files.rename_new)
        locks.fcntl.flock = counted(locks.fcntl.flock)
        try:
            work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


def check_sound(store):
    """Every object is what its name says, and every name leads to a whole snapshot."""
    for family in ("objects", "meta"):
        for raw in store.objects.names(family):
            store.objects.rehash(Digest(raw), family)
    for ref in store.refs.list():
        store.read_plan(ref.snapshot)
        store.dropped(store.snapshot(ref.snapshot))
        for entry in store.refs.log(ref.name, ref.kind):
            store.snapshot(entry.new)
            assert store.record(entry.record).snapshot == entry.new
    assert list(store.objects.foreign()) == []
    # One whose holder died before it said who it is has named nothing: it only waits to be old.
    assert not any(lease.alive and (lease.pid or lease.digests) for lease in store.leases.all())


def test_a_writer_killed_before_any_step_leaves_a_sound_store(tmp_path):
    store = Store.init(tmp_path / "store")
    step = 0
    while True:
        step += 1
        ref = f"new-{step}" if step % 4 == 0 else "main"
        if not killed_before(step, lambda: publish(store, f"text {step}", ref=ref, shards=1)):  # noqa: B023
            break
        check_sound(store)
        if step % 5 == 0:
            assert publish(store, f"text {step}", ref=ref, shards=1) == store.resolve(ref)
    assert step > 40
    check_sound(store)
    assert store.resolve(ref) == publish(store, f"text {step}", ref=ref, shards=1)


def test_a_store_killed_while_it_is_made_is_made_by_the_next(tmp_path):
    for step in (1, 2, 5, 300, 768, 780, 788, 790, 795):
        path = tmp_path / str(step)
        killed_before(step, lambda: Store.init(path))  # noqa: B023
        publish(Store.init(path), "one")
        check_sound(Store.open(path))
