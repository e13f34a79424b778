"""Pins, pages, snapshots, records and actions: what is written is read back, and what breaks the format is refused."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zgstore.errors import Corrupt, Invalid
from zgstore.format import canonical
from zgstore.format.action import Action, decode_sealed, encode_sealed
from zgstore.format.digest import Digest, digest_of
from zgstore.format.manifest import Column, Constant, Pins, Record, Snapshot
from zgstore.format.pages import MAX_ROWS, Blob, Dropped, LeafPage, RootPage, RowsPage, RowsRoot, Shard, rows_tree

DIGESTS = st.binary(min_size=32, max_size=32).map(Digest)
SIZES = st.integers(0, (1 << 64) - 1)
ROWS = st.integers(0, MAX_ROWS // 5)
BLOBS = st.builds(Blob, DIGESTS, SIZES)
PINS = Pins({"id": "t", "revision": "1", "measured": b"m" * 32}, {"id": "d"}, {"points": ["a:in"]})
COLUMNS = (
    Column("a:in", "boundary", "BF16", "raw", (None, 8), 0),
    Column("a:out", "boundary", "F32", "int8", (None, 8), 1),
    Column("logits", "output", "F16", "raw", (4,)),
    Column("id", "context", "I64", "raw", ()),
)


def shards(columns):
    return st.lists(st.builds(Shard, ROWS, DIGESTS, st.tuples(*[BLOBS] * columns)), min_size=1, max_size=5)


@given(st.integers(0, 3).flatmap(lambda n: st.tuples(st.just(n), shards(n))))
def test_a_leaf_page_gives_its_shards_back(case):
    columns, rows = case
    page = LeafPage.of(rows, columns=columns)
    again = LeafPage.decode(page.encode())
    assert again == page
    assert [again.shard(at) for at in range(len(again))] == rows


def test_a_root_page_sums_its_leaves():
    blob = Blob(Digest(b"b" * 32), 100)
    leaf = LeafPage.of([Shard(3, Digest(b"i" * 32), (blob,)), Shard(4, Digest(b"j" * 32), (blob,))], columns=1)
    root = RootPage.of([(Digest(b"l" * 32), leaf)] * 2, columns=1)
    again = RootPage.decode(root.encode())
    assert again == root
    assert int.from_bytes(again.rows[:8], "little") == 7
    assert int.from_bytes(again.column_bytes[0][8:], "little") == 200
    assert len(again) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"rows": bytes(7)},
        {"rows": b""},
        {"rows": (MAX_ROWS + 1).to_bytes(8, "little")},
        {"inputs": bytes(31)},
        {"blobs": [bytes(33)]},
        {"sizes": [bytes(16)]},
        {"sizes": []},
        {"kind": "root"},
        {"rows": "text"},
    ],
)
def test_a_leaf_page_whose_fields_disagree_is_corrupt(change):
    value = {"kind": "leaf", "rows": bytes(8), "inputs": bytes(32), "blobs": [bytes(32)], "sizes": [bytes(8)]}
    LeafPage.decode(canonical.encode(value))
    with pytest.raises(Corrupt):
        LeafPage.decode(canonical.encode(value | change))


@given(st.integers(0, 40))
def test_row_digests_make_a_tree_whose_root_counts_them(count):
    digests = b"".join(digest_of("row", bytes([at])).raw for at in range(count))
    root, pages = rows_tree(digests)
    assert RowsRoot.decode(root.encode()) == root
    assert root.count == count
    assert b"".join(RowsPage.decode(page.encode()).digests for page in pages) == digests


def test_rows_beyond_a_page_begin_the_next():
    digests = bytes(32) * ((1 << 16) + 1)
    root, pages = rows_tree(digests)
    assert [len(page.digests) // 32 for page in pages] == [1 << 16, 1]
    assert root.pages == b"".join(digest_of("page", page.encode()).raw for page in pages)


def test_dropped_rows_keep_their_reasons():
    dropped = Dropped((1, 5), ("NaN in a:in", "NaN in a:in"), (9,), ("too short",))
    assert Dropped.decode(dropped.encode()) == dropped


def snapshot(**changes):
    base = Snapshot(
        pins=PINS, columns=COLUMNS, constants=(Constant("w", "F32", (2, 3), Digest(b"c" * 32), 4120),), cut=16,
        samples=7, dropped=Digest(b"d" * 32), root=Digest(b"r" * 32),
    )  # fmt: skip
    return dataclasses.replace(base, **changes)


def test_a_snapshot_is_read_back():
    assert Snapshot.decode(snapshot().encode()) == snapshot()
    assert Snapshot.decode(snapshot(dropped=None).encode()).dropped is None


def test_boundaries_come_in_depth_order():
    turned = snapshot(columns=tuple(reversed(COLUMNS)))
    assert [column.name for column in turned.boundaries()] == ["a:in", "a:out"]


def test_a_column_that_is_not_there_is_refused_with_those_that_are():
    assert snapshot().column("logits") == (2, COLUMNS[2])
    with pytest.raises(Invalid) as caught:
        snapshot().column("nothing")
    assert "logits" in caught.value.hint


def test_an_unknown_feature_is_refused_by_name():
    with pytest.raises(Invalid, match="zstd-2"):
        Snapshot.decode(snapshot(requires=("zstd-2",)).encode())


def test_an_unknown_key_is_kept_out_of_the_way():
    value = canonical.decode(snapshot().encode()) | {"later": 1}
    assert Snapshot.decode(canonical.encode(value)) == snapshot()


def test_an_unknown_role_or_codec_does_not_make_the_snapshot_unreadable():
    columns = (*COLUMNS, Column("x", "weights", "BF16", "zstd", (4,)))
    assert Snapshot.decode(snapshot(columns=columns).encode()).columns == columns


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "record"}, {"format": "1"}, {"root": bytes(31)}, {"dropped": b""}, {"columns": {}}, {"cut": None},
        {"columns": [COLUMNS[0].as_value()] * 2}, {"columns": [COLUMNS[0].as_value() | {"shape": [4, None]}]},
        {"columns": [COLUMNS[0].as_value() | {"shape": [-1]}]}, {"columns": [COLUMNS[0].as_value() | {"depth": "0"}]},
    ],
)  # fmt: skip
def test_a_snapshot_that_breaks_the_format_is_corrupt(change):
    value = canonical.decode(snapshot().encode())
    with pytest.raises(Corrupt):
        Snapshot.decode(canonical.encode(value | change))


def test_no_circumstance_takes_part_in_a_snapshots_digest():
    assert "time" not in canonical.decode(snapshot().encode())


def action(**changes):
    base = Action(
        key=Digest(b"k" * 32), blob=Blob(Digest(b"b" * 32), 8192), rows=64, dtype="BF16", shape=(None, 8),
        platform={"torch": "2"}, nonfinite=(3, 9), statistics={"rms": 0.5}, seconds=1.25,
    )  # fmt: skip
    return dataclasses.replace(base, **changes)


def test_an_action_is_read_back():
    assert Action.decode(action().encode()) == action()


@given(st.data())
def test_a_torn_or_changed_action_fails_its_own_digest(data):
    content = bytearray(action().encode())
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    else:
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(Corrupt):
        Action.decode(bytes(content))


def test_a_sealed_action_with_a_field_of_no_width_is_corrupt():
    value = canonical.decode(action().encode()[:-32])
    with pytest.raises(Corrupt, match="8 bytes"):
        Action.decode(encode_sealed("action", value | {"nonfinite": b"odd"}))


def test_a_sealed_value_of_one_kind_is_not_read_as_another():
    sealed = encode_sealed("measurement", {"a": 1})
    assert decode_sealed("measurement", sealed) == {"a": 1}
    with pytest.raises(Corrupt):
        decode_sealed("action", sealed)


def test_a_record_is_read_back():
    record = Record(Digest(b"s" * 32), 12.5, {"host": "h", "durations": {"teacher": 1.0}})
    assert Record.decode(record.encode()) == record


def test_equal_pins_have_equal_digests_whatever_their_order():
    turned = Pins(dict(reversed(PINS.teacher.items())), PINS.data, PINS.capture)
    assert turned.digest() == PINS.digest()
    assert Pins(PINS.teacher, {"id": "e"}, PINS.capture).digest() != PINS.digest()
