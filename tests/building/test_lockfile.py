import pytest

from zgstore.building import lockfile
from zgstore.building.lockfile import Locked
from zgstore.errors import Invalid, NotFound
from zgstore.format.digest import digest_of


def locked(word):
    return Locked(digest_of("snapshot", word), digest_of("recipe", word), digest_of("pins", word))


def test_sections_are_kept_when_another_is_written(tmp_path):
    path = tmp_path / "zgstore.lock"
    lockfile.write(path, "main", locked(b"a"))
    lockfile.write(path, "org/eval.v2", locked(b"b"))
    lockfile.write(path, "main", locked(b"c"))
    assert lockfile.read(path) == {"main": locked(b"c"), "org/eval.v2": locked(b"b")}
    assert list(tmp_path.iterdir()) == [path]


def test_a_snapshot_without_a_recipe_can_be_locked(tmp_path):
    path = tmp_path / "zgstore.lock"
    one = Locked(digest_of("snapshot", b"a"), None, digest_of("pins", b"a"))
    lockfile.write(path, "main", one)
    assert lockfile.read(path)["main"] == one


def test_a_rev_of_the_lock_file_is_found_upward(tmp_path):
    lockfile.write(tmp_path / "zgstore.lock", "main", locked(b"a"))
    deep = tmp_path / "a" / "b"
    deep.mkdir(parents=True)
    assert lockfile.resolve("lock:main", deep) == str(locked(b"a").snapshot)
    assert lockfile.resolve("main@{1}", deep) == "main@{1}"
    with pytest.raises(NotFound, match="does not lock 'other'"):
        lockfile.resolve("lock:other", deep)


def test_no_lock_file_is_not_found_with_the_command_that_writes_one(tmp_path):
    with pytest.raises(NotFound) as caught:
        lockfile.resolve("lock:main", tmp_path)
    assert "zgstore lock main" in caught.value.hint


@pytest.mark.parametrize("text", ["[main", "[main]\nsnapshot = 3\n", "main = 1\n", '[main]\nsnapshot = "blake3:12"\n'])
def test_a_damaged_lock_file_is_named(tmp_path, text):
    path = tmp_path / "zgstore.lock"
    path.write_text(text)
    with pytest.raises(Invalid):
        lockfile.read(path)
