"""How long a command takes that needs no torch, on a small store: what people feel when they type."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks import generated
from tests.benchmarks.measuring import Entry, rounds, told, within
from zgstore.errors import NotFound
from zgstore.storage.store import Store

BOUND_SECONDS = 0.25
OBJECTS = 40
BARE = ("zgstore --help", "zgstore ls", "zgstore gc")


def _nothing(_: Store) -> None:
    pass


def _tagged(store: Store) -> None:
    store.point("v2", "tag", store.resolve("main"), force=True)


def _spare_ref(store: Store) -> None:
    store.point("spare", "head", store.resolve("main"))


def _held(store: Store) -> None:
    store.hold("paper", store.resolve("main"))


def _not_held(store: Store) -> None:
    with contextlib.suppress(NotFound):
        store.refs.unhold("paper")


def _not_exported(store: Store) -> None:
    shutil.rmtree(store.path.parent / "exported", ignore_errors=True)


@dataclass(frozen=True, slots=True)
class Command:
    """One command line, and what must be so before it, outside its time."""

    words: tuple[str, ...]
    before: Callable[[Store], None] = _nothing


def commands(store: Store) -> list[Command]:
    """Every command of ``zgstore`` that needs no torch, and of ``zgtrain`` what answers without a job."""
    blob = next(store.shards(store.snapshot(store.resolve("main")))).blobs[0].digest.short
    plain = [
        "--help", "--version", f"init {store.path}", "ls", "show main", "log main", "diff main grown", "du",
        f"why {blob}", "tag v1 main --force", "ref set other main", "lock main --file {folder}/zgstore.lock",
        "lease ls", "lease run main -- true", "copy main --to {folder}/other", "verify --quick", "gc", "reindex",
        "build --help",
    ]  # fmt: skip
    folder = str(store.path.parent)
    listed = [Command(("zgstore", *line.replace("{folder}", folder).split())) for line in plain]
    return [
        *listed,
        Command(("zgstore", "tag", "rm", "v2"), _tagged),
        Command(("zgstore", "ref", "rm", "spare"), _spare_ref),
        Command(("zgstore", "hold", "paper", "main"), _not_held),
        Command(("zgstore", "unhold", "paper"), _held),
        Command(("zgstore", "export", "main", f"{folder}/exported"), _not_exported),
        Command(("zgtrain", "--help")),
    ]


def took(store: Store, command: Command, **environment: str) -> float:
    """Seconds of a whole process, from its start to its end."""
    command.before(store)
    program, *words = command.words
    began = time.perf_counter()
    subprocess.run(
        [Path(sys.executable).with_name(program), *words], check=True, capture_output=True,
        env={**os.environ, "ZGSTORE_DIR": str(store.path), **environment},
    )  # fmt: skip
    return time.perf_counter() - began


def run(scratch: Path, *, n: int, names: Sequence[str] = (), bare: Sequence[str] = BARE) -> list[Entry]:
    """An entry for each command, and for some of them one without compiled files.

    Args:
        scratch: Where the store goes.
        n: Rounds.
        names: Which commands; all if none is named.
        bare: Those that are run without compiled files too.
    """
    folder = scratch / "startup"
    folder.mkdir(parents=True)
    store = generated.generate(folder / "store", OBJECTS)
    store.point("other", "head", store.resolve("main"))
    works = {_name(each): each for each in commands(store) if not names or _name(each) in names}
    Store.init(folder / "other")
    times = rounds({name: lambda each=each: took(store, each) for name, each in works.items()}, n=n)
    entries = [within(f"start: {name}", seconds, at_most=BOUND_SECONDS) for name, seconds in times.items()]
    entries += uncompiled(store, {name: works[name] for name in bare}, times, n=n)
    shutil.rmtree(folder)
    return entries


def _name(command: Command) -> str:
    """As the table has it: the program, and the words that choose what it does."""
    words = [word for word in command.words[1:3] if word.strip("-").isalpha() and word != "main"]
    return " ".join([command.words[0], *words])


def uncompiled(store: Store, works: dict[str, Command], compiled: dict[str, list[float]], *, n: int) -> list[Entry]:
    """The same where no module has a .pyc, as in a checkout that nothing compiled: every import is parsed."""
    nowhere = {"PYTHONPYCACHEPREFIX": str(store.path.parent / "no-cache"), "PYTHONDONTWRITEBYTECODE": "1"}
    times = rounds({name: lambda each=each: took(store, each, **nowhere) for name, each in works.items()}, n=n)
    return [told(f"start: {name}, without any .pyc, against with", times[name], compiled[name]) for name in works]
