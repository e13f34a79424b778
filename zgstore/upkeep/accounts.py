"""Why an object is kept, and what each snapshot takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from zgstore.errors import NotFound
from zgstore.format.digest import DIGEST_BYTES, Digest, digest_prefix
from zgstore.format.fields import all_digests, all_u64, raw_digests
from zgstore.format.manifest import Snapshot
from zgstore.format.pages import RowsRoot
from zgstore.storage.objects import FAMILIES
from zgstore.storage.store import Store
from zgstore.upkeep.digestsets import DigestSet, chosen, singles, total
from zgstore.upkeep.inspector import HoldFacts, holds
from zgstore.upkeep.reachability import (
    Reach,
    Retention,
    place_in,
    reach,
    read_any,
    roots,
)

# --- Why -----------------------------------------------------------------------------------------------------------


class Link(NamedTuple):
    """One step of a chain: what it is, its name for people, and its digest."""

    kind: str
    name: str
    digest: str


@dataclass(frozen=True, slots=True)
class Why:
    """What keeps one object.

    Args:
        digest: The object.
        place: ``objects``, ``meta``, ``trash`` or ``absent``.
        chains: From a root down to the object, one for each root that reaches it.
        holds: Of those roots the holds, each with who gave it, when and why.
    """

    digest: Digest
    place: str
    chains: tuple[tuple[Link, ...], ...]
    holds: tuple[HoldFacts, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "object": str(self.digest),
            "place": self.place,
            "chains": [[link._asdict() for link in chain] for chain in self.chains],
            "holds": [hold.as_json() for hold in self.holds],
        }


def why(store: Store, digest: str | Digest, *, retention: Retention | None = None) -> Why:
    """The chains that keep an object: of refs, tags, holds, reflog, leases, and of actions.

    Args:
        store: Where it is.
        digest: Its digest, or a prefix of at least 6 digits of an object that is there.
        retention: Which reflog entries count.

    Raises:
        NotFound: if no object has that prefix, or more than one; or if it is not there and nothing wants it.
        Missing, Corrupt: if metadata on the way cannot be read.
    """
    target = digest if isinstance(digest, Digest) else find_object(store, digest)
    found = roots(store, retention=retention or Retention(), now=store.now())
    below: dict[Digest, tuple[Link, ...] | None] = {}
    chains = []
    for root in found.named:
        if root.digest not in below:
            below[root.digest] = _chain_below(store, root.digest, target)
        chain = below[root.digest]
        if chain is not None:
            chains.append((Link(root.kind, root.name, ""), *chain))
    for uuid, leased in found.leased:
        if target.raw in set(raw_digests(leased)):
            chains.append((Link("lease", uuid, ""), Link("object", target.short, str(target))))
    for file, action in store.memos.actions_of(target):
        chains.append((Link("action", file.path.name, str(action.key)), Link("blob", target.short, str(target))))
    place = _place(store, target)
    if place == "absent" and not chains:
        raise NotFound(
            f"{target.short} is not in this store, and nothing in it refers to it",
            hint="`zgstore ls` and `zgstore show REV` give the digests that are",
        )
    named = {chain[0].name for chain in chains if chain[0].kind == "hold"}
    held = [facts for facts in holds(store) if facts.hold.name in named] if named else []
    return Why(target, place, tuple(chains), tuple(held))


def find_object(store: Store, text: str) -> Digest:
    """The one object, of either family, whose digest begins so; a whole digest is taken at its word.

    Raises:
        NotFound: if there is none, or more than one.
    """
    prefix = digest_prefix(text)
    if prefix is None:
        raise NotFound(f"{text!r} is no digest", hint="give at least 6 of its hex digits")
    if len(prefix) == 2 * DIGEST_BYTES:
        return Digest(bytes.fromhex(prefix))
    found = sorted({digest for _, digest in store.find(prefix)})
    if len(found) != 1:
        many = f"{len(found)} objects begin" if found else "no object begins"
        raise NotFound(f"{many} with {prefix}", hint="give more digits" if found else "see `zgstore show REV`")
    return found[0]


def _place(store: Store, digest: Digest) -> str:
    for family in FAMILIES:
        if store.objects.stat(digest, family) is not None:
            return family
    return "trash" if any(store.objects.in_trash(digest, family) for family in FAMILIES) else "absent"


def _chain_below(store: Store, start: Digest, target: Digest) -> tuple[Link, ...] | None:
    """From a snapshot or record down to the target; None if it does not lead there."""
    kind, body = read_any(store, start)
    first = Link(kind, start.short, str(start))
    if start == target:
        return (first,)
    if kind != "snapshot":
        return None
    snapshot = Snapshot.decode(body)
    for constant in snapshot.constants:
        if constant.blob == target:
            return (first, Link("blob", f"constant {constant.name}", str(target)))
    if snapshot.dropped == target:
        return (first, Link("dropped", target.short, str(target)))
    rest = _through_rows(store, snapshot, target) or _through_shards(store, snapshot, target)
    return None if rest is None else (first, *rest)


def _through_rows(store: Store, snapshot: Snapshot, target: Digest) -> tuple[Link, ...] | None:
    rows = store.rows_root_of(snapshot)
    if rows is None:
        return None
    link = Link("rows-root", rows.short, str(rows))
    if rows == target:
        return (link,)
    if target in all_digests(RowsRoot.decode(store.objects.read_meta(rows, "page")).pages):
        return (link, Link("rows", target.short, str(target)))
    return None


def _through_shards(store: Store, snapshot: Snapshot, target: Digest) -> tuple[Link, ...] | None:
    root = Link("root", snapshot.root.short, str(snapshot.root))
    if snapshot.root == target:
        return (root,)
    shard = 0
    for digest in all_digests(store.root(snapshot).leaves):
        leaf, page = Link("leaf", digest.short, str(digest)), store.leaf(digest)
        if digest == target:
            return (root, leaf)
        for column, blobs in zip(snapshot.columns, page.blobs, strict=False):
            at = place_in(blobs, target)
            if at is not None:
                return (root, leaf, Link("blob", f"column {column.name} of shard {shard + at}", str(target)))
        shard += len(page)
    return None


# --- Usage ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Share:
    """What one snapshot takes.

    Args:
        snapshot: Which.
        refs: The refs, tags and holds that name it.
        objects: Its blobs.
        bytes: Of these blobs.
        own_bytes: Of those that no other named snapshot has: what its collection would free.
        shared_bytes: Of the rest.
    """

    snapshot: Digest
    refs: tuple[str, ...]
    objects: int
    bytes: int
    own_bytes: int
    shared_bytes: int


@dataclass(frozen=True, slots=True)
class Usage:
    """What a store's snapshots take, and what lies beside them, in bytes.

    Args:
        snapshots: By the first name of each.
        total_bytes: Blobs of all of these, each once.
        other_bytes: Blobs that are there and that none of them has.
        metadata_bytes: Pages, snapshots and records.
        trash_bytes: In the trash.
    """

    snapshots: tuple[Share, ...]
    total_bytes: int
    other_bytes: int
    metadata_bytes: int
    trash_bytes: int

    def as_json(self) -> dict[str, Any]:
        return {
            "snapshots": [
                {
                    "snapshot": str(share.snapshot), "refs": list(share.refs), "objects": share.objects,
                    "bytes": share.bytes, "own_bytes": share.own_bytes, "shared_bytes": share.shared_bytes,
                }
                for share in self.snapshots
            ],
            "total_bytes": self.total_bytes, "other_bytes": self.other_bytes,
            "metadata_bytes": self.metadata_bytes, "trash_bytes": self.trash_bytes,
        }  # fmt: skip


def usage(store: Store) -> Usage:
    """What each named snapshot takes alone, and with others; from pages, without a look at a blob that one names.

    Raises:
        Missing, Corrupt: if reachable metadata cannot be read.
    """
    names: dict[Digest, list[str]] = {}
    for ref in store.refs.list():
        names.setdefault(ref.snapshot, []).append(ref.name)
    for hold in store.refs.holds():
        names.setdefault(hold.snapshot, []).append(f"hold {hold.name}")
    listed = b"".join(store.objects.packed_names("objects"))
    there = DigestSet(listed)
    parts = {digest: _here(there, reach(store, [digest])) for digest in names}
    joined, sizes = (b"".join(part[at] for part in parts.values()) for at in (0, 1))
    named, alone = DigestSet(joined), singles(joined)
    shares = []
    for digest, (blobs, blob_sizes) in parts.items():
        count = len(blobs) // DIGEST_BYTES
        mine, alone = alone[:count], alone[count:]
        size, own = sum(all_u64(blob_sizes)), total(blob_sizes, mine)
        shares.append(Share(digest, tuple(sorted(names[digest])), count, size, own, size - own))
    return Usage(
        snapshots=tuple(sorted(shares, key=lambda share: share.refs)),
        total_bytes=total(sizes, named.firsts()),
        other_bytes=_bytes_of(store, named.without(listed), "objects"),
        metadata_bytes=_bytes_of(store, b"".join(store.objects.packed_names("meta")), "meta"),
        trash_bytes=sum(each.size for each in store.objects.trashed()),
    )


def _here(there: DigestSet, found: Reach) -> tuple[bytes, bytes]:
    """The blobs that are there, and their sizes (u64, packed): of a part that was copied not all are."""
    blobs, sizes = found.blobs()
    mask = there.mask(blobs)
    return chosen(blobs, mask), chosen(sizes, mask, each=8)


def _bytes_of(store: Store, joined: bytes, family: str) -> int:
    return sum(found.size for found in store.objects.stats(list(all_digests(joined)), family) if found is not None)
