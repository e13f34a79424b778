"""``zgstore lease run``, ``zgstore lease ls``: who is using what."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from zgstore.cli.arguments import Rev
from zgstore.cli.console import Answer, Block, Line, Rows
from zgstore.cli.session import Session, session_of
from zgstore.cli.units import duration_text
from zgstore.errors import Invalid
from zgstore.format.digest import DIGEST_BYTES


def run(
    ctx: typer.Context,
    rev: Rev,
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND...", help="What to run; its exit code is passed on.",
                                  show_default=False)
    ],
) -> Answer:  # fmt: skip
    """Hold a reader's lease until the command has ended."""
    session = session_of(ctx)
    store = session.store()
    digest = session.resolve(store, rev)
    with store.using(digest, purpose="lease run") as lease:
        leased = lease is not None
        if not leased and (said := store.unkept(digest)):
            session.note(f"note: {said}")
        code = _run(session, command)
    value = {"snapshot": str(digest), "leased": leased, "command": command, "exit_code": code}
    return Answer(value, _view, exit_code=code)


def _run(session: Session, command: list[str]) -> int:
    """The command's exit code, as a shell gives it. Signals reach the command; it decides what they mean."""
    # With --json standard output holds one object and nothing else.
    output = None if session.options.json else session.screen.fd
    try:
        process = subprocess.Popen(command, stdout=output)  # noqa: S603 - what it runs is what the user typed
    except OSError as error:
        hint = "give a command after --, as a shell would find it"
        raise Invalid(f"{command[0]}: {error.strerror}", hint=hint) from error

    def forward(number: int) -> None:
        session.stopping = False
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)

    with session.stops_by(forward):
        code = process.wait()
    return 128 - code if code < 0 else code


def ls(ctx: typer.Context) -> Answer:
    """List the leases, dead ones too: the next gc removes them."""
    leases = [
        {
            "lease": lease.uuid, "purpose": lease.purpose, "host": lease.host, "pid": lease.pid,
            "start": lease.start, "age_seconds": lease.age_seconds, "alive": lease.alive,
            "objects": len(lease.digests) // DIGEST_BYTES,
        }
        for lease in session_of(ctx).store().leases.all()
    ]  # fmt: skip
    return Answer({"leases": leases}, _view_leases)


def _view(_: dict[str, Any]) -> Iterator[Block]:
    """The command has said what there is to say."""
    return iter(())


def _view_leases(value: dict[str, Any]) -> Iterator[Block]:
    if not value["leases"]:
        yield Line("nobody is using the store")
        return
    yield Rows(
        ("LEASE", "PURPOSE", "HOST", "PID", "REFRESHED", "OBJECTS", "STATE"),
        [
            (
                lease["lease"][:8], lease["purpose"], lease["host"], lease["pid"],
                f"{duration_text(lease['age_seconds'])} ago", lease["objects"], "alive" if lease["alive"] else "dead",
            )
            for lease in value["leases"]
        ],
        right=(3, 4, 5),
        shrink=(2, 1),
    )  # fmt: skip
