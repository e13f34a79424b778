"""One damaged store for each kind of damage: each is found at its level, named, and never kills the verification."""

import contextlib
import os
import shutil
import struct

import pytest

from tests.upkeep.bare_stores import ROWS, blobs_of_shard, dense, publish, ragged
from zgstore.errors import ZgError
from zgstore.format.blobheader import lay_out
from zgstore.format.canonical import encode
from zgstore.format.digest import Digest, digest_of
from zgstore.format.manifest import Column
from zgstore.format.pages import RowsRoot
from zgstore.storage.store import Store
from zgstore.upkeep import collector
from zgstore.upkeep.verifier import verify


@pytest.fixture
def store(tmp_path):
    store = Store.init(tmp_path / "store")
    publish(store, "main", [1, 2, 3], masked=[2])
    return store


@pytest.fixture(scope="module")
def mended_store(tmp_path_factory):
    """One that each test leaves as it was."""
    store = Store.init(tmp_path_factory.mktemp("mended") / "store")
    publish(store, "main", [1, 2, 3], masked=[2])
    return store


def paths(store):
    """The files of the kinds of objects that a snapshot has."""
    digest = store.resolve("main")
    snapshot = store.snapshot(digest)
    rows = store.rows_root_of(snapshot)
    shards = list(store.shards(snapshot))
    found = {
        "snapshot": (digest, "meta"),
        "root": (snapshot.root, "meta"),
        "leaf": (Digest(store.root(snapshot).leaves[:32]), "meta"),
        "dropped": (snapshot.dropped, "meta"),
        "rows-root": (rows, "meta"),
        "rows": (Digest(RowsRoot.decode(store.objects.read_meta(rows, "page")).pages), "meta"),
        "record": (store.refs.log("main")[0].record, "meta"),
        "dense": (shards[0].blobs[0].digest, "objects"),
        "ragged": (shards[1].blobs[1].digest, "objects"),
        "context": (shards[2].blobs[2].digest, "objects"),
        "constant": (snapshot.constants[0].blob, "objects"),
    }
    return {kind: store.objects.path(*where) for kind, where in found.items()}


def flip_the_last_bit(path):
    before = path.stat()
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def truncate(path):
    path.write_bytes(path.read_bytes()[:-4])


def truncate_to_nothing(path):
    path.write_bytes(b"")


def append_a_byte(path):
    with path.open("ab") as file:
        file.write(b"\0")


def ten_random_bytes(path):
    content = bytearray(path.read_bytes())
    content[-10:] = b"\xfe\xdc\xba\x98\x76\x54\x32\x10\xaa\x55"
    path.write_bytes(content)


def zero(path):
    path.write_bytes(bytes(path.stat().st_size))


def delete(path):
    path.unlink()


def a_link(path):
    real = path.with_suffix(".moved")
    path.rename(real)
    path.symlink_to(real)


def a_fifo(path):
    path.unlink()
    os.mkfifo(path)


def a_folder(path):
    path.unlink()
    path.mkdir()


DAMAGES = {
    flip_the_last_bit: "corrupt",
    truncate: "corrupt",
    truncate_to_nothing: "corrupt",
    append_a_byte: "corrupt",
    ten_random_bytes: "corrupt",
    zero: "corrupt",
    delete: "missing",
    a_link: "corrupt",
    a_fifo: "corrupt",
    a_folder: "corrupt",
}
SEEN_BY_QUICK = set(DAMAGES) - {flip_the_last_bit, ten_random_bytes}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda each: each.__name__)
def test_damage_to_each_kind_of_object_is_found_named_and_hurts_what_it_hurts(mended_store, damage):
    store = mended_store
    digest = store.resolve("main")
    for kind, path in paths(store).items():
        with damaged(path, damage):
            (problem,) = [each for each in verify(store) if each.path == str(path)]
            assert problem.kind == DAMAGES[damage], kind
            assert problem.object == f"blake3:{path.name[:64]}"
            assert problem.refs == (("main@{0}",) if kind == "record" else ("main",))
            assert problem.snapshots == (() if kind == "record" else (str(digest),))
            assert problem.hint
            # Metadata is read whole at every level; of a blob the quick level sees what size and header tell.
            quick = {each.path for each in verify(store, quick=True)}
            assert (str(path) in quick) == (path.suffix == ".msgpack" or damage in SEEN_BY_QUICK), kind
        assert list(verify(store)) == []


@contextlib.contextmanager
def damaged(path, damage):
    """The file damaged for the block, and then as it was."""
    content = path.read_bytes()
    path.chmod(0o644)
    damage(path)
    yield
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    path.unlink(missing_ok=True)
    path.with_suffix(".moved").unlink(missing_ok=True)
    path.write_bytes(content)


def test_two_blobs_swapped_are_both_found(store):
    a, b = paths(store)["dense"], paths(store)["context"]
    aside = a.with_suffix(".aside")
    a.rename(aside)
    b.rename(a)
    aside.rename(b)
    assert {problem.path for problem in verify(store) if problem.kind == "corrupt"} == {str(a), str(b)}


def test_two_blobs_of_one_shape_swapped_are_found_by_their_bytes(store):
    shards = list(store.shards(store.snapshot(store.resolve("main"))))
    a, b = (store.objects.path(shard.blobs[0].digest, "objects") for shard in shards[:2])
    content = a.read_bytes()
    for path, bytes_ in ((a, b.read_bytes()), (b, content)):
        path.chmod(0o644)
        path.write_bytes(bytes_)
    assert list(verify(store, quick=True)) == []
    assert {problem.path for problem in verify(store)} == {str(a), str(b)}


@pytest.mark.parametrize("family", ["objects", "meta"])
def test_foreign_things_are_named_and_left_alone(store, family, tmp_path):
    folder = store.path / family / "ab"
    things = {
        "link": folder / "link",
        "dangling": folder / ("ab" + "0" * 62 + ".safetensors"),
        "fifo": folder / "fifo",
        "folder": folder / "folder",
        "note": folder / "notes.txt",
        "misplaced": folder / ("cd" * 32 + (".safetensors" if family == "objects" else ".msgpack")),
        "top": store.path / family / "README",
    }
    things["link"].symlink_to(tmp_path)
    things["dangling"].symlink_to(tmp_path / "nowhere")
    os.mkfifo(things["fifo"])
    things["folder"].mkdir()
    things["note"].write_text("mine")
    things["misplaced"].write_text("mine")
    things["top"].write_text("mine")
    found = {problem.path: problem for problem in verify(store)}
    assert found.keys() == {str(path) for path in things.values()}
    assert {problem.kind for problem in found.values()} == {"foreign"}
    assert all("mv " in problem.hint for problem in found.values())
    assert all(os.path.lexists(path) for path in things.values())


def not_padded(fill):
    """The same tensors as any safetensors writer lays them out: readable, and not the one form that a blob has."""
    text = b'{"data":{"dtype":"F32","shape":[3,4],"data_offsets":[0,48]}}'
    return struct.pack("<Q", len(text)) + text + bytes([fill]) * 48


WRONG_BLOBS = {
    "a column with another dtype": lambda fill: [dense("I32", (ROWS, 4), fill), *blobs_of_shard(fill)[1:]],
    "a column with another shape": lambda fill: [dense("F32", (ROWS, 5), fill), *blobs_of_shard(fill)[1:]],
    "a column with too many rows": lambda fill: [dense("F32", (ROWS + 1, 4), fill), *blobs_of_shard(fill)[1:]],
    "a dense column that is ragged": lambda fill: [ragged([0, 1, 3, 6], 4, fill), *blobs_of_shard(fill)[1:]],
    "a ragged column that is dense": lambda fill: [
        blobs_of_shard(fill)[0], dense("F32", (6, 4), fill), blobs_of_shard(fill)[2],
    ],
    "offsets that fall": lambda fill: [
        blobs_of_shard(fill)[0], ragged([0, 4, 2, 6], 4, fill), blobs_of_shard(fill)[2],
    ],
    "offsets that do not begin at 0": lambda fill: [
        blobs_of_shard(fill)[0], ragged([1, 2, 3, 6], 4, fill), blobs_of_shard(fill)[2],
    ],
    "offsets that end before the data": lambda fill: [
        blobs_of_shard(fill)[0], ragged([0, 1, 3, 6], 4, fill, tokens=7), blobs_of_shard(fill)[2],
    ],
    "offsets of too few rows": lambda fill: [
        blobs_of_shard(fill)[0], ragged([0, 3, 6], 4, fill), blobs_of_shard(fill)[2],
    ],
    "a header that is not canonical": lambda fill: [not_padded(fill), *blobs_of_shard(fill)[1:]],
    "no header at all": lambda fill: [b"", *blobs_of_shard(fill)[1:]],
    "a pickle": lambda fill: [b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00]\x94(K\x01K\x02e." * 300,
                              *blobs_of_shard(fill)[1:]],
    "a header that claims 2^62 bytes": lambda fill: [struct.pack("<Q", 1 << 62) + bytes(5000),
                                                     *blobs_of_shard(fill)[1:]],
}  # fmt: skip


def test_blobs_that_are_what_their_names_say_and_not_what_their_pages_describe_are_found(tmp_path):
    store = Store.init(tmp_path / "made")
    for number, (wrong, blobs) in enumerate(WRONG_BLOBS.items()):
        digest = publish(store, f"made-{number}", [number], blobs=blobs)
        for quick in (True, False):
            (problem,) = verify(store, [digest], quick=quick)
            assert problem.kind == "corrupt", wrong
    assert len(list(verify(store))) == len(WRONG_BLOBS)


def test_an_int8_column_needs_its_scales(tmp_path):
    columns = (Column("h", "boundary", "BF16", "int8", (None, 70), 0),)

    def shard(groups):
        tensors = {"data": ("I8", (5, 70)), "scale": ("F16", (5, groups)), "offsets": ("I64", (4,))}
        header = lay_out(tensors)
        offsets = struct.pack("<4q", 0, 1, 2, 5)
        body = offsets + bytes(header.file_size - header.data_start - len(offsets))
        assert header.tensors[0].name == "offsets"
        return [header.encode() + body]

    store = Store.init(tmp_path / "made")
    publish(store, "two", [1], blobs=lambda _: shard(2), columns=columns)
    assert verify(store).report.ok
    publish(store, "three", [1], blobs=lambda _: shard(3), columns=columns)
    (problem,) = verify(store)
    assert "scale" in problem.message


HOSTILE_META = {
    "not msgpack": b"\xc1",
    "deep": b"\x91" * 3000 + b"\xc0",
    "wide": b"\xdd\xff\xff\xff\xff" + b"\xc0" * 100,
    "a key twice": b"\x82\xa1a\x01\xa1a\x02",
    "an extension": b"\xc7\x01\x05x",
    "another kind": encode({"kind": "leaf"}),
    "a later format": encode(
        {"kind": "snapshot", "format": 2, "requires": ["teleport"], "teacher": {}, "data": {}, "capture": {},
         "columns": [], "constants": [], "cut": 1, "samples": 0, "dropped": None, "root": bytes(32)}
    ),
}  # fmt: skip


def test_hostile_metadata_under_a_true_name_is_a_problem_and_never_a_crash(store):
    for hostile, body in HOSTILE_META.items():
        digest = digest_of("snapshot", body)
        store.objects.path(digest, "meta").write_bytes(body)
        (store.path / "refs" / "heads" / "bad").write_text(f"{digest}\n")
        (problem,) = verify(store)
        assert problem.kind == ("unreadable" if hostile == "a later format" else "corrupt"), hostile
        assert problem.refs == ("bad",)
        with pytest.raises(ZgError):
            collector.collect(store, now=True)


def test_everything_damaged_at_once_is_all_told(store):
    for path in paths(store).values():
        if path.suffix == ".safetensors":
            path.chmod(0o644)
            truncate(path)
    shutil.rmtree(store.path / "objects" / "00")
    (store.path / "objects" / "00").symlink_to(store.path)
    (store.path / "refs" / "tags" / "torn").write_text("")
    problems = list(verify(store))
    assert len([problem for problem in problems if problem.kind == "corrupt"]) >= 5
    assert str(store.path / "objects" / "00") in {problem.path for problem in problems}
