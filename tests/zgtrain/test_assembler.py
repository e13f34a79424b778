"""Assembly: the blocks are what was trained, belong together, and become one student; relays too."""

from __future__ import annotations

import errno
import json
import os
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from students import CODE, built, make_job

import zgstore
from tests.faults.disks import fill, small_disk
from zgtrain.assembler import assemble, gather
from zgtrain.blockreport import read_report
from zgtrain.blocks import run
from zgtrain.checkpoint import load, save, state_digest
from zgtrain.files import write_json
from zgtrain.jobfile import load_job
from zgtrain.prefixes import joined, relayed
from zgtrain.relaying import relay

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _own_import_path(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))


def trained(folder, *, blocks=(0, 1), **more):
    path = make_job(folder, **more)
    job, store, _ = built(path)
    for block in blocks:
        run(job, block=block)
    return path, job, store


def test_a_student_is_the_trained_blocks_one_after_the_other_and_its_manifest_says_so(tmp_path):
    _, job, store = trained(tmp_path)
    made = assemble(job, tmp_path / "student")
    reports = [read_report(job, block) for block in (0, 1)]
    assert [state_digest(block) for block in made.student] == [report.state_digest for report in reports]
    assert not made.student.training
    manifest = json.loads((tmp_path / "student" / "zgtrain.json").read_text())
    assert manifest["snapshot"] == str(store.resolve("cache")) == reports[0].snapshot
    assert manifest["job"] == job.identity()
    assert [each["state_digest"] for each in manifest["blocks"]] == [report.state_digest for report in reports]
    weights = load_file(tmp_path / "student" / "model.safetensors")
    assert torch.equal(weights["1.up.weight"], made.student[1].up.weight)
    assert set(manifest["files"]) == {"model.safetensors"}
    assert {each.stat().st_mode & 0o777 for each in (tmp_path / "student").iterdir()} == {0o644}
    again = assemble(job, tmp_path / "student")  # what an assembly wrote is replaced
    assert again.manifest["state_digest"] == made.manifest["state_digest"]
    with pytest.raises(zgstore.Invalid, match="no student of ours"):
        assemble(job, tmp_path)


def test_blocks_that_make_buffers_as_they_run_or_have_expanded_ones_are_assembled_and_relayed(tmp_path):
    tables = """
class Tables(Block):
    def __init__(self):
        super().__init__()
        self.register_buffer("ones", torch.ones(1, 1).expand(6, 16))
    def forward(self, x):
        if not hasattr(self, "cos"):
            self.register_buffer("cos", torch.linspace(1, 2, x.shape[1]), persistent=False)
        return super().forward(x) * self.cos[:, None] * self.ones
def block(number, **_):
    return Tables()
"""
    _, job, _ = trained(tmp_path, code=CODE + tables)
    made = assemble(job, tmp_path / "student")
    assert [state_digest(block) for block in made.student] == [read_report(job, b).state_digest for b in (0, 1)]
    weights = load_file(tmp_path / "student" / "model.safetensors")
    assert torch.equal(weights["0.ones"], torch.ones(6, 16))
    assert not any("cos" in name for name in weights)
    reports = relay(job)
    assert [state_digest(block) for block in gather(relayed(job)).blocks] == [each.state_digest for each in reports]
    for path in (tmp_path / "student" / "mine.txt", tmp_path / "student" / "mine" / "notes.md"):
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
        with pytest.raises(zgstore.Invalid, match=f"no assembly wrote '{path.relative_to(tmp_path / 'student')}'"):
            assemble(job, tmp_path / "student")
        path.unlink()
    assert sorted(each.name for each in tmp_path.iterdir() if "student" in each.name and "toy" not in each.name) == [
        "student"
    ]


def test_a_full_disk_is_said_to_be_one_and_leaves_the_student_before(tmp_path):
    _, job, _ = trained(tmp_path)
    with small_disk(tmp_path / "disk", megabytes=1) as disk:
        assemble(job, disk / "student")
        before = {path.name: path.read_bytes() for path in (disk / "student").iterdir()}
        fill(disk, leave_bytes=8192)
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)) as caught:
            assemble(job, disk / "student")
        assert caught.value.errno == errno.ENOSPC
        assert {path.name: path.read_bytes() for path in (disk / "student").iterdir()} == before
        assert sorted(path.name for path in disk.iterdir()) == ["ballast", "student"]


def test_a_student_that_saves_itself_is_let(tmp_path):
    code = CODE + (
        "\n\nclass Saving(nn.Sequential):\n"
        "    def save_pretrained(self, place):\n        (place / 'own.txt').write_text('saved')\n"
    )
    code = code.replace("    return nn.Sequential(*blocks)", "    return Saving(*blocks)")
    _, job, _ = trained(tmp_path, code=code)
    assemble(job, tmp_path / "student")
    assert sorted(each.name for each in (tmp_path / "student").iterdir()) == ["own.txt", "zgtrain.json"]


def test_what_is_not_trained_is_named(tmp_path):
    path, job, _ = trained(tmp_path, blocks=(0,))
    with pytest.raises(zgstore.NotFound, match="block 1 of 2 not trained") as caught:
        assemble(job)
    assert "zgtrain launch" in caught.value.hint
    with pytest.raises(zgstore.NotFound, match="blocks 0, 1"):
        assemble(load_job(path, ["train.steps=9"]))


def test_blocks_of_other_jobs_snapshots_or_sources_are_refused_each_named(tmp_path):
    path, job, _ = trained(tmp_path)

    def told(**fields):
        report = read_report(job, 1)
        write_json(job.folder(1) / "report.json", replace(report, **fields).as_value())
        with pytest.raises(zgstore.Refused) as caught:
            gather(job)
        write_json(job.folder(1) / "report.json", report.as_value())
        return caught.value

    other = "blake3:" + "7" * 64
    error = told(snapshot=other)
    assert error.message.startswith("the blocks are of different snapshots: block 0 of ")
    assert f"block 1 of {'7' * 12};" in f"{error.message};"  # as pages show a digest
    assert other in error.fields["blocks"]
    assert "--fresh" in error.hint
    assert "different jobs" in told(job=other).message
    assert "different sources: block 0 of the snapshot; block 1 of live" in told(targets="live").message
    assert "maps 'layers.2:in' to 'x'" in told(target="x").message
    told_following = replace(read_report(job, 1), targets="following")
    write_json(job.folder(1) / "report.json", told_following.as_value())
    gather(job)  # it read the same bits as they came
    with pytest.raises(zgstore.Refused, match="not of this job"):
        gather(load_job(path, ["train.seed=5"]))


def test_a_rebuilt_snapshot_is_another_one(tmp_path):
    _, job, store = trained(tmp_path)
    text = job.snapshot.recipe.read_text().replace("rows = 10", "rows = 12")
    job.snapshot.recipe.write_text(text)
    zgstore.build(store, job.snapshot.recipe)
    with pytest.raises(zgstore.Refused, match="not of this snapshot: blocks 0, 1 of"):
        gather(job)


def test_a_checkpoint_that_is_not_the_reports_is_corrupt(tmp_path):
    _, job, _ = trained(tmp_path)
    file = job.folder(1) / "checkpoint.pt"
    state = load(file)
    state["block_state"]["up.weight"][0, 0] += 1
    save(file, state)
    with pytest.raises(zgstore.Corrupt, match="block 1") as caught:
        gather(job)
    assert caught.value.actual != caught.value.expected == read_report(job, 1).state_digest
    file.unlink()
    with pytest.raises(zgstore.Missing, match="no checkpoint"):
        gather(job)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_parameter_in_two_blocks_is_refused_unless_frozen(tmp_path, frozen):
    _, job, _ = trained(tmp_path)
    module = sys.modules[job.student.block.text.partition(":")[0]]
    module.SHARED = torch.nn.Linear(16, 32).requires_grad_(not frozen)
    original = module.block

    def sharing(number, **args):
        made = original(number, **args)
        made.up = module.SHARED
        return made

    module.block = sharing
    same = load(job.folder(0) / "checkpoint.pt")["block_state"]
    for block in (0, 1):
        state = load(job.folder(block) / "checkpoint.pt")
        state["block_state"] |= {name: same[name] for name in ("up.weight", "up.bias")}
        save(job.folder(block) / "checkpoint.pt", state)
        made = sharing(block)
        made.load_state_dict({name: each for name, each in state["block_state"].items() if name != "calls"})
        made.calls.copy_(state["block_state"]["calls"])
        report = replace(read_report(job, block), state_digest=state_digest(made))
        write_json(job.folder(block) / "report.json", report.as_value())
    if frozen:
        gather(job)
        return
    with pytest.raises(zgstore.Refused, match=r"'up\.weight' of block 1 is also 'up\.weight' of block 0"):
        gather(job)


# ---- relays ----


@pytest.mark.parametrize(("ragged", "storage"), [(False, ""), (True, 'dtype = "bfloat16"')])
def test_a_relay_trains_each_block_on_what_those_before_it_make(tmp_path, ragged, storage):
    boundaries = ["layers.0:in", "layers.1:in", "layers.2:in", "norm:in"]
    _, job, store = trained(tmp_path, blocks=(0, 1, 2), ragged=ragged, storage=storage, boundaries=boundaries)
    reports = relay(job, steps=5)
    again = relayed(job)
    assert again.train.steps == 5
    assert [report.targets for report in reports] == ["cached", "relay", "relay"]
    assert reports[0].state_digest == read_report(job, 0).state_digest
    assert [report.initial_digest for report in reports[1:]] == [read_report(job, b).state_digest for b in (1, 2)]
    assert len({report.live_teacher_parameters for report in [*reports, read_report(job, 2)]}) == 1  # no neighbour
    made = assemble(again)
    assert made.manifest["relay"]
    # What block 2 was given is what the assembled prefix makes of the teacher's first boundary.
    prefix = store.resolve(f"relay/{zgstore.Digest.parse(again.identity()).short}/2")
    teacher = store.resolve("cache")
    with joined(store, teacher, prefix, "layers.2:in", "norm:in", context=["attention_mask", "position_ids"]) as data:
        batch = data.batch([7, 1])
    with zgstore.read(store, "cache") as reader:
        first = reader.batch([7, 1])["layers.0:in"].float()
    with torch.no_grad():
        seen = made.student[1](made.student[0](first).to(batch.source.dtype).float()).to(batch.source.dtype)
    mask = batch.context["mask"]
    assert torch.equal(seen[mask], batch.source[mask])
    assert bool(mask.all()) is not ragged
    before = [report.state_digest for report in reports]
    assert [report.state_digest for report in relay(job, steps=5)] == before
    # The parallel blocks are as they were.
    assert [state_digest(block) for block in gather(job).blocks] == [read_report(job, b).state_digest for b in range(3)]


def test_a_relay_that_is_stopped_anywhere_ends_as_one_that_was_not(tmp_path):
    path, _, _ = trained(tmp_path / "one")
    whole = [report.state_digest for report in relay(load_job(path), steps=6)]
    asked = []

    def stop():
        asked.append(1)
        return len(asked) % 5 == 0

    for _ in range(40):
        try:
            reports = relay(load_job(path), steps=6, fresh=not asked, stop=stop)
            break
        except zgstore.Interrupted:
            continue
    assert [report.state_digest for report in reports] == whole
    assert len(asked) > 5


def test_a_relay_from_scratch_needs_no_launch_and_is_another_one(tmp_path):
    _, job, _ = trained(tmp_path, blocks=())
    reports = relay(job, from_scratch=True)
    assert [report.steps for report in reports] == [7, 7]
    assert reports[0].initial_digest != reports[0].state_digest
    assemble(relayed(job))
    with pytest.raises(zgstore.Refused, match="begun in another way") as caught:
        relay(job)
    assert "--fresh" in caught.value.hint


def test_a_relay_whose_schedule_ends_with_its_steps_is_gone_on_with_by_as_many(tmp_path):
    path, _, _ = trained(tmp_path, train='schedule = { name = "cosine" }')
    relay(load_job(path), steps=3)
    with pytest.raises(zgstore.Refused, match="a relay of 3 steps, which its schedule ends with") as caught:
        relay(load_job(path))
    assert "--steps 3" in caught.value.hint
    relay(load_job(path), steps=3)


def test_a_fresh_relay_waits_for_nobody_and_clears_nothing_under_another(tmp_path):
    _, job, _ = trained(tmp_path)
    relay(job, steps=3)
    folder = relayed(job).folder(1)
    left, refused = sorted(folder.iterdir()), []

    def meanwhile(_block):
        with pytest.raises(zgstore.Busy, match="being relayed"):
            relay(job, fresh=True)
        refused.append(sorted(folder.iterdir()) == left)
        return lambda _line: None

    relay(job, steps=5, progress=meanwhile)
    assert refused == [True]


def test_a_relay_of_other_blocks_than_it_began_with_is_refused_and_begins_anew_with_fresh(tmp_path):
    path, job, _ = trained(tmp_path)
    relay(job, steps=4)
    longer = load_job(path, ["train.steps=12"])
    for block in (0, 1):
        run(longer, block=block)
    with pytest.raises(zgstore.Refused, match="began with other blocks") as caught:
        relay(longer)
    assert "--fresh" in caught.value.hint
    reports = relay(longer, fresh=True)
    assert reports[0].state_digest == read_report(longer, 0).state_digest
    assert reports[1].initial_digest == read_report(longer, 1).state_digest
    assert [report.steps for report in reports] == [12, 12]
    assert relayed(longer).train.steps == 12


def test_a_relay_that_was_stopped_says_how_to_go_on_without_touching_the_jobs_own_blocks(tmp_path):
    _, job, _ = trained(tmp_path)
    relay(job, steps=4)
    asked = []

    def stop():
        asked.append(1)
        return len(asked) > 4

    with pytest.raises(zgstore.Interrupted):
        relay(job, steps=50, stop=stop)
    again = relayed(job)
    with pytest.raises(zgstore.NotFound) as caught:
        gather(again)
    assert f"zgtrain relay {job.path} --steps 50" in caught.value.hint
    with pytest.raises(zgstore.Refused, match="block 1 was done at step 4") as caught:
        relay(job, steps=4)
    saved = load(again.folder(1) / "checkpoint.pt")["ledger"]["step"]
    assert f"zgtrain relay {job.path} --steps {saved}`" in caught.value.hint
    assert f"zgtrain relay {job.path} --fresh" in caught.value.hint
    assert "zgtrain run" not in caught.value.hint
    assert relayed(job).train.steps == 50  # what it was refused with is not remembered
    assert [report.steps for report in relay(job, steps=saved)] == [7, saved]
    (relayed(job).folder(1) / "checkpoint.pt").unlink()
    with pytest.raises(zgstore.Missing) as caught:
        gather(relayed(job))
    assert caught.value.hint == f"train it again: `zgtrain relay {job.path} --fresh`"


def test_a_relay_begins_with_what_the_job_has_left_or_says_why_not(tmp_path):
    path, job, store = trained(tmp_path)
    longer = load_job(path, ["train.steps=30"])
    reports = relay(longer, steps=3)  # the job has trained its blocks for seven steps, and they are what it has
    assert reports[0].state_digest == read_report(job, 0).state_digest
    assert reports[1].initial_digest == read_report(job, 1).state_digest
    (job.folder(1) / "report.json").rename(tmp_path / "report.json")
    with pytest.raises(zgstore.Refused, match=r"block 1 in .* is not trained to its end") as caught:
        relay(longer, fresh=True)
    assert "--block 1" in caught.value.hint
    assert "--from-scratch" in caught.value.hint
    (tmp_path / "report.json").rename(job.folder(1) / "report.json")
    job.snapshot.recipe.write_text(job.snapshot.recipe.read_text().replace("rows = 10", "rows = 14"))
    zgstore.build(store, job.snapshot.recipe)
    with pytest.raises(zgstore.Refused, match=r"block 0 in .* is of snapshot"):
        relay(job, fresh=True)
    snapshots = {report.snapshot for report in relay(job, fresh=True, from_scratch=True)}
    assert snapshots == {str(store.resolve("cache"))}


def test_a_block_that_is_trained_on_while_it_is_relayed_is_not_begun_with(tmp_path):
    path, job, _ = trained(tmp_path)

    def meanwhile(block, done, rows):
        if (block, done) == (0, rows):
            with torch.enable_grad():
                run(load_job(path, ["train.steps=12"]), block=1)

    with pytest.raises(zgstore.Refused, match=r"block 1 of .* was trained on while it was relayed"):
        relay(job, captured=meanwhile)
    relay(job, fresh=True)


def test_a_fresh_relay_clears_what_lies_behind_a_link(tmp_path):
    _, job, _ = trained(tmp_path)
    relay(job, steps=3)
    place = relayed(job).output
    place.rename(tmp_path / "elsewhere")
    place.symlink_to(tmp_path / "elsewhere")
    reports = relay(job, from_scratch=True, fresh=True)
    assert place.is_symlink()
    assert reports[0].initial_digest == read_report(job, 0).initial_digest
    assert reports[0].resumed_from is None


def test_a_student_is_written_behind_a_link_and_what_a_kill_left_is_swept(tmp_path):
    _, job, _ = trained(tmp_path)
    (tmp_path / "disk").mkdir()
    (tmp_path / "student").symlink_to(tmp_path / "disk" / "st")
    (tmp_path / "disk" / "st").mkdir()
    left = tmp_path / "disk" / ".st.new.99999999"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    for _ in range(2):
        assemble(job, tmp_path / "student")
        assert (tmp_path / "student").is_symlink()
        assert [each.name for each in (tmp_path / "disk").iterdir()] == ["st"]
    assert load_file(tmp_path / "disk" / "st" / "model.safetensors")


def test_a_relay_goes_on_to_the_steps_that_are_asked_for_now(tmp_path):
    _, job, _ = trained(tmp_path)
    assert [report.steps for report in relay(job, steps=3)] == [7, 3]  # the first is taken over
    assert [report.steps for report in relay(job)] == [7, 7]
    assert relayed(job).train.steps == 7
    (relayed(job).output / "relay.json").write_text('{"job": "x"')
    with pytest.raises(zgstore.Corrupt, match=r"relay\.json") as caught:
        relay(job)
    assert "--fresh" in caught.value.hint
    relay(job, fresh=True)


def test_a_relay_whose_prefix_changed_is_refused_at_assembly(tmp_path):
    _, job, _ = trained(tmp_path)
    relay(job, steps=4)
    again = relayed(job)
    report = read_report(again, 1)
    write_json(again.folder(1) / "report.json", replace(report, pins="blake3:" + "1" * 64).as_value())
    with pytest.raises(zgstore.Refused, match="states of other blocks"):
        gather(again)


def test_student_and_teacher_states_of_other_data_are_refused(tmp_path):
    _, job, store = trained(tmp_path)
    relay(job, steps=4)
    prefix = store.resolve(f"relay/{zgstore.Digest.parse(relayed(job).identity()).short}/1")
    job.snapshot.recipe.write_text(job.snapshot.recipe.read_text().replace("rows = 10", "rows = 9"))
    other = zgstore.build(store, job.snapshot.recipe, ref="other").snapshot
    with pytest.raises(zgstore.Refused, match="not of the same data"):
        joined(store, other, prefix, "layers.2:in", "norm:in", context=[])
