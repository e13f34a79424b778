"""A sample of ``make kills``: killed before a step, or told of an error, an operation leaves all that there was."""

import errno
import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults import steps
from tests.faults.kills import BYTES, TENSORS
from zgstore.format.digest import digest_of
from zgstore.storage import partials
from zgstore.storage.config import POLICIES
from zgtrain.job import LogSpec
from zgtrain.journal import FILE_NAME, Journal, read_lines

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(900)  # less than a minute where nothing else runs
def test_killed_or_failed_at_a_step_of_each_kind_nothing_is_lost_and_it_can_be_run_again():
    command = [sys.executable, "-m", "tests.faults.kills", "--sample", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    results = [json.loads(line) for line in done.stdout.splitlines()]
    if results and "skipped" in results[0]:
        pytest.skip(results[0]["skipped"])
    assert [result["operation"] for result in results] == [*BYTES, *TENSORS], done.stderr
    assert not [f"{result['operation']}: {each}" for result in results for each in result["findings"]]
    assert sum(result["kills"] for result in results) >= 60
    assert sum(result["errors"] + result["lasting"] for result in results) >= 15


def test_each_call_that_changes_a_folder_is_a_step_and_no_other(tmp_path):
    if why := steps.cannot():
        pytest.skip(why)

    def work():
        (tmp_path / "a").write_bytes(b"a")
        (tmp_path / "a").read_bytes()
        (tmp_path / "a").rename(tmp_path / "b")
        (tmp_path / "c").mkdir()
        (tmp_path / "c").mkdir(exist_ok=True)
        (tmp_path / "b").unlink()
        Path("/dev/null").write_bytes(b"elsewhere")

    run = steps.run(work, tmp_path, lambda _: steps.GO)
    assert [(each.call.removesuffix("at"), each.path) for each in run.steps] == [
        ("open", "a"), ("write", "a"), ("rename", "b"), ("mkdir", "c"), ("unlink", "b"),
    ]  # fmt: skip


def test_what_is_killed_at_a_step_has_done_all_before_it_and_nothing_more(tmp_path):
    if why := steps.cannot():
        pytest.skip(why)

    def work():
        for number in range(9):
            (tmp_path / f"{number}").mkdir()

    run = steps.run(work, tmp_path, lambda step: steps.KILL if step.number == 4 else steps.GO)
    assert run.killed
    assert sorted(each.name for each in tmp_path.iterdir()) == ["0", "1", "2"]


def test_an_error_comes_from_the_kernel_and_the_step_is_not_done(tmp_path):
    if why := steps.cannot():
        pytest.skip(why)

    def work():
        try:
            (tmp_path / "a").mkdir()
        except OSError as error:
            return error.errno

    assert steps.run(work, tmp_path, lambda _: 28).value == 28
    assert not list(tmp_path.iterdir())


def test_a_log_that_is_taken_up_again_is_whole_or_as_it_was_wherever_it_is_killed(tmp_path):
    if why := steps.cannot():
        pytest.skip(why)

    def work():
        with Journal(tmp_path, LogSpec()) as journal:
            journal({"step": 4})
        return [line["step"] for line in read_lines(tmp_path / FILE_NAME)]

    whole = [json.dumps({"step": step}) + "\n" for step in range(1, 6)]
    for number in itertools.count(1):
        (tmp_path / FILE_NAME).write_text("".join(whole))
        run = steps.run(work, tmp_path, lambda step: steps.KILL if step.number == number else steps.GO)  # noqa: B023
        kept = [line["step"] for line in read_lines(tmp_path / FILE_NAME)]
        assert kept in ([1, 2, 3, 4, 5], [1, 2, 3], [1, 2, 3, 4])
        assert steps.run(work, tmp_path, lambda _: steps.GO).value == [1, 2, 3, 4]
        if not run.killed:
            break
    assert number > 3


def test_what_the_disk_says_of_the_marker_of_a_part_is_an_error_of_ours(tmp_path):
    if why := steps.cannot():
        pytest.skip(why)
    digest = digest_of("snapshot", b"")
    partials.mark(tmp_path, digest, ["h.0"], POLICIES["private"])
    run = steps.run(lambda: partials.clear(tmp_path, digest), tmp_path, lambda _: errno.EIO)
    assert (run.kind, len(run.steps)) == ("transient", 1)
    assert partials.expected(tmp_path, digest) == {"h.0"}
