"""``zgstore verify``: every byte against its name; with ``--repair`` what is bad made anew."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zgstore.building import lockfile
from zgstore.cli.arguments import Revs, complete_recipe
from zgstore.cli.console import Answer, Block, Facts, Line, summary
from zgstore.cli.session import Session, session_of
from zgstore.cli.units import duration_text, listing, parse_part, plural, see_count, short
from zgstore.errors import Corrupt, Invalid, Missing, NotFound, Refused, ZgError
from zgstore.format.digest import Digest
from zgstore.format.fields import all_u64
from zgstore.storage.store import Store
from zgstore.upkeep import reachability, verifier
from zgstore.upkeep.survey import Problem

if TYPE_CHECKING:
    from zgstore.upkeep.recomputer import RecomputeReport


def verify(
    ctx: typer.Context,
    revs: Revs = None,
    *,
    quick: Annotated[bool, typer.Option("--quick", help="Presence, sizes, headers and canonical form.")] = False,
    part: Annotated[
        str | None,
        typer.Option(metavar="I/N", help="The I-th of N parts of the objects, counted from 1.", show_default=False),
    ] = None,
    new: Annotated[bool, typer.Option("--new", help="Only what has no valid stamp.")] = False,
    recompute: Annotated[
        int | None,
        typer.Option(metavar="N", help="Run the teacher on N shards and compare bits.", show_default=False),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(metavar="RECIPE", help="For --recompute and --repair.", autocompletion=complete_recipe,
                     show_default=False),
    ] = None,
    locked: Annotated[bool, typer.Option("--locked", help="What the nearest lock file names.")] = False,
    repair: Annotated[
        bool, typer.Option("--repair", help="Set aside what is corrupt and make it anew; the same digest only.")
    ] = False,
    source: Annotated[
        str | None,
        typer.Option("--from", metavar="STORE", help="For --repair: a store that has it.", show_default=False),
    ] = None,
) -> Answer:  # fmt: skip
    """Look at everything, and report everything."""
    _see_sense(quick=quick, new=new, recompute=recompute, recipe=recipe, repair=repair, source=source)
    session = session_of(ctx)
    named = [*(revs or ()), *(_locked() if locked else ())]
    found = look(session, named or None, quick=quick, part=None if part is None else parse_part(part, first=1), new=new)
    value, problems = found.as_json(), found.problems
    if repair and problems:
        value["repair"], problems = _repaired(session, problems, recipe, source)
    if recompute is not None and recipe is not None:
        again = _recomputed(session, named or [Path(recipe).stem], recipe, recompute)
        value["recomputed"] = {"shards": sum(each.shards for each in again), "blobs": sum(each.blobs for each in again)}
        problems = (*problems, *(problem for each in again for problem in each.problems))
    value |= {"ok": not problems, "quick": quick, "problems": [problem.as_json() for problem in problems]}
    return Answer(value, view, error=failure(problems))


def look(
    session: Session,
    revs: Sequence[str] | None,
    *,
    quick: bool = False,
    part: tuple[int, int] | None = None,
    new: bool = False,
) -> verifier.VerifyReport:
    """Verify the named snapshots, or all that names reach."""
    store = session.store()
    digests = None if revs is None else [session.resolve(store, rev) for rev in revs]
    with session.progress("verifying") as progress:
        if progress.shown and not (quick or part or new):
            progress.total = _size(store, digests)
        return verifier.verify(store, digests, quick=quick, part=part, new=new, progress=progress.add).report


def _size(store: Store, digests: Sequence[Digest] | None) -> int | None:
    """Bytes of the blobs that will be read; None if the pages cannot be."""
    names = [ref.snapshot for ref in store.refs.list()] if digests is None else digests
    try:
        return sum(all_u64(reachability.reach(store, names).blobs()[1]))
    except (Missing, Corrupt):
        return None


def failure(problems: Sequence[Problem]) -> ZgError | None:
    """The error that the problems amount to; None if there are none."""
    if problems and all(problem.kind == "differs" for problem in problems):
        return Refused(f"{plural(len(problems), 'blob')} came out otherwise when computed again", hint=problems[0].hint)
    return verifier.failure(problems)


def _repaired(
    session: Session, problems: Sequence[Problem], recipe: str | None, source: str | None
) -> tuple[dict[str, Any], tuple[Problem, ...]]:
    """What was mended, and the problems that are left."""
    from zgstore.upkeep import repairer  # noqa: PLC0415 - loads torch, which verifying need not

    other = None if source is None else Store.open(source)
    with session.progress("repairing") as progress:
        report = repairer.repair(
            session.store(), problems, recipe=recipe, source=other, progress=lambda _rows, size: progress.add(size)
        )
    value = report.as_json()
    del value["left"]
    return value, report.left


def _recomputed(session: Session, revs: Sequence[str], recipe: str, count: int) -> list[RecomputeReport]:
    from zgstore.upkeep import recomputer  # noqa: PLC0415 - loads torch

    store = session.store()
    with session.progress("recomputing") as progress:
        return [
            recomputer.recompute(
                store, session.resolve(store, rev), recipe, count, progress=lambda _rows, size: progress.add(size)
            )
            for rev in revs
        ]


def _see_sense(
    *, quick: bool, new: bool, recompute: int | None, recipe: str | None, repair: bool, source: str | None
) -> None:
    if quick and new:
        raise Invalid("--quick reads no blob, and --new is about which to read", hint="give one of them")
    see_count(recompute, "shards", "--recompute")
    if recompute is not None and recipe is None:
        raise Invalid("--recompute runs the teacher", hint="say which: --recipe RECIPE")
    if repair and recipe is None and source is None:
        raise Invalid("--repair makes it anew or fetches it", hint="say how: --recipe RECIPE, or --from STORE")
    if repair and recipe is not None and source is not None:
        raise Invalid("--repair takes one of --recipe and --from", hint="give one of them")
    if source is not None and not repair:
        raise Invalid("--from is where --repair fetches from", hint="add --repair")
    if recipe is not None and not repair and recompute is None:
        raise Invalid("--recipe is for --recompute and --repair", hint="add one of them")


def _locked() -> list[str]:
    """The snapshots of the nearest lock file."""
    path = lockfile.find(Path.cwd())
    if path is None:
        raise NotFound(f"there is no {lockfile.FILE_NAME} here or above", hint="`zgstore lock NAME` writes one")
    return [str(locked.snapshot) for locked in lockfile.read(path).values()]


def view(value: dict[str, Any]) -> Iterator[Block]:
    """The page: each problem, what was mended, and the sum."""
    for problem in value["problems"]:
        yield Line(f"{problem['kind']} {short(problem['object'])}".rstrip(), style="bold red")
        yield Facts(
            [
                ("  what", problem["message"]),
                ("  path", problem["path"]),
                ("  hurts", listing([*problem["refs"], *map(short, problem["snapshots"])]) or "nothing that is named"),
                ("  do", problem["hint"]),
            ]
        )
        yield Line("")
    mended = value.get("repair")
    if mended:
        yield Line(
            f"mended {plural(len(mended['mended']), 'object')} in {duration_text(mended['seconds'])}", style="bold"
        )
        yield Facts([(f"  {short(each['object'])}", _origin(each["source"])) for each in mended["mended"]])
        for path in mended["quarantined"]:
            yield Line(f"  set aside: {path}")
    if again := value.get("recomputed"):
        yield Line(f"recomputed {plural(again['shards'], 'shard')}, {plural(again['blobs'], 'blob')}")
    looked = f"{summary(value['objects'], 'object', value['bytes'])} in {duration_text(value['seconds'])}"
    found = f"{plural(len(value['problems']), 'problem')} left" if mended else plural(len(value["problems"]), "problem")
    sound = "sound as far as sizes and headers tell, no blob was hashed" if value["quick"] else "sound"
    yield Line(f"{found if value['problems'] else sound}: {looked}")


def _origin(source: str) -> str:
    return "a record that is lost: the reflog names it no more" if source == "forgotten" else f"from the {source}"
