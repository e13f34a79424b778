"""Programs that keep versions of files: DVC, git-annex, restic, borg, ostree, each set up to its advantage."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from tests.benchmarks.peers.boundaries import name_of, write
from tests.benchmarks.peers.peer import Tool, Unsound


class OverFiles(Tool):
    """A tool that is given a folder of files."""

    files: ClassVar[str] = "files"

    @property
    def source(self) -> Path:
        """Where its files lie."""
        return self.folder / self.files

    def prepare(self) -> None:
        write(self.source, self.data.first)
        self.set_up()

    def set_up(self) -> None:
        """An empty repository."""

    def prepare_more(self) -> None:
        write(self.source, self.data.more, since=len(self.data.first))

    def grow(self) -> None:
        self.ingest()

    def _restored(self) -> Iterator[bytes]:
        """The pieces of a copy that was restored."""
        found = {path.name: path for path in (self.folder / "restored").rglob("*.bin")}
        return (found[name_of(number)].read_bytes() for number in range(len(self.data.all)))


class Dvc(OverFiles):
    """Its working copy is made of links into its cache, so that nothing is kept twice."""

    name, program = "DVC", "dvc"

    @classmethod
    def absent(cls) -> str:
        return super().absent() or ("" if importlib.util.find_spec("dvc") else "the package dvc is not installed")

    def set_up(self) -> None:
        self.run("git", "init", "--quiet")
        self.run("dvc", "init", "--quiet")
        self.run("dvc", "config", "cache.type", "hardlink,symlink")
        self.run("dvc", "config", "core.site_cache_dir", str(self.folder / "site"))
        self.run("dvc", "config", "core.analytics", "false")

    def ingest(self) -> None:
        self.run("dvc", "add", "--quiet", self.files)

    def verify(self) -> None:
        """What it remembers of files it has hashed is forgotten, so that it hashes them."""
        shutil.rmtree(self.folder / "site", ignore_errors=True)
        shutil.rmtree(self.folder / ".dvc" / "tmp", ignore_errors=True)
        self.run("dvc", "status", "--quiet", fails=Unsound)

    def read(self, piece: int) -> bytes:
        import dvc.api  # noqa: PLC0415 - of the peers' environment

        return dvc.api.read(f"{self.files}/{name_of(piece)}", repo=str(self.folder), mode="rb")

    def kept(self) -> Path:
        return self.folder / ".dvc" / "cache"


class GitAnnex(OverFiles):
    """Files become links to what it keeps."""

    name, program = "git-annex", "git-annex"

    def set_up(self) -> None:
        self.run("git", "init", "--quiet")
        self.run("git", "annex", "init", "--quiet")

    def ingest(self) -> None:
        self.run("git", "annex", "add", "--quiet", self.files)
        with contextlib.suppress(RuntimeError):  # nothing new is an error to git
            self.run("git", "commit", "--quiet", "--message", "boundaries")

    def verify(self) -> None:
        self.run("git", "annex", "fsck", "--quiet", fails=Unsound)

    def read(self, piece: int) -> bytes:
        return (self.source / name_of(piece)).read_bytes()

    def kept(self) -> Path:
        return self.folder / ".git" / "annex" / "objects"


class Restic(OverFiles):
    """Without compression: what is compared is how versions are kept."""

    name, program = "restic", "restic"
    environment: ClassVar[dict[str, str]] = {
        "RESTIC_PASSWORD": "bench", "RESTIC_REPOSITORY": "repository", "RESTIC_COMPRESSION": "off",
    }  # fmt: skip

    def set_up(self) -> None:
        self.run("restic", "init", "--quiet")

    def ingest(self) -> None:
        self.run("restic", "backup", "--quiet", self.files)

    def verify(self) -> None:
        self.run("restic", "check", "--quiet", "--read-data", fails=Unsound)

    def read(self, piece: int) -> bytes:
        return self.run("restic", "dump", "latest", f"/{self.files}/{name_of(piece)}", fails=Unsound)

    def everything(self) -> Iterator[bytes]:
        self.run("restic", "restore", "latest", "--quiet", "--target", "restored", fails=Unsound)
        return self._restored()

    def kept(self) -> Path:
        return self.folder / "repository"


class Borg(OverFiles):
    """Without encryption and compression."""

    name, program = "borg", "borg"
    environment: ClassVar[dict[str, str]] = {"BORG_UNKNOWN_UNENCRYPTED_REPO_ACCESS_IS_OK": "yes"}

    def set_up(self) -> None:
        self.archives = 0
        self.run("borg", "init", "--encryption", "none", "repository")

    def ingest(self) -> None:
        self.archives += 1
        self.run("borg", "create", "--compression", "none", f"repository::{self.archives}", self.files)

    def verify(self) -> None:
        self.run("borg", "check", "--verify-data", "repository", fails=Unsound)

    def read(self, piece: int) -> bytes:
        wanted = f"{self.files}/{name_of(piece)}"
        return self.run("borg", "extract", "--stdout", f"repository::{self.archives}", wanted, fails=Unsound)

    def everything(self) -> Iterator[bytes]:
        target = self.folder / "restored"
        target.mkdir(exist_ok=True)
        where = self.folder / "repository"
        self.run("sh", "-c", f"cd {target} && borg extract {where}::{self.archives}", fails=Unsound)
        return self._restored()

    def kept(self) -> Path:
        return self.folder / "repository"


class Ostree(OverFiles):
    """Files are kept as they are."""

    name, program = "ostree", "ostree"

    def set_up(self) -> None:
        self.run("ostree", "init", "--repo=repository", "--mode=bare-user-only")

    def ingest(self) -> None:
        self.run(
            "ostree", "commit", "--repo=repository", "--branch=main", f"--tree=dir={self.files}",
            "--canonical-permissions",
        )  # fmt: skip

    def verify(self) -> None:
        self.run("ostree", "fsck", "--repo=repository", "--quiet", fails=Unsound)

    def read(self, piece: int) -> bytes:
        return self.run("ostree", "cat", "--repo=repository", "main", f"/{name_of(piece)}", fails=Unsound)

    def kept(self) -> Path:
        return self.folder / "repository"
