import sys

import pytest
import torch

from zgstore.building import sections
from zgstore.storage.store import Store

PROJECT_MODULES = ("tiny_project_", "twin", "entry_", "shared_features", "beside", "same", "nearly", "single")


@pytest.fixture(autouse=True)
def _own_import_path(monkeypatch):
    """Each test imports its own projects' modules."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sections, "_directories", [])
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith(PROJECT_MODULES):
            del sys.modules[name]


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def store(tmp_path):
    return Store.init(tmp_path / "store")
