import pytest

from zgstore.errors import Invalid
from zgstore.storage.naming import check_clashes, check_name


@pytest.mark.parametrize("name", ["main", "team/run-3", "v1.0", "0", "a" * 128, "A_b-c.d/e"])
def test_a_name_is_parts_of_letters_digits_and_a_few_signs(name):
    assert check_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "", "/", "a/", "/a", "a//b", ".", "..", "a/../b", ".hidden", "-x", "a b", "a\n", "ä", "a" * 129, "x.lock",
        "a.lock/b", "X.LOCK", "main@{1}", "a\0b",
    ],
)  # fmt: skip
def test_any_other_name_is_refused(name):
    with pytest.raises(Invalid) as caught:
        check_name(name)
    assert caught.value.hint


@pytest.mark.parametrize(("name", "other"), [("Main", "main"), ("a/b", "a"), ("a", "a/b"), ("a/b", "A"), ("A", "a/b")])
def test_names_that_some_file_system_confuses_clash(name, other):
    with pytest.raises(Invalid, match="clashes"):
        check_clashes(name, ["unrelated", other])


def test_names_that_merely_begin_alike_do_not_clash():
    check_clashes("main", ["main", "main2", "mai", "x/main", "main-2/a"])
