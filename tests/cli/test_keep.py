"""tag, ref, lock, hold, lease: names, and what keeps."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from made import blob_of, publish


def test_a_tag_does_not_move_without_force(store, zg):
    assert zg("tag", "v2", "main", "--json").json == {
        "ok": True, "name": "v2", "kind": "tag", "snapshot": str(store.resolve("main")),
    }  # fmt: skip
    assert zg("tag", "v2", "main").code == 0
    ran = zg("tag", "v2", "v1")
    assert ran.code == 13
    assert ran.error
    assert zg("tag", "v2", "v1", "--force").code == 0
    assert store.resolve("v2") == store.resolve("v1")


def test_a_tag_is_removed_and_its_snapshot_named_once_more(store, zg):
    digest = store.resolve("v1")
    ran = zg("tag", "rm", "v1")
    assert digest.short in ran.out
    assert store.refs.get("v1") is None
    assert zg("tag", "rm", "v1").code == 10
    assert "zgstore tag rm --help" in zg("tag", "rm").error
    assert "zgstore tag rm NAME" in zg("tag", "--", "rm", "main").error
    assert "tag rm" in zg("tag", "--help").out


@pytest.mark.parametrize("name", ["../up", "a.lock", "-x", "a b", "é", "x" * 200])
def test_a_name_that_breaks_the_rules_is_refused(store, zg, name):
    ran = zg("tag", "--", name, "main")
    assert ran.code == 2
    assert ran.error


def test_a_ref_is_set_and_only_from_what_was_expected(store, zg):
    assert zg("ref", "set", "dev", "v1", "--json").json["kind"] == "head"
    ran = zg("ref", "set", "dev", "main", "--expect", "main")
    assert ran.code == 13
    assert "zgstore log dev" in ran.error
    assert zg("ref", "set", "dev", "main", "--expect", "v1").code == 0
    assert store.resolve("dev") == store.resolve("main")
    assert "ref dev" in zg("ref", "rm", "dev").out
    assert zg("ref", "rm", "dev").code == 10
    assert zg("ref", "set", "dev", "nothing").code == 10


def test_what_has_lost_a_blob_gets_no_name(store, zg):
    store.objects.path(blob_of(store, "main").digest, "objects").unlink()
    for words in (["tag", "v3", "main"], ["ref", "set", "dev", "main"], ["hold", "h", "main"], ["lock", "main"]):
        ran = zg(*words, "--json")
        assert ran.code == 21, words
        assert ran.json["error"]["kind"] == "missing"
    assert store.refs.get("v3") is None


def test_lock_writes_the_nearest_file_and_holds_the_snapshot(store, zg, tmp_path, monkeypatch):
    below = tmp_path / "experiment"
    below.mkdir()
    (tmp_path / "zgstore.lock").write_text("")
    monkeypatch.chdir(below)
    value = zg("lock", "main", "--json").json
    digest = store.resolve("main")
    assert value["file"] == str(tmp_path / "zgstore.lock")
    assert value["snapshot"] == str(digest)
    assert store.refs.get_hold(f"lock/main/{digest.short}") is not None
    assert zg("show", "lock:main", "--json").json["snapshot"] == str(digest)
    assert zg("diff", "lock:main", "main", "--exit-code").code == 0
    assert zg("lock", "old", "main@{1}", "--file", "own.lock").code == 0
    assert "[old]" in (below / "own.lock").read_text()
    assert zg("lock", "nothing").code == 10


def test_a_hold_is_given_and_let_go(store, zg):
    assert zg("hold", "paper", "main", "--reason", "table 3", "--json").json["reason"] == "table 3"
    assert store.refs.get_hold("paper").reason == "table 3"
    assert zg("hold", "paper", "v1").code == 13
    assert store.resolve("main").short in zg("unhold", "paper").out
    assert zg("unhold", "paper").code == 10


def test_lease_run_keeps_the_snapshot_and_passes_output_and_exit_code_on(store, process):
    code = "import sys; print('out'); sys.exit(7)"
    ran = process("lease", "run", "main", "--", sys.executable, "-c", code)
    assert (ran.code, ran.out, ran.err) == (7, "out\n", "")
    told = process("lease", "run", "main", "--json", "--", sys.executable, "-c", code)
    assert told.code == 7
    assert told.json["exit_code"] == 7
    assert told.err == "out\n"
    assert store.leases.all() == []


def test_lease_ls_lists_who_is_using_the_store(store, zg, tmp_path):
    assert zg("lease", "ls", "--json").json == {"ok": True, "leases": []}
    assert "nobody" in zg("lease", "ls").out
    with store.using(store.resolve("main"), purpose="training"):
        (lease,) = zg("lease", "ls", "--json").json["leases"]
        assert (lease["purpose"], lease["pid"], lease["alive"], lease["objects"]) == ("training", os.getpid(), True, 1)
        assert "training" in zg("lease", "ls").out


def test_a_signal_reaches_the_leased_command(store, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", "from zgstore.cli.main import run; run()", "lease", "run", "main", "--", "sleep", "30"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    until = time.monotonic() + 20
    while not store.leases.all() and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGTERM
    assert store.leases.all() == []


def test_lease_run_of_no_command_is_a_mistake(store, zg):
    assert zg("lease", "run", "main").code == 2
    ran = zg("lease", "run", "main", "--", "no-such-program")
    assert ran.code == 2
    assert "no-such-program" in ran.error
    assert zg("lease", "run", "nothing", "--", "true").code == 10


def test_a_name_in_the_trash_comes_back_with_its_snapshot(store, zg):
    lost = publish(store, None, 9.0)
    assert zg("gc", "--grace", "0s", "--dry-run").code == 0
    assert zg("tag", "kept", lost.hex).code == 0
    assert zg("show", "kept").code == 0
