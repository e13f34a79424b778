"""``zgstore gc``: what nothing needs any more, deleted in two phases."""

from __future__ import annotations

from collections.abc import Iterator
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
    now: Annotated[bool, typer.Option("--now", help="Without any grace: resumable builds are lost too.")] = False,
    owner: Annotated[
        bool, typer.Option("--owner", help="Where file locks do not work: this host alone collects.")
    ] = False,
) -> Answer:
    """Collect."""
    if keep_last is not None and keep_last < 0:
        raise Invalid(f"{keep_last} entries cannot be kept", hint="give --keep-last 0 or more")
    session = session_of(ctx)

    def before(plan: collector.GcPlan) -> None:
        if now and not dry_run and plan.resumable.objects:
            cost = summary(plan.resumable.objects, "object", plan.resumable.bytes)
            session.note(f"--now gives up what a killed build could be resumed from: {cost}")

    report = collector.collect(
        session.store(),
        dry_run=dry_run,
        keep_last=keep_last,
        grace_seconds=None if grace is None else parse_duration(grace),
        expire_reflog_seconds=None if expire_reflog is None else parse_duration(expire_reflog),
        now=now,
        owner=owner,
        before=before,
    )
    return Answer(report.as_json(), _view)


_REASONS = {
    "head": "refs", "tag": "tags", "hold": "holds", "reflog": "reflogs", "lease": "who uses it now",
    "measurement": "measured data", "action": "builds that can be resumed", "recent": "its age: it is too young",
    "recheck": "a name given meanwhile", "foreign": "being no object: see `zgstore verify`",
}  # fmt: skip


def _view(value: dict[str, Any]) -> Iterator[Block]:
    if value["dry_run"]:
        yield Line("nothing was touched; this is what would be done")
    done = ("freed", "trashed", "restored", "quarantined", "leftovers")
    yield Facts([(name, _count(value[name])) for name in done if name in done[:2] or value[name]["objects"]])
    if value["freeable_now"]["objects"]:
        yield Line("")
        yield Line(f"`zgstore gc --now` would free {_count(value['freeable_now'])} more")
    if value["kept"]:
        yield Line("")
        yield Line(f"kept {_count(value['live'])}, by", style="bold")
        yield Facts([(f"  {_REASONS.get(reason, reason)}", _count(kept)) for reason, kept in value["kept"].items()])


def _count(value: dict[str, int]) -> str:
    return summary(value["objects"], "object", value["bytes"])
