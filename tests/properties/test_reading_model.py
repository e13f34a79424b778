"""Any table, cut anyhow, with any rows skipped, read in any order and layout, against plain lists."""

import sys
import tempfile
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1] / "reading"))
from stored import make_store

from zgstore.reading.opening import read
from zgstore.reading.sampler import Sampler

DTYPES = [torch.bfloat16, torch.float8_e4m3fn, torch.int16, torch.float64, torch.bool]


@st.composite
def tables(draw):
    """Rows of one ragged and one dense column, how many a shard has, and which are skipped."""
    lengths = draw(st.lists(st.integers(0, 5), min_size=1, max_size=12))
    width, dtype = draw(st.integers(1, 3)), draw(st.sampled_from(DTYPES))
    random = torch.Generator().manual_seed(draw(st.integers(0, 99)))

    def rows_of(sizes):
        return [torch.randint(0, 2, (*size, width), generator=random).to(dtype) for size in sizes]

    rows = {"h.0": rows_of([(length,) for length in lengths]), "y": rows_of([()] * len(lengths))}
    masked = draw(st.sets(st.integers(0, len(lengths) - 1), max_size=len(lengths) - 1))
    return rows, draw(st.integers(1, 6)), tuple(sorted(masked))


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@given(table=tables(), data=st.data())
@settings(max_examples=20, deadline=None)
def test_a_reader_is_its_visible_rows(table, data):
    rows, per_shard, masked = table
    with tempfile.TemporaryDirectory(dir=shared_memory()) as folder:
        made = make_store(Path(folder) / "store", rows, per_shard=per_shard, ragged=("h.0",), masked=masked)
        with read(made.store, "main") as reader:
            count = len(made.rows["y"])
            assert len(reader) == count
            chosen = data.draw(st.lists(st.integers(-count, count - 1), max_size=9))
            listed, packed, padded = (reader.batch(chosen, layout) for layout in ("list", "packed", "padded"))
            for at, row in enumerate(chosen):
                wanted = made.rows["h.0"][row]
                assert same(listed["h.0"][at], wanted)
                assert same(packed["h.0"][packed["offsets"][at] : packed["offsets"][at + 1]], wanted)
                assert same(padded["h.0"][at, : len(wanted)], wanted)
                assert same(reader[row]["h.0"], wanted)
                for batch in (packed, padded):
                    assert same(batch["y"][at], made.rows["y"][row])
            assert reader.lengths().tolist() == [len(row) for row in made.rows["h.0"]]
            tokens = reader.tokens("h.0")
            whole = torch.cat(made.rows["h.0"])
            assert same(tokens.batch(range(len(tokens))), whole)
            begin, end = sorted(data.draw(st.tuples(st.integers(0, count), st.integers(0, count))))
            if begin < end:
                assert same(reader.column("y")[begin:end], torch.stack(made.rows["y"][begin:end]))
            taken = [row for batch in Sampler(reader, token_budget=7) for row in batch]
            assert sorted(taken) == list(range(count))


def shared_memory():
    """A place where making a store costs little, if there is one."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None
