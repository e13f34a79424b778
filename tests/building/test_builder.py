import random
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from projects import CODE, make_project, write_recipe, write_rows

from tests.benchmarks import synthetic
from zgstore.building import lockfile
from zgstore.building.builder import build
from zgstore.building.capture import Capture
from zgstore.building.estimator import estimate, points
from zgstore.building.inputs import read_inputs
from zgstore.building.recipe import load_recipe
from zgstore.errors import Conflict, Interrupted, Invalid, NonFinite, Refused
from zgstore.format.fields import all_u64
from zgstore.format.tensorfile import decode
from zgstore.storage.store import Store
from zgstore.upkeep.verifier import verify


def column(store, snapshot, name):
    """All of a column, shard by shard."""
    value = store.snapshot(snapshot)
    at, described = value.column(name)
    parts = []
    for shard in store.shards(value):
        content = store.objects.path(shard.blobs[at].digest, "objects").read_bytes()
        parts.append(decode(content, described))
    return parts


def dense(store, snapshot, name):
    return torch.cat([part.data for part in column(store, snapshot, name)])


def test_a_build_stores_what_the_teacher_computes_bit_for_bit(tmp_path, store):
    path, _module = make_project(tmp_path / "p")
    report = build(store, path)
    assert store.refs.get("cache") == report.snapshot
    assert report.samples == 12
    assert report.teacher_loaded
    recipe = load_recipe(path)
    teacher = recipe.teacher.load()
    expected = {name: [] for name in recipe.capture.boundaries}
    with Capture(teacher, recipe.capture.boundaries) as capture:
        for batch in recipe.data.batches():
            sample = capture(batch)
            for name, tensor in sample.columns.items():
                expected[name].append(tensor.clone())
    for name, tensors in expected.items():
        assert torch.equal(dense(store, report.snapshot, name), torch.cat(tensors))
    names = [each.name for each in store.snapshot(report.snapshot).columns]
    assert names == [*recipe.capture.boundaries, "input_ids", "labels", "id"]
    assert torch.equal(dense(store, report.snapshot, "id"), torch.arange(12))


def test_interrupts_at_any_moment_leave_a_build_that_goes_on(tmp_path, interrupts):
    recipe = synthetic.recipe(tmp_path, count=6, rows=2, length=256, width=256, layers=2, cut=2)
    expected = build(Store.init(tmp_path / "whole"), recipe).snapshot
    draw, came, stores = random.Random(0), 0, 0
    while came < 20:
        store = Store.init(tmp_path / str(stores))
        stores += 1
        report = None
        while report is None:
            try:
                with interrupts.within(draw.uniform(1e-3, 0.1)):
                    report = build(store, recipe)
            except KeyboardInterrupt:
                came += 1
        assert report.snapshot == expected
        assert verify(store).report.ok


def test_nothing_missing_means_no_teacher_and_no_new_record(tmp_path, store):
    path, module = make_project(tmp_path / "p")
    first = build(store, path)
    loads = len(sys.modules[module].LOADED)
    again = build(store, path)
    assert again.snapshot == first.snapshot
    assert not again.teacher_loaded
    assert len(sys.modules[module].LOADED) == loads
    assert (again.shards_built, again.columns_built, again.new_bytes) == (0, 0, 0)
    assert len(store.refs.log("cache")) == 1


def test_a_further_name_for_what_is_there_does_not_change_what_building_it_took(tmp_path, store):
    path, _ = make_project(tmp_path / "p")
    first = build(store, path)
    took = store.record_of(first.snapshot).fields["durations"]
    again = build(store, path, ref="paper")
    assert again.snapshot == first.snapshot
    records = [store.record(store.refs.log(name)[-1].record) for name in ("cache", "paper")]
    assert records[0] != records[1]
    assert [record.fields["durations"] for record in records] == [took, took]


def test_a_no_op_reads_no_byte_of_a_blob(tmp_path, store):
    path, _ = make_project(tmp_path / "p")
    first = build(store, path)
    for blob in (store.path / "objects").glob("*/*.safetensors"):
        blob.chmod(0o644)
        size = blob.stat().st_size
        blob.write_bytes(b"\0" * size)
    assert build(store, path).snapshot == first.snapshot


def test_appended_rows_capture_the_last_shard_alone(tmp_path, store):
    path, _ = make_project(tmp_path / "p", rows=12)
    build(store, path)
    write_rows(tmp_path / "p", 13)
    report = build(store, path)
    assert (report.shards_built, report.shards_reused) == (1, 3)
    other = Store.init(tmp_path / "other")
    assert build(other, path).snapshot == report.snapshot


def test_a_new_boundary_captures_its_column_alone(tmp_path, store):
    path, module = make_project(tmp_path / "p")
    first = build(store, path)
    wider = write_recipe(tmp_path / "p", module, boundaries=("layers.0:in", "layers.1:in", "layers.2:in", "norm:in"))
    report = build(store, wider, explain=True)
    assert (report.columns_built, report.columns_reused) == (1, 6)
    assert {why.column for why in report.explain if not why.hit} == {"layers.1:in"}
    assert {why.reason for why in report.explain if not why.hit} == {"new column"}
    shared = dense(store, report.snapshot, "layers.2:in")
    assert torch.equal(shared, dense(store, first.snapshot, "layers.2:in"))
    assert report.snapshot == build(Store.init(tmp_path / "other"), wider).snapshot


def test_partitions_of_one_teacher_share_their_bytes(tmp_path, store):
    code = CODE.replace("layers=4", "layers=8")
    points = tuple(f"layers.{at}:in" for at in range(8))
    path, module = make_project(tmp_path / "p", code=code, boundaries=(*points, "norm:in"))
    whole = build(store, path, ref="b8")
    for count in (4, 2):
        part = write_recipe(tmp_path / "p", module, boundaries=(*points[:: 8 // count], "norm:in"))
        report = build(store, part, ref=f"b{count}")
        assert report.new_bytes == 0
        assert not report.teacher_loaded
    kept = sum(blob.stat().st_size for blob in (store.path / "objects").glob("*/*.safetensors"))
    assert kept <= whole.total_bytes


def test_new_bytes_are_those_that_the_store_did_not_have(tmp_path, store):
    path, module = make_project(tmp_path / "p")
    first = build(store, path, ref="four")
    shallower = write_recipe(tmp_path / "p", module, revision="rev2", teacher_args="layers = 3")
    second = build(store, shallower, ref="three")
    assert second.teacher_loaded
    kept = sum(blob.stat().st_size for blob in (store.path / "objects").glob("*/*.safetensors"))
    assert first.new_bytes + second.new_bytes == kept
    assert 0 < second.new_bytes < second.total_bytes // 2


def test_the_digest_does_not_depend_on_path_workers_or_memory(tmp_path, store, monkeypatch):
    path, _module = make_project(tmp_path / "p", rows=11)
    first = build(store, path)
    moved = tmp_path / "elsewhere" / "deep"
    moved.mkdir(parents=True)
    for file in (tmp_path / "p").iterdir():
        if file.is_file():
            (moved / file.name).write_bytes(file.read_bytes())
    monkeypatch.setattr("zgstore.building.inputs.KEEP_BYTES", 0)
    assert build(Store.init(tmp_path / "s2"), moved / "cache.toml").snapshot == first.snapshot
    shared = Store.init(tmp_path / "s3")
    for index in range(3):
        report = build(shared, path, worker=(index, 3))
        assert report.snapshot is None
    last = build(shared, path)
    assert last.snapshot == first.snapshot
    assert last.shards_built == 0
    assert not last.teacher_loaded


def test_several_devices_give_the_same_snapshot(tmp_path, store):
    path, _ = make_project(tmp_path / "p", rows=20)
    first = build(store, path)
    assert build(Store.init(tmp_path / "s2"), path, devices=["cpu", "cpu"]).snapshot == first.snapshot


def test_a_fault_of_one_replica_ends_the_others_at_their_next_shard(tmp_path, store):
    slow = (
        CODE.replace(
            "        x = self.embed(input_ids)\n",
            "        if input_ids[0, 0] == 29:\n            raise RuntimeError('this replica broke')\n"
            "        SEEN.append(1)\n        time.sleep(0.05)\n        x = self.embed(input_ids)\n",
        )
        .replace("import json\n", "import json\nimport time\n")
        .replace("LOADED = []", "LOADED = []\nSEEN = []")
    )
    path, module = make_project(tmp_path / "p", rows=30, code=slow, storage="batches_per_shard = 1")
    with pytest.raises(RuntimeError, match="this replica broke"):
        build(store, path, devices=["cpu", "cpu"])
    assert len(sys.modules[module].SEEN) < 6


def test_a_limit_gives_exactly_so_many_rows_and_moves_no_ref(tmp_path, store):
    path, _ = make_project(tmp_path / "p", rows=12)
    report = build(store, path, limit=7)
    assert report.samples == 7
    assert report.ref is None
    assert store.refs.get("cache") is None
    assert dense(store, report.snapshot, "norm:in").shape == (7, 6, 8)
    full = build(store, path)
    assert (full.shards_built, full.shards_reused) == (2, 1)


@pytest.mark.parametrize("kind", ["text", "weights", "length", "stored"])
def test_a_change_is_a_miss_or_a_refusal_that_names_it(tmp_path, store, kind):
    path, module = make_project(tmp_path / "p")
    build(store, path)
    if kind == "text":
        rows = (tmp_path / "p" / "rows.jsonl").read_text().splitlines()
        rows[5] = '{"tokens": [1, 2, 3, 4, 5, 6]}'
        (tmp_path / "p" / "rows.jsonl").write_text("\n".join(rows))
        with pytest.raises(Refused, match="row 5") as caught:
            build(store, path)
        assert caught.value.exit_code == 25
    elif kind == "weights":
        recipe = write_recipe(tmp_path / "p", module, teacher_args="")
        source = tmp_path / "p" / f"{module}.py"
        source.write_text(source.read_text().replace("torch.manual_seed(seed)", "torch.manual_seed(seed + 1)"))
        del sys.modules[module]
        with pytest.raises(Refused, match="weights") as caught:
            build(store, recipe)
        assert caught.value.exit_code == 25
    elif kind == "length":
        longer = write_recipe(tmp_path / "p", module, data_args="length = 9")
        report = build(store, longer, explain=True)
        reasons = {why.reason for why in report.explain if not why.hit}
        assert reasons == {"changed: data.pins.length"}
    else:
        narrow = write_recipe(tmp_path / "p", module, storage='dtype = "bfloat16"\nbatches_per_shard = 2')
        report = build(store, narrow, explain=True)
        reasons = {why.reason for why in report.explain if not why.hit}
        assert reasons == {"changed: dtype"}
        assert {why.column for why in report.explain if why.hit} == {"input_ids", "labels", "id"}


def test_another_revision_is_another_teacher_and_reuses_the_context(tmp_path, store):
    path, module = make_project(tmp_path / "p")
    build(store, path)
    other = write_recipe(tmp_path / "p", module, revision="rev2", teacher_args="seed = 5")
    report = build(store, other, explain=True)
    assert report.columns_built == 3
    assert {why.column for why in report.explain if why.hit} == {"input_ids", "labels", "id"}
    assert {why.reason for why in report.explain if not why.hit} == {"changed: teacher.measured"}


def test_a_changed_line_of_code_is_a_miss_and_the_same_snapshot(tmp_path, store):
    path, module = make_project(tmp_path / "p")
    first = build(store, path)
    source = tmp_path / "p" / f"{module}.py"
    source.write_text(source.read_text() + "\n# a remark\n")
    del sys.modules[module]
    report = build(store, path, explain=True)
    assert report.teacher_loaded
    assert report.snapshot == first.snapshot
    assert {why.reason for why in report.explain if not why.hit} == {"changed: source code of the teacher's classes"}


def test_the_files_of_a_teacher_make_a_no_op_sure(tmp_path, store):
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "weights.bin").write_bytes(b"one")
    path, _module = make_project(tmp_path / "p", teacher='files = ["weights.bin"]')
    assert build(store, path).teacher == "measured"
    again = build(store, path)
    assert (again.teacher, again.teacher_loaded) == ("measured", False)
    (tmp_path / "p" / "weights.bin").write_bytes(b"two")
    loaded = build(store, path)
    assert (loaded.teacher_loaded, loaded.shards_built) == (True, 0)


def test_check_teacher_measures_it_though_nothing_is_missing(tmp_path, store):
    path, _ = make_project(tmp_path / "p")
    build(store, path)
    assert build(store, path).teacher == "declared"
    checked = build(store, path, check_teacher=True)
    assert (checked.teacher, checked.teacher_loaded, checked.shards_built) == ("measured", True, 0)


def test_ragged_rows_lose_their_padding_and_keep_where_they_began(tmp_path, store):
    path, _module = make_project(
        tmp_path / "p", data_args='padding = "left"', context=("input_ids", "labels"),
        capture='lengths = "attention_mask"\nsequence = ["input_ids", "labels"]',
    )  # fmt: skip
    write_rows(tmp_path / "p", 9, ragged=True, ids=True)
    report = build(store, path)
    parts = column(store, report.snapshot, "layers.2:in")
    lengths = torch.cat([part.offsets.diff() for part in parts])
    assert lengths.tolist() == [2 + row % 5 for row in range(9)]
    assert dense(store, report.snapshot, "start").tolist() == [6 - int(length) for length in lengths]
    assert dense(store, report.snapshot, "id").tolist() == [1000 + row for row in range(9)]
    described = {each.name: each.shape for each in store.snapshot(report.snapshot).columns}
    assert described["input_ids"] == (None,)
    assert described["norm:in"] == (None, 8)


def test_the_padding_does_not_change_which_data_it_is(tmp_path, store):
    make = {"capture": 'lengths = "attention_mask"\nsequence = ["input_ids", "labels"]'}
    path, module = make_project(tmp_path / "p", **make)
    write_rows(tmp_path / "p", 9, ragged=True)
    one = build(store, path)
    other = build(store, write_recipe(tmp_path / "p", module, data_args="batch_size = 3", **make))
    pins = [store.snapshot(report.snapshot).pins.data["digest"] for report in (one, other)]
    assert pins[0] == pins[1]


def test_a_codec_and_a_dtype_apply_to_the_columns_they_are_given_for(tmp_path, store):
    storage = 'dtype = "bfloat16"\nbatches_per_shard = 2\n[storage.columns."norm:in"]\ncodec = "int8"\n'
    path, _ = make_project(tmp_path / "p", storage=storage)
    report = build(store, path)
    described = {each.name: each for each in store.snapshot(report.snapshot).columns}
    assert (described["layers.0:in"].dtype, described["layers.0:in"].codec) == ("BF16", "raw")
    assert (described["norm:in"].dtype, described["norm:in"].codec) == ("BF16", "int8")
    assert described["input_ids"].dtype == "I64"
    assert store.record_of(report.snapshot).fields["statistics"]["norm:in"]["error"] > 0


def test_a_column_can_have_a_dtype_of_its_own(tmp_path, store):
    storage = 'dtype = "bfloat16"\nbatches_per_shard = 2\n[storage.columns."norm:in"]\ndtype = "float16"\n'
    path, _ = make_project(tmp_path / "p", storage=storage)
    report = build(store, path)
    described = {each.name: each.dtype for each in store.snapshot(report.snapshot).columns}
    assert (described["layers.0:in"], described["norm:in"]) == ("BF16", "F16")
    wide = write_recipe(tmp_path / "p", path.read_text().split('"')[1].split(":")[0])
    exact = dense(store, build(store, wide, ref="wide").snapshot, "norm:in")
    assert torch.equal(dense(store, report.snapshot, "norm:in"), exact.to(torch.float16))


def test_another_batch_size_or_cut_is_named_and_changes_no_pin(tmp_path, store):
    path, module = make_project(tmp_path / "p")
    first = build(store, path)
    wider = build(store, write_recipe(tmp_path / "p", module, data_args="batch_size = 4"), explain=True)
    assert {why.reason for why in wider.explain if not why.hit} >= {"changed: batches (their size, order or padding)"}
    cut = build(store, write_recipe(tmp_path / "p", module, storage="batches_per_shard = 3"), ref="cut", explain=True)
    finer = build(store, write_recipe(tmp_path / "p", module, storage="batches_per_shard = 1"), ref="cut", explain=True)
    assert {why.reason for why in finer.explain if not why.hit} == {"changed: cut"}
    assert first.pins == wider.pins == cut.pins


def test_outputs_and_inputs_are_what_the_recipe_names(tmp_path, store):
    capture = 'outputs = ["head:out"]\ninputs = ["input_ids"]'
    path, _ = make_project(tmp_path / "p", capture=capture)
    report = build(store, path)
    snapshot = store.snapshot(report.snapshot)
    assert snapshot.column("head:out")[1].role == "output"
    assert dense(store, report.snapshot, "head:out").shape == (12, 6, 32)
    assert snapshot.pins.capture["inputs"] == ["input_ids"]


MASKING_HEAD = """
class Head(nn.Linear):
    def forward(self, x):
        logits = super().forward(x)
        logits[..., 5:] = {what}
        return logits


_plain = teacher


def teacher(**args):
    model = _plain(**args)
    model.head = Head(8, 32)
    return model
"""


@pytest.mark.parametrize(
    ("what", "codec", "legal"),
    [
        ("float('-inf')", "raw", True), ("float('-inf')", "int8", False), ("float('inf')", "raw", False),
        ("torch.where(x[..., :1].abs() > 9e9, 0.0, float('nan')).expand(-1, -1, 27)", "raw", False),
    ],
)  # fmt: skip
def test_masked_logits_may_be_minus_infinity_and_nothing_else(tmp_path, store, what, codec, legal):
    path, _ = make_project(
        tmp_path / "p", more=MASKING_HEAD.format(what=what), capture='outputs = ["head:out"]',
        storage=f'batches_per_shard = 2\n[storage.columns."head:out"]\ncodec = "{codec}"',
    )  # fmt: skip
    if legal:
        report = build(store, path)
        assert dense(store, report.snapshot, "head:out")[..., 5:].isneginf().all()
        assert build(store, path).snapshot == report.snapshot
        return
    with pytest.raises(NonFinite, match="head:out"):
        build(store, path)
    with pytest.raises(Invalid, match="no row is left"):
        build(store, path, on_nonfinite="drop")
    with pytest.raises(NonFinite, match="head:out"):  # what was kept with it dropped says so too
        build(store, path)


def test_nan_is_an_error_that_names_column_row_and_values_and_binds_nobody(tmp_path, store):
    path, _module = make_project(tmp_path / "p", teacher_args="poison = 15")
    with pytest.raises(NonFinite) as caught:
        build(store, path)
    assert "layers.0:in" in caught.value.message
    assert "row 2" in caught.value.message
    assert "nan" in caught.value.message
    with pytest.raises(NonFinite):
        build(store, path)
    report = build(store, path, on_nonfinite="drop")
    dropped = store.dropped(store.snapshot(report.snapshot))
    assert 2 in dropped.masked
    assert report.samples == 12 - len(dropped.masked)
    assert dropped.masked_reasons[0] == "layers.0:in is not finite"
    with pytest.raises(NonFinite):
        build(store, path)


def test_what_makes_no_sense_is_an_error_at_build_time(tmp_path, store):
    _path, module = make_project(tmp_path / "p")
    with pytest.raises(Invalid, match="no context column 'position_ids'") as caught:
        build(store, write_recipe(tmp_path / "p", module, context=("position_ids",)))
    assert "input_ids" in caught.value.hint
    with pytest.raises(Invalid, match="no point"):
        build(store, write_recipe(tmp_path / "p", module, boundaries=("layers.9:in",)))
    (tmp_path / "p" / "rows.jsonl").write_text("")
    with pytest.raises(Invalid, match="no rows"):
        build(store, write_recipe(tmp_path / "p", module))


def test_a_shorter_build_that_ends_later_does_not_shorten_what_is_known_of_the_data(tmp_path, store):
    path, _ = make_project(tmp_path / "p")
    whole = []

    def meanwhile(told):
        if told.stage == "shards" and not whole:
            whole.append(build(store, path))

    build(store, path, limit=4, progress=meanwhile)
    write_rows(tmp_path / "p", 8)
    with (tmp_path / "p" / "rows.jsonl").open("a") as rows:
        rows.write('{"tokens": [1, 1, 1, 1, 1, 1]}\n')
    with pytest.raises(Refused, match="row 8"):
        build(store, path)


def test_all_labels_masked_is_refused(tmp_path, store):
    code = CODE.replace("torch.where(mask == 1, ids, -100)", "torch.full_like(ids, -100)")
    path, _ = make_project(tmp_path / "p", code=code)
    with pytest.raises(Invalid, match="every label"):
        build(store, path)


def test_a_stream_that_differs_when_it_is_read_again_is_refused(tmp_path, store, monkeypatch):
    monkeypatch.setattr("zgstore.building.inputs.KEEP_BYTES", 0)
    more = """
    CALLS = []
    def shifting():
        CALLS.append(1)
        for at in range(4):
            yield {"input_ids": torch.full((2, 3), at + len(CALLS))}
    """
    path, module = make_project(tmp_path / "p", more=more, context=("input_ids",))
    path.write_text(path.read_text().replace(f"{module}:batches", f"{module}:shifting"))
    with pytest.raises(Refused, match="second time"):
        build(store, path)


def test_constants_are_stored_once_and_must_not_change(tmp_path, store):
    more = """
    def constant(changes=False):
        for at in range(4):
            bias = torch.arange(5.0) + (at if changes else 0)
            yield {"input_ids": torch.full((2, 3), at), "bias": bias}
    """
    path, module = make_project(tmp_path / "p", more=more, context=("input_ids",), capture='constants = ["bias"]')
    path.write_text(path.read_text().replace(f"{module}:batches", f"{module}:constant"))
    report = build(store, path)
    (constant,) = store.snapshot(report.snapshot).constants
    assert (constant.name, constant.dtype, constant.shape) == ("bias", "F32", (5,))
    changing = path.read_text().replace('args = {  }\nid = "tiny/data"', 'args = { changes = true }\nid = "x"')
    path.write_text(changing)
    with pytest.raises(Invalid, match="constant 'bias'"):
        build(store, path)


EXTRACTOR = """
from zgstore.building.capture import Trajectory

def extract(teacher, batch, scale=1.0, drop=()):
    keep = [row for row, first in enumerate(batch["input_ids"][:, 0].tolist()) if first not in drop]
    hidden = teacher.embed(batch["input_ids"])[keep] * scale
    return Trajectory(
        boundaries={"a": hidden, "b": hidden * 2},
        constants={"table": teacher.embed.weight[:2]},
        left_out={row: "too dull" for row in range(len(batch["input_ids"])) if row not in keep},
    )
"""


def test_an_extractor_can_leave_rows_out_and_their_ids_survive(tmp_path, store):
    capture = 'extractor = "{m}:extract"\nargs = {{ drop = [{drop}] }}\nconstants = ["table"]'
    path, module = make_project(tmp_path / "p", more=EXTRACTOR, boundaries=())
    write = lambda drop: path.write_text(  # noqa: E731
        write_recipe(tmp_path / "p", module, boundaries=(), capture=capture.format(m=module, drop=drop)).read_text()
    )
    write("22")  # the first token of row 3
    report = build(store, path)
    snapshot = store.snapshot(report.snapshot)
    dropped = store.dropped(snapshot)
    assert dropped.left_out == (3,)
    assert dropped.left_out_reasons == ("too dull",)
    assert dense(store, report.snapshot, "id").tolist() == [row for row in range(12) if row != 3]
    assert dense(store, report.snapshot, "input_ids").shape == (11, 6)
    assert (report.samples, report.dropped) == (11, 1)
    assert [constant.name for constant in snapshot.constants] == ["table"]
    again = build(store, path)
    assert again.snapshot == report.snapshot
    assert not again.teacher_loaded
    write("1")
    changed = build(store, path, explain=True)
    assert changed.snapshot != report.snapshot
    assert any("extractor.args.drop" in why.reason for why in changed.explain)


def test_a_factory_may_fill_the_same_tensors_again_while_a_shard_waits(tmp_path, store, monkeypatch):
    monkeypatch.setattr("zgstore.building.inputs.KEEP_BYTES", 0)
    more = """
    def refilling():
        tokens, ids = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
        for at in range(4):
            yield {"input_ids": tokens.fill_(at), "id": ids.copy_(torch.arange(2) + 10 * at)}
    """
    folder = tmp_path / "p"
    path, module = make_project(folder, more=EXTRACTOR + textwrap.dedent(more), boundaries=())
    write_recipe(folder, module, boundaries=(), context=("input_ids",), capture=f'extractor = "{module}:extract"')
    path.write_text(path.read_text().replace(f"{module}:batches", f"{module}:refilling"))
    report = build(store, path)
    assert dense(store, report.snapshot, "input_ids")[:, 0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert dense(store, report.snapshot, "id").tolist() == [0, 1, 10, 11, 20, 21, 30, 31]


@pytest.mark.parametrize("more", ["first", "later"])
def test_an_extractor_gives_every_batch_the_same_columns(tmp_path, store, more):
    code = """
    from zgstore.capture import Trajectory

    def extract(teacher, batch, more):
        hidden = teacher.embed(batch["input_ids"])
        first = int(batch["input_ids"][0, 0]) == 1
        return Trajectory({"a": hidden} | ({"b": hidden} if first == (more == "first") else {}))
    """
    _path, module = make_project(tmp_path / "p", more=code, boundaries=())
    capture = f'extractor = "{module}:extract"\nargs = {{ more = "{more}" }}'
    with pytest.raises(Invalid, match="'b'"):
        build(store, write_recipe(tmp_path / "p", module, boundaries=(), capture=capture))


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"storage": 'batches_per_shard = 2\ndtype = "bfloat16"'},
        {"storage": 'batches_per_shard = 2\n[storage.columns."norm:in"]\ncodec = "int8"'},
        {"capture": 'lengths = "attention_mask"\nsequence = ["input_ids", "labels"]'},
    ],
)
def test_the_space_for_all_that_is_missing_is_asked_for_before_the_first_shard_is_written(
    tmp_path, store, monkeypatch, how
):
    asked = []
    monkeypatch.setattr(Store, "check_space", lambda _, size: asked.append((size, len(blobs_in(store)))))
    path, _module = make_project(tmp_path / "p", **how)
    write_rows(tmp_path / "p", 13, ragged=True)
    report = build(store, path)
    most, blobs = max(asked)
    assert (most, blobs) == (report.total_bytes, 0)


def blobs_in(store):
    return list((store.path / "objects").glob("??/*"))


def test_a_dry_run_says_what_would_be_done_and_does_nothing(tmp_path, store):
    path, _module = make_project(tmp_path / "p")
    dry = build(store, path, dry_run=True, explain=True)
    assert dry.snapshot is None
    assert (dry.shards_built, dry.columns_built, dry.teacher) == (3, 6, "unknown")
    assert not list((store.path / "actions").glob("*/*"))
    real = build(store, path)
    dry = build(store, path, dry_run=True)
    assert (dry.shards_built, dry.new_bytes, dry.total_bytes) == (0, 0, real.total_bytes)
    assert dry.pins == real.pins


def test_a_ref_that_moved_meanwhile_is_a_conflict_unless_it_moved_to_the_same(tmp_path, store):
    path, _module = make_project(tmp_path / "p")
    other = build(store, path, limit=4, ref=None)

    def meddle(progress):
        if progress.stage == "publishing" and store.refs.get("cache") is None:
            store.point("cache", "head", other.snapshot)

    with pytest.raises(Conflict):
        build(store, path, progress=meddle)
    winner = build(store, path, ref=None)

    def race(progress):
        if progress.stage == "publishing" and store.refs.get("fresh") is None:
            store.point("fresh", "head", winner.snapshot)

    assert build(store, path, ref="fresh", progress=race).snapshot == winner.snapshot


def test_a_stop_finishes_the_shard_in_flight_and_a_rerun_resumes(tmp_path, store):
    path, _ = make_project(tmp_path / "p")
    handed = []

    def stop():
        return len(handed) >= 2

    with pytest.raises(Interrupted):
        build(store, path, stop=stop, progress=lambda p: handed.append(p) if p.stage == "shards" else None)
    assert list((store.path / "actions").glob("*/*.msgpack"))
    report = build(store, path)
    assert (report.shards_built, report.shards_reused) == (2, 1)
    assert report.snapshot == build(Store.init(tmp_path / "s2"), path).snapshot


def test_a_writer_that_fails_ends_the_build_with_its_cause(tmp_path, store, monkeypatch):
    path, _ = make_project(tmp_path / "p")
    before = len(list(Path("/proc/self/fd").iterdir()))
    monkeypatch.setattr("zgstore.building.shards.as_bytes", lambda *a, **k: (_ for _ in ()).throw(OSError(5, "broken")))
    with pytest.raises(OSError, match="broken"):
        build(store, path)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert not list((store.path / "tmp").iterdir())


def test_followers_see_each_shard_and_then_the_snapshot(tmp_path, store):
    path, _ = make_project(tmp_path / "p")
    seen = set()
    report = build(store, path, progress=lambda p: seen.add(p.build))
    (uuid,) = store.memos.builds()
    grown = store.memos.build(uuid)
    assert grown.snapshot == report.snapshot
    assert [shard.rows for shard in grown.shards] == [4, 4, 4]
    assert grown.columns == store.snapshot(report.snapshot).columns
    assert uuid in seen | {uuid}


def test_locked_stops_at_a_present_snapshot_and_names_what_differs(tmp_path, store, monkeypatch):
    path, module = make_project(tmp_path / "p")
    report = build(store, path)
    monkeypatch.chdir(tmp_path / "p")
    file, locked = lockfile.lock(store, "cache")
    assert file == tmp_path / "p" / "zgstore.lock"
    assert (locked.snapshot, locked.recipe) == (report.snapshot, report.recipe)
    assert (build(store, path, locked=True).locked, build(store, path, locked=True).ref) == ("present", "cache")
    store.refs.remove("cache", "head")
    assert build(store, path, locked=True).ref is None  # it moves none, and none names it
    other = Store.init(tmp_path / "other")
    assert build(other, path, locked=True).locked == "same"
    third = Store.init(tmp_path / "third")
    differs = build(third, write_recipe(tmp_path / "p", module, revision="rev9"), locked=True)
    assert "pins" in differs.locked
    assert third.refs.get("cache") is None


def test_an_estimate_is_what_a_build_then_stores(tmp_path, store):
    more = """
    def skeleton():
        return Teacher(8, 4)
    """
    path, module = make_project(tmp_path / "p", more=more)
    text = path.read_text().replace("[data]", f'skeleton = "{module}:skeleton"\n[data]', 1)
    path.write_text(text)
    before = estimate(store, path)
    assert (before.teacher, before.samples) == ("skeleton", 12)
    assert len(sys.modules[module].LOADED) == 0
    offer = points(path)
    assert "layers.2:in" in {point.name for point in offer.points}
    assert len(sys.modules[module].LOADED) == 0
    report = build(store, path)
    assert sum(before.columns.values()) == report.total_bytes
    after = estimate(store, path)
    assert (after.teacher, after.new_bytes) == ("known", 0)


def test_an_estimate_without_a_skeleton_loads_the_teacher_and_says_so(tmp_path, store):
    path, _module = make_project(tmp_path / "p")
    found = estimate(store, path)
    assert found.as_value()["teacher_loaded"]
    assert sum(found.columns.values()) == build(store, path).total_bytes


def test_the_record_holds_circumstance_and_statistics(tmp_path, store):
    path, _ = make_project(tmp_path / "p")
    report = build(store, path, circumstance={"message": "first", "ci": {"job": "7"}})
    fields = store.record_of(report.snapshot).fields
    assert fields["message"] == "first"
    assert fields["recipe"] == report.recipe.raw
    assert fields["statistics"]["norm:in"]["rms"] > 0
    assert fields["platforms"][0]["device"] == "cpu"


def test_a_transformer_of_hugging_face_is_captured_at_its_layers(tmp_path, store):
    more = """
    def llama():
        from transformers import LlamaConfig, LlamaForCausalLM
        torch.manual_seed(0)
        config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=3,
                             num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=32)
        return LlamaForCausalLM(config)
    """
    points = ("model.layers.0:in", "model.layers.1:in", "model.layers.2:in", "model.norm:in")
    path, module = make_project(
        tmp_path / "p", more=more, boundaries=points,
        capture='lengths = "attention_mask"\nsequence = ["input_ids", "labels"]',
    )  # fmt: skip
    write_rows(tmp_path / "p", 7, ragged=True)
    path.write_text(path.read_text().replace(f"{module}:teacher", f"{module}:llama"))
    report = build(store, path)
    assert report.samples == 7
    again = build(store, path)
    assert (again.snapshot, again.teacher_loaded) == (report.snapshot, False)
    root = store.root(store.snapshot(report.snapshot))
    assert sum(all_u64(root.rows)) == 7


def test_inputs_too_large_to_keep_are_read_again(tmp_path):
    path, _ = make_project(tmp_path / "p")
    recipe = load_recipe(path)
    assert read_inputs(recipe, keep_bytes=100).kept is None
    assert len(read_inputs(recipe).kept) == 6
