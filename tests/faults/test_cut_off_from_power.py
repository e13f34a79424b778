"""A sample of ``make power-loss``: what had been published before the power went is there, whole."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(300)  # a few seconds where nothing else runs
def test_what_was_published_before_the_power_went_is_there_and_the_rest_can_be_done_again():
    command = [sys.executable, "-m", "tests.faults.power_loss", "--moments", "8", "publish", "names"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.stdout.startswith("skipped:"):
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"^all: (\d+) moments; 0 findings", done.stdout, re.MULTILINE)
    assert found, done.stdout
    assert int(found[1]) >= 10
