"""The arguments that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

from zgstore.cli.arguments import complete_recipe

JobFile = Annotated[
    str, typer.Argument(metavar="JOB", help="The job's TOML file.", autocompletion=complete_recipe, show_default=False)
]
Relay = Annotated[bool, typer.Option("--relay", help="Of the relay beside the job, not of the job's own blocks.")]
