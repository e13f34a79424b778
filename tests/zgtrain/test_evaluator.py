"""A trained job assembled and judged, from its files alone."""

from __future__ import annotations

import json

import pytest
from pruned import make_pruned, trained

import zgstore
from zgstore.cli.console import _lay_out
from zgtrain import assemble, load_job
from zgtrain.cli.evaluate import view
from zgtrain.evaluator import evaluate

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    return trained(make_pruned(tmp_path_factory.mktemp("pruned"), module="evaluated_rows"))


@pytest.fixture(scope="module")
def judged(job):
    return evaluate(job, device="cpu")


def test_every_gate_speaks_and_the_result_lies_beside_the_blocks(job, judged):
    value = json.loads((job.output / "evaluation.json").read_text(encoding="utf-8"))
    assert value == json.loads(json.dumps(judged.as_value()))
    assert [gate["name"] for gate in value["gates"]] == [
        "finite", "local learning", "quality", "context use", "coherence", "teacher-scored generation",
    ]  # fmt: skip
    assert all({"number", "threshold", "passes"} <= set(gate) for gate in value["gates"])
    assert value["ok"] is all(gate["passes"] for gate in value["gates"])
    assert value["gates"][0]["passes"]
    assert value["gates"][1]["passes"]


def test_the_page_names_every_measure_of_every_gate(judged):
    lines = [text.rstrip() for block in view(judged.as_value()) for text, _ in _lay_out(block, 80)]
    assert max(map(len, lines)) <= 80
    for gate in judged.gates:
        at = lines.index(gate.name)
        for measure, line in zip(gate.measures, lines[at + 1 :], strict=False):
            assert line.startswith(f"  {measure.name}  ")  # whole, on a terminal of 80 columns
            assert line.endswith("passed" if measure.passes else "failed")


def test_a_student_is_written_without_a_word(job, tmp_path, capfd):
    assemble(job, tmp_path / "student")
    assert capfd.readouterr() == ("", "")


def test_it_says_which_blocks_of_which_snapshot_were_judged(job, judged):
    reports = [json.loads((job.folder(b) / "report.json").read_text(encoding="utf-8")) for b in range(2)]
    assert judged.snapshot == reports[0]["snapshot"]
    assert list(judged.blocks) == [each["state_digest"] for each in reports]
    assert (judged.rows, judged.sweep_rows, judged.tokens) == (8, 4, 2 * (3 * 9 + 6))
    assert judged.parameters["student"] < judged.parameters["teacher"]


def test_the_sweep_keeps_its_two_invariants_on_a_trained_student(judged):
    first = {tuple(sorted({**row, "alpha": 0}.items())) for row in judged.sweep if row["block"] == 0}
    assert len(first) == 1
    assert len({row["ce"] for row in judged.sweep if row["alpha"] == 0.0}) == 1
    assert len(judged.sweep) == 10


def test_what_a_block_is_fed_is_what_the_one_before_leaves(judged):
    first, last = judged.boundaries
    assert first["assembled_predecessor_error"]["mse"] == 0.0
    assert last["assembled_predecessor_error"] == first["assembled_output_error"]
    assert first["teacher_input_fit"]["mse"] == first["assembled_output_error"]["mse"] > 0


@pytest.mark.parametrize("key", ["student.assemble", "student.teacher", "evaluate.data", "evaluate.prompts"])
def test_what_is_needed_for_a_gate_is_not_left_out(job, key):
    text = job.path.read_text(encoding="utf-8")
    name = key.partition(".")[2]
    part = job.path.with_name("part.toml")
    part.write_text(
        "".join(line for line in text.splitlines(keepends=True) if not line.startswith(f"{name} =")), "utf-8"
    )
    with pytest.raises(zgstore.Invalid, match=f"{key} is missing"):
        evaluate(load_job(part))
