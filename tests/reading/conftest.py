import pytest
import torch
from stored import RAGGED, dense, make_store, ragged


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def dense_store(tmp_path_factory):
    """Eighteen left-padded rows in five shards; not to be damaged."""
    return make_store(tmp_path_factory.mktemp("dense") / "store", dense())


@pytest.fixture(scope="session")
def ragged_store(tmp_path_factory):
    """Eighteen rows of 1 to 7 tokens in five shards; not to be damaged."""
    return make_store(tmp_path_factory.mktemp("ragged") / "store", ragged(), ragged=RAGGED)
