"""The options of every command, the arguments that several share, and the job that they make together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from zgstore.cli.arguments import complete_recipe
from zgstore.cli.session import Options as StoreOptions
from zgstore.cli.session import session_of
from zgtrain.job import Job, load_job

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


def job_of(ctx: typer.Context, path: str, *, relay: bool = False) -> Job:
    """A job file with what was set over it; with ``relay`` the relay beside it.

    Raises:
        zgstore.Invalid: if it says something a job may not.
    """
    options = session_of(ctx).options
    job = load_job(path, options.overrides if isinstance(options, Options) else ())
    if relay:
        from zgtrain.prefixes import relayed  # noqa: PLC0415 - loads torch

        return relayed(job)
    return job
