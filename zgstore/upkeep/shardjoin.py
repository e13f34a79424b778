"""The shards of two snapshots joined: by their inputs, else by their place; only pages that are not in both are read.

Shapes: N shards of the opened pages of one side.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zgstore.format.digest import DIGEST_BYTES
from zgstore.format.fields import all_digests, all_u64, raw_digests
from zgstore.format.manifest import Snapshot
from zgstore.format.pages import RootPage
from zgstore.storage.store import Store
from zgstore.upkeep.reachability import DigestTable

Numbers = NDArray[np.int64]
Sizes = NDArray[np.uint64]
Words = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Joined:
    """What the join found.

    Args:
        added: Shards of b alone.
        removed: Shards of a alone.
        same: Shards with equal inputs, and equal blobs in all common columns.
        changed: Shards that stand for each other and are not the same.
        conflicts: Those of them whose inputs are equal.
        unequal: Common columns with an unequal blob in an aligned shard.
        shared_bytes: Blobs that both have, each once; of pages that both have, as their root page says.
        only_a_bytes: Blobs of a alone.
        only_b_bytes: Blobs of b alone.
    """

    added: int
    removed: int
    same: int
    changed: int
    conflicts: int
    unequal: frozenset[str]
    shared_bytes: int
    only_a_bytes: int
    only_b_bytes: int


def join(store: Store, a: Snapshot, b: Snapshot) -> Joined:
    """Join the shards of ``a`` and ``b``.

    Raises:
        Missing, Corrupt: if a page is not there, or not what its name says.
    """
    roots = store.root(a), store.root(b)
    shared = _shared_leaves(a, b, *roots)
    left, right = (_opened(store, snapshot, root, shared) for snapshot, root in zip((a, b), roots, strict=True))
    same_shards, shared_bytes = _sums(roots[0], shared)
    with_inputs, rest_a, rest_b = _paired(_ranked(left.inputs, right.inputs))
    by_place, alone_a, alone_b = _paired((left.places[rest_a], right.places[rest_b]))
    meet_a = np.concatenate([with_inputs[0], rest_a[by_place[0]]])
    meet_b = np.concatenate([with_inputs[1], rest_b[by_place[1]]])
    equal_inputs = np.arange(len(meet_a)) < len(with_inputs[0])
    differs = np.zeros(len(meet_a), dtype=bool)
    unequal = set()
    for name in left.blobs.keys() & right.blobs.keys():
        here = np.any(_words(left.blobs[name])[meet_a] != _words(right.blobs[name])[meet_b], axis=1)
        differs |= here
        if here.any():
            unequal.add(name)
    same = int((equal_inputs & ~differs).sum())
    both, only_a, only_b = _bytes(left, right)
    return Joined(
        added=len(alone_b),
        removed=len(alone_a),
        same=same_shards + same,
        changed=len(meet_a) - same,
        conflicts=int((equal_inputs & differs).sum()),
        unequal=frozenset(unequal),
        shared_bytes=shared_bytes + both,
        only_a_bytes=only_a,
        only_b_bytes=only_b,
    )


@dataclass(frozen=True, slots=True)
class _Opened:
    """The opened pages of one side, field by field.

    Args:
        places: Which shard of the snapshot each is, int64 ``[N]``.
        inputs: Digests of their inputs, joined.
        blobs: By column, digests joined.
        sizes: By column, bytes of each, u64 ``[N]``; then the constants'.
        constants: Digests of the constants, joined.
    """

    places: Numbers
    inputs: bytes
    blobs: Mapping[str, bytes]
    sizes: Sizes
    constants: bytes


def _shared_leaves(a: Snapshot, b: Snapshot, root_a: RootPage, root_b: RootPage) -> frozenset[bytes]:
    """Leaves that both name; they mean the same shards only where both list the same columns in one order."""
    if [column.name for column in a.columns] != [column.name for column in b.columns]:
        return frozenset()
    return frozenset(raw_digests(root_a.leaves)) & frozenset(raw_digests(root_b.leaves))


def _sums(root: RootPage, leaves: frozenset[bytes]) -> tuple[int, int]:
    """Shards and bytes of the leaves, as their root says."""
    counted = np.array([leaf in leaves for leaf in raw_digests(root.leaves)], dtype=bool)
    shards = np.array(all_u64(root.shards), dtype=np.uint64)[counted]
    sizes = [np.frombuffer(column, "<u8")[counted].sum() for column in root.column_bytes]
    return int(shards.sum()), sum(int(size) for size in sizes)


def _opened(store: Store, snapshot: Snapshot, root: RootPage, shared: frozenset[bytes]) -> _Opened:
    places, pages, first = [np.empty(0, np.int64)], [], 0
    for leaf, shards in zip(all_digests(root.leaves), all_u64(root.shards), strict=True):
        if leaf.raw not in shared:
            pages.append(store.leaf(leaf))
            places.append(np.arange(first, first + shards))
        first += shards
    sizes = b"".join(page.sizes[at] for at in range(len(snapshot.columns)) for page in pages)
    constants = [constant.size for constant in snapshot.constants]
    return _Opened(
        places=np.concatenate(places),
        inputs=b"".join(page.inputs for page in pages),
        blobs={column.name: b"".join(page.blobs[at] for page in pages) for at, column in enumerate(snapshot.columns)},
        sizes=np.concatenate([np.frombuffer(sizes, "<u8"), np.array(constants, dtype=np.uint64)]),
        constants=b"".join(constant.blob.raw for constant in snapshot.constants),
    )


def _words(joined: bytes) -> Words:
    return np.frombuffer(joined, "<u8").reshape(-1, DIGEST_BYTES // 8)


def _ranked(a: bytes, b: bytes) -> tuple[Numbers, Numbers]:
    """A number for each digest, equal where digest and occurrence are: the n-th of equal ones meets the n-th."""
    table = DigestTable(a + b)
    most = (len(a) + len(b)) // DIGEST_BYTES + 1
    ranked = []
    for joined in (a, b):
        found = table.find(joined)
        order = np.argsort(found, kind="stable")
        ordered = found[order]
        begins = np.searchsorted(ordered, ordered)
        rank = np.empty(len(found), np.int64)
        rank[order] = np.arange(len(found)) - begins
        ranked.append(found * most + rank)
    return ranked[0], ranked[1]


def _paired(keys: tuple[Numbers, Numbers]) -> tuple[tuple[Numbers, Numbers], Numbers, Numbers]:
    """Where distinct keys stand on both sides, and what stands on one alone; ascending in a."""
    _, at_a, at_b = np.intersect1d(*keys, assume_unique=True, return_indices=True)
    order = np.argsort(at_a)
    alone_a = np.setdiff1d(np.arange(len(keys[0])), at_a, assume_unique=True)
    alone_b = np.setdiff1d(np.arange(len(keys[1])), at_b, assume_unique=True)
    return (at_a[order], at_b[order]), alone_a, alone_b


def _bytes(a: _Opened, b: _Opened) -> tuple[int, int, int]:
    """Bytes of blobs that both have, of a alone, of b alone; each blob once."""
    tables = [DigestTable(b"".join([*each.blobs.values(), each.constants])) for each in (a, b)]
    sizes = [each.sizes[table.first] for each, table in zip((a, b), tables, strict=True)]
    in_b, in_a = tables[1].has(tables[0].raw()), tables[0].has(tables[1].raw())
    return int(sizes[0][in_b].sum()), int(sizes[0][~in_b].sum()), int(sizes[1][~in_a].sum())
