"""A sample of ``make damage``: each byte class of each kind of file, and who tells that it is damaged."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.faults.byte_classes import POINTS

ROOT = Path(__file__).parents[2]
BLOBS = {"constant", "blob of a dense column", *(f"blob of {name}" for name in (*POINTS, "input_ids"))}
METADATA = {"snapshot", "root page", "leaf page", "rows root", "rows page", "dropped page", "record"}
UNREAD = {"rows root", "rows page", "record"}  # which rows they are, and who built them: no reader's business
NAMES = {"ref", "tag", "reflog", "hold", "lease", "partial", "build", "configuration"}
MADE_AGAIN = {"action", "measurement", "index", "lock", "left over"}


@pytest.mark.timeout(600)  # less than half a minute where nothing else runs
def test_damage_to_each_class_of_bytes_is_told_of_and_never_read_as_values():
    command = [sys.executable, "-m", "tests.faults.damage", "--sample", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    found = {kind.pop("kind"): kind for kind in map(json.loads, done.stdout.splitlines())}
    assert [each for kind in found.values() for each in kind["findings"]] == []
    assert done.returncode == 0, done.stderr
    assert found.keys() == BLOBS | METADATA | NAMES | MADE_AGAIN
    for kind in BLOBS | METADATA:
        told, flips = Counter(found[kind]["flip_tellers"]), found[kind]["flips"]
        assert told["verify"] == flips > 0, kind
        assert told["read"] == (0 if kind in UNREAD else flips), kind
