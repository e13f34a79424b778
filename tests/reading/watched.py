"""What a loader's worker holds, told with each batch; imports nothing that a worker would not."""

import contextlib
import os
import sys
from pathlib import Path

from torch.utils.data import Dataset


class Watched(Dataset):
    """A reader whose worker says, with each batch, what it holds."""

    def __init__(self, reader):
        self.reader = reader

    def __len__(self):
        return len(self.reader)

    def __getitem__(self, rows):
        batch = self.reader.batch(rows)
        maps = Path("/proc/self/maps").read_text()
        descriptors = []
        for link in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile by a thread of the loader's
                descriptors.append(str(link.readlink()))
        batch["lmdb_imported"] = "lmdb" in sys.modules
        batch["lmdb_open"] = "lmdb-1" in maps or any("lmdb-1" in each for each in descriptors)
        batch["store_imported"] = "zgstore.storage.store" in sys.modules
        batch["pid"] = os.getpid()
        return batch
