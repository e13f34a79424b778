"""Two threads at one list of jobs."""

import threading
from functools import partial

import pytest

from zgstore.errors import Corrupt, Missing
from zgstore.storage.sharing import SecondThread


def test_all_are_done_and_the_first_failure_in_their_order_is_raised():
    done = []

    def job(number, error=None):
        if error is not None:
            raise error
        done.append(number)

    second = SecondThread("second")
    second.share([partial(job, number) for number in range(100)])
    assert sorted(done) == list(range(100))
    with pytest.raises(Missing, match="first"):
        second.share([partial(job, 100), partial(job, 0, Missing("first")), partial(job, 0, Corrupt("second"))])
    assert done[-1] == 100
    second.close()


def test_an_interrupt_begins_no_more():
    second, begun, left, done = SecondThread("second"), threading.Event(), threading.Event(), []
    this_thread = threading.get_ident()

    def job(number):
        if threading.get_ident() == this_thread:
            assert begun.wait(10)
            raise KeyboardInterrupt
        begun.set()
        assert left.wait(10)
        done.append(number)

    with pytest.raises(KeyboardInterrupt):
        second.share([partial(job, number) for number in range(9)])
    left.set()
    second.share([lambda: None, lambda: None])
    second.close()
    assert len(done) <= 1


def test_who_is_busy_with_another_list_is_not_waited_for():
    second, begun, go_on = SecondThread("second"), threading.Event(), threading.Event()
    here = threading.get_ident()

    def wait():
        begun.set()
        assert go_on.wait(10)

    other = threading.Thread(target=second.share, args=([wait, wait],))
    other.start()
    assert begun.wait(10)
    by = []
    second.share([lambda: by.append(threading.get_ident())] * 5)
    assert by.count(here) >= 1
    assert len(by) == 5
    go_on.set()
    other.join()
    second.close()


def test_the_thread_of_who_is_forgotten_ends():
    second = SecondThread("forgotten")
    second.share([lambda: None, lambda: None])
    (thread,) = (each for each in threading.enumerate() if each.name == "forgotten")
    del second
    thread.join(5)
    assert not thread.is_alive()
