"""What is common today, written from its description: the baseline that the store is measured against.

Per batch all boundaries and context in one ``torch.save``, never synced; the file read back and hashed with SHA-256;
everything hashed again when a cache is opened; the whole record loaded for each step.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor


def write(folder: Path, batches: Iterable[tuple[Sequence[Tensor], dict[str, Tensor]]]) -> None:
    """Store (boundaries, context) of each batch, and a table with their digests."""
    table = []
    for number, (boundaries, context) in enumerate(batches):
        path = folder / f"batch_{number:08d}.pt"
        torch.save({"boundaries": list(boundaries), "context": context}, path)
        table.append({"file": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()})
    (folder / "manifest.json").write_text(json.dumps(table))


def open_and_verify(folder: Path) -> list[Path]:
    """Hash every file again, as each worker does before it starts."""
    files = []
    for entry in json.loads((folder / "manifest.json").read_text()):
        path = folder / entry["file"]
        assert hashlib.sha256(path.read_bytes()).hexdigest() == entry["sha256"]
        files.append(path)
    return files


def step(path: Path) -> dict[str, object]:
    """Load the whole record, though two boundaries of it are wanted."""
    return torch.load(path, weights_only=True)
