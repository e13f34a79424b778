"""``zgstore build``: run the teacher where something is missing."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from zgstore.cli.arguments import Recipe
from zgstore.cli.console import Answer, Block, Facts, Line, Progress, Rows
from zgstore.cli.session import Session, session_of
from zgstore.cli.units import duration_text, listing, parse_list, parse_part, see_count, short, size_text
from zgstore.errors import Invalid

if TYPE_CHECKING:
    from zgstore.building.preparation import Progress as Told

# Where no shard can be in flight yet, a signal need not wait for one.
EARLY: Final = ("starting", "inputs")


def build(
    ctx: typer.Context,
    recipe: Recipe,
    *,
    ref: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The ref to move; the recipe's stem if not given.", show_default=False),
    ] = None,
    no_ref: Annotated[bool, typer.Option("--no-ref", help="Move no ref.")] = False,
    limit: Annotated[
        int | None, typer.Option(metavar="ROWS", help="Exactly so many rows; no ref unless named.", show_default=False)
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what is missing, and do nothing.")] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say hit or miss per column and shard, and what changed.")
    ] = False,
    locked: Annotated[
        bool, typer.Option("--locked", help="Verify what the lock file names, or make it again.")
    ] = False,
    worker: Annotated[
        str | None,
        typer.Option(metavar="I/N", help="This worker's share, counted from 0; or auto.", show_default=False),
    ] = None,
    devices: Annotated[
        str | None, typer.Option(metavar="D,…", help="A copy of the teacher on each of these.", show_default=False)
    ] = None,
    check_teacher: Annotated[
        bool, typer.Option("--check-teacher", help="Load and measure the teacher even if nothing is missing.")
    ] = False,
    on_nonfinite: Annotated[
        str, typer.Option(metavar="POLICY", help="Rows that are not finite: error, or drop.")
    ] = "error",
) -> Answer:
    """Build it."""
    if ref is not None and no_ref:
        raise Invalid("--ref and --no-ref exclude each other", hint="give one of them")
    see_count(limit, "rows", "--limit")
    share = None if worker is None else _share(worker, os.environ)
    session = session_of(ctx)
    store = session.store()
    stage = [EARLY[0]]

    def show(told: Told) -> None:
        stage[0] = told.stage
        _show(progress, told)

    with session.progress("starting") as progress, session.finishes_shards(lambda: stage[0] not in EARLY) as stopping:
        from zgstore.building import builder  # noqa: PLC0415 - loads torch, which the help need not

        report = builder.build(
            store,
            recipe,
            ref=None if no_ref else ref or builder.DEFAULT_REF,
            limit=limit,
            worker=share,
            devices=parse_list(devices) or (),
            check_teacher=check_teacher,
            on_nonfinite=on_nonfinite,
            locked=locked,
            dry_run=dry_run,
            explain=explain,
            progress=show,
            stop=stopping,
            circumstance=_circumstance(os.environ),
        )
    value = {**report.as_value(), "dry_run": dry_run, "worker": worker}
    if report.locked == "present":
        return _verified(session, value)
    differs = report.locked not in {None, "same"}
    return Answer({"ok": not differs, **value}, _view, exit_code=int(differs))


def _verified(session: Session, value: dict[str, Any]) -> Answer:
    """The locked snapshot is there: what remains is to see that it is whole."""
    from zgstore.cli.verify import failure, look  # noqa: PLC0415 - a command's help needs no store

    problems = look(session, [value["snapshot"]]).problems
    value["problems"] = [problem.as_json() for problem in problems]
    return Answer(value, _view, error=failure(problems))


def _share(text: str, environment: Mapping[str, str]) -> tuple[int, int]:
    """``I/N``, or what the launcher of this process says.

    Raises:
        Invalid: if it is neither.
    """
    if text != "auto":
        return parse_part(text, first=0)
    try:
        if "RANK" in environment and "WORLD_SIZE" in environment:
            return int(environment["RANK"]), int(environment["WORLD_SIZE"])
        if "SLURM_ARRAY_TASK_ID" in environment:
            task, first, count = (int(environment[f"SLURM_ARRAY_TASK_{name}"]) for name in ("ID", "MIN", "COUNT"))
            return (task - first) // int(environment.get("SLURM_ARRAY_TASK_STEP", "1")), count
    except (KeyError, ValueError) as error:
        raise Invalid(f"the launcher's variables make no share: {error}", hint="give --worker I/N") from error
    raise Invalid("--worker auto finds neither RANK and WORLD_SIZE nor SLURM_ARRAY_TASK_ID", hint="give --worker I/N")


def _circumstance(environment: Mapping[str, str]) -> dict[str, Any]:
    """What the record says of this run."""
    job = next((environment[name] for name in ("CI_JOB_URL", "BUILD_URL") if environment.get(name)), "")
    if not job and environment.get("GITHUB_RUN_ID"):
        job = f"{environment.get('GITHUB_REPOSITORY', '')} run {environment['GITHUB_RUN_ID']}".strip()
    command = " ".join(["zgstore", *sys.argv[1:]])
    return {"command": command, **({"ci": job} if job else {})}


def _show(progress: Progress, told: Told) -> None:
    titles = {"inputs": "reading inputs", "teacher": "loading the teacher", "shards": "building"}
    progress.title = titles.get(told.stage, told.stage)
    # Rows are known in all, bytes are not: what is to come is taken to be like what has come.
    total = told.new_bytes * told.total_rows // told.rows if told.rows else None
    progress.set(told.new_bytes, total)


def _view(value: dict[str, Any]) -> Iterator[Block]:
    yield Line(_headline(value))
    shards, columns = value["shards"], value["columns"]
    verb = "to build" if value["dry_run"] else "built"
    yield Facts(
        [
            ("ref", value["ref"]),
            ("recipe", short(value["recipe"]) or None),
            ("pins", short(value["pins"]) or None),
            ("samples", value["samples"]),
            ("dropped", value["dropped"] or None),
            ("shards", f"{shards['built']} {verb}, {shards['reused']} reused"),
            ("columns", f"{columns['built']} {verb}, {columns['reused']} reused"),
            ("size", _size(value)),
            ("teacher", f"{value['teacher']}, {'loaded' if value['teacher_loaded'] else 'not loaded'}"),
            ("time", _times(value["seconds"])),
            ("locked", value.get("locked")),
        ]
    )
    if value.get("explain"):
        yield Line("")
        yield Rows(("COLUMN", "SHARDS", "FOUND", "WHY"), list(_explained(value["explain"])), shrink=(3, 0))


def _size(value: dict[str, Any]) -> str:
    if value["teacher"] == "unknown" and value["shards"]["built"]:
        return "not known before the teacher is loaded: `zgstore estimate` tells"
    new, total = value["bytes"]["new"], value["bytes"]["total"]
    anew = value["shards"]["reused"] == value["columns"]["reused"] == 0
    once = "; equal bytes are stored once" if anew and new < total else ""
    rest = f", and that of {listing(value['unsized'])}: `zgstore estimate` tells" if value.get("unsized") else ""
    return f"{size_text(new)} new of {size_text(total)}{once}{rest}"


def _headline(value: dict[str, Any]) -> str:
    if value["dry_run"]:
        return "nothing was done; this is what a build would do"
    if value["snapshot"] is None:
        return f"worker {value['worker']} has done its share: a plain `zgstore build` publishes"
    if value["shards"]["built"] == 0:
        return f"nothing was missing: snapshot {short(value['snapshot'])}"
    return f"snapshot {short(value['snapshot'])}"


def _times(seconds: dict[str, float]) -> str:
    parts = ", ".join(f"{name} {duration_text(seconds[name])}" for name in ("inputs", "teacher", "store"))
    return f"{duration_text(seconds['total'])} ({parts})"


def _explained(lines: list[dict[str, Any]]) -> Iterator[tuple[str, str, str, str]]:
    """One line for each run of shards with one answer."""
    run: list[dict[str, Any]] = []
    for line in [*lines, None]:
        same = line is not None and run and all(run[-1][key] == line[key] for key in ("column", "hit", "reason"))
        if run and not same:
            first, last = run[0]["shard"], run[-1]["shard"]
            shards = str(first) if first == last else f"{first}–{last}"
            yield run[0]["column"], shards, "hit" if run[0]["hit"] else "miss", run[0]["reason"]
            run = []
        if line is not None:
            run.append(line)
