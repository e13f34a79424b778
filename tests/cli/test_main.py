"""The door: options anywhere, errors in two lines or as JSON, signals, pipes, and what a start may load."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from made import blob_of

from zgstore import errors
from zgstore.cli import faults
from zgstore.cli import main as door
from zgstore.cli.catalogue import COMMANDS, TABLE
from zgstore.cli.console import error_value, plain
from zgstore.errors import ZgError

NAMED_IN_INTERFACE = [
    "init",
    "build",
    "estimate",
    "points",
    "verify",
    "gc",
    "diff",
    "show",
    "ls",
    "log",
    "du",
    "why",
    "tag",
    "lock",
    "hold",
    "unhold",
    "copy",
    "export",
    "reindex",
]
TWO_WORDS = ("tag rm", "ref set", "ref rm", "lease run", "lease ls", "import zerograph", "import safetensors")


def test_every_command_of_the_interface_is_there():
    assert set(TABLE) == {*NAMED_IN_INTERFACE, *TWO_WORDS}


def test_every_command_has_a_sentence_that_fits_its_line():
    for entry in COMMANDS:
        assert entry.sentence.endswith(".")
        assert len(entry.sentence) <= 55, entry.sentence


def test_every_command_explains_itself(zg):
    for entry in COMMANDS:
        ran = zg(*entry.name.split(), "--help")
        assert ran.code == 0, ran.err
        assert entry.sentence.split()[0] in ran.out
        assert "--json" in ran.out
        assert max(map(len, ran.out.splitlines())) <= 80


def test_the_options_of_all_commands_are_taken_before_and_after_the_name(store, zg):
    path = str(store.path)
    before, after = zg("--store", path, "--json", "ls"), zg("ls", f"--store={path}", "--json")
    assert before.code == after.code == 0
    assert before.json == after.json
    assert zg("ls", "--quiet").out == zg("-q", "ls").out == ""


def test_what_stands_after_two_dashes_is_not_ours():
    assert door.PROGRAM.hoist(["lease", "run", "main", "--json", "--", "cat", "--store", "x", "--json"]) == (
        ["--json"],
        ["lease", "run", "main", "--", "cat", "--store", "x", "--json"],
    )


def test_the_store_is_the_option_else_the_variable_else_the_nearest_upward(store, process, zg, tmp_path, monkeypatch):
    assert process("ls", ZGSTORE_DIR=str(store.path)).code == 0
    assert process("ls", ZGSTORE_DIR=str(tmp_path / "none")).code == 10
    assert process("ls", "--store", str(store.path), ZGSTORE_DIR=str(tmp_path / "none")).code == 0
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    assert zg("ls").code == 0


def test_no_store_is_said_with_what_to_do(zg):
    ran = zg("ls")
    assert ran.code == 10
    assert "zgstore init" in ran.error
    assert ran.out == ""
    assert zg("ls", "--json").json["error"]["kind"] == "not_found"


@pytest.mark.parametrize(
    "words",
    [
        ["nonsense"],
        ["ls", "--nonsense"],
        ["show"],
        ["diff", "main"],
        ["lease"],
        ["ref"],
        ["import"],
        ["lease", "nonsense"],
        ["ls", "--store", ""],
        ["show", "main", "--decode", "seven"],
        ["ls", "--wait", "soon"],
        ["ls", "--store"],
        ["ls", "too", "many"],
    ],
)
def test_a_mistyped_command_is_two_lines_and_exit_2(store, zg, words):
    ran = zg(*words)
    assert ran.code == 2
    assert ran.error
    told = zg("--json", *words)
    assert told.code == 2
    assert told.json["ok"] is False
    assert told.json["error"]["kind"] == "invalid"


def test_a_misspelt_command_is_told_the_nearest(zg):
    assert "'show'" in zg("shwo").error


def test_no_command_shows_the_help_and_is_a_mistake(zg):
    ran = zg()
    assert ran.code == 2
    assert "Usage" in ran.out
    assert zg("--json").json["ok"] is False


def test_the_version_is_one_line(zg):
    assert zg("--version").out.startswith("zgstore ")


@pytest.mark.parametrize("kind", [each for each in vars(errors).values() if isinstance(each, type)])
def test_every_error_is_a_kind_with_its_exit_code(kind):
    if kind is ZgError or not issubclass(kind, ZgError):
        return
    error = kind("it broke\nin two places", hint="mend it", path="a/b", nothing=None)
    value = error_value(error)
    assert value["kind"] in (
        [
            "not_found",
            "conflict",
            "busy",
            "corrupt",
            "missing",
            "partial",
            "refused",
            "no_space",
            "non_finite",
            "invalid",
            "transient",
            "interrupted",
        ]
    )
    assert value["message"] == "it broke in two places"
    assert value["path"] == "a/b"
    assert "nothing" not in value


def test_a_number_that_is_none_is_null_in_json():
    assert plain({"a": float("nan"), "b": (1, b"\x01"), "c": b"\x00" * 32}) == {
        "a": None,
        "b": [1, "01"],
        "c": "blake3:" + "00" * 32,
    }


def test_what_a_terminal_would_act_on_is_written_out(store, zg):
    ran = zg("show", "\x1b[2Jmain")
    assert "\x1b" not in ran.error


def test_what_the_system_says_is_no_space_a_wrong_path_or_what_may_pass():
    for number, code in {28: 24, 122: 24, 13: 2, 30: 2, 20: 2, 2: 2, 24: 30, 5: 30}.items():
        error = faults.explain(OSError(number, os.strerror(number), "x"))
        assert (error.exit_code, error.message) == (code, f"x: {os.strerror(number)}")


def test_an_exception_of_a_recipe_names_the_factory(store, zg, tmp_path):
    (tmp_path / "broken.py").write_text("def batches():\n    raise RuntimeError('no such\\ndata')\n")
    (tmp_path / "r.toml").write_text(RECIPE_OF_NOTHING)
    ran = zg("show", "main", "--decode", "0", "--recipe", "r.toml")
    assert ran.code == 2
    assert "broken:batches raised RuntimeError: no such data" in ran.error
    assert "--debug" in ran.error
    assert "Traceback" in zg("show", "main", "--decode", "0", "--recipe", "r.toml", "--debug").err


RECIPE_OF_NOTHING = """
[teacher]
factory = "broken:teacher"
id = "a"
revision = "b"
[data]
factory = "broken:batches"
id = "a"
revision = "b"
[capture]
boundaries = ["m:in"]
"""

PRINTS = """
import os, subprocess, sys
from zgstore.cli import ls
def noisy(store):
    print("from python"); os.write(1, b"from a descriptor\\n"); subprocess.run(["echo", "from a child"])
    import atexit; atexit.register(print, "at the end")
    return []
ls.inspector.listing = noisy
from zgstore.cli.main import run
run()
"""


def test_json_is_alone_on_standard_output_whatever_is_printed(store, process):
    ran = process("ls", "--json", code=PRINTS)
    assert ran.json == {"ok": True, "refs": [], "holds": []}
    for text in ("from python", "from a descriptor", "from a child"):
        assert text in ran.err


LIGHT = [
    ["--help"],
    ["--version"],
    ["ls"],
    ["show", "main"],
    ["log", "main"],
    ["diff", "v1", "main"],
    ["du"],
    ["lease", "ls"],
    ["tag", "v2", "main"],
    ["ref", "set", "dev", "main"],
    ["hold", "h", "main"],
    ["lock", "main"],
    ["gc", "--dry-run"],
    ["verify"],
    ["reindex"],
    ["init"],
    ["build", "--help"],
    ["lease", "run", "main", "--", "true"],
]


@pytest.mark.parametrize("words", LIGHT, ids=" ".join)
def test_a_command_that_reads_no_tensor_loads_no_torch(store, process, words):
    code = (
        "import sys\nfrom zgstore.cli.main import main\nfrom zgstore.cli.console import Screen\n"
        "code = main(sys.argv[1:], Screen())\n"
        "heavy = {'torch', 'transformers', 'pydantic'} & set(sys.modules)\n"
        "sys.exit(f'{heavy} was loaded' if heavy and 'torch' in heavy else code)"
    )
    ran = process(*words, code=code)
    assert ran.code == 0, ran.err


def test_why_loads_no_torch(store, process):
    code = (
        "import sys\nfrom zgstore.cli.main import main\nfrom zgstore.cli.console import Screen\n"
        "code = main(sys.argv[1:], Screen())\nsys.exit('torch was loaded' if 'torch' in sys.modules else code)"
    )
    assert process("why", blob_of(store, "main").digest.short, code=code).code == 0


def test_a_reader_that_has_gone_is_no_error(store, tmp_path):
    command = f"{sys.executable} -c 'from zgstore.cli.main import run; run()' ls | true"
    for text in (command, command.replace(" ls ", " --help ")):
        ran = subprocess.run(text, shell=True, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_standard_files_are_no_error(store, tmp_path, closed):
    command = f"{sys.executable} -c 'from zgstore.cli.main import run; run()' verify {closed}"
    assert subprocess.run(command, shell=True, cwd=tmp_path, check=False).returncode == 0


def test_a_full_standard_output_is_said(store, tmp_path):
    command = f"{sys.executable} -c 'from zgstore.cli.main import run; run()' ls > /dev/full"
    ran = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 24
    assert "error: " in ran.stderr


WAITS = """
import sys, time
from zgstore.cli import ls
def slow(store):
    sys.stderr.write("ready\\n"); sys.stderr.flush()
    time.sleep(30)
ls.inspector.listing = slow
from zgstore.cli.main import run
run()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("flag", ["--json", "--debug"])
def test_a_signal_ends_by_130(store, tmp_path, number, flag):
    process = subprocess.Popen(
        [sys.executable, "-c", WAITS, "ls", flag],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr.readline() == "ready\n"
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert '"interrupted"' in out if flag == "--json" else "error: stopped by a signal" in err


def test_a_second_signal_ends_at_once(store, tmp_path):
    code = WAITS.replace("time.sleep(30)", "\n    try: time.sleep(30)\n    finally: time.sleep(30)")
    process = subprocess.Popen(
        [sys.executable, "-c", code, "ls", "--json"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stderr.readline() == b"ready\n"
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=10)
    assert process.returncode == 130
    assert out.count(b"\n") == 1


SAVES = """
import sys, time
from zgstore.cli.console import Screen
from zgstore.cli.session import Options, Session
told = []
session = Session(Options(), Screen())
with session.signals(), session.stops_by(told.append, saves=True):
    sys.stderr.write("ready\\n"); sys.stderr.flush()
    while not told:
        time.sleep(0.01)
    time.sleep(1)
sys.stderr.write(f"saved, told {len(told)} time")
"""


def test_sigterm_again_ends_nothing_that_is_saving():
    process = subprocess.Popen([sys.executable, "-c", SAVES], stderr=subprocess.PIPE, text=True)
    assert process.stderr.readline() == "ready\n"
    for _ in range(3):  # of the batch system, of its step, of the launch
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
    _, err = process.communicate(timeout=10)
    assert (process.returncode, err) == (0, "saved, told 1 time")


def test_waiting_for_a_busy_store_ends_in_time(store, zg):
    with store.leases.gc_lock():
        started = time.monotonic()
        ran = zg("gc")
        assert ran.code == 11
        assert time.monotonic() - started < 5
        told = zg("gc", "--json", "--wait", "0.5s").json["error"]
        assert told["kind"] == "busy"
        assert told["pid"] == os.getpid()
        assert {"host", "age_seconds"} <= set(told)
        assert time.monotonic() - started >= 0.5


def test_no_command_module_imports_torch_at_its_head():
    for path in Path(door.__file__).parent.glob("*.py"):
        heads = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
        assert not any("torch" in ast.unparse(node) for node in heads)
