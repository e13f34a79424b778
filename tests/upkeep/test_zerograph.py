"""What is and what is not a ZeroGraph cache."""

from __future__ import annotations

import hashlib
import json

import pytest
import torch
import zerograph_cache as made

from zgstore.errors import Corrupt, Invalid, Missing, Partial, ZgError
from zgstore.upkeep import zerograph


@pytest.fixture
def root(tmp_path):
    return tmp_path / "cache"


def test_a_cache_is_read_as_it_was_written(root):
    payloads = [made.payload_of(seed, rows=4) for seed in range(2)]
    made.make(root, payloads)
    cache = zerograph.read_manifest(root)
    zerograph.check(cache)
    assert (cache.teacher_id, cache.teacher_revision, cache.data_id) == ("org/teacher", "0123abc", "org/data")
    assert cache.boundaries == 3
    for batch, payload in zip(zerograph.load(cache), payloads, strict=True):
        assert all(map(torch.equal, batch.boundaries, payload["boundaries"]))
        assert batch.context.keys() == payload["context"].keys()


def test_flat_names_are_understood(root):
    manifest = made.make(root, [made.payload_of(0, rows=2)])
    row = manifest["files"][0]
    row["file"] = row.pop("path")
    flat = {"teacher_id": "t", "teacher_revision": "r", "sigma": 0, "data": {"id": "d"}}
    del manifest["teacher"], manifest["data_id"]
    made.seal(root, manifest | flat)
    cache = zerograph.read_manifest(root)
    assert (cache.teacher_id, cache.teacher_revision, cache.data_id) == ("t", "r", "d")


def test_how_long_the_cache_took_is_no_part_of_its_digest(root):
    manifest = made.make(root, [made.payload_of(0, rows=2)])
    before = zerograph.read_manifest(root).digest()
    made.seal(root, manifest | {"seconds": 99.0})
    assert zerograph.read_manifest(root).digest() == before


@pytest.mark.parametrize("at", [0, -1])
def test_a_flipped_bit_is_named_with_its_file(root, at):
    made.make(root, [made.payload_of(seed, rows=2) for seed in range(2)])
    path = root / "batch_00000001.pt"
    body = bytearray(path.read_bytes())
    body[at] ^= 1
    path.write_bytes(body)
    with pytest.raises(Corrupt) as caught:
        zerograph.check(zerograph.read_manifest(root))
    assert caught.value.object == path.name
    assert caught.value.path == str(path)


def test_a_file_that_changed_after_the_check_is_seen_when_it_is_loaded(root):
    made.make(root, [made.payload_of(0, rows=2)])
    cache = zerograph.read_manifest(root)
    zerograph.check(cache)
    torch.save(made.payload_of(1, rows=2), root / "batch_00000000.pt")
    with pytest.raises(Corrupt):
        list(zerograph.load(cache))


def test_a_changed_manifest_is_corrupt(root):
    made.make(root, [made.payload_of(0, rows=2)])
    path = root / "manifest.json"
    path.write_text(path.read_text().replace("org/teacher", "org/other"))
    with pytest.raises(Corrupt) as caught:
        zerograph.read_manifest(root)
    assert caught.value.object == "manifest.json"


@pytest.mark.parametrize("name", ["manifest.json", "manifest.sha256.json", "batch_00000000.pt"])
def test_a_missing_file_is_named(root, name):
    made.make(root, [made.payload_of(0, rows=2)])
    (root / name).unlink()
    with pytest.raises(Missing) as caught:
        zerograph.check(zerograph.read_manifest(root))
    assert name in caught.value.message


@pytest.mark.parametrize("name", ["manifest.json", "manifest.sha256.json", "batch_00000000.pt"])
def test_links_are_not_followed(root, tmp_path, name):
    made.make(root, [made.payload_of(0, rows=2)])
    (root / name).rename(tmp_path / name)
    (root / name).symlink_to(tmp_path / name)
    with pytest.raises(Corrupt):
        zerograph.check(zerograph.read_manifest(root))


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"kind": "other"}, Invalid),
        ({"sigma": 0.1}, Invalid),
        ({"sigma": None}, Invalid),
        ({"status": "running"}, Partial),
        ({"batch_count": 2}, Corrupt),
        ({"files": []}, Corrupt),
        ({"files": ["batch_00000000.pt"]}, Corrupt),
        ({"block_count": 7}, Corrupt),
        ({"teacher": {"id": "t"}}, Corrupt),
        ({"data_id": ""}, Corrupt),
    ],
)
def test_a_manifest_that_makes_no_sense_is_refused(root, changes, error):
    made.make(root, [made.payload_of(0, rows=2)], **changes)
    with pytest.raises(error):
        zerograph.read_manifest(root)


@pytest.mark.parametrize("name", ["../batch_00000000.pt", "/etc/passwd", "sub/batch_00000000.pt", "x.pt", "", None, 3])
def test_no_name_leads_out_of_the_folder(root, name):
    manifest = made.make(root, [made.payload_of(0, rows=2)])
    manifest["files"][0]["path"] = name
    made.seal(root, manifest)
    with pytest.raises(Invalid):
        zerograph.read_manifest(root)


def test_batches_out_of_order_are_corrupt(root):
    manifest = made.make(root, [made.payload_of(seed, rows=2) for seed in range(2)])
    manifest["files"].reverse()
    made.seal(root, manifest)
    with pytest.raises(Corrupt):
        zerograph.read_manifest(root)


class Code:
    """Unpickled by the common way, it runs."""

    def __reduce__(self):
        return (print, ("run",))


def reseal(root, manifest, payload):
    """Put any payload where batch 0 is, with the digests that it has."""
    path = root / "batch_00000000.pt"
    if isinstance(payload, bytes):
        path.write_bytes(payload)
    else:
        torch.save(payload, path)
    row = manifest["files"][0]
    row["bytes"], row["sha256"] = path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest()
    made.seal(root, manifest)


def damaged():
    good = made.payload_of(0, rows=2)
    yield "a pickle with code", {**good, "extra": Code()}
    yield "no archive", b"not a file of tensors"
    yield "an empty file", b""
    yield "a list", [1, 2]
    yield "too few boundaries", {**good, "boundaries": good["boundaries"][:2]}
    yield "another shape", {**good, "boundaries": [t[:, :3].clone() for t in good["boundaries"]]}
    yield "another dtype", {**good, "boundaries": [t.float() for t in good["boundaries"]]}
    yield "text for a tensor", {**good, "context": {**good["context"], "input_ids": "text"}}
    yield "another context", {**good, "context": {"input_ids": good["context"]["input_ids"]}}
    yield "an expanded tensor", {**good, "boundaries": [torch.zeros(1, dtype=torch.bfloat16).expand(2, 6, 8)] * 3}
    yield "a sparse tensor", {**good, "boundaries": [t.to_sparse() for t in good["boundaries"]]}


@pytest.mark.parametrize(("what", "payload"), list(damaged()), ids=[what for what, _ in damaged()])
def test_what_is_no_batch_is_refused_with_its_file_named(root, capsys, what, payload):
    reseal(root, made.make(root, [made.payload_of(0, rows=2)]), payload)
    with pytest.raises(ZgError) as caught:
        list(zerograph.load(zerograph.read_manifest(root)))
    assert isinstance(caught.value, Invalid)
    assert "batch_00000000.pt" in caught.value.message
    assert capsys.readouterr().out == ""


def test_a_manifest_without_shapes_is_enough(root):
    manifest = made.make(root, [made.payload_of(0, rows=2)])
    del manifest["files"][0]["boundaries"], manifest["files"][0]["context"], manifest["block_count"]
    made.seal(root, manifest)
    assert len(list(zerograph.load(zerograph.read_manifest(root)))) == 1


def test_a_manifest_that_is_no_json_is_refused(root):
    made.make(root, [made.payload_of(0, rows=2)])
    body = b"[" * 100_000
    (root / "manifest.json").write_bytes(body)
    (root / "manifest.sha256.json").write_text(json.dumps({"sha256": hashlib.sha256(body).hexdigest()}))
    with pytest.raises(Invalid):
        zerograph.read_manifest(root)
