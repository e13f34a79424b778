"""``zgstore gc``: what nothing needs any more, deleted in two phases."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any

import typer

from zgstore.cli.console import Answer, Block, Facts, Line, summary
from zgstore.cli.session import session_of
from zgstore.cli.units import parse_duration
from zgstore.errors import Invalid
from zgstore.upkeep import collector


def gc(
    ctx: typer.Context,
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")] = False,
    keep_last: Annotated[
        int | None, typer.Option(metavar="N", help="Of each reflog keep this many entries.", show_default=False)
    ] = None,
    grace: Annotated[
        str | None,
        typer.Option(metavar="DUR", help="Age of what may be trashed, and of trash that is freed.", show_default=False),
    ] = None,
    expire_reflog: Annotated[
        str | None, typer.Option(metavar="DUR", help="Age at which reflog entries go; 30d.", show_default=False)
    ] = None,
    now: Annotated[bool, typer.Option("--now", help="Without any grace; what builds could reuse goes too.")] = False,
    owner: Annotated[
        bool, typer.Option("--owner", help="Where file locks do not work: this host alone collects.")
    ] = False,
) -> Answer:
    """Collect."""
    if keep_last is not None and keep_last < 0:
        raise Invalid(f"{keep_last} entries cannot be kept", hint="give --keep-last 0 or more")
    session = session_of(ctx)
    age = 0.0 if now else None if grace is None else parse_duration(grace)

    def before(plan: collector.GcPlan) -> None:
        if now and not dry_run and plan.resumable.objects:
            session.note(_cost_of_now(plan.resumable.as_json()))

    report = collector.collect(
        session.store(),
        dry_run=dry_run,
        keep_last=keep_last,
        grace_seconds=age,
        expire_reflog_seconds=None if expire_reflog is None else parse_duration(expire_reflog),
        now=now,
        owner=owner,
        before=before,
    )
    return Answer(report.as_json(), partial(_view, now=now, at_once=age == 0))


_REASONS = {
    "head": "refs", "tag": "tags", "hold": "holds", "reflog": "reflogs", "lease": "who uses it now",
    "measurement": "measured data", "action": "builds of the last 7 days", "recent": "its age: it is too young",
    "recheck": "a name given meanwhile", "foreign": "being no object: see `zgstore verify`",
}  # fmt: skip


def _view(value: dict[str, Any], *, now: bool, at_once: bool) -> Iterator[Block]:
    if value["dry_run"]:
        yield Line("nothing was touched; this is what would be done")
    yield Facts(list(_done(value, at_once=at_once)))
    if value["dry_run"] and now and value["resumable"]["objects"]:
        yield Line("")
        yield Line(_cost_of_now(value["resumable"]))
    if value["freeable_now"]["objects"]:
        yield Line("")
        yield Line(f"`zgstore gc --now` would free {_count(value['freeable_now'])} more")
    if value["kept"]:
        yield Line("")
        yield Line(f"kept {_count(value['live'])}, by", style="bold")
        yield Facts([(f"  {_REASONS.get(reason, reason)}", _count(kept)) for reason, kept in value["kept"].items()])


def _done(value: dict[str, Any], *, at_once: bool) -> Iterator[tuple[str, object]]:
    yield "freed", _count(value["freed"])
    if not at_once:  # else it is among what was freed
        later = ": a gc after the grace frees them" if value["trashed"]["objects"] else ""
        yield "trashed", f"{_count(value['trashed'])}{later}"
    for name in ("restored", "quarantined"):
        if value[name]["objects"]:
            yield name, _count(value[name])
    if value["leftovers"]["objects"]:
        left = summary(value["leftovers"]["objects"], "piece", value["leftovers"]["bytes"])
        yield "leftovers", f"{left}, of what is gone: memos, leases, unfinished files"


def _cost_of_now(resumable: dict[str, int]) -> str:
    blobs = summary(resumable["objects"], "blob", resumable["bytes"])
    return f"--now frees {blobs}, captured in the last 7 days: a build that wants this runs its teacher again"


def _count(value: dict[str, int]) -> str:
    return summary(value["objects"], "object", value["bytes"])
