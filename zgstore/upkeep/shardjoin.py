"""The shards of two snapshots joined: by their inputs, else by their place; only pages that are not in both are read.

Shapes: N shards of the opened pages of one side.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, compress
from typing import TypeVar

from zgstore.format.digest import DIGEST_BYTES
from zgstore.format.fields import all_digests, all_u64, pack_u64, raw_digests
from zgstore.format.manifest import Snapshot
from zgstore.format.pages import RootPage
from zgstore.storage.store import Store
from zgstore.upkeep.digestsets import DigestSet, both, inverse, total

Key = TypeVar("Key", bound=Hashable)


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
    met, rest_a, rest_b = _paired(left.inputs, right.inputs)
    by_place, alone_a, alone_b = _paired([left.places[at] for at in rest_a], [right.places[at] for at in rest_b])
    met_by_inputs = len(met)
    met += [(rest_a[at], rest_b[to]) for at, to in by_place]
    differing: set[int] = set()
    unequal = set()
    in_place = next((at for at, pair in enumerate(met) if pair != (at, at)), len(met))
    for name in left.blobs.keys() & right.blobs.keys():
        here = _unequal(left.blobs[name], right.blobs[name], met, in_place=in_place)
        differing.update(here)
        if here:
            unequal.add(name)
    conflicts = sum(at < met_by_inputs for at in differing)
    same = met_by_inputs - conflicts
    in_both, only_a, only_b = _bytes(left, right)
    return Joined(
        added=len(alone_b),
        removed=len(alone_a),
        same=same_shards + same,
        changed=len(met) - same,
        conflicts=conflicts,
        unequal=frozenset(unequal),
        shared_bytes=shared_bytes + in_both,
        only_a_bytes=only_a,
        only_b_bytes=only_b,
    )


@dataclass(frozen=True, slots=True)
class _Opened:
    """The opened pages of one side, field by field.

    Args:
        places: Which shard of the snapshot each is ``[N]``.
        inputs: Digests of their inputs ``[N]``.
        blobs: By column, digests ``[N]``, joined.
        all_blobs: Digests of all columns' blobs, then of the constants, joined.
        all_sizes: Their sizes, u64, packed.
    """

    places: Sequence[int]
    inputs: Sequence[bytes]
    blobs: Mapping[str, bytes]
    all_blobs: bytes
    all_sizes: bytes


def _shared_leaves(a: Snapshot, b: Snapshot, root_a: RootPage, root_b: RootPage) -> frozenset[bytes]:
    """Leaves that both name; they mean the same shards only where both list the same columns in one order."""
    if [column.name for column in a.columns] != [column.name for column in b.columns]:
        return frozenset()
    return frozenset(raw_digests(root_a.leaves)) & frozenset(raw_digests(root_b.leaves))


def _sums(root: RootPage, leaves: frozenset[bytes]) -> tuple[int, int]:
    """Shards and bytes of the leaves, as their root says."""
    counted = [leaf in leaves for leaf in raw_digests(root.leaves)]
    sizes = (sum(compress(all_u64(column), counted)) for column in root.column_bytes)
    return sum(compress(all_u64(root.shards), counted)), sum(sizes)


def _opened(store: Store, snapshot: Snapshot, root: RootPage, shared: frozenset[bytes]) -> _Opened:
    places: list[int] = []
    pages, first = [], 0
    for leaf, shards in zip(all_digests(root.leaves), all_u64(root.shards), strict=True):
        if leaf.raw not in shared:
            pages.append(store.leaf(leaf))
            places += range(first, first + shards)
        first += shards
    columns = range(len(snapshot.columns))
    blobs = [b"".join(page.blobs[at] for page in pages) for at in columns]
    sizes = [b"".join(page.sizes[at] for page in pages) for at in columns]
    return _Opened(
        places=places,
        inputs=list(raw_digests(b"".join(page.inputs for page in pages))),
        blobs={column.name: blobs[at] for at, column in enumerate(snapshot.columns)},
        all_blobs=b"".join([*blobs, *(constant.blob.raw for constant in snapshot.constants)]),
        all_sizes=b"".join([*sizes, pack_u64([constant.size for constant in snapshot.constants])]),
    )


def _paired(a: Sequence[Key], b: Sequence[Key]) -> tuple[list[tuple[int, int]], list[int], list[int]]:
    """Where equal keys stand on both sides, the n-th with the n-th, and what stands on one alone; ascending in a."""
    aligned = next(
        (at for at, (here, there) in enumerate(zip(a, b, strict=False)) if here != there), min(len(a), len(b))
    )
    pairs, alone = [(at, at) for at in range(aligned)], []
    waiting: defaultdict[Key, deque[int]] = defaultdict(deque)
    for at, key in enumerate(b[aligned:], aligned):
        waiting[key].append(at)
    for at, key in enumerate(a[aligned:], aligned):
        if waiting[key]:
            pairs.append((at, waiting[key].popleft()))
        else:
            alone.append(at)
    return pairs, alone, sorted(chain.from_iterable(waiting.values()))


def _unequal(mine: bytes, theirs: bytes, met: Sequence[tuple[int, int]], *, in_place: int) -> list[int]:
    """Which of the shards that met have two blobs; the first ``in_place`` of them stand in the same place."""
    straight = in_place * DIGEST_BYTES
    first = in_place if mine[:straight] == theirs[:straight] else 0
    if first == len(met):
        return []
    a, b = list(raw_digests(mine)), list(raw_digests(theirs))
    return [at for at, (here, there) in enumerate(met[first:], first) if a[here] != b[there]]


def _bytes(a: _Opened, b: _Opened) -> tuple[int, int, int]:
    """Bytes of blobs that both have, of a alone, of b alone; each blob once."""
    set_a, firsts_b = DigestSet(a.all_blobs), DigestSet(b.all_blobs).firsts()
    only_b = total(b.all_sizes, both(firsts_b, inverse(set_a.mask(b.all_blobs))))
    in_both = total(b.all_sizes, firsts_b) - only_b
    return in_both, total(a.all_sizes, set_a.firsts()) - in_both, only_b
