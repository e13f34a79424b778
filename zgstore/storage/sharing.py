"""Jobs done by two threads, of which the caller's is one. An interrupt may come at any moment, and leaves no harm."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue

Job = Callable[[], None]


class SecondThread:
    """A thread beside the caller's.

    Args:
        name: What a list of threads shows.

    Whatever both wait for is one step of the interpreter: an interrupted wait in Python's own pools or conditions
    would leave their locks held, and the next batch would wait for ever.
    """

    def __init__(self, name: str) -> None:
        self._todo: SimpleQueue[Job | None] = SimpleQueue()
        # An interrupt may come while the thread starts: then there is nobody to close it.
        weakref.finalize(self, self._todo.put, None)
        self._thread = threading.Thread(target=_serve, args=(self._todo,), name=name, daemon=True)
        self._thread.start()

    def share(self, jobs: Sequence[Job]) -> None:
        """Do the jobs, each by whoever is free, and return when all have ended.

        After an interrupt the second thread may still be at one: give it nothing that is used again.

        Raises:
            What the first job that failed, in their order, raised.
        """
        todo, failures = enumerate(jobs), dict[int, Exception]()  # a step of one iterator is one under Python's lock
        begun, ended = dict[str, str](), SimpleQueue[None]()

        def work() -> None:
            for at, job in todo:
                try:
                    job()
                except Exception as error:  # noqa: BLE001 - raised below
                    failures[at] = error

        def beside() -> None:
            if begun.setdefault("by", "second") == "second":
                work()
                ended.put(None)

        try:
            self._todo.put(beside)
            work()
            # It may be busy with another batch, and is not waited for where it has not begun with this one.
            if begun.setdefault("by", "caller") == "second":
                ended.get()
        finally:
            for _ in todo:
                pass
        if failures:
            try:
                raise failures[min(failures)]
            finally:
                failures.clear()  # by its traceback the failure would hold itself, and all that these frames hold

    def close(self) -> None:
        """Let the thread end when it is free."""
        self._todo.put(None)

    def join(self) -> None:
        """Wait until it has ended."""
        self._thread.join()


def _serve(todo: SimpleQueue[Job | None]) -> None:
    while (job := todo.get()) is not None:
        job()
        del job  # and the memory that it reads into
