import errno
import os
import pickle
import stat
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import keep

from zgstore.errors import Corrupt, Missing, NoSpace, Transient
from zgstore.format.digest import Digest, digest_of
from zgstore.format.fields import raw_digests
from zgstore.storage import drafts
from zgstore.storage.names import FAMILIES, packed_names_in, parse_name


def put(session, content=b"some bytes"):
    blob = keep(session, content)
    session.sync()
    return blob


def overwrite(path, content):
    path.chmod(0o644)
    path.write_bytes(content)


def test_a_blob_s_name_is_the_plain_digest_of_its_bytes(store, session):
    content = os.urandom(3 * drafts.PIECE_BYTES + 17)
    blob = put(session, content)
    path = store.objects.path(blob.digest, "objects")
    assert blob.digest == digest_of(None, content)
    assert blob.size == len(content)
    assert path == store.path / "objects" / blob.digest.hex[:2] / f"{blob.digest.hex}.safetensors"
    assert path.read_bytes() == content
    assert stat.S_IMODE(path.stat().st_mode) == 0o444


def test_pieces_of_any_kind_and_size_give_the_same_blob(session):
    content = bytes(range(256)) * 300
    draft = session.draft()
    for at in range(0, len(content), 777):
        draft.write(memoryview(bytearray(content[at : at + 777])))
    assert session.keep(draft).digest == digest_of(None, content)


def test_short_writes_are_completed(session, monkeypatch):
    real = os.write
    monkeypatch.setattr(drafts.os, "write", lambda handle, data: real(handle, memoryview(data)[:1000]))
    content = os.urandom(10_001)
    draft = session.draft()
    draft.write(content)
    assert draft.finish().digest == digest_of(None, content)


@pytest.mark.parametrize(("number", "kind"), [("ENOSPC", NoSpace), ("EIO", Transient)])
def test_a_failed_write_leaves_nothing(store, session, monkeypatch, number, kind):
    def fail(_handle, _data):
        raise OSError(getattr(errno, number), number)

    draft = session.draft()
    monkeypatch.setattr(drafts.os, "write", fail)
    with pytest.raises(kind):
        draft.write(b"bytes")
    monkeypatch.undo()
    assert list((store.path / "tmp" / session.uuid).iterdir()) == []
    assert list(store.objects.names("objects")) == []


def test_a_failed_sync_means_a_bad_file(store, session, monkeypatch):
    draft = session.draft()
    draft.write(b"bytes")

    def fail(_handle):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(drafts.os, "fdatasync", fail)
    with pytest.raises(Transient):
        session.keep(draft)
    monkeypatch.undo()
    assert list((store.path / "tmp" / session.uuid).iterdir()) == []
    assert list(store.objects.names("objects")) == []
    assert put(session, b"bytes").size == 5


def test_the_same_bytes_are_stored_once(store, session):
    first, again = put(session), put(session)
    assert first == again
    assert len(list(store.objects.names("objects"))) == 1
    assert list((store.path / "tmp" / session.uuid).iterdir()) == []


def test_a_bad_file_of_the_same_name_goes_to_quarantine(store, session):
    blob = put(session)
    overwrite(store.objects.path(blob.digest, "objects"), b"other bytes")
    put(session)
    assert store.objects.rehash(blob.digest, "objects").size == 10
    (bad,) = (store.path / "quarantine").iterdir()
    assert bad.read_bytes() == b"other bytes"
    assert bad.name.startswith(blob.digest.hex)


def test_even_a_folder_of_that_name_gives_way(store, session):
    digest = digest_of(None, b"some bytes")
    store.objects.path(digest, "objects").mkdir()
    put(session)
    assert store.objects.rehash(digest, "objects").size == 10


def test_opening_says_missing_and_how_to_mend_it(store):
    with pytest.raises(Missing) as caught:
        store.objects.open(Digest(bytes(32)), "objects")
    assert "--repair" in caught.value.hint
    assert caught.value.fields["object"] == str(Digest(bytes(32)))


@pytest.mark.parametrize("kind", ["link", "folder", "fifo"])
def test_what_is_no_regular_file_is_neither_opened_nor_missed(store, kind):
    digest = Digest(bytes(32))
    path = store.objects.path(digest, "objects")
    if kind == "link":
        path.symlink_to("/etc/hostname")
    elif kind == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)
    with pytest.raises(Corrupt):
        store.objects.open(digest, "objects")
    with pytest.raises(Corrupt):
        store.objects.stat(digest, "objects")
    with pytest.raises(Corrupt):
        store.objects.rehash(digest, "objects")
    assert list(store.objects.foreign()) == [path]


@pytest.mark.parametrize("damage", ["cut", "grown", "flipped", "emptied"])
def test_rehashing_finds_every_damage(store, session, damage):
    content = bytes(5000)
    blob = put(session, content)
    path = store.objects.path(blob.digest, "objects")
    before = path.stat()
    changed = {
        "cut": content[:-4], "grown": content + b"\0", "flipped": b"\x01" + content[1:], "emptied": b"",
    }[damage]  # fmt: skip
    overwrite(path, changed)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(Corrupt) as caught:
        store.objects.rehash(blob.digest, "objects")
    assert caught.value.object == caught.value.expected == str(blob.digest)
    assert caught.value.actual == str(digest_of(None, changed))
    assert caught.value.path == str(path)


def test_metadata_of_one_kind_is_not_read_as_another(store, session):
    digest = session.put_meta("page", b"\x80")
    assert store.objects.read_meta(digest, "page") == b"\x80"
    with pytest.raises(Corrupt):
        store.objects.read_meta(digest, "snapshot")
    assert store.objects.kind_of(digest) == "page"
    assert store.objects.rehash(digest, "meta").size == 1


def test_listing_takes_names_that_are_digests_and_leaves_the_rest_to_foreign(store, session):
    blob = put(session)
    home = store.path / "objects" / blob.digest.hex[:2]
    strange = [
        home / "notes.txt",
        home / (blob.digest.hex.upper() + ".safetensors"),
        home / ("0" * 64 + ".safetensors" if blob.digest.hex[:2] != "00" else "f" * 64 + ".safetensors"),
        home / ("g" * 64 + ".safetensors"),
        store.path / "objects" / "README",
        store.path / "meta" / "xx",
    ]
    for path in strange:
        path.write_bytes(b"")
    assert list(store.objects.names("objects")) == [blob.digest.raw]
    assert b"".join(store.objects.packed_names("objects")) == blob.digest.raw
    assert set(store.objects.foreign()) == set(strange)


def test_what_is_absent_is_found_by_listing_as_by_looking(store, session):
    there = [put(session, bytes([number])).digest.raw for number in range(20)]
    gone = [digest_of(None, b"gone", bytes([number % 256, number // 256])).raw for number in range(2000)]
    assert store.objects.absent(there + gone[:5], "objects") == gone[:5]
    assert store.objects.absent(there + gone, "objects") == gone


def test_trash_and_back(store, session):
    blob = put(session)
    store.objects.to_trash("17", blob.digest, "objects")
    assert store.objects.stat(blob.digest, "objects") is None
    assert store.objects.in_trash(blob.digest, "objects")
    assert [tuple(each) for each in store.objects.trashed()] == [("17", "objects", blob.digest, blob.size)]
    with pytest.raises(Missing, match="in the trash"):
        store.objects.open(blob.digest, "objects")
    assert store.objects.restore(blob.digest, "objects")
    assert not store.objects.restore(blob.digest, "objects")
    assert store.objects.rehash(blob.digest, "objects").size == blob.size


def test_what_was_set_aside_cannot_come_back(store, session):
    blob = put(session)
    store.objects.to_trash("17", blob.digest, "objects")
    (trashed,) = store.objects.trashed()
    assert store.objects.all_aside([trashed], "gc-1") == [trashed]
    assert store.objects.all_aside([trashed], "gc-1") == []
    assert not store.objects.restore(blob.digest, "objects")
    assert [name for name, _ in store.objects.leftovers()] == sorted(["gc-1", session.uuid])
    store.objects.remove_aside("gc-1")
    store.objects.remove_epoch("17")
    assert store.objects.epochs() == []
    assert not (store.path / "tmp" / "gc-1").exists()


def test_syncs_of_two_threads_wait_for_each_other(store, session, monkeypatch):
    put(session)
    order, began, go = [], threading.Event(), threading.Event()
    real = os.fsync

    def slow(handle):
        began.set()
        go.wait(10)
        order.append("synced")
        real(handle)

    monkeypatch.setattr(os, "fsync", slow)
    store.objects.touch([bytes(32)], "objects")
    first = threading.Thread(target=store.objects.sync)
    first.start()
    began.wait(10)
    second = threading.Thread(target=lambda: (store.objects.sync(), order.append("returned")))
    second.start()
    go.set()
    first.join()
    second.join()
    assert order == ["synced", "returned"]


def test_objects_travel_to_other_processes(store, session):
    blob = put(session)
    assert pickle.loads(pickle.dumps(store)).objects.rehash(blob.digest, "objects").size == blob.size


@given(st.data())
def test_names_that_look_like_objects_together_and_not_one_by_one(data):
    """Listings are read all at once; a name that is cut in the wrong place, longer as another is shorter, is none."""
    family = data.draw(st.sampled_from(sorted(FAMILIES)))
    extension = FAMILIES[family]
    digests = data.draw(st.lists(st.binary(min_size=31, max_size=31).map(lambda tail: b"\xab" + tail), unique=True))
    names = [digest.hex() + extension for digest in digests]
    whole = "".join(names)
    shift = data.draw(st.integers(-3, 3))
    if shift and len(names) > 1:  # the same characters, cut elsewhere
        cut = len(names[0]) + shift
        names[:2] = [whole[:cut], whole[cut : 2 * len(names[0])]]
    names += data.draw(st.lists(st.sampled_from(["x", "ab" * 32, "AB" * 32 + extension, extension, "é"]), unique=True))
    right = {parse_name(name, family) for name in names} - {None}
    with tempfile.TemporaryDirectory() as top:
        Path(top, "ab").mkdir()
        for name in names:
            Path(top, "ab", name).touch()
        folder = os.open(top, os.O_RDONLY)
        found = packed_names_in(folder, "ab", family)
        os.close(folder)
    assert sorted(raw_digests(found)) == sorted(digest.raw for digest in right if digest.hex.startswith("ab"))
