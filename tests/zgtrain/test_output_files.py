"""Files that are put in place whole, opened if they are some, and locked by one at a time."""

from __future__ import annotations

import fcntl
import json
import os
import time

import pytest

import zgstore
from zgtrain.files import opened, write_json
from zgtrain.locks import held, holder


def test_a_lock_is_held_by_one_who_is_named_and_by_nobody_after_a_kill(tmp_path):
    path = tmp_path / ".lock"
    assert holder(path) is None
    with held(path, "block 3 is being trained"):
        assert holder(path) == f"pid {os.getpid()} on {os.uname().nodename}"
        busy = f"block 3 is being trained by another process \\(pid {os.getpid()} "
        with pytest.raises(zgstore.Busy, match=busy), held(path, "block 3 is being trained"):
            pass
    assert holder(path) is None
    child = os.fork()
    if not child:
        with held(path, "it"):
            os.kill(os.getpid(), 9)
    os.waitpid(child, 0)
    assert f"pid {child} on" in path.read_text()
    assert holder(path) is None
    path.write_text(f"pid 1 on {os.uname().nodename} since 2020\n")  # its number was given out again
    assert holder(path) is None


def test_who_looks_at_a_lock_keeps_nobody_from_it(tmp_path):
    path = tmp_path / ".lock"
    looking, look = os.pipe()
    child = os.fork()
    if not child:
        with path.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_SH)  # as one who looks has it for a moment
            os.write(look, b"1")
            time.sleep(0.05)
        os._exit(0)
    os.read(looking, 1)
    with held(path, "it"):
        assert holder(path) is not None
    os.waitpid(child, 0)


def test_another_hosts_lock_holds_while_its_log_grows(tmp_path):
    path, log = tmp_path / ".lock", tmp_path / "log.jsonl"
    path.write_text("pid 7 on elsewhere since 2026\n")
    log.write_text("")
    assert holder(path) == "pid 7 on elsewhere"
    for each in (path, log):
        os.utime(each, (time.time() - 600, time.time() - 600))
    assert holder(path) is None


def test_a_pipe_in_a_locks_place_is_no_lock(tmp_path):
    os.mkfifo(tmp_path / ".lock")
    with pytest.raises(zgstore.Corrupt, match="it is no file"), held(tmp_path / ".lock", "it"):
        pass


def test_a_file_is_put_in_place_whole_or_not_at_all(tmp_path):
    path = tmp_path / "deep" / "value.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [each.name for each in path.parent.iterdir()] == ["value.json"]
    assert opened(tmp_path / "none", remedy="") is None


def test_what_is_not_ours_to_open_is_said_to_be(tmp_path):
    if os.geteuid():
        pytest.skip("needs another user")
    path = tmp_path / "report.json"
    path.write_text("{}")
    path.chmod(0o600)
    child = os.fork()
    if not child:
        os.setuid(65534)
        try:
            opened(path, remedy="")
        except zgstore.Invalid as error:
            os._exit("cannot be opened" not in error.message)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
