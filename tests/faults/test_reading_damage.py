"""Damage that a reader meets: a typed error that names the blob and the command that mends it, never other values."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parents[1] / "reading"))
from stored import RAGGED, dense, make_store, ragged

from zgstore.errors import Corrupt, Missing, Partial, Transient
from zgstore.format.fields import pack_u64
from zgstore.format.pages import Dropped, RootPage
from zgstore.reading.opening import read
from zgstore.reading.sampler import Sampler
from zgstore.storage import partials
from zgstore.upkeep.differ import diff
from zgstore.upkeep.verifier import verify


@pytest.fixture
def made(tmp_path):
    torch.set_num_threads(1)
    return make_store(tmp_path / "store", dense())


def rewrite(path, body, *, keep_times=False):
    before = path.stat()
    path.chmod(0o600)
    path.write_bytes(body)
    path.chmod(0o444)
    if keep_times:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def flip(path, at=-5, **how):
    body = bytearray(path.read_bytes())
    body[at] ^= 0x10
    rewrite(path, bytes(body), **how)


def test_a_flipped_bit_is_found_at_first_use_and_named(made):
    path = made.path("h.0", 2)
    flip(path, keep_times=True)
    with read(made.store, "main", columns=["h.0"]) as reader:
        assert torch.equal(reader[0]["h.0"], made.rows["h.0"][0])
        for _ in range(2):
            with pytest.raises(Corrupt) as caught:
                reader.batch([0, 9])
        error = caught.value
        assert error.object == error.expected == str(made.blobs["h.0"][2].digest)
        assert error.actual != error.expected
        assert error.path == str(path)
        assert "zgstore verify" in error.hint
        assert "--repair" in error.hint
        assert torch.equal(reader[0]["h.0"], made.rows["h.0"][0])  # the rest is still read


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_flipped_bit_found_by_a_worker_arrives_as_a_typed_error(made, method):
    flip(made.path("h.1", 0))
    with read(made.store, "main", columns=["h.1"]) as reader:
        loader = DataLoader(reader, batch_sampler=Sampler(reader, batch_size=4), num_workers=1,
                            multiprocessing_context=method)  # fmt: skip
        with pytest.raises(Corrupt) as caught:
            list(loader)
        error = caught.value
        assert error.object == error.expected == str(made.blobs["h.1"][0].digest)
        assert error.path == str(made.path("h.1", 0))
        assert "zgstore verify" in error.hint
        assert "\n" not in error.message


@pytest.mark.parametrize("how", ["cut", "grown", "random", "emptied", "another"])
def test_other_bytes_are_never_read_as_values(made, how):
    path = made.path("h.0", 1)
    body = path.read_bytes()
    rewrite(path, {
        "cut": body[:-4096], "grown": body + b"\0", "random": body[:99] + os.urandom(10) + body[109:], "emptied": b"",
        "another": made.path("h.0", 0).read_bytes(),
    }[how])  # fmt: skip
    with pytest.raises(Corrupt), read(made.store, "main", columns=["h.0"]) as reader:
        reader[5]


def test_damage_after_opening_is_found_too(made):
    with read(made.store, "main", columns=["h.0"]) as reader:
        body = made.path("h.0", 1).read_bytes()
        rewrite(made.path("h.0", 1), body[:-1])
        with pytest.raises(Corrupt, match="bytes"):
            reader[5]
        made.path("h.0", 2).unlink()
        with pytest.raises(Missing) as caught:
            reader[9]
        assert "--repair" in caught.value.hint
        assert made.blobs["h.0"][2].digest.hex in str(caught.value)
        rewrite(made.path("h.0", 1), body)  # mended: another file, looked at again
        assert torch.equal(reader[5]["h.0"], made.rows["h.0"][5])


def test_a_link_or_a_pipe_in_the_place_of_a_blob_is_refused(made, tmp_path):
    with read(made.store, "main", columns=["h.0"]) as reader:
        path = made.path("h.0", 1)
        path.rename(tmp_path / "aside")
        path.symlink_to(tmp_path / "aside")
        with pytest.raises(Corrupt, match="regular"):
            reader[5]
        path.unlink()
        os.mkfifo(path)
        with pytest.raises(Corrupt):
            reader[5]


def test_without_verification_a_size_and_a_header_are_still_looked_at(made):
    flip(made.path("h.0", 1))
    flip(made.path("h.0", 2), at=20)
    with read(made.store, "main", columns=["h.0"], verify="never") as reader:
        assert not torch.equal(reader[7]["h.0"], made.rows["h.0"][7])  # what was asked for
        with pytest.raises(Corrupt):
            reader[9]


def test_a_file_that_is_cut_while_it_is_open_is_an_error_and_not_a_short_batch(made):
    with read(made.store, "main", columns=["h.0"]) as reader:
        reader[5]
        path = made.path("h.0", 1)
        path.chmod(0o600)
        os.truncate(path, 4096 + 10)
        with pytest.raises((Corrupt, Transient)):
            reader[5]


def test_a_stamp_does_not_vouch_for_a_file_that_changed(made, monkeypatch):
    monkeypatch.setattr("zgstore.reading.blobs.SETTLE_SECONDS", 0.0)
    monkeypatch.setattr("zgstore.storage.index.SETTLE_SECONDS", 0.0)
    with read(made.store, "main", columns=["h.0"], verify="open"):
        pass
    flip(made.path("h.0", 1), keep_times=True)
    with read(made.store, "main", columns=["h.0"]) as reader, pytest.raises(Corrupt):
        reader[5]


def test_damaged_offsets_are_found(tmp_path):
    made = make_store(tmp_path / "store", ragged(), ragged=RAGGED)
    path = made.path("h.0", 1)
    flip(path, at=4096 + 8)  # offsets come first: eight bytes wide
    with read(made.store, "main", columns=["h.0"]) as reader:
        for look in (lambda: reader[5], reader.lengths, lambda: reader.tokens("h.0")[20]):
            with pytest.raises(Corrupt):
                look()
    with read(made.store, "main", columns=["h.0"], verify="never") as reader, pytest.raises(Corrupt):
        reader[5]


def test_a_blob_that_is_cut_while_it_is_compared_is_an_error_and_kills_nothing(tmp_path):
    wide = {"h.0": [torch.full((6, 4096), float(row)) for row in range(8)]}
    made = make_store(tmp_path / "store", wide)
    other = {"h.0": [row + 1 for row in wide["h.0"]]}
    make_store(tmp_path / "store", other, ref="other")

    def cut(_bytes):
        path = made.path("h.0", 0)
        path.chmod(0o600)
        os.truncate(path, 4096 + 10)

    with pytest.raises((Corrupt, Transient)):
        diff(made.store, "main", "other", values=True, progress=cut)


def lying(made, *, samples=18, **fields):
    """The snapshot again with these fields of its only leaf page changed, every digest true."""
    store, snapshot = made.store, made.store.snapshot(made.digest)
    leaf = replace(next(store.leaves(snapshot)), **fields)
    with store.writing("test") as session:
        named = session.put_meta("page", leaf.encode())
        root = session.put_meta("page", RootPage.of([(named, leaf)], columns=len(snapshot.columns)).encode())
        session.publish(replace(snapshot, root=root, samples=samples), ref="lying")


@pytest.mark.parametrize("rows", [[4, 4, 5, 5, 2], [5, 4, 4, 4, 8], [1 << 40, 4, 4, 4, 9]])
def test_a_page_that_counts_other_rows_than_a_blob_holds_is_never_read_as_values(made, rows):
    lying(made, rows=pack_u64(rows))
    with pytest.raises(Corrupt, match="rows"):
        read(made.store, "lying", columns=["h.0"])
    lying(made, samples=sum(rows), rows=pack_u64(rows))
    with read(made.store, "lying", columns=["h.0"]) as reader, pytest.raises(Corrupt, match="rows"):
        reader.batch(range(len(reader) - 20, len(reader)))
    assert any("rows" in problem.message for problem in verify(made.store, ["lying"]))


@pytest.mark.parametrize("masked", [(3, 2), (2, 2), (18,), (1 << 63,)])
def test_a_page_that_masks_rows_that_are_not_there_is_corrupt(made, masked):
    store, snapshot = made.store, made.store.snapshot(made.digest)
    with store.writing("test") as session:
        dropped = session.put_meta("page", Dropped(masked, ("nan",) * len(masked)).encode())
        session.publish(replace(snapshot, dropped=dropped), ref="lying")
    with pytest.raises(Corrupt, match="masks"):
        read(store, "lying")


def test_a_part_reads_what_it_has_and_names_the_copy_that_fetches_the_rest(made):
    for name in ("h.1", "attention_mask"):
        for shard in range(5):
            made.path(name, shard).unlink(missing_ok=True)
    store = made.store
    partials.mark(store.path, made.digest, ["h.0", "input_ids", "position_ids"], store.modes)
    with read(store, "main") as reader:
        assert set(reader.columns) == {"h.0", "input_ids", "position_ids"}
    with read(store, "main", columns=["h.0"]) as reader:
        batch = reader.batch([0, 1])
        assert torch.equal(batch["h.0"], torch.stack(made.rows["h.0"][:2]))
        assert set(batch) == {"h.0", "positions"}  # what the absent mask would say is left out, not guessed
        with pytest.raises(Partial, match="attention_mask"):
            reader.batch([0], layout="packed")
    with pytest.raises(Partial) as caught:
        read(store, "main", columns=["h.1"])
    assert "zgstore copy" in caught.value.hint


def test_a_prefetched_batch_raises_where_it_would_have_come(made):
    flip(made.path("h.0", 4))
    with read(made.store, "main", columns=["h.0"]) as reader:
        batches = reader.prefetch([[0], [1], [17], [2]], depth=2)
        assert len(next(batches)["h.0"]) == 1
        assert len(next(batches)["h.0"]) == 1
        with pytest.raises(Corrupt):
            next(batches)
