import itertools
import math
import signal
import sys
import threading
import time

import pytest
import torch

from zgstore.building.planner import Wanted
from zgstore.building.shards import Background, ShardDraft
from zgstore.errors import Invalid
from zgstore.format.manifest import Column
from zgstore.format.tensorfile import encode


def wanted(name="h", dtype=None, codec="raw", role="boundary"):
    return Wanted(name, role, 0, dtype, codec, "teacher", None, {}, b"")


def content(store, blob):
    return store.objects.path(blob.digest, "objects").read_bytes()


def threads_left(before):
    """The threads that were not there before, once those that end have ended."""
    latest = time.monotonic() + 5
    while (left := {*threading.enumerate()} - before) and time.monotonic() < latest:
        time.sleep(0.01)
    return left


def add(draft, *args, **more):
    for job in draft.take(*args, **more):
        job()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.float8_e4m3fn])
@pytest.mark.parametrize("known", [True, False])
def test_a_streamed_blob_is_the_one_that_is_encoded_at_once(store, dtype, known):
    lengths = torch.tensor([3, 1, 2])
    x = (torch.arange(24).view(6, 4) % 2 * 2).to(dtype)
    with store.writing("test") as session:
        draft = ShardDraft(session, [wanted()], rows=3 if known else None, lengths=lengths if known else None)
        add(draft, {"h": x[:4]}, lengths=lengths[:2], packed=frozenset({"h"}))
        add(draft, {"h": x[4:]}, lengths=lengths[2:], packed=frozenset({"h"}))
        (stored,) = draft.keep()
        assert content(store, stored.blob) == encode(stored.column, x, lengths)
        assert stored.column.shape == (None, 4)


@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_dense_columns_are_cast_and_encoded(store, codec):
    x = torch.randn(6, 5, 70)
    with store.writing("test") as session:
        draft = ShardDraft(session, [wanted(dtype="BF16", codec=codec)], rows=6, lengths=None)
        for part in x.split(2):
            add(draft, {"h": part})
        (stored,) = draft.keep()
        assert stored.column == Column("h", "boundary", "BF16", codec, (5, 70), 0)
        assert content(store, stored.blob) == encode(stored.column, x.to(torch.bfloat16))
        assert stored.rows == 6
        assert stored.statistics["max"] == pytest.approx(float(x.max()), rel=0.01)


def test_rows_that_are_not_finite_are_found_with_their_values(store):
    x = torch.zeros(4, 3)
    x[2, 1] = float("inf")
    with store.writing("test") as session:
        draft = ShardDraft(session, [wanted(), wanted("out", role="output")], rows=4, lengths=None)
        add(draft, {"h": x[:2], "out": x[:2]})
        add(draft, {"h": x[2:], "out": x[2:]})
        assert draft.check()["h"] == ((2,), "inf")
        draft.discard()


def test_batches_that_do_not_go_together_are_refused(store):
    with store.writing("test") as session:
        draft = ShardDraft(session, [wanted()], rows=4, lengths=None)
        add(draft, {"h": torch.zeros(2, 3)})
        with pytest.raises(Invalid, match="one batch"):
            add(draft, {"h": torch.zeros(2, 4)})
        with pytest.raises(Invalid, match="no 'h'"):
            add(draft, {"g": torch.zeros(2, 3)})
        with pytest.raises(Invalid, match="2 rows of a shard of 4"):
            draft.keep()
        draft.discard()


def test_work_is_done_in_order_and_its_failure_ends_the_next_call():
    seen = []
    with Background() as background:
        for at in range(50):
            background.submit(lambda at=at: seen.append(at))
        background.drain()
        assert seen == list(range(50))

        def fail():
            raise OSError("disk gone")

        background.submit(fail)
        with pytest.raises(OSError, match="disk gone"):
            background.drain()
        with pytest.raises(OSError, match="disk gone"):
            background.submit(fail)
        with pytest.raises(OSError, match="disk gone"):
            background.share([lambda: seen.append(50)])
        assert len(seen) == 50


def test_waiting_bytes_are_bounded_and_a_failure_wakes_who_waits():
    release = threading.Event()
    with Background(budget_bytes=100) as background:
        background.submit(release.wait, weight_bytes=90)
        waiter = threading.Thread(target=background.submit, args=(lambda: None,), kwargs={"weight_bytes": 90})
        waiter.start()
        time.sleep(0.05)
        assert waiter.is_alive()
        release.set()
        waiter.join(5)
        assert not waiter.is_alive()
        background.drain()


def test_closing_drops_what_has_not_begun():
    release, seen = threading.Event(), []
    background = Background()
    background.submit(release.wait)
    background.submit(lambda: seen.append(1))
    threading.Timer(0.05, release.set).start()
    background.close()
    assert not seen


def test_an_interrupted_close_leaves_no_thread_behind(interrupts):
    before = {*threading.enumerate()}
    background = Background()
    begun, release = threading.Event(), threading.Event()
    background.submit(lambda: (begun.set(), release.wait()))
    assert begun.wait(10)  # what has not begun is dropped
    interrupting = threading.Timer(0.05, signal.pthread_kill, (threading.get_ident(), interrupts.signal))
    interrupting.start()
    with pytest.raises(KeyboardInterrupt), interrupts.within():
        background.close()
    release.set()
    interrupting.join()
    assert not threads_left(before)


@pytest.mark.parametrize("nth", [1, 2])
def test_an_interrupt_while_a_thread_starts_leaves_none_behind(nth):
    before, starts = {*threading.enumerate()}, itertools.count(1)

    def trace(frame, *_):
        if frame.f_code is threading.Event.wait.__code__ and next(starts) == nth:
            raise KeyboardInterrupt

    tracing = sys.gettrace()
    sys.settrace(trace)
    try:
        with pytest.raises(KeyboardInterrupt):
            Background()
    finally:
        sys.settrace(tracing)
    assert not threads_left(before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.float8_e5m2])
def test_what_is_not_finite_is_said_under_autocast_too(store, dtype):
    x = torch.zeros(3, 4)
    x[1] = torch.tensor([-math.inf, 0, math.nan, math.inf])
    with store.writing("test") as session, torch.autocast("cpu", torch.bfloat16):
        draft = ShardDraft(session, [wanted()], rows=3, lengths=None)
        add(draft, {"h": x.to(dtype)})
        assert draft.check() == {"h": ((1,), "nan, inf, -inf")}
        draft.discard()
