import tomllib
from pathlib import Path

import pytest

from zgstore.building.recipe import Recipe, load_recipe
from zgstore.errors import Invalid

GOOD = """
[teacher]
factory = "tiny:teacher"
args = { width = 8 }
id = "org/model"
revision = "0123456789abcdef"

[data]
factory = "tiny:batches"
id = "org/data"
revision = "fedcba9876543210"

[capture]
boundaries = ["layers.0:in", "layers.1:in"]
context = ["input_ids"]
"""


def write(directory: Path, text: str, name: str = "cache.toml") -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / name
    path.write_text(text)
    return path


def refusal(directory: Path, text: str) -> Invalid:
    with pytest.raises(Invalid) as caught:
        load_recipe(write(directory, text))
    return caught.value


def test_a_recipe_is_read_as_it_is_written(tmp_path):
    recipe = load_recipe(write(tmp_path, GOOD))
    assert recipe.name == "cache"
    assert recipe.directory == tmp_path
    assert recipe.teacher.args == {"width": 8}
    assert recipe.capture.boundaries == ("layers.0:in", "layers.1:in")
    assert recipe.storage.batches_per_shard == 16


@pytest.mark.parametrize(
    ("line", "key", "near"),
    [
        ('[teacher]\nrevison = "x"', "teacher.revison", "revision"),
        ('[capture]\nboundries = ["a:in"]', "capture.boundries", "boundaries"),
        ("[storage]\nbatch_per_shard = 3", "storage.batch_per_shard", "batches_per_shard"),
        ("[storge]\nx = 1", "storge", "storage"),
    ],
)
def test_an_unknown_key_names_the_nearest_known_one(tmp_path, line, key, near):
    header, _, _ = line.partition("\n")
    text = GOOD.replace(header, line, 1) if header in GOOD else GOOD + line
    error = refusal(tmp_path, text)
    assert key in error.message
    assert near in error.hint


@pytest.mark.parametrize(
    ("old", "new", "hint"),
    [
        ('"layers.1:in"', '"layers.1:inn"', "did you mean 'layers.1:in'?"),
        ('"layers.1:in"', '"layers.1"', "did you mean 'layers.1:in'?"),
        ('"layers.1:in"', '"layers.1.in"', "did you mean 'layers.1:in'?"),
        ("[capture]", "[captur]", "is 'captur' meant to be 'capture'?"),
        ('id = "org/model"', 'ids = "org/model"', "is 'ids' meant to be 'id'?"),
        ('context = ["input_ids"]', 'context = "input_ids"', 'write an array, as ["one", "two"]'),
    ],
)
def test_what_is_nearly_right_says_what_was_meant(tmp_path, old, new, hint):
    assert old in GOOD
    assert hint in refusal(tmp_path, GOOD.replace(old, new, 1)).hint


def test_a_job_in_a_recipes_place_is_called_one(tmp_path):
    text = "[snapshot]\nstore = 1\n[student]\n[train]\n"
    error = refusal(tmp_path, text)
    assert "is a job, not a recipe" in error.message
    assert "[capture], [data], [teacher]" in error.hint


def test_a_key_of_another_table_is_said_to_be_there(tmp_path):
    text = GOOD.replace('context = ["input_ids"]', 'context = ["input_ids"]\nfactory = "tiny:teacher"')
    assert refusal(tmp_path, text).hint == "did you mean 'teacher.factory'?"


@pytest.mark.parametrize("pin", ['id = "org/model"', 'revision = "0123456789abcdef"', 'revision = "fedcba9876543210"'])
def test_a_missing_pin_is_an_error(tmp_path, pin):
    assert "is missing" in refusal(tmp_path, GOOD.replace(pin, "", 1)).message


@pytest.mark.parametrize("revision", ["main", "master", "latest", "HEAD"])
def test_a_mutable_revision_is_refused_unless_allowed(tmp_path, revision):
    text = GOOD.replace("0123456789abcdef", revision)
    assert "allow_mutable_revision" in refusal(tmp_path, text).hint
    allowed = text.replace("[teacher]", "[teacher]\nallow_mutable_revision = true")
    assert load_recipe(write(tmp_path, allowed)).teacher.revision == revision


def test_data_is_pinned_by_a_revision_or_by_files_but_not_by_both(tmp_path):
    (tmp_path / "train.jsonl").write_text("{}")
    files = GOOD.replace('revision = "fedcba9876543210"', 'files = ["train.jsonl"]')
    assert load_recipe(write(tmp_path, files)).data.revision is None
    assert "keep one" in refusal(tmp_path, files.replace("files", 'revision = "1"\nfiles')).hint


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        ('"layers.1:in"', '"layers.1"', "hook point"),
        ('"layers.1:in"', '"layers.0:in"', "twice"),
        ('context = ["input_ids"]', 'context = ["input_ids"]\nsequence = ["input_ids"]', "needs lengths"),
        ('context = ["input_ids"]', 'outputs = ["head:in"]', "outputs"),
        ('context = ["input_ids"]', 'extractor = "tiny:extract"', "beside hook points"),
        ('boundaries = ["layers.0:in", "layers.1:in"]', "", "missing"),
        ('factory = "tiny:teacher"', 'factory = "tiny"', "factory"),
        ("args = { width = 8 }", "args = { when = 2020-01-01 }", "args"),
        ('id = "org/model"', "id = 3", "id"),
        ('context = ["input_ids"]', 'context = ["start"]', "start"),
    ],
)
def test_what_makes_no_sense_is_named(tmp_path, old, new, word):
    assert word in refusal(tmp_path, GOOD.replace(old, new)).message


def test_storage_takes_dtypes_and_codecs_of_known_columns_alone(tmp_path):
    text = GOOD + '[storage]\ndtype = "bfloat16"\n[storage.columns."layers.1:in"]\ncodec = "int8"\n'
    storage = load_recipe(write(tmp_path, text)).storage
    assert (storage.of("layers.0:in").dtype, storage.of("layers.0:in").codec) == ("BF16", "raw")
    assert (storage.of("layers.1:in").dtype, storage.of("layers.1:in").codec) == ("BF16", "int8")
    assert "layers.1:in" in refusal(tmp_path, text.replace('columns."layers.1:in"', 'columns."layer.1:in"')).hint
    assert "bfloat16" in refusal(tmp_path, text.replace('"bfloat16"', '"bflot16"')).hint


def test_overrides_replace_single_values_by_dotted_keys(tmp_path):
    path = write(tmp_path, GOOD)
    recipe = load_recipe(
        path, {"storage.batches_per_shard": 2, "teacher.args.width": 4, 'storage.columns."layers.0:in".codec': "int8"}
    )
    assert recipe.storage.batches_per_shard == 2
    assert recipe.teacher.args == {"width": 4}
    assert recipe.storage.of("layers.0:in").codec == "int8"


def test_factories_come_from_beside_the_recipe_and_run_there(tmp_path):
    (tmp_path / "beside.py").write_text(
        "import pathlib\ndef teacher(width):\n    return str(pathlib.Path.cwd()), width\n"
        "def batches():\n    with open('lines.txt') as f:\n        for line in f:\n            yield line.strip()\n"
    )
    (tmp_path / "lines.txt").write_text("a\nb\n")
    recipe = load_recipe(write(tmp_path, GOOD.replace("tiny:", "beside:")))
    assert recipe.teacher.load() == (str(tmp_path), 8)
    here = Path.cwd()
    assert list(recipe.data.batches()) == ["a", "b"]
    assert Path.cwd() == here


def test_two_recipes_with_different_modules_of_one_name_are_refused(tmp_path):
    for side in ("left", "right"):
        write(tmp_path / side, GOOD.replace("tiny:", "twin:"))
        (tmp_path / side / "twin.py").write_text(f"def teacher(width):\n    return {side!r}\n")
    assert load_recipe(tmp_path / "left" / "cache.toml").teacher.load() == "left"
    with pytest.raises(Invalid, match="already imported"):
        load_recipe(tmp_path / "right" / "cache.toml").teacher.load()


def test_a_hidden_helper_of_another_recipe_is_refused_too(tmp_path):
    for side in ("left", "right"):
        write(tmp_path / side, GOOD.replace("tiny:", f"entry_{side}:"))
        (tmp_path / side / f"entry_{side}.py").write_text("import shared_features\ndef teacher(width):\n    return 1\n")
        (tmp_path / side / "shared_features.py").write_text(f"SIDE = {side!r}\n")
    load_recipe(tmp_path / "left" / "cache.toml").teacher.load()
    with pytest.raises(Invalid, match="shared_features"):
        load_recipe(tmp_path / "right" / "cache.toml").teacher.load()


def test_equal_modules_at_another_path_are_not_different(tmp_path):
    for side in ("left", "right"):
        write(tmp_path / side, GOOD.replace("tiny:", "same:"))
        (tmp_path / side / "same.py").write_text("def teacher(width):\n    return width\n")
        assert load_recipe(tmp_path / side / "cache.toml").teacher.load() == 8


def test_a_missing_module_or_function_is_named_with_the_nearest(tmp_path):
    (tmp_path / "nearly.py").write_text("def teachers():\n    pass\n")
    with pytest.raises(Invalid, match="no module"):
        load_recipe(write(tmp_path, GOOD.replace("tiny:", "absent:"))).teacher.load()
    with pytest.raises(Invalid) as caught:
        load_recipe(write(tmp_path, GOOD.replace("tiny:", "nearly:"))).teacher.load()
    assert "teachers" in caught.value.hint


def test_listed_code_must_be_there(tmp_path):
    text = GOOD.replace('boundaries = ["layers.0:in", "layers.1:in"]', 'extractor = "tiny:extract"\ncode = ["gone.py"]')
    assert "gone.py" in refusal(tmp_path, text).message


def test_batches_that_cannot_be_iterated_are_named(tmp_path):
    (tmp_path / "single.py").write_text("def batches():\n    return 3\n")
    with pytest.raises(Invalid, match="returned a int"):
        load_recipe(write(tmp_path, GOOD.replace("tiny:", "single:"))).data.batches()


def test_a_recipe_can_come_from_a_mapping(tmp_path):
    recipe = Recipe.parse(tomllib.loads(GOOD), path=tmp_path / "other.toml")
    assert recipe.name == "other"
