"""``zgstore import zerograph``, ``zgstore import safetensors``: caches made elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from zgstore.cli.console import Answer, Block, Facts, Line, summary
from zgstore.cli.session import session_of
from zgstore.cli.units import duration_text, listing, short

Directory = Annotated[str, typer.Argument(metavar="DIR", help="The folder it lies in.", show_default=False)]
RefName = Annotated[
    str | None, typer.Option("--ref", metavar="NAME", help="The ref to move; none if not given.", show_default=False)
]
Cut = Annotated[
    int | None, typer.Option("--cut", metavar="N", help="So many of its files in a shard.", show_default=False)
]


def zerograph(ctx: typer.Context, directory: Directory, *, ref: RefName = None, cut: Cut = None) -> Answer:
    """Bring in a cache of boundaries, its own digests checked first."""
    session = session_of(ctx)
    store = session.store()
    from zgstore.upkeep import importer  # noqa: PLC0415 - loads torch, which the help need not

    with session.progress("importing") as progress:
        report = importer.import_zerograph(store, directory, ref=ref, cut=cut, progress=progress.add)
    return Answer(report.as_json(), _view)


def safetensors(
    ctx: typer.Context,
    directory: Directory,
    *,
    ref: RefName = None,
    cut: Cut = None,
    teacher_id: Annotated[
        str | None, typer.Option(metavar="ID", help="What made plain files' states.", show_default=False)
    ] = None,
    teacher_revision: Annotated[
        str | None, typer.Option(metavar="REVISION", help="Which of it; the files' digest.", show_default=False)
    ] = None,
    data_id: Annotated[
        str | None, typer.Option(metavar="ID", help="What they were made over.", show_default=False)
    ] = None,
) -> Answer:
    """Bring in an export, or plain files of equal keys."""
    session = session_of(ctx)
    store = session.store()
    from zgstore.upkeep import importer  # noqa: PLC0415

    with session.progress("importing") as progress:
        report = importer.import_safetensors(
            store, directory, ref=ref, cut=cut, teacher_id=teacher_id, teacher_revision=teacher_revision,
            data_id=data_id, progress=progress.add,
        )  # fmt: skip
    return Answer(report.as_json(), _view)


def _view(value: dict[str, Any]) -> Iterator[Block]:
    yield Line(f"snapshot {short(value['snapshot'])}")
    yield Facts(
        [
            ("ref", value["ref"]),
            ("samples", value["samples"]),
            ("columns", listing(value["columns"])),
            ("read", f"{summary(value['files'], 'file', value['bytes'])} in {duration_text(value['seconds'])}"),
        ]
    )
    if value["ref"] is None:
        yield Line(f"next: zgstore ref set NAME {short(value['snapshot'])}, or gc will take it")
