"""Caches made elsewhere, brought in."""

from __future__ import annotations

import json

import pytest
import small_stores as small
import torch
import zerograph_cache as made
from safetensors.torch import save_file

from zgstore.building.rows import row_digests
from zgstore.errors import Corrupt, Invalid, Missing, NonFinite, ZgError
from zgstore.format import tensorfile
from zgstore.format.digest import Digest
from zgstore.format.manifest import Column
from zgstore.format.pages import Dropped, RowsPage, RowsRoot
from zgstore.storage.store import Store
from zgstore.upkeep.exporter import export
from zgstore.upkeep.importer import import_safetensors, import_zerograph
from zgstore.upkeep.verifier import verify


@pytest.fixture
def store(tmp_path):
    return Store.init(tmp_path / "store")


@pytest.fixture
def root(tmp_path):
    return tmp_path / "cache"


def column(store: Store, rev: str, name: str) -> list[torch.Tensor]:
    """A column's rows, read from its blobs alone."""
    snapshot = store.snapshot(store.resolve(rev))
    at, described = snapshot.column(name)
    rows: list[torch.Tensor] = []
    for shard in store.shards(snapshot):
        body = store.objects.path(shard.blobs[at].digest, "objects").read_bytes()
        data, offsets = tensorfile.decode(body, described)
        rows += data.split(offsets.diff().tolist()) if offsets is not None else data.unbind()
    return rows


def same(found: list[torch.Tensor], wanted: torch.Tensor | list[torch.Tensor]) -> bool:
    return len(found) == len(wanted) and all(map(torch.equal, found, wanted))


def names(store: Store, rev: str) -> dict[str, str]:
    return {each.name: each.role for each in store.snapshot(store.resolve(rev)).columns}


# -- ZeroGraph ---------------------------------------------------------------------------------------------------------


def test_a_zerograph_cache_becomes_a_snapshot(store, root):
    payloads = [made.payload_of(seed, rows=rows) for seed, rows in enumerate((4, 4, 3))]
    made.make(root, payloads)
    report = import_zerograph(store, root, ref="old")
    assert list(verify(store)) == []
    assert (report.samples, report.ref, report.files) == (11, "old", 3)
    assert json.loads(json.dumps(report.as_json()))["snapshot"] == str(store.resolve("old"))
    for depth in range(3):
        assert same(
            column(store, "old", f"boundary.{depth}"), torch.cat([each["boundaries"][depth] for each in payloads])
        )
    for name in ("input_ids", "attention_mask"):
        assert same(column(store, "old", name), torch.cat([each["context"][name] for each in payloads]))
    snapshot = store.snapshot(store.resolve("old"))
    assert [each.name for each in snapshot.boundaries()] == ["boundary.0", "boundary.1", "boundary.2"]


def test_its_pins_are_declared_and_not_measured(store, root):
    made.make(root, [made.payload_of(0, rows=2)])
    import_zerograph(store, root, ref="old")
    pins = store.snapshot(store.resolve("old")).pins
    assert pins.teacher == {"id": "org/teacher", "revision": "0123abc", "declared": True}
    assert pins.data["id"] == "org/data"


def test_its_rows_have_the_digests_that_rows_have(store, root):
    payload = made.payload_of(0, rows=3)
    made.make(root, [payload])
    import_zerograph(store, root, ref="old")
    data = store.snapshot(store.resolve("old")).pins.data["digest"]
    rows = RowsRoot.decode(store.objects.read_meta(Digest(data), "page"))
    page = RowsPage.decode(store.objects.read_meta(Digest(rows.pages), "page"))
    assert page.digests == b"".join(each.raw for each in row_digests(payload["context"]))


def test_the_same_cache_gives_the_same_snapshot(store, root, tmp_path):
    payloads = [made.payload_of(seed, rows=2) for seed in range(3)]
    made.make(root, payloads)
    made.make(tmp_path / "again", payloads, seconds=77.0)
    first = import_zerograph(store, root)
    assert import_zerograph(store, tmp_path / "again").snapshot == first.snapshot
    assert import_zerograph(Store.init(tmp_path / "other"), root).snapshot == first.snapshot


def test_another_cache_that_declares_the_same_is_not_mistaken_for_it(store, root, tmp_path):
    one, other = made.payload_of(0, rows=2), made.payload_of(0, rows=2)
    other["boundaries"] = [tensor + 1 for tensor in one["boundaries"]]
    made.make(root, [one])
    made.make(tmp_path / "other", [other])
    import_zerograph(store, root, ref="one")
    import_zerograph(store, tmp_path / "other", ref="other")
    assert same(column(store, "one", "boundary.1"), one["boundaries"][1])
    assert same(column(store, "other", "boundary.1"), other["boundaries"][1])


def test_equal_rows_are_all_kept(store, root):
    payload = made.payload_of(0, rows=2)
    made.make(root, [payload] * 3)
    assert import_zerograph(store, root, ref="old", cut=1).samples == 6
    assert import_zerograph(store, root, ref="old", cut=1).samples == 6


def test_batches_of_unequal_length_lose_their_padding(store, root):
    lengths = ([3, 5], [4, 2])
    payloads = [
        made.payload_of(0, rows=2, length=5, lengths=lengths[0]),
        made.payload_of(1, rows=2, length=4, lengths=lengths[1]),
    ]
    made.make(root, payloads)
    import_zerograph(store, root, ref="old")
    wanted = [
        payload["boundaries"][1][row, :count]
        for payload, counts in zip(payloads, lengths, strict=True)
        for row, count in enumerate(counts)
    ]
    assert same(column(store, "old", "boundary.1"), wanted)
    assert list(verify(store)) == []


def test_unequal_lengths_without_a_mask_are_whole_rows(store, root):
    payloads = [made.payload_of(0, rows=2, length=5), made.payload_of(1, rows=2, length=4)]
    for payload in payloads:
        del payload["context"]["attention_mask"]
    made.make(root, payloads)
    import_zerograph(store, root, ref="old")
    assert [len(row) for row in column(store, "old", "boundary.0")] == [5, 5, 4, 4]
    assert [len(row) for row in column(store, "old", "input_ids")] == [5, 5, 4, 4]


def test_context_without_rows_becomes_a_constant(store, root):
    payloads = [made.payload_of(seed, rows=rows) for seed, rows in enumerate((2, 3))]
    for payload in payloads:
        payload["context"]["inv_freq"] = torch.arange(4.0)
        payload["context"]["scale"] = torch.tensor(2.0)
    made.make(root, payloads)
    import_zerograph(store, root, ref="old")
    assert {each.name for each in store.snapshot(store.resolve("old")).constants} == {"inv_freq", "scale"}


def test_a_cache_without_context_keeps_the_place_of_each_row(store, root):
    payloads = [made.payload_of(seed, rows=2) for seed in range(2)]
    for payload in payloads:
        payload["context"] = {}
    made.make(root, payloads)
    import_zerograph(store, root, ref="old")
    assert [int(row) for row in column(store, "old", "source_row")] == [0, 1, 2, 3]
    assert same(column(store, "old", "boundary.0"), torch.cat([each["boundaries"][0] for each in payloads]))


def test_a_manifest_without_shapes_gives_the_same_snapshot(store, root):
    manifest = made.make(root, [made.payload_of(seed, rows=2, length=4 + seed) for seed in range(2)])
    first = import_zerograph(store, root).snapshot
    for row in manifest["files"]:
        del row["boundaries"], row["context"]
    made.seal(root, manifest)
    assert import_zerograph(store, root).snapshot == first


def test_nothing_is_written_where_a_file_is_damaged(store, root):
    made.make(root, [made.payload_of(seed, rows=2) for seed in range(2)])
    path = root / "batch_00000001.pt"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(Corrupt) as caught:
        import_zerograph(store, root, ref="old")
    assert caught.value.object == "batch_00000001.pt"
    assert store.refs.list() == []
    assert list((store.path / "objects").glob("*/*")) == []


def test_states_that_are_not_finite_are_refused(store, root):
    payload = made.payload_of(0, rows=2)
    payload["boundaries"][1][1, 0, 0] = torch.nan
    made.make(root, [payload])
    with pytest.raises(NonFinite):
        import_zerograph(store, root, ref="old")


# -- safetensors -------------------------------------------------------------------------------------------------------

H0, H1 = small.boundary("h.0", 0), small.boundary("h.1", 1, codec="int8")
RAGGED = small.boundary("words", 2, shape=(None, 4))
OUT = Column("logits", "output", "F32", "raw", (3,))
IDS = Column("input_ids", "context", "I64", "raw", (None,))


def exported(tmp_path, **changes):
    source = Store.init(tmp_path / "source")
    lengths = torch.tensor([2, 3])
    columns = {
        H0: [small.values(at, 2) for at in range(2)],
        H1: [small.values(10 + at, 2) for at in range(2)],
        RAGGED: [(small.values(20 + at, 5, width=4), lengths) for at in range(2)],
        OUT: [torch.ones(2, 3) * at for at in range(2)],
        IDS: [(torch.arange(5) + at, lengths) for at in range(2)],
    }
    small.publish(source, columns, ref="main", constants={"rope": torch.ones(3)}, **changes)
    export(source, "main", tmp_path / "out")
    return source, tmp_path / "out"


def test_an_export_comes_back_with_its_columns_roles_and_values(store, tmp_path):
    source, out = exported(tmp_path)
    report = import_safetensors(store, out, ref="back")
    assert list(verify(store)) == []
    assert report.samples == 4
    roles = names(store, "back")
    assert {name: roles[name] for name in names(source, "main")} == names(source, "main")
    for name in names(source, "main"):
        assert same(column(store, "back", name), column(source, "main", name)), name
    assert [each.name for each in store.snapshot(store.resolve("back")).constants] == ["rope"]
    pins = store.snapshot(store.resolve("back")).pins
    assert pins.teacher == {"id": "org/teacher", "revision": "r1", "declared": True}


def test_masked_rows_stay_away(store, tmp_path):
    source, out = exported(tmp_path, dropped=Dropped(masked=(1, 2), masked_reasons=("x", "x")))
    assert import_safetensors(store, out, ref="back").samples == 2
    for name in ("h.0", "words", "input_ids"):
        rows = column(source, "main", name)
        assert same(column(store, "back", name), [rows[0], rows[3]])


def test_a_changed_file_of_an_export_is_named(store, tmp_path):
    _, out = exported(tmp_path)
    path = out / "h.0" / "000001.safetensors"
    body = bytearray(path.read_bytes())
    body[-1] ^= 1
    path.write_bytes(body)
    with pytest.raises(Corrupt) as caught:
        import_safetensors(store, out)
    assert caught.value.object == "h.0/000001.safetensors"


@pytest.mark.parametrize("name", ["../x/000000.safetensors", "/etc/passwd", "h.0/../../x", "a/b/c", 7])
def test_no_name_of_a_manifest_leads_elsewhere(store, tmp_path, name):
    _, out = exported(tmp_path)
    manifest = json.loads((out / "manifest.json").read_text())
    manifest["columns"][0]["files"][0]["file"] = name
    (out / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(Invalid):
        import_safetensors(store, out)


@pytest.mark.parametrize("cut_out", ["columns", "constants", "teacher", "kind"])
def test_a_manifest_that_lacks_something_is_refused(store, tmp_path, cut_out):
    _, out = exported(tmp_path)
    manifest = json.loads((out / "manifest.json").read_text())
    del manifest[cut_out]
    (out / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(Invalid):
        import_safetensors(store, out)


@pytest.mark.parametrize("masked", [3, [3], [{}], [{"row": -1}], [{"row": "1"}], [{"row": [1]}]])
def test_masked_rows_that_are_no_numbers_are_refused(store, tmp_path, masked):
    _, out = exported(tmp_path)
    manifest = json.loads((out / "manifest.json").read_text())
    (out / "manifest.json").write_text(json.dumps(manifest | {"masked": masked}))
    with pytest.raises(Invalid, match="no manifest of an export"):
        import_safetensors(store, out)


def plain(root, files):
    root.mkdir()
    for name, tensors in files.items():
        save_file(tensors, root / name)


def test_plain_files_are_a_table(store, root):
    tables = [
        {"h.2": small.values(at, 3), "h.10": small.values(9 + at, 3), "labels": torch.arange(3) + at} for at in range(2)
    ]
    plain(root, {f"part-{at + 9}.safetensors": table for at, table in enumerate(tables)})
    report = import_safetensors(store, root, ref="plain", teacher_id="org/model", teacher_revision="abc", data_id="d")
    assert report.samples == 6
    snapshot = store.snapshot(store.resolve("plain"))
    assert [each.name for each in snapshot.boundaries()] == ["h.2", "h.10"]
    assert names(store, "plain")["labels"] == "context"
    assert snapshot.pins.teacher == {"id": "org/model", "revision": "abc", "declared": True}
    for name in tables[0]:
        assert same(column(store, "plain", name), torch.cat([table[name] for table in tables]))
    assert list(verify(store)) == []


def test_plain_files_need_no_declaration(store, root):
    plain(root, {"a.safetensors": {"h": small.values(0, 2)}})
    import_safetensors(store, root, ref="plain")
    assert store.snapshot(store.resolve("plain")).pins.teacher["revision"].startswith("blake3:")


@pytest.mark.parametrize(
    "second",
    [
        {"h": small.values(0, 2), "more": torch.ones(2)},
        {"h": small.values(0, 2).float()},
        {"h": small.values(0, 2, width=4)},
        {"h": torch.tensor(1.0)},
        {"other": small.values(0, 2)},
    ],
)
def test_files_of_unequal_keys_are_refused(store, root, second):
    plain(root, {"a.safetensors": {"h": small.values(0, 2)}, "b.safetensors": second})
    with pytest.raises(Invalid) as caught:
        import_safetensors(store, root)
    assert "b.safetensors" in caught.value.message


def test_columns_of_unequal_rows_are_refused(store, root):
    plain(root, {"a.safetensors": {"h": small.values(0, 2), "labels": torch.ones(3)}})
    with pytest.raises(Invalid):
        import_safetensors(store, root)


def test_what_is_no_table_is_refused(store, root, tmp_path):
    with pytest.raises(Missing):
        import_safetensors(store, root)
    root.mkdir()
    with pytest.raises(Invalid):
        import_safetensors(store, root)
    (root / "a.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ZgError):
        import_safetensors(store, root)
    (root / "a.safetensors").unlink()
    save_file({"h": small.values(0, 2)}, tmp_path / "elsewhere")
    (root / "a.safetensors").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Corrupt):
        import_safetensors(store, root)
