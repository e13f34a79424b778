"""One self-contained page about a trained student: curves, gates, boundaries, economics, pins and sizes.

Everything on it was measured and lies in the job's output; nothing is fetched when it is opened. Nothing here knows
tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zgstore
from zgtrain.blockreport import EVALUATION, BlockReport, command_of
from zgtrain.economics import economics, reports_of
from zgtrain.files import read_json, write_text
from zgtrain.job import Job
from zgtrain.journal import FILE_NAME as LOG_NAME
from zgtrain.journal import read_lines
from zgtrain.page import page
from zgtrain.progress import count_blocks


def write_report(job: Job, path: Path | str, *, others: Sequence[Job] = ()) -> Path:
    """Write the page.

    Args:
        job: Whose blocks are trained; what is not there yet (an evaluation of them as they are now, a live run) is
            left out, and said so.
        path: Where; its folder is made.
        others: Further runs of the same blocks, cached or live, for the economics.

    Returns:
        The path.

    Raises:
        zgstore.NotFound: if no block is trained yet.
        zgstore.Refused: if the blocks are of another job.
        zgstore.Corrupt: if a file in the job's output is not what its name says.
    """
    path = Path(path)
    write_text(path, page(gathered(job, others)))
    return path


def gathered(job: Job, others: Sequence[Job] = ()) -> dict[str, Any]:
    """What the page shows, as one value."""
    reports = reports_of(job)
    try:
        costs: dict[str, Any] = economics([job, *others]).as_value()
    except zgstore.ZgError as error:
        costs = {"missing": error.message}
    logs = [read_lines(job.folder(report.block or 0) / LOG_NAME) for report in reports]
    return {
        "name": job.path.stem,
        "identity": job.identity(),
        "blocks_in_all": count_blocks(job),
        "blocks": [{"report": each.as_value(), "log": log} for each, log in zip(reports, logs, strict=True)],
        **_judged(job, reports),
        "economics": costs,
        "snapshot": _snapshot(job, reports[0].snapshot),
    }


def _judged(job: Job, reports: Sequence[BlockReport]) -> dict[str, Any]:
    """The evaluation of these very blocks, or why there is none to show."""
    command = command_of("evaluate", job, *(["--relay"] if job.relay else []))
    value = read_json(job.output / EVALUATION, {"blocks": list}, remedy=f"evaluate again: `{command}`")
    if value is not None and value["blocks"] == [each.state_digest for each in reports]:
        return {"evaluation": value, "not_evaluated": None}
    why = "Not evaluated yet" if value is None else "Not evaluated since these blocks were trained"
    return {"evaluation": None, "not_evaluated": (why, command)}


def _snapshot(job: Job, digest: str) -> dict[str, Any]:
    """What the store says of the snapshot; nothing if it is not here."""
    try:
        shown = zgstore.show(zgstore.Store.open(job.snapshot.store), digest).as_json()
    except zgstore.ZgError:
        return {}
    return {
        "teacher": shown["teacher"], "data": shown["data"], "bytes": shown["bytes"], "samples": shown["samples"],
        "columns": [column["name"] for column in shown["columns"]],
    }  # fmt: skip
