"""The real command, run by one of several users: each run is a child of its own that became that user."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path

from zgstore.cli.console import Screen
from zgstore.cli.main import main

GROUP = 54321


@dataclass(frozen=True)
class User:
    """Ids that nothing else on the machine has; what the user is a member of beside a group of its own."""

    number: int
    groups: tuple[int, ...] = (GROUP,)

    def become(self, umask: int) -> None:
        """Be that user, for good."""
        os.setgroups(list(self.groups))
        os.setgid(self.number)  # its own group comes first: only the folders say whose a new file is
        os.setuid(self.number)
        os.umask(umask)


ADA, BEN = User(54322), User(54323)
STRANGER = User(54324, groups=())


@dataclass(frozen=True)
class Ran:
    code: int
    text: str


def as_user(user, work, *, umask=0o077):
    """Call ``work`` as that user; its number is the exit code, what it prints the text."""
    said = tempfile.TemporaryFile()  # noqa: SIM115  (the child's too)
    child = os.fork()
    if child == 0:
        code = 99
        try:
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
            user.become(umask)
            sys.stdout, sys.stderr = (os.fdopen(each, "w", closefd=False) for each in (1, 2))
            code = work() or 0
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with said:
        said.seek(0)
        return Ran(status, said.read().decode())


def command(user, *words, umask=0o077):
    """``zgstore WORDS`` as that user."""

    python = interpreter() or sys.executable

    def work():
        warnings.simplefilter("default")  # as a command has them
        sys.executable = python
        screen = Screen()
        try:
            return main([str(word) for word in words], screen)
        finally:
            screen.restore()

    return as_user(user, work, umask=umask)


def warm(*lines):
    """Run commands in this process: then all modules are loaded, though no other user may read where they lie."""
    screen = Screen()
    for line in lines:
        try:
            assert main([str(word) for word in line], screen) == 0, line
        finally:
            screen.restore()


@functools.cache
def interpreter():
    """A Python that any user may run, as gc's test of the locks does; None if there is none."""
    places = [Path(sys.executable), *(Path(folder) / "python3" for folder in ("/usr/local/bin", "/usr/bin", "/bin"))]
    for path in filter(Path.exists, places):
        tried = subprocess.run(
            [shutil.which("env"), path, "-I", "-S", "-c", "import fcntl"], capture_output=True, check=False,
            **({"user": ADA.number, "group": ADA.number} if os.getuid() == 0 else {}),
        )  # fmt: skip
        if tried.returncode == 0:
            return str(path)
    return None
