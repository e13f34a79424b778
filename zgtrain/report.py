"""One self-contained page about a trained student: curves, gates, boundaries, economics, pins and sizes.

Everything on it was measured and lies in the job's output; nothing is fetched when it is opened. Nothing here knows
tensors.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import zgstore
from zgtrain.economics import REPORT, economics
from zgtrain.job import Job
from zgtrain.page import page

EVALUATION: Final = "evaluation.json"
LOG: Final = "log.jsonl"


def write_report(job: Job, path: Path | str, *, others: Sequence[Job] = ()) -> Path:
    """Write the page.

    Args:
        job: Whose blocks are trained; what is not there yet (an evaluation, a live run) is left out, and said so.
        path: Where; its folder is made.
        others: Further runs of the same blocks, cached or live, for the economics.

    Returns:
        The path.

    Raises:
        zgstore.NotFound: if no block is trained yet.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(gathered(job, others)), encoding="utf-8")
    return path


def gathered(job: Job, others: Sequence[Job] = ()) -> dict[str, Any]:
    """What the page shows, as one value."""
    blocks: list[dict[str, Any]] = []
    while (file := job.folder(len(blocks)) / REPORT).is_file():
        lines = _lines(file.with_name(LOG))
        blocks.append({"report": json.loads(file.read_text(encoding="utf-8")), "log": lines})
    if not blocks:
        raise zgstore.NotFound(f"{job.output} has no trained block", hint=f"train them: `zgtrain launch {job.path}`")
    evaluation = job.output / EVALUATION
    try:
        costs: dict[str, Any] = economics([job, *others]).as_value()
    except zgstore.ZgError as error:
        costs = {"missing": error.message}
    return {
        "name": job.path.stem,
        "identity": job.identity(),
        "blocks": blocks,
        "evaluation": json.loads(evaluation.read_text(encoding="utf-8")) if evaluation.is_file() else None,
        "economics": costs,
        "snapshot": _snapshot(job, blocks[0]["report"]["snapshot"]),
    }


def _lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a log."""
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            lines.append(json.loads(text))
        except ValueError:
            continue  # cut off by a kill
    return lines


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
