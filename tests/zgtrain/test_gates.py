"""Gates as values: every one with its number, its threshold and a verdict, whatever the others say."""

from __future__ import annotations

import json
import math

import pytest

from zgtrain.gates import (
    coherence_gate,
    context_gate,
    finite_gate,
    local_learning_gate,
    quality_gate,
    repeated,
    share,
    teacher_scored_gate,
)


def test_a_single_number_that_is_not_finite_fails():
    assert finite_gate(losses=0, parameters=0, logits=0).passes
    assert not finite_gate(losses=0, parameters=1, logits=0).passes


def test_every_block_has_to_learn():
    assert local_learning_gate([(1.0, 0.5), (2.0, 1.9)]).passes
    gate = local_learning_gate([(1.0, 0.5), (2.0, 2.0)])
    assert not gate.passes
    assert [each.passes for each in gate.measures] == [True, False]
    assert not local_learning_gate([(1.0, math.nan)]).passes


def test_quality_may_lose_half_a_nat():
    assert quality_gate(student_ce=3.5, teacher_ce=3.0).passes
    assert not quality_gate(student_ce=3.501, teacher_ce=3.0).passes
    assert not quality_gate(student_ce=math.inf, teacher_ce=3.0).passes


@pytest.mark.parametrize(
    ("student", "prompts", "passes"),
    [
        (0.5, [1, 1, 1, -1], True),
        (0.49, [1, 1, 1, 1], False),
        (0.5, [1, 1, -1, 0], False),
        (0.5, [1, 1, 1, math.nan], True),
    ],
)
def test_half_of_the_teachers_context_and_three_of_four_prompts(student, prompts, passes):
    gate = context_gate(student=student, teacher=1.0, prompts=prompts, teacher_prompts=[1, 1, 1, 1])
    assert gate.passes is passes
    assert [each.threshold for each in gate.measures] == [0.5, 3]


def test_a_generation_that_repeats_itself_fails_and_a_teacher_that_does_lends_its_own_measure():
    varied = [list(range(64))] * 1
    stuck = [[1, 2] * 32]
    assert coherence_gate(varied, varied).passes
    assert not coherence_gate(stuck, varied).passes
    assert coherence_gate(stuck, stuck).passes
    share_, bigrams = coherence_gate(stuck, varied).measures
    assert (share_.number, share_.threshold) == (0.5, 0.2)
    assert bigrams.number == pytest.approx(1 - 2 / 63)
    assert bigrams.threshold == 0.3


def test_shares_and_bigrams_are_pooled_and_no_bigram_reaches_over_a_prompt():
    assert share([[1, 1, 2], [1, 3, 4]]) == 0.5
    assert repeated([[1, 2], [1, 2]]) == 0.5
    assert repeated([[1, 2], [2, 1], [1]]) == 0.0
    assert math.isnan(share([[]]))


def test_the_teacher_may_find_the_student_a_nat_less_likely_than_itself():
    assert teacher_scored_gate(on_student=2.0, on_itself=1.0).passes
    assert not teacher_scored_gate(on_student=2.01, on_itself=1.0).passes


def test_a_gate_as_a_value_is_json_and_names_what_fails():
    value = coherence_gate([[1, 2] * 32], [list(range(64))]).as_value()
    assert value["passes"] is False
    assert (value["number"], value["relation"], value["threshold"]) == (0.5, "≤", 0.2)
    value = quality_gate(student_ce=math.nan, teacher_ce=3.0).as_value()
    assert json.loads(json.dumps(value, allow_nan=False))["number"] is None
