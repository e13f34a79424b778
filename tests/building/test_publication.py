from projects import make_project

from zgstore.building.builder import build
from zgstore.reading.opening import read
from zgstore.storage import partials
from zgstore.storage.store import Store
from zgstore.upkeep.copier import copy


def test_a_part_that_is_built_here_is_whole(tmp_path, store):
    path, _ = make_project(tmp_path / "p")
    built = build(store, path)
    other = Store.init(tmp_path / "other")
    copy(store, "cache", to=other, columns=["norm:in"])
    assert build(other, path).snapshot == built.snapshot
    assert partials.expected(other.path, built.snapshot) is None
    with read(other, "cache") as reader:
        assert "layers.0:in" in reader.columns
