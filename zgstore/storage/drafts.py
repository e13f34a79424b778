"""One file being written: hashed as it is written, durable when it is finished."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from typing import Final

from zgstore.errors import Invalid
from zgstore.format.digest import Hasher
from zgstore.format.pages import Blob
from zgstore.storage.files import create, faults, start_writeback

# The best piece found: write-back overlaps with hashing, and the piece is still in the core's cache when it is hashed.
PIECE_BYTES: Final = 1 << 20

_numbers = itertools.count()


class Draft:
    """A file in a session's folder ``tmp/UUID``, without a name until its digest is known.

    Args:
        dir_fd: Handle of the session's folder; it stays open as long as its drafts.
        mode: Permissions of the finished file.
        size_hint: Bytes expected; 0 if unknown.
        kind: What its bytes are hashed as; None for a blob.

    Raises:
        NoSpace, Transient: as the disk says.
    """

    def __init__(self, dir_fd: int, *, mode: int, size_hint: int = 0, kind: str | None = None) -> None:
        self.dir_fd = dir_fd
        self.name = f"{next(_numbers)}"
        self.size = 0
        self.size_hint = size_hint
        self._mode = mode
        self._hasher = Hasher(kind)
        self._blob: Blob | None = None
        with faults("starting a new file"):
            self._handle = create(dir_fd, self.name, 0o600)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append ``data``: in pieces of 1 MiB, each written, sent on its way to the disk, then hashed.

        Raises:
            NoSpace: if the disk is full; the draft is discarded.
            Transient: if the disk fails; the draft is discarded.
        """
        if self._handle < 0:
            raise Invalid("this draft is finished or discarded", hint="start a new one")
        view = memoryview(data).cast("B")
        with self._or_discard("writing a new file"):
            for at in range(0, len(view), PIECE_BYTES):
                piece = view[at : at + PIECE_BYTES]
                left = piece
                while left:  # a write may be short
                    left = left[os.write(self._handle, left) :]
                start_writeback(self._handle, self.size, len(piece))
                self._hasher.update(piece)
                self.size += len(piece)

    def finish(self) -> Blob:
        """Make it durable; its digest is the one of the bytes as they were written.

        Raises:
            NoSpace, Transient: if the sync fails. What a failed sync left may be anything: the draft is discarded, and
                must be written again.
        """
        if self._blob is None:
            if self._handle < 0:
                raise Invalid("this draft was discarded", hint="start a new one")
            with self._or_discard("syncing a new file"):
                os.fchmod(self._handle, self._mode)
                os.fdatasync(self._handle)
            self._close()
            self._blob = Blob(self._hasher.digest(), self.size)
        return self._blob

    def placed(self) -> None:
        """It has its name now, and is no draft any more."""
        self.name = ""

    def discard(self) -> None:
        """Remove it; harmless when repeated, or when it has been placed."""
        if self._handle >= 0:
            self._close()
        if self.name:
            with contextlib.suppress(OSError):
                os.unlink(self.name, dir_fd=self.dir_fd)
            self.name = ""

    def _close(self) -> None:
        # Forgotten first, lest an interrupt have it closed twice, and another's file with it.
        handle, self._handle = self._handle, -1
        os.close(handle)

    @contextlib.contextmanager
    def _or_discard(self, doing: str) -> Iterator[None]:
        try:
            with faults(doing):
                yield
        except BaseException:
            self.discard()
            raise
