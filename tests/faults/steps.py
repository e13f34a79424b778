"""A process held before each system call that changes a folder: to be let go, killed, or told of an error.

The kernel itself hands the calls over (seccomp's user notification, Linux 5.5), from all threads in the one order in
which they come. So a step is a real call of the real system: what is killed at step N has done N - 1 of them and no
more; what is told of an error was told by the kernel. Nothing else of the process is touched or slowed.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import platform
import select
import signal
import socket
import struct
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from zgstore.errors import ZgError

GO, KILL = 0, -1
Verdict = int  # GO, KILL, or the errno that the call shall fail with
STUCK_SECONDS: Final = 60

# Call → its number on x86-64 and on arm64 (None: not there), and where its arguments say what is changed: a descriptor
# (fd N), a path (path N), or a path below a descriptor (at N: the descriptor's place; the path's is the next).
CALLS: Final = {
    "write": (1, 64, "fd 0"), "pwrite64": (18, 68, "fd 0"), "writev": (20, 66, "fd 0"), "pwritev": (296, 70, "fd 0"),
    "pwritev2": (328, 287, "fd 0"), "sendfile": (40, 71, "fd 0"), "copy_file_range": (326, 285, "fd 2"),
    "fsync": (74, 82, "fd 0"), "fdatasync": (75, 83, "fd 0"), "ftruncate": (77, 46, "fd 0"),
    "truncate": (76, 45, "path 0"), "fallocate": (285, 47, "fd 0"), "open": (2, None, "path 0"),
    "creat": (85, None, "path 0"), "openat": (257, 56, "at 0"), "mkdir": (83, None, "path 0"),
    "mkdirat": (258, 34, "at 0"), "rename": (82, None, "path 1"), "renameat": (264, 38, "at 2"),
    "renameat2": (316, 276, "at 2"), "link": (86, None, "path 1"), "linkat": (265, 37, "at 2"),
    "symlink": (88, None, "path 1"), "symlinkat": (266, 36, "at 1"), "unlink": (87, None, "path 0"),
    "unlinkat": (263, 35, "at 0"), "rmdir": (84, None, "path 0"), "chmod": (90, None, "path 0"),
    "fchmod": (91, 52, "fd 0"), "fchmodat": (268, 53, "at 0"), "utimensat": (280, 88, "at 0"),
}  # fmt: skip
_OPENS: Final = {"open": 1, "openat": 2}  # the argument with the flags: only those that make or empty a file are held
_MAKES: Final = os.O_CREAT | os.O_TRUNC
_AT_CWD: Final = -100 & 0xFFFFFFFF

_MACHINES: Final = {"x86_64": (0, 0xC000003E, 317), "aarch64": (1, 0xC00000B7, 277)}
_ALLOW, _NOTIFY = 0x7FFF0000, 0x7FC00000
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_NOTIFICATION: Final = struct.Struct("QIIiIQ6Q")
_ANSWER: Final = struct.Struct("QqiI")
_RECEIVE, _SEND, _CONTINUE = 0xC0502100, 0xC0182101, 1
_MESSAGE_BYTES: Final = 8000


class Step(NamedTuple):
    """One call that changes something.

    Args:
        number: From 1.
        call: Its name.
        path: What it changes, relative to the folder that is watched.
    """

    number: int
    call: str
    path: str

    def __str__(self) -> str:
        return f"step {self.number}, {self.call} {self.path}"


@dataclass(slots=True)
class Run:
    """What became of a process.

    Args:
        steps: Every step that it came to.
        value: What its work returned.
        error: The class of what its work raised; "" if it raised nothing.
        kind: The kind of a ``ZgError``; "" of any other exception.
        message: What it said, with its traceback.
        killed: Whether it was killed.
    """

    steps: list[Step] = field(default_factory=list)
    value: Any = None
    error: str = ""
    kind: str = ""
    message: str = ""
    killed: bool = False

    @property
    def failed(self) -> bool:
        return bool(self.error)


def cannot() -> str:
    """Why no process can be held here; "" if it can."""
    if platform.machine() not in _MACHINES:
        return f"the numbers of the system calls of {platform.machine()} are not known here"
    try:
        run(lambda: Path("/dev/null").write_bytes(b"x"), Path("/dev"), lambda _: GO)
    except OSError as error:
        return f"this system does not let a process hold another's system calls: {error}"
    return ""


def run(work: Callable[[], Any], folder: Path, decide: Callable[[Step], Verdict]) -> Run:
    """Run ``work`` in a child, and ask at each step under ``folder`` what shall become of it.

    Args:
        work: What it returns must fit JSON. It runs in a fork of this process, which should have no other thread.
        folder: Calls that change something elsewhere go on unasked.
        decide: Is given a step that has not happened yet.
    """
    ours, theirs = socket.socketpair()
    said, say = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(said)
        ours.close()
        _be_held(theirs, say, work)
    theirs.close()
    os.close(say)
    with ours, os.fdopen(said, "rb") as result:
        listener = _received(ours, child)
        try:
            ended = _attend(child, listener, folder.resolve(), decide)
        finally:
            os.close(listener)
        os.waitpid(child, 0)
        told = json.loads(result.read() or b"{}")
    if not ended.killed and not told:
        ended.error = "it ended without a word"
    for name, value in told.items():
        setattr(ended, name, value)
    return ended


def alone(work: Callable[[], Any]) -> Any:
    """What ``work`` returns, of a process of its own that nobody watches.

    Raises:
        AssertionError: with its traceback, if it raised anything.
    """
    said, say = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(said)
        _finish(say, work)
    os.close(say)
    with os.fdopen(said, "rb") as result:
        told = json.loads(result.read() or b"{}")
    os.waitpid(child, 0)
    assert told and not told["error"], told.get("message", "it ended without a word")  # noqa: PT018
    return told["value"]


# ---- the child ----


def _be_held(theirs: socket.socket, say: int, work: Callable[[], Any]) -> None:
    try:
        listener = _install()
    except OSError as error:
        theirs.send(struct.pack("i", error.errno))
        os._exit(1)
    socket.send_fds(theirs, [struct.pack("i", 0)], [listener])
    os.close(listener)
    theirs.close()
    _finish(say, work)


def _finish(say: int, work: Callable[[], Any]) -> None:
    """Do the work, tell what came of it, and end at once: nothing of the parent's is run on the way out."""
    told: dict[str, Any] = {"error": ""}
    try:
        told["value"] = work()
    except BaseException as error:  # noqa: BLE001 - it is told
        text = "".join(traceback.format_exception(error))[-_MESSAGE_BYTES:]
        kind = error.kind if isinstance(error, ZgError) else ""
        told = {"error": type(error).__name__, "kind": kind, "message": text}
    os.write(say, json.dumps(told).encode())
    os._exit(0)


def _install() -> int:
    """Have this process's calls handed over; the descriptor that they are taken from."""
    libc = ctypes.CDLL(None, use_errno=True)
    filtered = ctypes.create_string_buffer(_filter())
    program = struct.pack("HxxxxxxP", len(filtered.raw[:-1]) // 8, ctypes.addressof(filtered))
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS, so that no privilege is needed
    new_listener = 1 << 3
    seccomp = _MACHINES[platform.machine()][2]
    handle: int = libc.syscall(seccomp, 1, new_listener, ctypes.create_string_buffer(program))
    if handle < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return handle


def _filter() -> bytes:
    """A BPF program: hand over the calls of the table, and of opens those that make or empty a file."""
    at, audit, _ = _MACHINES[platform.machine()]
    plain = [numbers[at] for name, numbers in CALLS.items() if name not in _OPENS and numbers[at] is not None]
    opens = [(CALLS[name][at], argument) for name, argument in _OPENS.items() if CALLS[name][at] is not None]
    # Each open is three instructions; then come ALLOW and NOTIFY.
    code: list[tuple[int, int, int, int]] = []
    after = 3 + len(plain) + 3 * len(opens)
    code += [(_LOAD, 0, 0, 4), (_EQUAL, 0, after - 2, audit), (_LOAD, 0, 0, 0)]
    code += [(_EQUAL, after - len(code) - each, 0, number) for each, number in enumerate(plain)]
    for number, argument in opens:
        code.append((_EQUAL, 0, 2, number))
        code.append((_LOAD, 0, 0, 16 + 8 * argument))
        code.append((_ANY_BIT, after - len(code), after - len(code) - 1, _MAKES))
    code += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _NOTIFY)]
    return b"".join(struct.pack("HBBI", *each) for each in code)


# ---- the parent ----


def _received(ours: socket.socket, child: int) -> int:
    message, handles, _, _ = socket.recv_fds(ours, 4, 1)
    (number,) = struct.unpack("i", message or struct.pack("i", errno.EPIPE))
    if not handles:
        os.waitpid(child, 0)
        raise OSError(number, os.strerror(number))
    return handles[0]


def _attend(child: int, listener: int, folder: Path, decide: Callable[[Step], Verdict]) -> Run:
    ended, poll = Run(), select.poll()
    poll.register(listener, select.POLLIN)
    names = {numbers[_MACHINES[platform.machine()][0]]: name for name, numbers in CALLS.items()}
    while True:
        found = poll.poll(1000 * STUCK_SECONDS)
        if not found:
            os.kill(child, signal.SIGKILL)
            last = ended.steps[-1] if ended.steps else "its start"
            raise TimeoutError(f"a process has done nothing for {STUCK_SECONDS} s after {last}")
        if not found[0][1] & select.POLLIN:
            return ended
        notification = bytearray(_NOTIFICATION.size)
        try:
            fcntl.ioctl(listener, _RECEIVE, notification)
        except FileNotFoundError:  # its thread died meanwhile
            continue
        ticket, thread, _, number, _, _, *arguments = _NOTIFICATION.unpack(notification)
        verdict = GO
        path = _changed(thread, CALLS[names[number]][2], arguments)
        if path is not None and path.is_relative_to(folder) and not _is_there(names[number], path, arguments):
            ended.steps.append(Step(len(ended.steps) + 1, names[number], str(path.relative_to(folder))))
            verdict = decide(ended.steps[-1])
        if verdict == KILL:
            ended.killed = True
            os.kill(child, signal.SIGKILL)
            return ended
        fcntl.ioctl(listener, _SEND, _ANSWER.pack(ticket, 0, -verdict, 0 if verdict else _CONTINUE))


def _changed(thread: int, where: str, arguments: list[int]) -> Path | None:
    """What a call changes: an absolute path; None if it is no file."""
    how, place = where.split()
    at = int(place)
    if how == "fd" or (how == "at" and arguments[at + 1] == 0):
        opened = Path(f"/proc/{thread}/fd/{arguments[at] & 0xFFFFFFFF}").readlink()
        return Path(str(opened).removesuffix(" (deleted)")) if opened.is_absolute() else None
    with Path(f"/proc/{thread}/mem").open("rb", buffering=0) as memory:
        memory.seek(arguments[at + (how == "at")])
        text = os.fsdecode(_until_zero(memory.read(4096)))
    start = arguments[at] & 0xFFFFFFFF
    base = Path(f"/proc/{thread}/cwd" if how == "path" or start == _AT_CWD else f"/proc/{thread}/fd/{start}")
    return Path(os.path.normpath(base.readlink() / text))


def _is_there(call: str, path: Path, arguments: list[int]) -> bool:
    """Whether what should be made is there already, so that nothing changes."""
    made = call.startswith("mkdir") or (call in _OPENS and not arguments[_OPENS[call]] & os.O_TRUNC)
    return made and path.exists()


def _until_zero(memory: bytes | None) -> bytes:
    return (memory or b"").split(b"\0", 1)[0]
