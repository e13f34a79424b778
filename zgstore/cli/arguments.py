"""The arguments that several commands share, and what a shell can complete of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final

import typer

from zgstore.cli.console import Screen
from zgstore.cli.session import Options, Session
from zgstore.errors import ZgError

_MOST_NAMES: Final = 1000


def complete_rev(incomplete: str) -> list[str]:
    """Refs, tags and locked names that begin so; the store is not opened for it."""
    return [name for name in _names() if name.startswith(incomplete)]


def complete_recipe(incomplete: str) -> list[str]:
    """TOML files, and the folders on the way to them."""
    folder = Path(incomplete) if incomplete.endswith("/") else Path(incomplete).parent
    found = [path for path in folder.glob("*") if path.suffix == ".toml" or path.is_dir()]
    names = [f"{path}/" if path.is_dir() else str(path) for path in sorted(found)[:_MOST_NAMES]]
    return [name for name in names if name.startswith(incomplete)]


def _names() -> Iterator[str]:
    from zgstore.building import lockfile  # noqa: PLC0415 - a command's help needs no store

    try:
        store = Session(Options(), Screen()).store_path()
        for kind in ("heads", "tags"):
            folder = store / "refs" / kind
            yield from sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        if path := lockfile.find(Path.cwd()):
            yield from (f"{lockfile.PREFIX}{name}" for name in lockfile.read(path))
    except (ZgError, OSError):
        return


Rev = Annotated[
    str,
    typer.Argument(
        metavar="REV", help="A ref, tag, digest or prefix, NAME@{N}, or lock:NAME.", autocompletion=complete_rev,
        show_default=False,
    ),
]  # fmt: skip
Revs = Annotated[
    list[str] | None,
    typer.Argument(metavar="[REV]...", help="Snapshots; all refs if none is named.", autocompletion=complete_rev),
]
Recipe = Annotated[
    str,
    typer.Argument(metavar="RECIPE", help="The recipe's TOML file.", autocompletion=complete_recipe,
                   show_default=False),
]  # fmt: skip
Columns = Annotated[
    str | None, typer.Option("--columns", metavar="NAME,…", help="Only these columns, separated by commas.")
]
