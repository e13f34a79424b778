"""SECURITY.md names tests that exist, targets that run and limits that hold."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

from tests.fuzz.bounds import BOUND_BYTES, MAX_INPUT_BYTES, SECONDS
from tests.fuzz.targets import all_targets

ROOT = Path(__file__).resolve().parent.parent.parent
TEXT = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
TESTS = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", TEXT)
LIMITS = re.findall(r"^\|[^|]*\| (\d+)(?: (B|KiB|MiB|GiB|TiB))? \| `([\w.]+):(\w+)` \|$", TEXT, re.MULTILINE)
UNITS = {"": 0, "B": 0, "KiB": 10, "MiB": 20, "GiB": 30, "TiB": 40}


@pytest.mark.parametrize(("path", "name"), TESTS, ids=[name or path for path, name in TESTS])
def test_every_test_that_is_named_exists(path, name):
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    names = [each.name for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)]
    assert any(each.startswith("test_") for each in names)
    assert not name or name in names


def test_every_rule_has_its_tests():
    rules = re.split(r"^\*\*", TEXT.partition("## What is promised")[2].partition("## Limits")[0], flags=re.MULTILINE)[
        1:
    ]
    assert len(rules) >= 8
    for rule in rules:
        assert re.search(r"^`(tests/|fuzz: )", rule, re.MULTILINE), rule.partition("*")[0]


def test_every_target_holds_a_rule_and_every_target_that_is_named_exists():
    assert set(re.findall(r"`fuzz: ([\w' ]+)`", TEXT)) - {"NAME"} == set(all_targets())


@pytest.mark.parametrize(("number", "unit", "module", "name"), LIMITS, ids=[each[3] for each in LIMITS])
def test_every_limit_is_the_one_in_the_code(number, unit, module, name):
    assert getattr(importlib.import_module(module), name) == int(number) << UNITS[unit]


def test_the_limits_are_all_read_and_those_of_the_fuzzer_said():
    table = TEXT.partition("## Limits")[2].partition("\n\n#")[0]
    assert len(LIMITS) == table.count("\n| ") - 1
    assert f"{MAX_INPUT_BYTES >> 10} KiB may take {BOUND_BYTES >> 20} MiB and {SECONDS:.0f} s" in TEXT
