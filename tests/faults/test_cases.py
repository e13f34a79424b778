"""What people met with caches of this kind, tried on the real command: the cases that have no other place of their own.

`docs/explanation/failure-model.md` lists all of them, with the test of each.
"""

import json
import re
import resource
import shutil
import subprocess
import sys
from collections import UserDict
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import zgstore
from zgstore.building import sections
from zgstore.building.shards import QUEUE_BYTES
from zgstore.cli.faults import explain
from zgstore.cli.main import main
from zgstore.storage import locks
from zgstore.storage.store import Store

sys.path.insert(0, str(Path(__file__).parents[1] / "building"))

from commands import runner
from projects import CODE, make_project, write_recipe, write_rows


@pytest.fixture(autouse=True)
def _own_import_path(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sections, "_directories", [])
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ZGSTORE_DIR", raising=False)
    torch.set_num_threads(1)


@pytest.fixture
def zg(capfd):
    """Runs the command in this process; its exit code, and both of what it printed."""

    return runner(main, capfd)


@pytest.fixture
def built(tmp_path, zg):
    """A project, and the store `.zgstore` with its snapshot `main`."""
    recipe, module = make_project(tmp_path / "project", rows=12)
    assert zg("init")[0] == 0
    assert zg("build", recipe, "--ref", "main")[0] == 0
    return recipe, module


def lines_of(recipe, folder):
    """Command lines that fail, and the exit code of each."""
    bad, unknown, full = folder / "bad.toml", folder / "unknown.toml", folder / "full"
    bad.write_text("a = [")
    unknown.write_text(recipe.read_text() + "\nnope = 3\n")
    full.mkdir()
    (full / "a").write_text("somebody's")
    nowhere, zeros, plain = folder / "none", "0" * 64, folder / "plain"
    plain.mkdir()
    save_file({"h": torch.ones(2, 3)}, plain / "a.safetensors")
    return [
        (2, "frob"), (2, "ls", "--frob"), (2, "ls", "extra"), (10, "--store", nowhere, "ls"),
        (10, "--store", bad, "ls"), (2, "init", folder / "i", "--policy", "zz"), (2, "init", bad),
        (2, "init", folder / "i", "--example", "zz"), (2, "points", bad), (2, "estimate", bad),
        (2, "build"), (2, "build", bad), (2, "build", unknown), (2, "build", nowhere), (2, "build", full),
        (10, "--store", nowhere, "build", recipe), (2, "build", recipe, "--worker", "3/3"),
        (2, "build", recipe, "--limit", "0"), (2, "build", recipe, "--ref", "a.lock"),
        (2, "build", recipe, "--devices", "frob"), (2, "build", recipe, "--on-nonfinite", "zz"),
        (10, "build", recipe, "--locked"), (10, "show", "nope"), (10, "show", "abcdef012345"), (10, "show", "main@{7}"),
        (10, "show", "lock:x"), (2, "show", "main", "--decode", "3"),
        (2, "show", "main", "--decode", "999", "--recipe", recipe), (10, "log", "nope"), (10, "diff", "main", "nope"),
        (2, "diff", "main", "main", "--values", "--samples", "-1"), (10, "why", "abcdef0123"),
        (10, "verify", "nope"), (2, "verify", "--part", "4/3"), (2, "verify", "--recompute", "2"),
        (2, "verify", "--repair"), (10, "verify", "--locked"), (2, "gc", "--grace", "x"),
        (2, "gc", "--keep-last", "-1"),
        (2, "tag", "a b", "main"), (10, "tag", "v1", "nope"), (10, "tag", "rm", "nope"), (10, "ref", "rm", "nope"),
        (10, "ref", "set", "x", "nope"), (10, "ref", "set", "main", "main", "--expect", zeros),
        (2, "ref", "set", "x.lock", "main"), (2, "ref", "set", "MAIN", "main"), (2, "ref", "set", "main/x", "main"),
        (10, "hold", "h", "nope"), (10, "unhold", "nope"), (10, "lock", "n", "nope"), (2, "lease", "run", "main"),
        (2, "lease", "run", "main", "--", "/no/such"), (10, "lease", "run", "nope", "--", "true"),
        (10, "copy", "main", "--to", nowhere), (2, "copy", "main"), (2, "copy", "main", "--to", ".zgstore"),
        (2, "export", "main", full), (10, "export", "nope", folder / "e"),
        (2, "export", "main", folder / "e", "--columns", "zz"), (21, "import", "zerograph", nowhere),
        (2, "import", "safetensors", full), (2, "import", "frob", full),
        (2, "import", "safetensors", plain, "--cut", "0"),
    ]  # fmt: skip


def test_every_command_that_fails_says_it_in_two_lines_and_as_json_by_its_exit_code(built, tmp_path, zg):
    before = sorted(Path(".zgstore").rglob("*"))
    for expected, *words in lines_of(built[0], tmp_path):
        code, out, err = zg(*words)
        first, second = err.splitlines()
        assert (code, out) == (expected, ""), (words, err)
        assert first.startswith("error: "), (words, err)
        assert second.startswith("hint: "), (words, err)
        code, out, _ = zg("--json", *words)
        value = json.loads(out)
        error = value["error"]
        assert (code, out.count("\n"), value["ok"]) == (expected, 1, False), (words, out)
        assert error["message"], words
        assert error["hint"], words
        assert first == f"error: {error['message']}", words
    assert sorted(Path(".zgstore").rglob("*")) == before


WAYS = {
    "moved": "mv .zgstore there",
    "copied": "cp -r .zgstore there",
    "copied by another umask": "umask 077; cp -r --no-preserve=all .zgstore there",
    "packed, times lost": "tar cf t.tar .zgstore && mkdir x && tar xf t.tar -C x --touch && mv x/.zgstore there",
    "times before all others": "cp -r .zgstore there && find there -exec touch -h -d @0 {} +",
    "times to come": "cp -r .zgstore there && find there -exec touch -h -d '2 days' {} +",
    "without its empty folders": "cp -r .zgstore there && find there -type d -empty -delete",
    "without its empty files": "cp -r .zgstore there && find there -empty -delete && rm -rf there/index",
}


@pytest.mark.parametrize("way", WAYS)
def test_a_store_that_was_carried_elsewhere_verifies_and_needs_no_new_work(built, zg, way):
    subprocess.run(WAYS[way], shell=True, check=True)
    assert json.loads(zg("--store", "there", "--json", "verify")[1])["ok"]
    again = json.loads(zg("--store", "there", "--json", "build", built[0], "--ref", "main")[1])
    assert (again["shards"], again["teacher_loaded"], again["bytes"]["new"]) == ({"built": 0, "reused": 3}, False, 0)
    assert zg("--store", "there", "gc", "--now")[0] == 0
    assert zg("--store", "there", "verify")[0] == 0


def test_what_reads_no_blob_reads_no_blob(built, zg):
    blobs = list(Path(".zgstore", "objects").rglob("*.safetensors"))
    assert len(blobs) > 10
    for blob in blobs:
        size = blob.stat().st_size
        blob.chmod(0o644)
        blob.write_bytes(bytes(size))
    for words in (["build", built[0], "--ref", "main"], ["ls"], ["show", "main"], ["log", "main"], ["du"], ["gc"],
                  ["diff", "main", "main"], ["estimate", built[0]], ["tag", "v1", "main"]):  # fmt: skip
        assert zg(*words)[0] == 0, words
    assert zg("verify")[0] == 20


def test_of_two_projects_on_one_store_each_keeps_what_it_names(tmp_path, built, zg):
    theirs, _ = make_project(tmp_path / "theirs", rows=12, teacher_args="seed = 3")
    assert zg("build", theirs, "--ref", "theirs/main")[0] == 0
    assert zg("hold", "theirs", "theirs/main")[0] == 0
    snapshot = Store.open(".zgstore").resolve("theirs/main")
    assert zg("ref", "rm", "theirs/main")[0] == 0
    assert zg("gc", "--now")[0] == 0
    assert zg("verify")[0] == 0
    assert zg("verify", snapshot)[0] == 0
    assert zg("unhold", "theirs")[0] == 0
    planned = json.loads(zg("--json", "gc", "--now", "--dry-run")[1])
    done = json.loads(zg("--json", "gc", "--now")[1])
    assert planned["freed"] == done["freed"] != {"objects": 0, "bytes": 0}
    assert zg("verify")[0] == 0
    assert zg("show", snapshot)[0] == 10
    again = json.loads(zg("--json", "build", built[0], "--ref", "main")[1])
    assert again["shards"] == {"built": 0, "reused": 3}


def test_a_read_only_mount_is_read_and_refuses_what_writes(built, zg, tmp_path):
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    bind = subprocess.run(["mount", "--bind", tmp_path / ".zgstore", mounted], capture_output=True, check=False)
    if bind.returncode:
        pytest.skip("nothing can be mounted here")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", mounted], check=True)
        recipe = built[0]
        for words in (["ls"], ["show", "main"], ["verify"], ["diff", "main", "main", "--values"], ["lease", "ls"],
                      ["export", "main", tmp_path / "plain"], ["build", recipe, "--dry-run"]):  # fmt: skip
            assert zg("--store", mounted, *words)[0] == 0, words
        for words in (["build", recipe], ["tag", "v1", "main"], ["hold", "h", "main"], ["ref", "rm", "main"], ["gc"]):
            code, _, err = zg("--store", mounted, *words)
            assert (code, "check who owns it" in err, "Read-only" in err) == (2, True, True), (words, err)
        code, _, err = zg("--store", mounted, "lease", "run", "main", "--", "true")
        assert (code, "no lease keeps" in err) == (0, True)
        with pytest.warns(RuntimeWarning, match="no lease keeps"):
            assert len(zgstore.read(Store.open(mounted), "main")) == 12
    finally:
        subprocess.run(["umount", mounted], check=True)


def test_where_every_lock_is_granted_bytes_are_right_and_only_an_owner_collects(tmp_path, zg, monkeypatch):
    monkeypatch.setattr(locks.fcntl, "flock", lambda _handle, _how: None)
    recipe, _ = make_project(tmp_path / "project", rows=12)
    assert zg("init")[0] == 0
    assert zg("build", recipe, "--ref", "main")[0] == 0
    assert zg("verify")[0] == 0
    code, _, err = zg("gc")
    assert (code, "--owner" in err) == (25, True)
    assert zg("gc", "--owner")[0] == 0
    assert zg("verify")[0] == 0


def test_forty_shards_are_built_kept_and_carried_with_few_descriptors(tmp_path, zg):
    recipe, _ = make_project(tmp_path / "project", rows=80, storage="batches_per_shard = 1")
    assert zg("init")[0] == zg("init", "other")[0] == 0
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len([*Path("/proc/self/fd").iterdir()]) + 32, limits[1]))
    try:
        for words in (["build", recipe, "--ref", "main"], ["verify"], ["diff", "main", "main", "--values"],
                      ["export", "main", "plain"], ["copy", "main", "--to", "other"], ["gc", "--now"]):  # fmt: skip
            code, _, err = zg(*words)
            assert code == 0, (words, err)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


ROWS = "x = torch.ones(2, 6, dtype=torch.int64)\n    "
WRONG_DATA = {
    "return {'input_ids': torch.ones(2, 6)}": "gave a str of 9 where a mapping of tensors was expected",
    "return None": "returned a NoneType, not an iterable of batches",
    "return [(torch.ones(2, 6),)]": "gave a tuple of 1 where a mapping of tensors was expected",
    "return [{'input_ids': [[1, 2]]}]": "'input_ids' is a list of 1, not a tensor",
    "return [{'input_ids': torch.ones(2, 6).numpy()}]": "'input_ids' is a numpy.ndarray, not a tensor",
    "return [{}]": "gave a batch without tensors",
    "return []": "the data factory gave no rows",
    ROWS + "return [{'input_ids': x, 'labels': x[:0]}]": "disagree about the number of samples: input_ids 2, labels 0",
    ROWS + "return [{'input_ids': x[:0], 'labels': x[:0]}]": "gave a batch of zero rows",
    ROWS + "return [{'input_ids': x, 'labels': x * 0 - 100}]": "every label",
    ROWS + "yield {'input_ids': x, 'labels': x}\n    raise ValueError('the file ends here')": "the file ends here",
}
WRONG_TEACHERS = {
    "return None": "NoneType",
    "return {'model': 1}": "dict",
    "return lambda batch: batch": "function",
    "raise OSError('weights are gone')": "weights are gone",
    "raise SystemExit(3)": r"exit\(3\)",
}


@pytest.mark.parametrize(
    ("what", "body", "said"),
    [*(("batches", *each) for each in WRONG_DATA.items()), *(("teacher", *each) for each in WRONG_TEACHERS.items())],
)
def test_what_is_no_batch_and_no_teacher_is_refused_saying_what_was_got(tmp_path, what, body, said):
    path, _ = make_project(tmp_path / "project", more=f"\n\ndef {what}(**_):\n    {body}\n")
    store = Store.init("store")
    with pytest.raises(BaseException) as caught:
        zgstore.build(store, zgstore.load_recipe(path))
    error = explain(caught.value)
    assert re.search(said, error.message), error.message
    assert (error.exit_code, bool(error.hint)) == (2, True)
    assert not store.refs.list()


def test_mappings_that_are_no_dicts_are_batches(tmp_path):
    code = CODE.replace("yield batch", "yield UserDict(batch)").replace(
        "import json", "import json\nfrom collections import UserDict", 1
    )
    assert UserDict.__name__ in code
    path, _ = make_project(tmp_path / "project", code=code)
    plain, _ = make_project(tmp_path / "plain")
    store = Store.init("store")
    first, second = (zgstore.build(store, zgstore.load_recipe(each)) for each in (path, plain))
    assert store.snapshot(first.snapshot).pins.data["digest"] == store.snapshot(second.snapshot).pins.data["digest"]


def test_how_far_a_teacher_depends_on_its_batch_is_told_by_comparing_two(tmp_path, zg):
    """Rows alone and together, padded on either side: one set of pins, and `diff` says whether the bits differ."""
    folder = tmp_path / "project"
    alone, module = make_project(folder, rows=8, data_args="batch_size = 1")
    write_rows(folder, 8, ragged=True)
    ragged = 'lengths = "attention_mask"\nsequence = ["input_ids", "labels"]'
    write_recipe(folder, module, data_args="batch_size = 1", capture=ragged)
    assert zg("init")[0] == 0
    assert zg("build", alone, "--ref", "alone")[0] == 0
    left = 'batch_size = 4, padding = "left"'
    together = write_recipe(folder, module, name="together", data_args=left, capture=ragged)
    assert zg("build", together, "--ref", "together")[0] == 0
    found = json.loads(zg("--json", "diff", "alone", "together", "--values")[1])
    assert not found["pins"], "the rows are the same, however they were padded"
    for column in ("layers.0:in", "layers.2:in", "norm:in"):
        assert found["values"][column]["max_abs"] < 1e-5, column  # this teacher sees one token at a time
    assert found["values"]["input_ids"]["max_abs"] == 0


def test_the_last_batches_of_a_store_that_lost_its_end_are_named(built, zg):
    """A copy that was cut short: files missing, one half written, one empty."""
    blobs = sorted(Path(".zgstore", "objects").rglob("*.safetensors"))
    shutil.copy(blobs[0], "spare")
    blobs[0].unlink()
    for blob, size in ((blobs[1], blobs[1].stat().st_size // 2), (blobs[2], 0)):
        blob.chmod(0o644)
        with blob.open("r+b") as file:
            file.truncate(size)
    code, out, _ = zg("--json", "verify", "--quick")
    value = json.loads(out)
    assert (code, sorted(problem["kind"] for problem in value["problems"])) == (20, ["corrupt", "corrupt", "missing"])
    assert all(problem["refs"] == ["main"] and problem["hint"] for problem in value["problems"])
    assert zg("verify", "--repair", "--recipe", built[0])[0] == 0
    assert blobs[0].read_bytes() == Path("spare").read_bytes()


WIDE = """


class Plus(nn.Module):
    def forward(self, x):
        return x + 1


def teacher(width=16384):
    torch.manual_seed(0)
    model = Teacher(4, 1)
    model.embed, model.norm, model.head = nn.Embedding(32, width), nn.Identity(), nn.Identity()
    model.layers = nn.ModuleList(Plus() for _ in range(3))
    return model
"""


def high_water_bytes():
    (line,) = [each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith("VmHWM")]
    return int(line.split()[1]) << 10


def test_a_build_of_much_more_than_it_may_hold_streams(tmp_path, zg):
    recipe, _ = make_project(tmp_path / "project", rows=960, more=WIDE, boundaries=("layers.0:in", "layers.1:in"))
    assert zg("init")[0] == 0
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the high water mark begins here
    except OSError:
        pytest.skip("the kernel does not let a process forget its high water mark")
    before = high_water_bytes()
    code, out, _ = zg("--json", "build", recipe, "--ref", "main")
    assert code == 0
    total = json.loads(out)["bytes"]["total"]
    assert total > 700 << 20
    assert high_water_bytes() - before < QUEUE_BYTES + (64 << 20)
    reader = zgstore.read(Store.open(".zgstore"), "main", columns=["layers.1:in"])
    before = high_water_bytes()
    for at in range(0, len(reader), 4):
        reader.batch(range(at, at + 4))
    reader.close()
    assert high_water_bytes() - before < total / 20
