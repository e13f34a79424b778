"""The documentation is true: links lead somewhere, snippets run, and nothing that exists is left out."""

from __future__ import annotations

import doctest
import inspect
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from textwrap import dedent

import pytest
import torch

import zgstore
from zgstore import errors
from zgstore.cli import catalogue as command
from zgstore.cli.faults import USAGE_ERROR
from zgstore.cli.main import PROGRAM as ZGSTORE
from zgstore.format import action, manifest, pages
from zgtrain.cli.main import PROGRAM as ZGTRAIN

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
REFERENCE = ROOT / "docs" / "reference"
# Pages whose commands are typed, one after the other, into one folder; each is a list of (language, text).
RUN = ["README.md", "docs/tutorial/first-snapshot.md"]

FENCE = re.compile(r"^ *```(\w+)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def text_of(page):
    return (ROOT / page).read_text(encoding="utf-8")


def blocks_of(page, *languages):
    return [(language, dedent(body)) for language, body in FENCE.findall(text_of(page)) if language in languages]


def without_code(text):
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))


def commands_in(body):
    """The commands of a console block: what follows each `$ `, up to the next one."""
    return [each.removeprefix("$ ") for each in re.split(r"\n(?=\$ )", body.strip())]


@pytest.fixture
def environment():
    mine = {key: value for key, value in os.environ.items() if not key.startswith(("ZGSTORE", "SLURM", "PYTEST"))}
    return {**mine, "PATH": f"{Path(sys.executable).parent}:{mine['PATH']}", "OMP_NUM_THREADS": "1"}


# ---- links ----


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page):
    for target in LINK.findall(without_code(page.read_text(encoding="utf-8"))):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target.partition("#")[0]).exists(), f"{target} in {page}"


def names_of_tests_on(page):
    """Links to tests: what is linked is the test's sentence, as people write it."""
    found = re.findall(r"\[([^\]]+)\]\((?:\.\./)*(tests/[^)]+\.py)\)", text_of(page))
    return [(sentence, ROOT / file) for sentence, file in found if "/" not in sentence]


def test_every_test_that_the_failure_model_names_is_there():
    named = names_of_tests_on("docs/explanation/failure-model.md")
    assert len(named) > 100
    for sentence, file in named:
        name = f"test_{sentence.replace(' ', '_')}"
        assert re.search(rf"^def {name}\(", file.read_text(encoding="utf-8"), re.MULTILINE), f"{name} in {file}"


def test_each_case_of_the_failure_model_is_shown_by_a_test():
    _, _, cases = text_of("docs/explanation/failure-model.md").partition("## Cases")
    rows = [line.split("|")[1:-1] for line in cases.splitlines() if re.match(r"\| \d+ \|", line)]
    assert [int(row[0]) for row in rows] == [*range(1, 36)]
    assert all("](../../tests/" in row[3] for row in rows)


def test_every_page_is_reached_from_the_readme():
    seen, coming = set(), [ROOT / "README.md"]
    while coming:
        page = coming.pop()
        if page not in seen and page.suffix == ".md":
            seen.add(page)
            links = LINK.findall(without_code(page.read_text(encoding="utf-8")))
            coming += [(page.parent / link).resolve() for link in links if "://" not in link]
    assert {page for page in PAGES if "design" not in page.parts} <= seen


# ---- snippets ----


@pytest.mark.parametrize("page", RUN)
def test_the_commands_and_snippets_of_a_page_run(page, tmp_path, environment):
    shutil.copytree(ROOT / "examples" / "minimal", tmp_path / "examples" / "minimal")
    here = tmp_path
    for language, body in blocks_of(page, "console", "python"):
        if language == "python":
            ran = subprocess.run(
                [sys.executable, "-c", body], cwd=here, env=environment, capture_output=True, text=True, check=False
            )
            assert ran.returncode == 0, f"{body}\n{ran.stderr}"
            continue
        for line in commands_in(body):
            ran = run_in_shell(line, here, environment)
            assert ran.returncode == 0, f"$ {line}\n{ran.stdout}\n{ran.stderr}"
            here = Path(ran.stdout.rstrip().rpartition("\n")[2])


def run_in_shell(line, here, environment):
    """Run one command; the folder it ends in is the last line that it prints."""
    return subprocess.run(
        ["bash", "-c", f"set -e\n{line}\necho; pwd"], cwd=here, env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip


def test_every_python_snippet_compiles():
    for page in PAGES:
        for _, body in blocks_of(page, "python"):
            if ">>>" not in body:
                compile(body, str(page), "exec")


def test_the_recipe_of_the_readme_is_the_one_of_the_example():
    (recipe,) = [body for language, body in blocks_of("README.md", "toml") if "[teacher]" in body]
    assert tomllib.loads(recipe) == tomllib.loads((ROOT / "examples/minimal/cache.toml").read_text(encoding="utf-8"))


def commands_typed():
    """(page, program, words) of every command of ours in the docs; what a shell puts in for a variable is a 1."""
    for page in PAGES:
        for _, body in blocks_of(page, "sh", "bash", "yaml", "console"):
            for name, rest in re.findall(r"(?<![\w/.])(zgstore|zgtrain) ([a-z][^\n|#;&>]*)", body):
                yield page, name, re.sub(r"\$\w+", "1", rest).replace('"', "").split()


@pytest.mark.parametrize("program", [ZGSTORE, ZGTRAIN], ids=lambda program: program.name)
def test_every_command_in_the_docs_can_be_typed(program):
    found = [(page, words) for page, name, words in commands_typed() if name == program.name]
    assert len(found) > 20
    for page, words in found:
        try:
            parse(program, words)
        except USAGE_ERROR as error:
            pytest.fail(f"{program.name} {' '.join(words)} in {page}: {error}")


def parse(program, words):
    """Read what was typed as the program does, and do nothing."""
    options, rest = program.hoist(words)
    group = program._group()
    above = group.make_context(program.name, [*options, *rest])
    name, entry, arguments = group.resolve_command(above, [*above._protected_args, *above.args])
    entry.make_context(name, arguments, parent=above)


# ---- the reference is whole ----


def sections():
    """Command → its section of the reference."""
    parts = re.split(r"^### `zgstore ([^`]*)`$", text_of("docs/reference/cli.md"), flags=re.MULTILINE)
    titled = zip(parts[1::2], parts[2::2], strict=True)
    return {re.match(r"[a-z]+( [a-z]+)?", title)[0]: title + body for title, body in titled}


def test_the_reference_has_every_command_and_no_other():
    assert set(sections()) == {entry.name for entry in command.COMMANDS}


def test_the_reference_has_every_option_of_every_command(environment):
    everywhere = text_of("docs/reference/cli.md").partition("## Start")[0]
    for name, section in sections().items():
        helped = subprocess.run(
            [Path(sys.executable).with_name("zgstore"), *name.split(), "--help"], env=environment, capture_output=True,
            text=True, check=True,
        )  # fmt: skip
        options = set(re.findall(r"(?m)^│\s*\*?\s*(--[a-z][a-z-]+)", helped.stdout)) - {"--help"}
        assert options, helped.stdout
        missing = {option for option in options if option not in section + everywhere}
        assert not missing, f"zgstore {name}"


def test_the_reference_has_every_kind_of_error_with_its_class_and_exit_code():
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| (\d+) \|", text_of("docs/reference/errors.md"), re.MULTILINE)
    classes = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, errors.ZgError)]
    assert {(kind, name, int(code)) for kind, name, code in rows} == {
        (each.kind, each.__name__, each.exit_code) for each in classes if each is not errors.ZgError
    }


def test_the_reference_has_every_public_name():
    text = text_of("docs/reference/api.md")
    assert not [name for name in zgstore.__all__ if not re.search(rf"\b{name}\b", text)]


def test_the_reference_names_every_argument_of_every_function():
    text = text_of("docs/reference/api.md")
    for name in zgstore.__all__:
        if inspect.isfunction(function := getattr(zgstore, name)):
            (row,) = [line for line in text.splitlines() if re.match(rf"\|.*`{name}\(", line)]
            if "(…)" not in row.partition(f"`{name}(")[2][:3]:
                said = set(re.findall(r"\w+", row))
                missing = {each for each in inspect.signature(function).parameters if each not in said}
                assert missing <= {"progress", "what", "near", "before"}, name


def test_the_reference_has_every_field_of_the_format():
    text = text_of("docs/reference/format-v1.md")
    source = "\n\n\n".join(Path(each.__file__).read_text(encoding="utf-8") for each in (manifest, pages, action))
    encoders = "".join(re.findall(r"def (?:encode|as_value)\(self\).*?(?=\n    def|\n    @|\n\n\n)", source, re.DOTALL))
    fields = set(re.findall(r'"([a-z_]+)":', encoders))
    assert {"snapshot", "left_out_reasons", "nonfinite", "columns"} <= fields
    assert not {field for field in fields if f"`{field}`" not in text}
    assert not {dtype for dtype in manifest.DTYPES if dtype not in text}
    assert not {codec for codec in manifest.CODECS if f"`{codec}`" not in text}
    assert not {role for role in manifest.ROLES if f"`{role}`" not in text}


def test_the_worked_example_of_the_format_gives_its_digests():
    result = doctest.testfile(str(REFERENCE / "format-v1.md"), module_relative=False)
    assert result.attempted > 20
    assert result.failed == 0


def test_a_row_of_the_worked_example_is_what_the_library_digests():
    (digest, _) = zgstore.row_digests({"x": torch.arange(6, dtype=torch.float32).reshape(2, 3)})
    assert str(digest) in text_of("docs/reference/format-v1.md")
