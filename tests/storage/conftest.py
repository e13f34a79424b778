import pytest

from zgstore.storage.store import Store


@pytest.fixture
def store(tmp_path):
    return Store.init(tmp_path / "store")


@pytest.fixture
def session(store):
    with store.writing("test") as opened:
        yield opened
