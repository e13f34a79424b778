"""Makes ZeroGraph caches as their own writer lays them out."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch

KIND = "zerograph_clean_teacher_boundaries_v1"


def described(tensor):
    return {"shape": list(tensor.shape), "dtype": str(tensor.dtype)}


def seal(root: Path, manifest: dict) -> None:
    body = (json.dumps(manifest, indent=2, sort_keys=True) + "\n").encode()
    (root / "manifest.json").write_bytes(body)
    said = {"manifest": "manifest.json", "sha256": hashlib.sha256(body).hexdigest()}
    (root / "manifest.sha256.json").write_text(json.dumps(said))


def row_of(root: Path, number: int, payload) -> dict:
    path = root / f"batch_{number:08d}.pt"
    torch.save(payload, path)
    return {
        "index": number,
        "path": path.name,
        "bytes": path.stat().st_size,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "boundaries": [described(item) for item in payload["boundaries"]],
        "context": {key: described(item) for key, item in payload["context"].items()},
    }


def payload_of(seed: int, *, rows: int, length: int = 6, width: int = 8, boundaries: int = 3, lengths=None) -> dict:
    draw = torch.Generator().manual_seed(seed)
    mask = torch.ones(rows, length, dtype=torch.int64)
    for row, count in enumerate(lengths or ()):
        mask[row, count:] = 0
    return {
        "boundaries": [torch.randn(rows, length, width, generator=draw).to(torch.bfloat16) for _ in range(boundaries)],
        "context": {
            "input_ids": torch.randint(0, 99, (rows, length), generator=draw),
            "attention_mask": mask,
        },
    }


def make(root: Path, payloads, **changes) -> dict:
    """Write the payloads as a cache; the manifest, which ``changes`` override."""
    root.mkdir(parents=True, exist_ok=True)
    rows = [row_of(root, number, payload) for number, payload in enumerate(payloads)]
    manifest = {
        "format_version": 1,
        "kind": KIND,
        "status": "completed",
        "objective": "clean_teacher_boundary_regression",
        "sigma": 0.0,
        "teacher": {"id": "org/teacher", "revision": "0123abc"},
        "data_id": "org/data",
        "block_count": len(payloads[0]["boundaries"]) - 1,
        "batch_count": len(rows),
        "seconds": 1.5,
        "files": rows,
        **changes,
    }
    seal(root, manifest)
    return manifest
