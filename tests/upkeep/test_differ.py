"""Two snapshots compared: by digest, and by value."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest
import small_stores as small
import torch

from zgstore.errors import Corrupt, NotFound
from zgstore.format.fields import all_digests
from zgstore.format.manifest import Column
from zgstore.format.pages import Dropped
from zgstore.storage.store import Store
from zgstore.upkeep.differ import Change, Counts, diff

H0, H1 = small.boundary("h.0", 0), small.boundary("h.1", 1)
IDS = Column("input_ids", "context", "I64", "raw", (4,))


@pytest.fixture
def store(tmp_path):
    return Store.init(tmp_path / "store")


def two(seed: int, shards: int = 3) -> dict:
    return {
        H0: [small.values(seed + at, 2) for at in range(shards)],
        H1: [small.values(seed + 100 + at, 2) for at in range(shards)],
    }


def test_a_snapshot_is_the_same_as_itself(store):
    small.publish(store, two(0), ref="main")
    found = diff(store, "main", "main")
    assert found.same
    assert (found.pins, found.head, found.cause) == ((), (), None)
    assert found.shards == Counts(added=0, removed=0, changed=0, same=3)
    assert found.columns.same == ("h.0", "h.1")
    assert found.bytes.only_a == found.bytes.only_b == 0 < found.bytes.shared


def test_a_nested_pin_is_named_by_its_path(store):
    small.publish(store, two(0), ref="a", arithmetic={"dtype": "BF16", "tf32": False})
    small.publish(store, two(0), ref="b", arithmetic={"dtype": "F32", "attention": "sdpa"}, teacher="b")
    found = diff(store, "a", "b")
    assert [change.field for change in found.pins] == [
        "teacher.measured",
        "capture.arithmetic.attention",
        "capture.arithmetic.dtype",
        "capture.arithmetic.tf32",
    ]
    assert found.pins[2] == Change("capture.arithmetic.dtype", "BF16", "F32")
    measured = found.as_json()["pins"][0]
    assert measured["a"].startswith("blake3:")
    assert measured["a"] != measured["b"]


def test_another_teacher_changes_the_columns_and_no_context(store):
    ids = [torch.arange(8).view(2, 4) + at for at in range(3)]
    small.publish(store, {**two(0), IDS: ids}, ref="a", teacher="a")
    small.publish(store, {**two(50), IDS: ids}, ref="b", teacher="b")
    found = diff(store, "a", "b")
    assert found.columns.changed == ("h.0", "h.1")
    assert found.definitions == {}
    assert found.columns.same == ("input_ids",)
    assert found.shards == Counts(added=0, removed=0, changed=3, same=0)
    assert found.bytes.shared > 0
    assert found.bytes.only_a == found.bytes.only_b > 0
    assert found.cause is None


def test_an_appended_shard_is_added_and_changes_no_column(store):
    small.publish(store, two(0, shards=3), ref="a")
    small.publish(store, two(0, shards=4), ref="b")
    found = diff(store, "a", "b")
    assert found.shards == Counts(added=1, removed=0, changed=0, same=3)
    assert found.columns.same == ("h.0", "h.1")
    assert found.bytes.only_a == 0 < found.bytes.only_b
    assert diff(store, "b", "a").shards == Counts(added=0, removed=1, changed=0, same=3)
    assert [change.field for change in found.head] == ["samples"]


def test_an_added_column_leaves_the_shards_the_same(store):
    full = two(0)
    small.publish(store, {H0: full[H0]}, ref="a")
    small.publish(store, full, ref="b")
    found = diff(store, "a", "b")
    assert found.columns.added == ("h.1",)
    assert found.columns.same == ("h.0",)
    assert found.shards == Counts(added=0, removed=0, changed=0, same=3)
    assert diff(store, "b", "a").columns.removed == ("h.1",)


def test_a_column_of_another_definition_is_changed(store):
    full = two(0)
    wide = {H0: full[H0], dataclasses.replace(H1, dtype="F32"): [tensor.float() for tensor in full[H1]]}
    small.publish(store, full, ref="a")
    small.publish(store, wide, ref="b")
    found = diff(store, "a", "b")
    assert found.columns.changed == ("h.1",)
    assert found.definitions == {"h.1": (Change("dtype", "BF16", "F32"),)}
    assert found.as_json()["definitions"] == {"h.1": [{"field": "dtype", "a": "BF16", "b": "F32"}]}


def test_shards_are_aligned_by_their_inputs_then_by_place(store):
    small.publish(store, two(0), ref="a", inputs=["x", "y", "z"])
    full = two(0)
    moved = {column: [parts[2], parts[0], parts[1]] for column, parts in full.items()}
    small.publish(store, moved, ref="b", inputs=["z", "x", "other"])
    assert diff(store, "a", "b").shards == Counts(added=1, removed=1, changed=0, same=2)
    small.publish(store, full, ref="c", inputs=["x", "other", "z"])
    assert diff(store, "a", "c").shards == Counts(added=0, removed=0, changed=1, same=2)


def test_only_pages_that_are_not_in_both_are_read(store):
    """The shared leaf is taken away: whatever asked for it would fail."""
    shards = 12
    parts = {H0: [small.values(at, 1) for at in range(shards)]}
    a = small.publish(store, parts, ref="a", per_leaf=4)
    parts[H0][11] = small.values(99, 1)
    b = small.publish(store, parts, ref="b", per_leaf=4)
    leaves_a, leaves_b = (list(all_digests(store.root(store.snapshot(each)).leaves)) for each in (a, b))
    assert leaves_a[:2] == leaves_b[:2]
    for leaf in leaves_a[:2]:
        store.objects.path(leaf, "meta").unlink()
    found = diff(store, "a", "b")
    assert found.shards == Counts(added=0, removed=0, changed=1, same=11)
    assert found.bytes.shared == 11 * found.bytes.only_a
    assert found.columns.changed == ("h.0",)


def test_no_blob_is_opened_without_values(store):
    small.publish(store, two(0), ref="a")
    small.publish(store, two(50), ref="b")
    for path in (store.path / "objects").glob("*/*"):
        path.unlink()
    assert diff(store, "a", "b").shards.changed == 3


def test_constants_are_compared(store):
    for ref, value in (("a", 1.0), ("b", 2.0)):
        small.publish(store, two(0), ref=ref, constants={"inv_freq": torch.full((3,), value), "same": torch.ones(2)})
    found = diff(store, "a", "b")
    assert found.constants.changed == ("inv_freq",)
    assert found.constants.same == ("same",)
    assert found.bytes.only_a > 0


@pytest.mark.parametrize(
    ("platforms", "said"),
    [
        (([{"torch": "2.1", "cpu": "x"}], [{"torch": "2.2", "cpu": "x"}]), "torch (2.1 and 2.2)"),
        (([{"torch": "2.1"}], [{"torch": "2.1"}]), "not reproducible"),
        (([], [{"torch": "2.1"}]), "no record"),
    ],
)
def test_equal_pins_and_unequal_bytes_have_a_cause(store, platforms, said):
    small.publish(store, two(0), ref="a", platforms=platforms[0])
    small.publish(store, two(50), ref="b", platforms=platforms[1])
    cause = diff(store, "a", "b").cause
    assert cause is not None
    assert said in cause


def test_growth_has_no_cause(store):
    small.publish(store, two(0, shards=3), ref="a", platforms=[{"torch": "2.1"}])
    small.publish(store, two(0, shards=4), ref="b", platforms=[{"torch": "2.2"}])
    assert diff(store, "a", "b").cause is None


def test_an_unknown_rev_is_not_found(store):
    small.publish(store, two(0), ref="a")
    with pytest.raises(NotFound):
        diff(store, "a", "nowhere")


# -- values ------------------------------------------------------------------------------------------------------------


def expected(a: torch.Tensor, b: torch.Tensor) -> dict:
    """The numbers by the book, over whole tensors [R, …]."""
    x, y = a.double().flatten(1), b.double().flatten(1)
    cosines = torch.nn.functional.cosine_similarity(x, y, dim=1)
    rows = (a != b).flatten(1).any(1).nonzero().flatten()
    return {
        "max_abs": float((x - y).abs().max()),
        "mean_abs": float((x - y).abs().mean()),
        "rel_l2": float((x - y).norm() / x.norm()),
        "cos_min": float(cosines.min()),
        "cos_mean": float(cosines.mean()),
        "first_row": int(rows[0]) if len(rows) else None,
    }


def close(found, wanted: dict) -> None:
    for name, value in wanted.items():
        assert getattr(found, name) == (value if name == "first_row" else pytest.approx(value, abs=1e-12)), name


def test_values_are_the_numbers_of_the_book(store):
    a, b = two(0), two(0)
    b[H1] = [a[H1][0], a[H1][1] + 0.5, a[H1][2]]
    small.publish(store, a, ref="a")
    small.publish(store, b, ref="b")
    found = diff(store, "a", "b", values=True)
    close(found.values["h.1"], expected(torch.cat(a[H1]), torch.cat(b[H1])))
    assert found.values["h.1"].first_row == 2
    zero = found.values["h.0"].as_json()
    assert zero == {
        "max_abs": 0.0, "mean_abs": 0.0, "rel_l2": 0.0, "cos_min": 1.0, "cos_mean": 1.0, "first_row": None,
        "rows": 6, "unlike": 0,
    }  # fmt: skip


def test_identical_blobs_are_not_read(store):
    a, b = two(0), two(0)
    b[H1] = [tensor + 1 for tensor in a[H1]]
    snapshot = small.publish(store, a, ref="a")
    small.publish(store, b, ref="b")
    for shard in store.shards(store.snapshot(snapshot)):
        path = store.objects.path(shard.blobs[0].digest, "objects")
        size = path.stat().st_size
        path.unlink()
        path.write_bytes(bytes(size))
    assert diff(store, "a", "b", values=True).values["h.0"].max_abs == 0


def test_rows_are_aligned_by_what_they_are(store):
    """The same rows in another order, cut otherwise, one of them gone."""
    table = small.values(0, 6)
    order = [4, 2, 0, 5, 1]
    names = small.row_names(6)
    moved = b"".join(names[32 * row : 32 * row + 32] for row in order)
    small.publish(store, {H0: list(table.split(2))}, ref="a")
    small.publish(store, {H0: list(table[order].split(3))}, ref="b", rows=moved, inputs=["p", "q"])
    found = diff(store, "a", "b", values=True).values["h.0"]
    assert (found.rows, found.max_abs, found.first_row) == (5, 0.0, None)


def test_masked_rows_are_skipped_and_not_counted(store):
    a, b = small.values(0, 4), small.values(0, 4)
    a[1], b[1] = torch.nan, 7.0
    b[3] += 1
    dropped = Dropped(masked=(1,), masked_reasons=("not finite",))
    small.publish(store, {H0: [a]}, ref="a", dropped=dropped)
    small.publish(store, {H0: [b]}, ref="b", dropped=dropped)
    found = diff(store, "a", "b", values=True).values["h.0"]
    keep = [0, 2, 3]
    close(found, expected(a[keep], b[keep]))
    assert (found.rows, found.first_row) == (3, 2)


def test_ragged_rows_have_one_cosine_each(store):
    ragged = small.boundary("h.0", 0, shape=(None, 4))
    lengths = torch.tensor([3, 1, 2])
    a, b = small.values(0, 6, width=4), small.values(1, 6, width=4)
    small.publish(store, {ragged: [(a, lengths)]}, ref="a")
    small.publish(store, {ragged: [(b, lengths)]}, ref="b")
    found = diff(store, "a", "b", values=True).values["h.0"]
    x, y = a.double().split([3, 1, 2]), b.double().split([3, 1, 2])
    cosines = [torch.cosine_similarity(p.flatten(), q.flatten(), dim=0) for p, q in zip(x, y, strict=True)]
    assert found.cos_min == pytest.approx(float(min(cosines)), abs=1e-12)
    assert found.cos_mean == pytest.approx(float(sum(cosines)) / 3, abs=1e-12)


def test_rows_of_unequal_lengths_are_counted_apart(store):
    ragged = small.boundary("h.0", 0, shape=(None, 4))
    table = small.values(0, 7, width=4)
    small.publish(store, {ragged: [(table[[0, 1, 2, 3, 5, 6]], torch.tensor([3, 1, 2]))]}, ref="a")
    small.publish(store, {ragged: [(table, torch.tensor([3, 2, 2]))]}, ref="b")
    found = diff(store, "a", "b", values=True).values["h.0"]
    assert (found.rows, found.unlike, found.first_row) == (2, 1, 1)


def test_int8_columns_are_compared_as_what_they_stand_for(store):
    coded = small.boundary("h.0", 0, codec="int8")
    table = small.values(0, 4)
    small.publish(store, {H0: [table]}, ref="a")
    small.publish(store, {coded: [table]}, ref="b")
    found = diff(store, "a", "b", values=True).values["h.0"]
    assert 0 < found.max_abs < 0.05


def test_what_is_not_finite_is_null_in_json(store):
    a, b = small.values(0, 2), small.values(0, 2)
    a[0, 0] = b[0, 0] = -torch.inf
    small.publish(store, {H0: [a]}, ref="a")
    b[1, 1] += 1
    small.publish(store, {H0: [b]}, ref="b")
    assert diff(store, "a", "b", values=True).values["h.0"].first_row == 1
    b[1, 1] = torch.nan
    small.publish(store, {H0: [b]}, ref="c")
    found = diff(store, "a", "c", values=True).as_json()
    assert found["values"]["h.0"]["max_abs"] is None
    json.loads(json.dumps(found, allow_nan=False))


def test_large_integers_are_told_apart(store):
    table = torch.tensor([[2**60], [5]])
    column = Column("input_ids", "context", "I64", "raw", (1,))
    small.publish(store, {column: [table]}, ref="a")
    small.publish(store, {column: [table + torch.tensor([[1], [0]])]}, ref="b")
    assert diff(store, "a", "b", values=True).values["input_ids"].first_row == 0


def test_samples_are_spread_evenly(store):
    a = small.values(0, 100)
    b = a.clone()
    b[50] += 1
    small.publish(store, {H0: [a]}, ref="a")
    small.publish(store, {H0: [b]}, ref="b")
    few = diff(store, "a", "b", values=True, samples=5).values["h.0"]
    assert (few.rows, few.first_row) == (5, 50)
    assert diff(store, "a", "b", values=True, samples=1000).values["h.0"].rows == 100


def test_columns_of_other_shapes_are_skipped_with_the_reason(store):
    small.publish(store, {H0: [small.values(0, 2)]}, ref="a")
    small.publish(store, {small.boundary("h.0", 0, shape=(4,)): [small.values(0, 2, width=4)]}, ref="b")
    found = diff(store, "a", "b", values=True)
    assert found.values == {}
    assert "[4]" in found.skipped["h.0"]


def test_pieces_give_what_the_whole_gives(store, monkeypatch):
    a, b = small.values(0, 50), small.values(1, 50)
    small.publish(store, {H0: list(a.split(20))}, ref="a")
    small.publish(store, {H0: list(b.split(7))}, ref="b", inputs=[str(at) for at in range(8)])
    monkeypatch.setattr("zgstore.upkeep.valuediff.PIECE_ELEMENTS", 3 * small.WIDTH)
    close(diff(store, "a", "b", values=True).values["h.0"], expected(a, b))


def test_a_corrupt_blob_is_found_before_it_is_compared(store):
    a = small.publish(store, {H0: [small.values(0, 4)]}, ref="a")
    small.publish(store, {H0: [small.values(1, 4)]}, ref="b")
    (shard,) = store.shards(store.snapshot(a))
    path = store.objects.path(shard.blobs[0].digest, "objects")
    path.chmod(0o644)
    body = bytearray(path.read_bytes())
    body[-1] ^= 1
    path.write_bytes(body)
    with pytest.raises(Corrupt):
        diff(store, "a", "b", values=True)


def test_comparing_by_digest_loads_no_torch(store):
    small.publish(store, two(0), ref="a")
    small.publish(store, two(50), ref="b")
    code = (
        "import sys; from zgstore.storage.store import Store; from zgstore.upkeep.differ import diff;"
        f"diff(Store.open({str(store.path)!r}), 'a', 'b'); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
