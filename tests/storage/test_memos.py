import pytest
from tiny import COLUMNS

from zgstore.errors import Corrupt, Invalid
from zgstore.format.action import Action
from zgstore.format.digest import digest_of
from zgstore.format.pages import Blob, Shard
from zgstore.storage.memos import platform_tag

KEY = digest_of("action", b"key")
TAG, OTHER = platform_tag({"torch": "2.5", "device": "cpu"}), platform_tag({"torch": "2.5", "device": "gpu"})
UUID = "12345678-1234-1234-1234-123456789abc"


def action(key=KEY, content=b"blob"):
    return Action(key, Blob(digest_of(None, content), 4), 3, "F32", (2,), {"torch": "2.5"}, (1,), {"rms": 1.5}, 0.25)


@pytest.fixture
def memos(store):
    return store.memos


def test_an_action_comes_back_for_its_key_and_platform_only(memos):
    memos.put_action(action(), TAG)
    assert memos.action(KEY, TAG) == action()
    assert memos.action(KEY, OTHER) is None
    assert memos.action(digest_of("action", b"other"), TAG) is None
    memos.put_action(action(content=b"again"), OTHER)
    assert memos.action_platforms(KEY) == sorted([TAG, OTHER])


def test_a_platform_s_tag_is_twelve_digits_of_what_it_says():
    assert TAG != OTHER
    assert platform_tag({"device": "cpu", "torch": "2.5"}) == TAG
    assert len(TAG) == 12


@pytest.mark.parametrize("damage", ["cut", "flipped", "emptied", "of another key"])
def test_a_torn_action_is_a_miss_and_dropped(memos, damage):
    memos.put_action(action(), TAG)
    (file,) = memos.actions()
    content = bytearray(file.path.read_bytes())
    if damage == "cut":
        content = content[:-1]
    elif damage == "flipped":
        content[20] ^= 1
    elif damage == "emptied":
        content = b""
    else:
        content = action(digest_of("action", b"other")).encode()
    file.path.write_bytes(content)
    assert memos.action(KEY, TAG) is None
    assert not file.path.exists()


def test_actions_are_listed_with_their_age(memos, store):
    memos.put_action(action(), TAG)
    (store.path / "actions" / "00" / "strange.txt").write_bytes(b"")
    (file,) = memos.actions()
    assert (file.key_hex, file.tag) == (KEY.hex, TAG)
    assert abs(file.mtime_seconds - store.now()) < 60
    assert memos.read_action(file) == action()
    memos.remove(file.path)
    memos.remove(file.path)
    assert list(memos.actions()) == []


def test_a_measurement_is_replaced_whole(memos):
    assert memos.measurement(KEY) is None
    memos.put_measurement(KEY, {"entries": [1]})
    memos.put_measurement(KEY, {"entries": [1, 2]})
    assert memos.measurement(KEY) == {"entries": [1, 2]}
    assert list(memos.measurements()) == [{"entries": [1, 2]}]


def test_a_measurement_in_the_place_of_another_was_never_made(memos, store):
    other = digest_of("action", b"other")
    memos.put_measurement(KEY, {"entries": [1]})
    memos.put_measurement(other, {"rows": b"", "count": 0})
    folder = store.path / "measurements"
    (folder / f"{KEY.hex}.msgpack").replace(folder / f"{other.hex}.msgpack")
    assert memos.measurement(other) is None
    assert list(memos.measurements()) == []
    assert memos.measurement(KEY) is None


def test_a_torn_measurement_was_never_made(memos, store):
    memos.put_measurement(KEY, {"entries": [1]})
    path = store.path / "measurements" / f"{KEY.hex}.msgpack"
    path.write_bytes(path.read_bytes()[:-1])
    assert memos.measurement(KEY) is None
    assert list(memos.measurements()) == []


def shard(number):
    blobs = tuple(Blob(digest_of(None, bytes([number, at])), number + at) for at in range(len(COLUMNS)))
    return Shard(3, digest_of("batch", bytes([number])), blobs)


def head():
    return {"columns": [column.as_value() for column in COLUMNS], "note": "mine"}


def test_followers_see_a_build_grow_and_end(memos):
    assert memos.build(UUID) is None
    with memos.start_build(UUID, head()) as file:
        grown = memos.build(UUID)
        assert (grown.columns, grown.shards, grown.snapshot) == (COLUMNS, (), None)
        assert grown.head["note"] == "mine"
        file.append(shard(1))
        file.append(shard(2))
        assert memos.build(UUID).shards == (shard(1), shard(2))
        file.finish(KEY)
    assert memos.build(UUID).snapshot == KEY
    assert memos.build(UUID).shards == (shard(1), shard(2))
    assert memos.builds() == [UUID]
    memos.remove_build(UUID)
    assert memos.builds() == []


def test_a_torn_tail_of_a_build_is_ignored(memos, store):
    with memos.start_build(UUID, head()) as file:
        file.append(shard(1))
        file.append(shard(2))
    path = store.path / "builds" / UUID
    content = path.read_bytes()
    for cut in (1, 50, 119):
        path.write_bytes(content[:-cut])
        assert memos.build(UUID).shards == (shard(1),)


def test_a_build_whose_head_is_torn_says_so(memos, store):
    with memos.start_build(UUID, head()):
        pass
    path = store.path / "builds" / UUID
    content = path.read_bytes()
    for damaged in (b"", content[:20], b"\xff" * 8 + content[8:], content[:-1] + b"\0"):
        path.write_bytes(damaged)
        with pytest.raises(Corrupt):
            memos.build(UUID)


def test_a_shard_has_a_blob_for_each_column(memos):
    with memos.start_build(UUID, head()) as file, pytest.raises(Invalid):
        file.append(Shard(3, KEY, ()))


def test_no_path_is_built_from_what_somebody_says_is_a_build(memos):
    for name in ("../zgstore.toml", "", UUID.upper(), f"{UUID}/x"):
        assert memos.build(name) is None
        memos.remove_build(name)
