"""What programs read: the JSON of results over the frozen store, key by key.

A change here is a change of the interface. ``python tests/golden/test_json_results.py`` writes the files anew.
"""

from __future__ import annotations

import json
import sys
import tarfile
import tempfile
from pathlib import Path

import pytest

from zgstore.cli.console import plain
from zgstore.storage.store import Store
from zgstore.upkeep.copier import copy
from zgstore.upkeep.differ import diff
from zgstore.upkeep.exporter import export
from zgstore.upkeep.inspector import show
from zgstore.upkeep.verifier import verify

HERE = Path(__file__).resolve().parent
ARCHIVE = HERE.parent / "compat" / "format1.tar.xz"
CIRCUMSTANCE = {"seconds", "to", "directory"}


def results(folder: Path) -> dict[str, object]:
    with tarfile.open(ARCHIVE) as tar:
        tar.extractall(folder, filter="tar")
    store = Store.open(folder / "store")
    other = Store.init(folder / "other")
    checked = verify(store)
    return {
        "diff-grown": diff(store, "v1", "main").as_json(),
        "diff-values": diff(store, "v1", "quantised", values=True).as_json(),
        "show": plain(show(store, "main").as_json()),
        "copy-part": copy(store, "main", to=other, columns=["pooled", "id"]).as_json(),
        "copy": copy(store, "main", to=other).as_json(),
        "export": export(store, "v1", folder / "plain").as_json(),
        "export-manifest": json.loads((folder / "plain" / "manifest.json").read_text()),
        "verify": checked.report.as_json(),
    }


def settled(value: object) -> object:
    """Without what differs from run to run, floats to nine digits."""
    if isinstance(value, dict):
        return {key: "…" if key in CIRCUMSTANCE else settled(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [settled(item) for item in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return results(tmp_path_factory.mktemp("golden"))


@pytest.mark.parametrize(
    "name", ["diff-grown", "diff-values", "show", "copy-part", "copy", "export", "export-manifest", "verify"]
)
def test_the_result_is_the_recorded_one(found, name):
    recorded = json.loads((HERE / f"{name}.json").read_text())
    assert json.loads(json.dumps(settled(found[name]))) == recorded
    assert list(settled(found[name])) == list(recorded), "the order of the keys"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        for each, value in results(Path(scratch)).items():
            (HERE / f"{each}.json").write_text(json.dumps(settled(value), indent=2, ensure_ascii=False) + "\n")
    sys.exit(0)
