"""Operations cut off from power at many moments: what had not been flushed is lost, and then it is looked at.

The stores lie on a file system in an image, and the image on one that can clone a file, which is one atomic moment. The
clone is what a disk would have after the power went at that moment: what the kernel had not written out is not in it.
Half of the moments are right before a chosen step of the operation, the others are anywhere, in the middle of a sync
too. What a disk keeps in a cache of its own, and may reorder, is not lost here.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import fcntl
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.faults import steps
from tests.faults.kills import Sweep, operation
from tests.faults.steps import GO, Step, Verdict

_FICLONE = 0x40049409
CUT = ["publish", "names", "gc into the trash", "gc out of the trash", "copy", "build", "build of more rows",
       "checkpoint"]  # fmt: skip
HOSTS = {"xfs": ["mkfs.xfs", "-q", "-m", "reflink=1"], "btrfs": ["mkfs.btrfs", "-q"]}
# What ext4 writes out early, for those who forget to ask for it, is not relied upon.
OPTIONS = {"ext4": "loop,noauto_da_alloc"}
INNER = {"ext4": ["mkfs.ext4", "-q", "-F"], "xfs": ["mkfs.xfs", "-q", "-f"], "btrfs": ["mkfs.btrfs", "-q", "-f"]}
HOST_BYTES, DISK_BYTES = 16 << 30, 512 << 20  # sparse files
_NEW_MOUNTS = 0x20000  # CLONE_NEWNS


class CannotCut(Exception):
    """Why no disk can be cut off here."""


def _do(*command: str | Path) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise CannotCut(f"{command[0]} is not installed") from error
    except subprocess.CalledProcessError as error:
        raise CannotCut(f"{' '.join(map(str, command))}: {error.stderr.strip()}") from error


def _mount_unseen() -> None:
    """From here on nobody else sees what this process mounts, and all of it goes when the process does."""
    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_MOUNTS) != 0:
        raise CannotCut(f"no mounts of its own for this process: {os.strerror(ctypes.get_errno())}")
    _do("mount", "--make-rprivate", "/")


@contextlib.contextmanager
def mounted(image: Path, at: Path, options: str = "loop") -> Iterator[None]:
    at.mkdir(exist_ok=True)
    _do("mount", "-o", options, image, at)
    try:
        yield
    finally:
        _do("umount", at)


def _image(path: Path, size: int, make: Sequence[str]) -> Path:
    path.touch()
    os.truncate(path, size)
    _do(*make, path)
    return path


@contextlib.contextmanager
def host(folder: Path) -> Iterator[Path]:
    """A folder in which files can be cloned."""
    if os.geteuid() != 0:
        raise CannotCut("only the superuser can mount")
    make = next((make for make in HOSTS.values() if shutil.which(make[0])), None)
    if make is None:
        raise CannotCut(f"none of {', '.join(HOSTS)} can be made here: install xfsprogs or btrfs-progs")
    _mount_unseen()
    with mounted(_image(folder / "host.img", HOST_BYTES, make), folder / "host"):
        yield folder / "host"


@dataclass(frozen=True, slots=True)
class Moment:
    """A clone, and when it was made."""

    image: Path
    when: str


class Cuts:
    """Clones an image before chosen steps, and at random moments beside them."""

    def __init__(self, image: Path, before: set[int], *, random_ones: int, chance: random.Random) -> None:
        self.image, self.before, self.random_ones, self.chance = image, before, random_ones, chance
        self.moments: list[Moment] = []
        self._last: Step | None = None
        self._over = threading.Event()
        self._mutex = threading.Lock()
        self._beside = threading.Thread(target=self._at_random)

    def __call__(self, step: Step) -> Verdict:
        if self._last is None:  # now the process is there: a fork has no other thread
            self._beside.start()
        self._last = step
        if step.number in self.before:
            self.cut(f"before {step}")
        return GO

    def end(self) -> None:
        """And the last one: nothing that is done may be lost any more."""
        self._over.set()
        self._beside.join()
        self.cut("after the end")

    def cut(self, when: str) -> None:
        with self._mutex:
            to = self.image.with_name(f"cut-{len(self.moments)}.img")
            with self.image.open("rb") as source, to.open("wb") as target:
                fcntl.ioctl(target, _FICLONE, source.fileno())
            self.moments.append(Moment(to, when))

    def _at_random(self) -> None:
        for _ in range(self.random_ones):
            if self._over.wait(self.chance.expovariate(1 / 0.02)):
                return
            self.cut(f"at some moment after {self._last}")


def cut_off(name: str, inner: str, folder: Path, *, moments: int, seed: int) -> tuple[int, list[str]]:
    """One operation, cut off at so many moments; how many they were, and what did not hold."""
    chance = random.Random(seed)
    image, disk = _image(folder / "disk.img", DISK_BYTES, INNER[inner]), folder / "disk"
    options = OPTIONS.get(inner, "loop")
    with mounted(image, disk, options):
        sweep = Sweep(operation(name), disk)
        chosen = set(chance.sample(range(1, len(sweep.steps) + 1), min(moments // 2, len(sweep.steps))))
        cuts = Cuts(image, chosen, random_ones=moments - len(chosen), chance=chance)
        with sweep.place() as place:
            os.sync()
            ended = steps.run(lambda: sweep.operation.work(place), place, cuts)
            assert ended.value == sweep.value, ended.message
            cuts.end()
    for moment in cuts.moments:
        with mounted(moment.image, disk, options):
            sweep.check(place, moment.when, done=moment is cuts.moments[-1])
        moment.image.unlink()
    image.unlink()
    return len(cuts.moments), sweep.counts.findings


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("operations", nargs="*", default=CUT, metavar="OPERATION")
    parser.add_argument("--moments", type=int, default=40, help="of each operation")
    parser.add_argument("--inner", choices=INNER, default="ext4", help="the file system that the stores lie on")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where the images lie; it takes some GiB")
    asked = parser.parse_args()
    began, total, found = time.monotonic(), 0, 0
    try:
        if why := steps.cannot():
            raise CannotCut(why)  # noqa: TRY301
        with tempfile.TemporaryDirectory(dir=asked.folder or "/var/tmp") as folder, host(Path(folder)) as place:
            for name in asked.operations:
                since = time.monotonic()
                count, findings = cut_off(name, asked.inner, place, moments=asked.moments, seed=asked.seed)
                total, found = total + count, found + len(findings)
                print(f"{name} on {asked.inner}: cut off at {count} moments; {len(findings)} findings; "
                      f"{time.monotonic() - since:.0f} s", flush=True)  # fmt: skip
                for each in findings:
                    print(f"--- {name}: {each}", flush=True)
    except CannotCut as error:
        print(f"skipped: {error}")
        return 0
    except OSError as error:
        if error.errno not in {errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY}:
            raise
        print(f"skipped: files cannot be cloned here: {error}")
        return 0
    print(f"all: {total} moments; {found} findings; {time.monotonic() - began:.0f} s")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
