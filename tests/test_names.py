"""The public names: all that was promised, each where it is said to be, and none loaded before it is asked for."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import zgstore

PROMISED = [
    "Store",
    "build",
    "load_recipe",
    "Recipe",
    "writer",
    "row_digests",
    "SampleBatch",
    "read",
    "Sampler",
    "verify",
    "diff",
    "collect",
    "copy",
    "Pins",
    "points",
    "estimate",
    "show",
    "log",
    "why",
    "lock",
    "hold",
    "tag",
    "export",
    "import_zerograph",
    "import_safetensors",
    "capture",
    "encode",
    "ZgError",
    "NotFound",
    "Conflict",
    "Busy",
    "Corrupt",
    "Missing",
    "Refused",
    "NoSpace",
    "NonFinite",
    "Invalid",
    "Partial",
    "Transient",
    "Interrupted",
]


@pytest.mark.parametrize("name", PROMISED)
def test_a_promised_name_is_there(name):
    assert getattr(zgstore, name) is not None
    assert name in dir(zgstore)
    assert name in zgstore.__all__


def test_capture_is_a_module_with_run_and_topk_logits():
    assert callable(zgstore.capture.run)
    assert callable(zgstore.capture.topk_logits)


def test_capture_is_imported_as_a_module_is():
    code = "from zgstore.capture import Trajectory; import zgstore; assert zgstore.capture.Trajectory is Trajectory"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = zgstore.nothing_of_the_kind


def test_type_checkers_are_told_the_same_names_and_homes():
    (block,) = (node for node in ast.parse(Path(zgstore.__file__).read_text()).body if isinstance(node, ast.If))
    told = {each.asname: node.module for node in block.body for each in node.names}
    assert told.pop("capture") == "zgstore"
    assert told == {name: f"zgstore.{home}" for name, home in zgstore._HOME_OF.items()}


def test_importing_the_package_loads_nothing_heavy():
    code = (
        "import zgstore, sys; sys.exit(bool({'torch', 'numpy', 'lmdb', 'typer', 'rich', 'blake3'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("line", ["zgstore build --help", "zgtrain launch --help", "zgstore --help"])
def test_help_loads_no_store(line):
    program, *words = line.split()
    code = f"import sys; from {program}.cli.main import main; from zgstore.cli.console import Screen\n"
    code += f"main({words}, Screen()); sys.exit(bool({{'torch', 'numpy', 'zgstore.storage'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False, stdout=subprocess.DEVNULL).returncode == 0


def test_no_module_bears_the_name_of_a_public_function():
    top = {path.stem for path in Path(zgstore.__file__).parent.glob("*")}
    assert not top & set(zgstore._HOME_OF)
