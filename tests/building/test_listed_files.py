"""Files are digested by what they hold and what they are called below their root, never by where they lie."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
from blake3 import blake3

from zgstore.building.files import (
    SourcePin,
    changed_sources,
    file_digest,
    files_digest,
    list_files,
    package_folder,
    source_file,
)
from zgstore.errors import Missing
from zgstore.format.digest import digest_of


def folder(at, files):
    at.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (at / name).parent.mkdir(parents=True, exist_ok=True)
        (at / name).write_text(content)
    return at


def test_a_files_digest_is_the_one_that_b3sum_prints(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(256)) * 30000)
    assert file_digest(path).hex == blake3(path.read_bytes()).hexdigest()
    with pytest.raises(Missing, match="cannot be read"):
        file_digest(tmp_path / "none")


def test_a_folder_is_the_same_wherever_it_lies(tmp_path):
    one = folder(tmp_path / "a" / "model", {"config": "c", "shards/0": "x", "shards/1": "y"})
    two = folder(tmp_path / "b", {"config": "c", "shards/0": "x", "shards/1": "y"})
    digest = files_digest(["model"], base=one.parent)
    assert files_digest([str(two)], base=tmp_path) == digest
    (two / "shards" / "1").write_text("z")
    assert files_digest([str(two)], base=tmp_path) != digest


def test_names_bytes_and_order_each_count(tmp_path):
    folder(tmp_path, {"a": "1", "b": "2", "c/x": "1", "d/y": "1"})
    found = [
        files_digest(paths, base=tmp_path)
        for paths in (["a"], ["b"], ["a", "b"], ["b", "a"], ["c"], ["d"])
    ]  # fmt: skip
    assert len(set(found)) == 6


def test_what_python_and_tools_leave_behind_is_no_part(tmp_path):
    folder(tmp_path, {"m/a": "1"})
    before = files_digest(["m"], base=tmp_path)
    folder(tmp_path, {"m/__pycache__/a": "x", "m/.git/head": "y", "m/a.pyc": "z", "m/sub/.cache": "w"})
    assert files_digest(["m"], base=tmp_path) == before


def test_links_are_followed_as_hubs_caches_need(tmp_path):
    folder(tmp_path, {"blobs/abc": "weights", "plain/model": "weights"})
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "model").symlink_to(tmp_path / "blobs" / "abc")
    assert files_digest(["snapshot"], base=tmp_path) == files_digest(["plain"], base=tmp_path)


def test_links_in_a_circle_end(tmp_path):
    folder(tmp_path, {"m/a": "1", "m/sub/b": "2", "plain/a": "1", "plain/sub/b": "2"})
    (tmp_path / "m" / "sub" / "round").symlink_to(tmp_path / "m")
    assert files_digest(["m"], base=tmp_path) == files_digest(["plain"], base=tmp_path)


def test_what_is_not_there_is_missing(tmp_path):
    (tmp_path / "empty").mkdir()
    for text in ("none", "empty", "package:no_such_package_at_all", "package:"):
        with pytest.raises(Missing):
            files_digest([text], base=tmp_path)


def test_digests_come_through_a_callback_in_one_call(tmp_path):
    folder(tmp_path, {"m/a": "1", "m/b": "2"})
    asked = []

    def digests(paths):
        asked.append([path.name for path in paths])
        return [digest_of(None, path.read_bytes()) for path in paths]

    assert files_digest(["m"], base=tmp_path, digests=digests) == files_digest(["m"], base=tmp_path)
    assert asked == [["a", "b"]]


PACKAGE = """
raise SystemExit("imported")
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package that must not be imported."""
    files = {"__init__.py": PACKAGE, "data/model.gguf": "weights", "sub/deep.py": PACKAGE}
    root = folder(tmp_path / "site", {f"zg_test_package/{name}": content for name, content in files.items()})
    monkeypatch.syspath_prepend(root)
    return root / "zg_test_package"


def test_a_packages_data_is_found_without_importing_it(package, tmp_path):
    assert package_folder("zg_test_package") == package
    assert package_folder("zg_test_package.data") == package / "data"
    names = [file.name for file in list_files(["package:zg_test_package"], base=tmp_path)]
    assert names == ["0/__init__.py", "0/data/model.gguf", "0/sub/deep.py"]
    assert "zg_test_package" not in sys.modules


def test_sources_are_found_without_importing_them(package, tmp_path):
    assert source_file("zg_test_package") == package / "__init__.py"
    assert source_file("zg_test_package.sub.deep") == package / "sub" / "deep.py"
    assert source_file("zg_test_package.sub.nothing") is None
    assert source_file("no_such_package_at_all.x") is None
    folder(tmp_path / "recipe", {"mine.py": "x = 1"})
    assert source_file("mine", search=[tmp_path / "recipe"]) == tmp_path / "recipe" / "mine.py"
    assert source_file("../mine", search=[tmp_path / "recipe" / "sub"]) is None


def test_a_changed_line_is_named_and_a_file_that_is_gone_too(package):
    path = package / "sub" / "deep.py"
    pin = SourcePin(
        {"zg_test_package.sub.deep": file_digest(path)}, {"zg_test_package": file_digest(package / "__init__.py")}
    )
    assert changed_sources(pin) == []
    path.write_text("changed")
    assert changed_sources(pin) == ["zg_test_package.sub.deep"]
    path.unlink()
    (package / "__init__.py").write_text("changed")
    assert changed_sources(pin) == ["zg_test_package", "zg_test_package.sub.deep"]


def test_a_class_without_a_file_can_never_be_found_again(package):
    pin = SourcePin({"__nowhere__": None}, {})
    assert changed_sources(pin) == ["__nowhere__"]
    assert SourcePin({}, {}).digest() != pin.digest()


def test_the_factory_is_no_part_of_the_digest_of_the_classes(package):
    here = file_digest(package / "__init__.py")
    assert SourcePin({"a": here}, {"b": here}).digest() == SourcePin({"a": here}, {}).digest()


def test_none_of_it_needs_torch():
    code = textwrap.dedent("""
        import sys
        import zgstore.building.files
        sys.exit("torch" in sys.modules or "numpy" in sys.modules)
    """)
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
