from projects import make_project, write_rows

from zgstore.building import recall
from zgstore.building.builder import build


def drop_actions(store):
    for action in (store.path / "actions").glob("*/*.msgpack"):
        action.unlink()


def test_a_plan_that_was_complete_is_found_again_without_its_actions(tmp_path, store):
    path, _ = make_project(tmp_path / "p")
    first = build(store, path)
    drop_actions(store)
    again = build(store, path)
    assert (again.snapshot, again.shards_built) == (first.snapshot, 0)


def test_a_plan_too_large_for_one_file_is_found_in_several(tmp_path, store, monkeypatch):
    monkeypatch.setattr(recall, "MAX_CELLS", 7)  # one shard of five columns a file
    path, _ = make_project(tmp_path / "p", rows=12)
    first = build(store, path)
    assert sum(b"statistics" in file.read_bytes() for file in (store.path / "measurements").iterdir()) == 3
    drop_actions(store)
    again = build(store, path)
    assert (again.snapshot, again.shards_built) == (first.snapshot, 0)


def test_what_is_not_known_together_is_asked_for_one_by_one(tmp_path, store):
    path, _ = make_project(tmp_path / "p")
    first = build(store, path)
    for file in (store.path / "measurements").iterdir():
        content = file.read_bytes()
        if b"statistics" in content:
            file.write_bytes(content[:-1])
    again = build(store, path)
    assert (again.snapshot, again.shards_built, again.teacher_loaded) == (first.snapshot, 0, False)


def test_appended_rows_leave_the_rest_found(tmp_path, store):
    path, _ = make_project(tmp_path / "p", rows=12)
    build(store, path)
    drop_actions(store)
    write_rows(tmp_path / "p", 14)
    assert build(store, path).shards_built == 1


def test_a_blob_that_is_gone_is_a_miss_all_the_same(tmp_path, store):
    path, _ = make_project(tmp_path / "p")
    first = build(store, path)
    next((store.path / "objects").glob("*/*.safetensors")).unlink()
    again = build(store, path)
    assert (again.snapshot, again.shards_built) == (first.snapshot, 1)


def test_dropped_rows_are_remembered(tmp_path, store):
    path, _ = make_project(tmp_path / "p", teacher_args="poison = 15")
    first = build(store, path, on_nonfinite="drop")
    drop_actions(store)
    again = build(store, path, on_nonfinite="drop")
    assert (again.snapshot, again.dropped, again.shards_built) == (first.snapshot, first.dropped, 0)
