"""Names given to snapshots that are there: refs moved, tags, holds; and the names taken away again."""

from __future__ import annotations

from collections.abc import Callable

from zgstore.format.digest import Digest
from zgstore.storage.refs import ANY, Expectation
from zgstore.storage.store import Store


def tag(store: Store, name: str, rev: str | Digest, *, force: bool = False) -> Digest:
    """Give a snapshot a name that does not move.

    Args:
        store: Where it is.
        name: The tag.
        rev: REV, or its digest.
        force: Move a tag that names another snapshot.

    Raises:
        Conflict: if the tag names another snapshot and ``force`` is not set.
        Missing: if something of the snapshot is not there.
    """
    digest = _digest(store, rev)
    store.point(name, "tag", digest, force=force, record=store.record_of(digest))
    return digest


def set_ref(store: Store, name: str, rev: str | Digest, *, expect: str | Digest | Expectation | None = ANY) -> Digest:
    """Point a ref at a snapshot.

    Args:
        store: Where it is.
        name: The ref.
        rev: REV, or its digest.
        expect: What it must point at now; None if it must not exist yet.

    Raises:
        Conflict: if it points at something else.
        Missing: if something of the snapshot is not there.
    """
    digest = _digest(store, rev)
    expected = store.resolve(expect) if isinstance(expect, str) else expect
    store.point(name, "head", digest, expect=expected, record=store.record_of(digest))
    return digest


def hold(store: Store, name: str, rev: str | Digest, reason: str = "") -> Digest:
    """Keep a snapshot from gc until it is let go.

    Args:
        store: Where it is.
        name: The hold's own name.
        rev: REV, or its digest.
        reason: Why, for whoever wonders later.

    Raises:
        Conflict: if the name holds another snapshot.
        Missing: if something of the snapshot is not there.
    """
    digest = _digest(store, rev)
    store.hold(name, digest, reason)
    return digest


def forget(store: Store, name: str, kind: str) -> Digest:
    """Remove a ``head`` or ``tag`` and its reflog; what it pointed at. Raises NotFound."""
    return _removed(store, lambda: store.refs.remove(name, kind))


def unhold(store: Store, name: str) -> Digest:
    """Let a held snapshot go; which it was. Raises NotFound."""
    return _removed(store, lambda: store.refs.unhold(name))


def _removed(store: Store, remove: Callable[[], Digest]) -> Digest:
    # Shared: a collection that has read the roots sees by its re-check that this one is gone, or keeps it once more.
    with store.leases.store_lock(exclusive=False):
        return remove()


def _digest(store: Store, rev: str | Digest) -> Digest:
    return rev if isinstance(rev, Digest) else store.resolve(rev)
