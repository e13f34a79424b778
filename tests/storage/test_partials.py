"""The marker of a part."""

from __future__ import annotations

import pytest

from zgstore.errors import Corrupt
from zgstore.format.digest import digest_of
from zgstore.storage import partials
from zgstore.storage.config import POLICIES

SNAPSHOT = digest_of("snapshot", b"one")
OTHER = digest_of("snapshot", b"other")


@pytest.fixture
def root(tmp_path):
    (tmp_path / "tmp").mkdir()
    return tmp_path


def mark(root, snapshot, columns):
    partials.mark(root, snapshot, columns, POLICIES["private"])


def test_a_snapshot_without_a_marker_is_whole(root):
    assert partials.expected(root, SNAPSHOT) is None
    assert list(partials.listed(root)) == []


def test_a_marked_snapshot_names_its_columns(root):
    mark(root, SNAPSHOT, {"h.1", "h.0"})
    assert partials.expected(root, SNAPSHOT) == {"h.0", "h.1"}
    assert partials.expected(root, OTHER) is None
    assert [snapshot for _, snapshot in partials.listed(root)] == [SNAPSHOT]


def test_marking_again_replaces(root):
    mark(root, SNAPSHOT, {"h.0"})
    mark(root, SNAPSHOT, {"h.0", "h.2"})
    assert partials.expected(root, SNAPSHOT) == {"h.0", "h.2"}


def test_clearing_makes_it_whole_again_and_is_harmless_twice(root):
    mark(root, SNAPSHOT, {"h.0"})
    partials.clear(root, SNAPSHOT)
    partials.clear(root, SNAPSHOT)
    assert partials.expected(root, SNAPSHOT) is None


@pytest.mark.parametrize(
    "damage", [lambda body: body[:-1], lambda body: b"", lambda body: bytes([body[0] ^ 1]) + body[1:]]
)
def test_a_damaged_marker_is_corrupt_and_says_what_mends_it(root, damage):
    mark(root, SNAPSHOT, {"h.0"})
    path = root / partials.FOLDER / SNAPSHOT.hex
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(Corrupt) as caught:
        partials.expected(root, SNAPSHOT)
    assert "zgstore copy" in caught.value.hint


def test_the_marker_of_another_snapshot_is_corrupt(root):
    mark(root, SNAPSHOT, {"h.0"})
    (root / partials.FOLDER / SNAPSHOT.hex).rename(root / partials.FOLDER / OTHER.hex)
    with pytest.raises(Corrupt):
        partials.expected(root, OTHER)


def test_a_link_in_its_place_is_refused(root, tmp_path):
    (root / partials.FOLDER).mkdir()
    (tmp_path / "elsewhere").write_bytes(b"")
    (root / partials.FOLDER / SNAPSHOT.hex).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Corrupt):
        partials.expected(root, SNAPSHOT)
