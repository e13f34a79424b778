"""The options of every command, the arguments that several share, and the job that they make together."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from zgstore.cli.arguments import complete_recipe
from zgstore.cli.session import Options as StoreOptions
from zgstore.cli.session import session_of
from zgtrain.job import Job
from zgtrain.jobfile import load_job

JobFile = Annotated[
    str, typer.Argument(metavar="JOB", help="The job's TOML file.", autocompletion=complete_recipe, show_default=False)
]
Relay = Annotated[bool, typer.Option("--relay", help="Of the relay beside the job, not of the job's own blocks.")]


@dataclass(frozen=True, slots=True)
class Options(StoreOptions):
    """The options of every command.

    Args:
        overrides: ``KEY=VALUE`` over the job file.
    """

    overrides: tuple[str, ...] = ()


Others = Annotated[
    list[str] | None,
    typer.Argument(metavar="[OTHER]...", help="Further runs of the same blocks, cached, following or live: job files, "
                   "or folders that JOB had as its output.", autocompletion=complete_recipe),
]  # fmt: skip


def job_of(ctx: typer.Context, path: str, *, relay: bool = False) -> Job:
    """A job file with what was set over it; with ``relay`` the relay beside it.

    Raises:
        zgstore.Invalid: if it says something a job may not.
    """
    job = load_job(path, _overrides(ctx))
    if relay:
        from zgtrain.prefixes import relayed  # noqa: PLC0415 - loads torch

        return relayed(job)
    return job


def others_of(ctx: typer.Context, path: str, others: Sequence[str] | None) -> list[Job]:
    """Further runs of a job: files of their own, or folders that ``--set output=…`` gave the same file.

    What is set over the job is set over these folders too, and over no other file.

    Raises:
        zgstore.Invalid: if a file says something a job may not.
    """
    return [
        load_job(path, (*_overrides(ctx), f"output={json.dumps(str(Path(other).absolute()))}"))
        if Path(other).is_dir()
        else load_job(other)
        for other in others or ()
    ]


def _overrides(ctx: typer.Context) -> tuple[str, ...]:
    options = session_of(ctx).options
    return options.overrides if isinstance(options, Options) else ()
