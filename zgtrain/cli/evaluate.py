"""``zgtrain evaluate``: the assembled student, judged by the gates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from zgstore.cli.console import Answer, Block, Facts, Line, Rows
from zgstore.cli.session import session_of
from zgstore.cli.units import duration_text, short
from zgtrain.cli.arguments import JobFile, Relay, job_of


def evaluate(
    ctx: typer.Context,
    job: JobFile,
    *,
    device: Annotated[
        str | None, typer.Option(metavar="D", help="Where; CUDA if there is one.", show_default=False)
    ] = None,
    report_only: Annotated[bool, typer.Option("--report-only", help="Exit 0 whatever the gates say.")] = False,
    relay: Relay = False,
) -> Answer:
    """Judge it."""
    loaded = job_of(ctx, job, relay=relay)
    with session_of(ctx).progress("assembling") as progress:

        def say(what: str) -> None:
            progress.title = what
            progress.set(progress.done)

        from zgtrain import evaluator  # noqa: PLC0415 - loads torch, which the help need not

        found = evaluator.evaluate(loaded, device=device, progress=say)
    value = found.as_value()
    return Answer(value, view, exit_code=int(not found.ok and not report_only))


def view(value: dict[str, Any]) -> Iterator[Block]:
    """The page of an evaluation."""
    student, teacher = value["student"], value["teacher"]
    failed = [gate["name"] for gate in value["gates"] if not gate["passes"]]
    yield Line("every gate is passed" if not failed else f"not passed: {', '.join(failed)}")
    yield Facts(
        [
            ("snapshot", short(value["snapshot"])),
            ("held out", f"{value['rows']} rows, {value['tokens']} scored tokens"),
            ("student", _quality(student)),
            ("teacher", _quality(teacher)),
            ("time", duration_text(value["seconds"])),
        ]
    )
    yield Line("")
    yield Rows(
        ("GATE, AND ITS MEASURES", "NUMBER", "WANTED", "VERDICT"),
        [row for gate in value["gates"] for row in _gate_rows(gate)],
        right=(1,),
    )
    if value["boundaries"]:
        yield Line("")
        yield Line("relative error of states: fed the teacher's, left by predecessors, assembled")
        yield Rows(
            ("BLOCK", "ON THE TEACHER'S", "OF PREDECESSORS", "ASSEMBLED"),
            [
                (
                    at,
                    *(
                        _number(each[name]["relative_mse"])
                        for name in ("teacher_input_fit", "assembled_predecessor_error", "assembled_output_error")
                    ),
                )
                for at, each in enumerate(value["boundaries"])
            ],
            right=(0, 1, 2, 3), shrink=(),
        )  # fmt: skip


def _gate_rows(gate: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """The gate's name, and below it each measure: side by side they are wider than a terminal."""
    yield gate["name"], "", "", ""
    for each in gate["measures"]:
        wanted = f"{each['relation']} {_number(each['threshold'])}"
        yield f"  {each['name']}", _number(each["number"]), wanted, "passed" if each["passes"] else "failed"


def _quality(value: dict[str, Any]) -> str:
    return (
        f"CE {_number(value['ce'])}, perplexity {_number(value['perplexity'])}, accuracy {_number(value['accuracy'])}"
    )


def _number(value: Any) -> str:
    if isinstance(value, bool | str) or value is None:
        return "none" if value is None else str(value)
    return f"{value:.4g}"
