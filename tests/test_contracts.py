"""The shape of the code: one-way imports, one door for each library, nothing that hides what a module knows."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.utils._device import _device_constructors

ROOT = Path(__file__).resolve().parent.parent
MODULES = sorted([*(ROOT / "zgstore").rglob("*.py"), *(ROOT / "zgtrain").rglob("*.py")])

# Library → where it may be imported; a folder stands for all of its files.
DOORS = {
    "blake3": "zgstore/format/digest.py",
    "msgpack": "zgstore/format/canonical.py",
    "lmdb": "zgstore/storage/index.py",
    "tomllib": "zgstore/format/foreign.py",
    "zipfile": "zgstore/upkeep/torcharchive.py",
    "typer": "zgstore/cli/",
    "click": "zgstore/cli/",
    "rich": "zgstore/cli/",
}
FORBIDDEN_NAMES = {"utils", "util", "helpers", "common", "types", "backends", "registry", "misc", "base"}
# What a command that reads no tensor may load: importing any of these must not bring torch in.
WITHOUT_TORCH = [
    "zgstore",
    "zgstore.errors",
    "zgstore.format.digest",
    "zgstore.format.canonical",
    "zgstore.format.blobheader",
    "zgstore.format.pages",
    "zgstore.format.manifest",
    "zgstore.format.action",
    "zgstore.format.readplan",
    "zgstore.storage.objects",
    "zgstore.storage.index",
    "zgstore.storage.refs",
    "zgstore.storage.leases",
    "zgstore.storage.memos",
    "zgstore.storage.store",
    "zgstore.upkeep.reachability",
    "zgstore.upkeep.verifier",
    "zgstore.upkeep.collector",
    "zgstore.upkeep.differ",
    "zgstore.upkeep.copier",
    "zgstore.building.recipe",
    "zgstore.building.lockfile",
    "zgstore.reading.order",
    "zgstore.cli.main",
    "zgtrain.job",
    "zgtrain.progress",
    "zgtrain.cli.main",
    "zgtrain.cli.status",
]


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> Iterator[tuple[str, ast.stmt]]:
    """Every import of a file, wherever it stands, as full module names."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((each.name, node) for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            for each in node.names:
                yield f"{node.module}.{each.name}", node


def top(name: str) -> str:
    return name.partition(".")[0]


def test_modules_import_one_way():
    linter = Path(sys.executable).with_name("lint-imports")
    found = subprocess.run([linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize("library", DOORS)
def test_each_library_has_one_door(library):
    door = DOORS[library]
    importers = {
        str(path.relative_to(ROOT)) for path in MODULES if library in {top(name) for name, _ in imports_of(path)}
    }
    doors = (door, door.replace("zgstore/cli/", "zgtrain/cli/"))
    assert not {path for path in importers if not path.startswith(doors)}


def test_the_environment_is_read_in_cli_alone():
    readers = set()
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            named = isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv", "environb"}
            if named and "cli" not in path.parts and path.stem != "cli":
                readers.add(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not readers


def test_no_module_name_hides_what_it_holds():
    assert not [str(path) for path in MODULES if FORBIDDEN_NAMES & set(path.relative_to(ROOT).with_suffix("").parts)]


def test_nothing_unpickles_or_evaluates():
    bad = set()
    for path in MODULES:
        for name, node in imports_of(path):
            if top(name) in {"pickle", "marshal", "shelve", "dill", "cloudpickle"}:
                bad.add(f"{path.relative_to(ROOT)}:{node.lineno} imports {name}")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            safe = any(each.arg == "weights_only" and ast.unparse(each.value) == "True" for each in node.keywords)
            if called in {"eval", "exec"} or (called == "torch.load" and not safe):
                bad.add(f"{path.relative_to(ROOT)}:{node.lineno} calls {called}")
    assert not bad


def test_every_tensor_that_the_store_makes_says_where():
    """What calls it may have set a default device; bytes are read into CPU memory all the same."""
    makers = {made.__name__ for made in _device_constructors()}
    for path in (path for path in MODULES if top(name_of(path)) == "zgstore"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in {f"torch.{name}" for name in makers}:
                assert "device" in {given.arg for given in node.keywords}, f"{path}:{node.lineno}"


def test_the_reader_knows_neither_store_nor_index():
    reader = ROOT / "zgstore/reading/reader.py"
    known = {name for name, _ in imports_of(reader)} if reader.exists() else set()
    assert not {name for name in known if name.startswith(("zgstore.storage", "lmdb"))}


def test_zgtrain_uses_the_public_names_of_zgstore_alone():
    for path in (path for path in MODULES if top(name_of(path)) == "zgtrain"):
        beside = name_of(path).startswith("zgtrain.cli.")  # the two commands share how they parse and print
        for name, node in imports_of(path):
            if beside and name.startswith("zgstore.cli."):
                continue
            deep = isinstance(node, ast.Import) or node.module != "zgstore"
            assert not (deep and name.startswith("zgstore.")), f"{path}: {ast.unparse(node)}"


def test_the_packages_of_zgstore_export_nothing():
    for path in (ROOT / "zgstore").glob("*/__init__.py"):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        assert len(body) == 1, f"{path} holds more than its sentence"


def test_every_module_opens_with_a_sentence():
    for path in MODULES:
        sentence = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n")[0]
        assert sentence, f"{path} does not say what it is"


def test_what_reads_no_tensor_loads_no_torch():
    present = [name for name in WITHOUT_TORCH if (ROOT / name.replace(".", "/")).with_suffix(".py").exists()]
    code = f"import importlib, sys; [importlib.import_module(n) for n in {present!r}]; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def listed_in_the_architecture():
    """Module → its sentence in ARCHITECTURE.md."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    found = dict(re.findall(r"^`(zgstore/\w+)`: (.*)$", text, re.MULTILINE))
    for folder, rows in re.findall(r"^### `([\w/]+)`$(.*?)(?=^#|\Z)", text, re.MULTILINE | re.DOTALL):
        found |= {f"{folder}/{name}": said for name, said in re.findall(r"^\| `(\w+)` \| (.*) \|$", rows, re.MULTILINE)}
    return found


def test_the_architecture_lists_every_module_by_its_own_first_sentence():
    modules = {
        str(path.relative_to(ROOT).with_suffix("")): (
            ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        ).split("\n")[0]
        for path in MODULES
        if path.stem != "__init__"
    }
    assert listed_in_the_architecture() == modules


def test_the_contract_of_imports_names_every_module_below_the_command():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    layers = [line for each in contracts["contracts"] if each["type"] == "layers" for line in each["layers"]]
    named = set(re.findall(r"zg(?:store|train)\.[\w.]+", " ".join(layers)))
    inside = {name_of(path) for path in MODULES if path.stem != "__init__"}
    below = {name for name in inside if ".cli" not in name}
    assert named - {"zgstore.cli", "zgtrain.cli"} == below
