"""Snapshots of a few bytes, as a builder would publish them."""

from zgstore.format.digest import digest_of
from zgstore.format.manifest import Column, Pins, Record, Snapshot
from zgstore.format.pages import LeafPage, RootPage, Shard, rows_tree

COLUMNS = (
    Column("h.0", "boundary", "F32", "raw", (2,), 0),
    Column("h.1", "boundary", "F32", "raw", (2,), 1),
)


def keep(session, content):
    draft = session.draft()
    draft.write(content)
    return session.keep(draft)


def write(session, text, *, shards=2, columns=COLUMNS):
    """All but the snapshot itself: blobs, pages and row pages."""
    made = []
    for number in range(shards):
        blobs = tuple(keep(session, f"{text} {number} {column.name}".encode()) for column in columns)
        made.append(Shard(3, digest_of("batch", f"{text} {number}".encode()), blobs))
    session.sync()
    leaf = LeafPage.of(made, columns=len(columns))
    root = RootPage.of([(session.put_meta("page", leaf.encode()), leaf)], columns=len(columns))
    rows_root, pages = rows_tree(digest_of("row", text.encode()).raw * 3 * shards)
    for page in pages:
        session.put_meta("page", page.encode())
    pins = Pins({"id": "teacher"}, {"digest": session.put_meta("page", rows_root.encode()).raw}, {})
    return Snapshot(pins, columns, (), 1, 3 * shards, None, session.put_meta("page", root.encode()))


def publish(store, text, *, ref="main", time_seconds=1.0, shards=2, **options):
    """A snapshot made of ``text``, published; returns its digest."""
    with store.writing("test") as session:
        snapshot = write(session, text, shards=shards)
        record = Record(digest_of("snapshot", snapshot.encode()), time_seconds)
        return session.publish(snapshot, record=record, ref=ref, **options)


def blobs_of(store, digest):
    """Every blob of a snapshot."""
    return [blob for shard in store.shards(store.snapshot(digest)) for blob in shard.blobs]
