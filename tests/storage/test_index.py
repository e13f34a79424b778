import os
import shutil

import pytest
from tiny import keep

from zgstore.errors import Corrupt, Invalid
from zgstore.format.digest import digest_of
from zgstore.storage import index as index_module
from zgstore.storage.files import SETTLE_SECONDS, Stat
from zgstore.storage.index import STAMP_SECONDS, FileDigest, Stamp
from zgstore.storage.store import Store

DIGEST = digest_of(None, b"bytes").raw
STAT = Stat(1, 2, 3, 4_000_000_000, 5_000_000_000)


def stamp(stat=STAT, *, after=10.0):
    return Stamp(stat, stat.ctime_ns / 1e9 + after)


def test_a_stamp_comes_back_as_it_was_given(store):
    assert store.index.stamps([DIGEST]) == [None]
    store.index.put_stamps([(DIGEST, stamp())])
    assert store.index.stamps([bytes(32), DIGEST]) == [None, stamp()]
    store.index.drop([DIGEST])
    assert store.index.stamps([DIGEST]) == [None]


def test_a_stamp_is_not_given_within_two_seconds_of_the_last_change(store):
    store.index.put_stamps([(DIGEST, stamp(after=SETTLE_SECONDS - 0.1))])
    assert store.index.stamps([DIGEST]) == [None]
    store.index.put_stamps([(DIGEST, stamp(after=SETTLE_SECONDS + 0.1))])
    assert store.index.stamps([DIGEST]) != [None]


def test_a_stamp_fits_for_thirty_days_and_the_same_file_only():
    given = stamp()
    assert given.fits(STAT, given.time_seconds + 1)
    assert not given.fits(STAT, given.time_seconds + STAMP_SECONDS)
    assert not given.fits(STAT, given.time_seconds - 60)
    for field in Stat._fields:
        assert not given.fits(STAT._replace(**{field: 99}), given.time_seconds + 1), field


def test_a_change_that_keeps_size_and_mtime_ends_the_stamp(store, session):
    blob = keep(session, b"bytes")
    path = store.objects.path(blob.digest, "objects")
    seen = store.objects.rehash(blob.digest, "objects")
    store.index.put_stamps([(blob.digest.raw, stamp(seen))])
    (given,) = store.index.stamps([blob.digest.raw])
    assert given.fits(store.objects.stat(blob.digest, "objects"), given.time_seconds)
    before = path.stat()
    path.chmod(0o644)
    path.write_bytes(b"Bytes")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert not given.fits(store.objects.stat(blob.digest, "objects"), given.time_seconds)


@pytest.mark.parametrize("damage", ["deleted", "garbled", "cut", "emptied", "other version", "unsealed", "zeroed page"])
def test_a_damaged_index_begins_again_and_never_crashes(store, damage):
    store.index.put_stamps([(digest_of(None, bytes([n, m])).raw, stamp()) for n in range(100) for m in range(20)])
    data = store.index.path / "data.mdb"
    content = data.read_bytes()
    if damage == "deleted":
        shutil.rmtree(store.index.path)
    elif damage == "garbled":
        data.write_bytes(os.urandom(len(content)))
    elif damage == "cut":
        data.write_bytes(content[: len(content) // 2])
    elif damage == "emptied":
        data.write_bytes(b"")
    elif damage == "other version":
        data.write_bytes(content[:16] + b"\xbe\xef\xc0\xde\x07" + content[21:])
    elif damage == "unsealed":
        (store.index.path / "seal").unlink()
    else:
        data.write_bytes(content[:8192] + bytes(4096) + content[12288:])
    assert store.index.stamps([digest_of(None, bytes([1, 1])).raw]) == [None]
    store.index.put_stamps([(DIGEST, stamp())])
    assert store.index.stamps([DIGEST]) == [stamp()]


def test_damage_that_lmdb_itself_finds_begins_again_too(store, monkeypatch):
    store.index.put_stamps([(DIGEST, stamp())])
    data = store.index.path / "data.mdb"
    data.write_bytes(b"\0" * 100 + data.read_bytes()[100:])
    with monkeypatch.context() as patched:
        patched.setattr(index_module.Index, "_is_ours", lambda _self: True)
        assert store.index.stamps([DIGEST]) == [None]
    store.index.put_stamps([(DIGEST, stamp())])
    assert store.index.stamps([DIGEST]) == [stamp()]


def test_a_copied_store_begins_without_stamps(store, tmp_path):
    store.index.put_stamps([(DIGEST, stamp())])
    shutil.copytree(store.path, tmp_path / "copy", copy_function=shutil.copy2)
    assert Store.open(tmp_path / "copy").index.stamps([DIGEST]) == [None]
    assert store.index.stamps([DIGEST]) == [stamp()]


def test_a_moved_store_keeps_its_stamps(store, tmp_path):
    store.index.put_stamps([(DIGEST, stamp())])
    store.path.rename(tmp_path / "moved")
    assert Store.open(tmp_path / "moved").index.stamps([DIGEST]) == [stamp()]


def test_the_map_grows(store, monkeypatch):
    monkeypatch.setattr(index_module, "_SMALLEST_MAP", 64 << 10)
    monkeypatch.setattr(index_module, "_BYTES_EACH", 1)
    digests = [digest_of(None, n.to_bytes(4)).raw for n in range(5000)]
    store.index.put_stamps([(digest, stamp()) for digest in digests])
    assert None not in store.index.stamps(digests)


def test_a_map_that_may_not_grow_costs_stamps_and_nothing_else(store, monkeypatch):
    monkeypatch.setattr(index_module, "_SMALLEST_MAP", 64 << 10)
    monkeypatch.setattr(index_module, "_LARGEST_MAP", 64 << 10)
    monkeypatch.setattr(index_module, "_BYTES_EACH", 1)
    digests = [digest_of(None, n.to_bytes(4)).raw for n in range(5000)]
    store.index.put_stamps([(digest, stamp()) for digest in digests])
    assert len(store.index.stamps(digests)) == 5000


def test_reading_goes_on_where_nothing_can_be_written(store, monkeypatch):
    def refuse(*_args, **_options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(index_module, "directory", refuse)
    store.index.put_stamps([(DIGEST, stamp())])
    assert store.index.stamps([DIGEST]) == [None]
    with pytest.raises(Invalid):  # whoever asks for a new one is told that there is none
        store.index.clear()


def test_a_file_of_the_index_cannot_lead_elsewhere(store, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "data.mdb").write_bytes(b"x")
    store.index.path.symlink_to(tmp_path / "elsewhere")
    store.index.put_stamps([(DIGEST, stamp())])
    assert store.index.stamps([DIGEST]) == [None]
    assert (tmp_path / "elsewhere" / "data.mdb").read_bytes() == b"x"


def test_a_forked_child_uses_the_index_like_its_parent(store):
    store.index.put_stamps([(DIGEST, stamp())])
    for _ in range(130):
        assert store.index.stamps([DIGEST]) == [stamp()]
    child = os.fork()
    if child == 0:
        os._exit(0 if store.index.stamps([DIGEST]) == [stamp()] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert store.index.stamps([DIGEST]) == [stamp()]


def with_its_index_in(store, folder):
    config = store.path / "zgstore.toml"
    config.write_text(config.read_text() + f'index = "{folder}"\n')
    return Store.open(store.path)


def test_an_index_elsewhere_is_the_store_s_own(store, tmp_path):
    moved = with_its_index_in(store, tmp_path / "fast")
    moved.index.clear()
    moved.index.put_stamps([(DIGEST, stamp())])
    assert moved.index.stamps([DIGEST]) == [stamp()]
    assert list((tmp_path / "fast").iterdir()) == [tmp_path / "fast" / store.id]
    assert list((store.path / "index").iterdir()) == []


def test_a_store_makes_no_index_elsewhere_until_it_is_asked_to(store, tmp_path):
    (tmp_path / "fast").mkdir()
    moved = with_its_index_in(store, tmp_path / "fast")
    moved.index.put_stamps([(DIGEST, stamp())])
    assert moved.index.stamps([DIGEST]) == [None]
    assert list((tmp_path / "fast").iterdir()) == []


def test_the_folder_of_the_index_cannot_lead_elsewhere(store, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (store.path / "index").rmdir()
    (store.path / "index").symlink_to(tmp_path / "elsewhere")
    store.index.put_stamps([(DIGEST, stamp())])
    with pytest.raises(Corrupt):
        store.index.clear()
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_on_a_network_file_system_the_store_s_own_index_is_not_used(store, monkeypatch):
    monkeypatch.setattr(index_module, "on_network", lambda _path: True)
    store.index.put_stamps([(DIGEST, stamp())])
    assert store.index.stamps([DIGEST]) == [None]


def test_digests_of_files_outside_are_kept_until_they_change(store, tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(b"weights")
    now = store.now()
    seen, digest = Stat.of(path.stat()), digest_of("files", b"weights")
    store.index.put_file_digests([FileDigest(path, seen, digest, now)])
    assert store.index.file_digests([path], now=now) == [None]  # changed a moment ago
    later = seen.ctime_ns / 1e9 + 5
    store.index.put_file_digests([FileDigest(path, seen, digest, later)])
    assert store.index.file_digests([path, tmp_path / "other"], now=later) == [digest, None]
    path.write_bytes(b"Weights")
    assert store.index.file_digests([path], now=later) == [None]
