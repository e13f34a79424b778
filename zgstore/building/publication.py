"""From actions to a snapshot: pages, the rows that are dropped, the record, and the ref."""

from __future__ import annotations

import functools
import os
import platform as host
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Final

from zgstore.building.execution import constant_bytes
from zgstore.building.planner import BuildPlan, Wanted
from zgstore.building.recall import Found, of_many_cells
from zgstore.errors import Conflict, Invalid, NonFinite
from zgstore.format.digest import Digest, digest_of
from zgstore.format.manifest import Column, Constant, Record, Snapshot
from zgstore.format.pages import SHARDS_PER_LEAF, Blob, Dropped, LeafPage, RootPage, RowsPage, RowsRoot, Shard
from zgstore.storage import partials
from zgstore.storage.files import user_name
from zgstore.storage.refs import Expectation
from zgstore.storage.store import Session, Store

_VERSIONED: Final = ("zgstore", "torch", "transformers", "safetensors", "numpy")
_LISTED_ROWS: Final = 5


@dataclass(frozen=True, slots=True)
class Assembled:
    """A snapshot before it is published.

    Args:
        snapshot: The value.
        digest: What it will be called.
        pages: The bodies of its pages: rows, dropped, leaves, root.
        dropped: What readers skip.
        total_bytes: Of all its blobs.
    """

    snapshot: Snapshot
    digest: Digest
    pages: tuple[bytes, ...]
    dropped: Dropped
    total_bytes: int


@of_many_cells
def assemble(
    plan: BuildPlan, row_pages: Sequence[RowsPage | RowsRoot], constants: Sequence[Constant],
    left_out: Mapping[int, str], *, cut: int, on_nonfinite: str,
) -> Assembled:  # fmt: skip
    """Put a complete plan's actions together.

    Args:
        plan: With an action for each column and shard.
        row_pages: Of the stream's rows, and their root.
        constants: Kept already.
        left_out: Stream index → why an extractor left the row out.
        cut: Batches for each shard.
        on_nonfinite: ``error`` or ``drop``.

    Raises:
        NonFinite: if a boundary has NaN or Inf, under ``error``.
        Invalid: if shards of a column disagree, or no row is left.
    """
    actions = [[_required(action) for action in column] for column in plan.found]
    columns = tuple(_column(wanted, mine) for wanted, mine in zip(plan.columns, actions, strict=True))
    shards = [
        Shard(
            rows=_rows(plan, [mine[shard.index] for mine in actions], shard.index),
            inputs=shard.inputs,
            blobs=tuple(mine[shard.index].blob for mine in actions),
        )
        for shard in plan.shards
    ]
    masked = _masked(plan, actions, shards)
    if masked and on_nonfinite != "drop":
        raise nonfinite_error(masked)
    dropped = Dropped(
        masked=tuple(sorted(masked)),
        masked_reasons=tuple(masked[row] for row in sorted(masked)),
        left_out=tuple(sorted(left_out)),
        left_out_reasons=tuple(left_out[row] for row in sorted(left_out)),
    )
    samples = sum(shard.rows for shard in shards) - len(masked)
    if not samples:
        raise Invalid("no row is left: all are dropped", hint="see why with --on-nonfinite error, or in the extractor")
    leaves = [
        LeafPage.of(shards[at : at + SHARDS_PER_LEAF], columns=len(columns))
        for at in range(0, len(shards), SHARDS_PER_LEAF)
    ]
    bodies = [leaf.encode() for leaf in leaves]
    root = RootPage.of(
        [(digest_of("page", body), leaf) for body, leaf in zip(bodies, leaves, strict=True)], columns=len(columns)
    )
    dropped_page = [dropped.encode()] if masked or left_out else []
    snapshot = Snapshot(
        pins=plan.pins,
        columns=columns,
        constants=tuple(sorted(constants, key=lambda constant: constant.name)),
        cut=cut,
        samples=samples,
        dropped=digest_of("page", dropped_page[0]) if dropped_page else None,
        root=digest_of("page", root.encode()),
    )
    return Assembled(
        snapshot=snapshot,
        digest=digest_of("snapshot", snapshot.encode()),
        pages=(*(page.encode() for page in row_pages), *dropped_page, *bodies, root.encode()),
        dropped=dropped,
        total_bytes=sum(blob.size for shard in shards for blob in shard.blobs) + sum(c.size for c in constants),
    )


def _required(action: Found | None) -> Found:
    assert action is not None, "a plan is assembled when nothing is missing"
    return action


def _column(wanted: Wanted, actions: Sequence[Found]) -> Column:
    columns = {wanted.column(action.dtype, action.shape) for action in actions}
    if len(columns) > 1:
        said = " and ".join(sorted(f"{column.dtype} {list(column.shape)}" for column in columns))
        raise Invalid(
            f"column {wanted.name!r} is {said} in different shards",
            hint="give every batch the same shape, or store sequences without padding: lengths and sequence",
        )
    return columns.pop()


def _rows(plan: BuildPlan, actions: Sequence[Found], shard: int) -> int:
    rows = {action.rows for action in actions}
    if len(rows) > 1:
        said = ", ".join(f"{wanted.name} {a.rows}" for wanted, a in zip(plan.columns, actions, strict=True))
        raise Invalid(
            f"the columns of shard {shard} have different numbers of rows: {said}",
            hint="the extractor must leave out the same rows each time it sees a batch",
        )
    return rows.pop()


def _masked(plan: BuildPlan, actions: Sequence[Sequence[Found]], shards: Sequence[Shard]) -> dict[int, str]:
    """Position → reason, of rows where a boundary or an output is not finite."""
    masked: dict[int, str] = {}
    first = 0
    for at, shard in enumerate(shards):
        for wanted, mine in zip(plan.columns, actions, strict=True):
            for row in mine[at].nonfinite:  # of context none is looked for
                masked.setdefault(first + row, f"{wanted.name} is not finite")
        first += shard.rows
    return masked


def nonfinite_error(masked: Mapping[int, str], *, shown: str = "") -> NonFinite:
    """The error that names column, row and first values."""
    rows = sorted(masked)
    values = f" ({shown})" if shown else ""
    more = f", and {len(rows) - 1} more rows" if len(rows) > 1 else ""
    return NonFinite(
        f"{masked[rows[0]]} in row {rows[0]}{values}{more}",
        hint="mend the teacher or the row (a fully masked row gives NaN), store a wider dtype, or a masked output "
        "without int8, or leave such rows out with --on-nonfinite drop",
        rows=rows[:_LISTED_ROWS],
        column=masked[rows[0]].removesuffix(" is not finite"),
    )


def keep_constants(session: Session, constants: Mapping[str, Any]) -> tuple[Constant, ...]:
    """Store constants that are not there yet."""
    kept = []
    for name in sorted(constants):
        content, dtype, shape = constant_bytes(constants[name])
        blob = Blob(digest_of(None, content), len(content))
        if session.reserve([blob]) != [True]:
            draft = session.draft(size_hint=len(content))
            draft.write(content)
            session.keep(draft)
            session.sync()
        kept.append(Constant(name, dtype, shape, blob.digest, blob.size))
    return tuple(kept)


def publish(
    session: Session, assembled: Assembled, *, ref: str | None, expect: Digest | Expectation | None,
    record: Callable[[], Record],
) -> bool:  # fmt: skip
    """Pages, snapshot, record and ref, in this order (FORMAT 1, 7.4). Nothing is written where all of it is sound.

    Args:
        session: Whose lease names all of it.
        assembled: What is published.
        ref: The name to move; None moves none.
        expect: What it must name now.
        record: Called only if there is something to say.

    Returns:
        Whether the ref was moved, or the snapshot is new.

    Raises:
        Conflict: if the ref moved meanwhile, to another snapshot than this.
    """
    store = session.store
    pages = [digest_of("page", body) for body in assembled.pages]
    there = all(session.reserve([*pages, assembled.digest], "meta")) and _are_sound(store, pages, assembled.digest)
    whole = partials.expected(store.path, assembled.digest) is None  # a part that was copied here is one no longer
    if there and whole and (ref is None or store.refs.get(ref, "head") == assembled.digest):
        return False
    for body in assembled.pages:
        session.put_meta("page", body)
    session.sync()
    try:
        session.publish(assembled.snapshot, record=record(), ref=ref, expect=expect)
    except Conflict:
        # Another build of the same recipe was faster: what was wanted is there.
        if ref is None or store.refs.get(ref, "head") != assembled.digest:
            raise
        return False
    return True


def _are_sound(store: Store, pages: Sequence[Digest], snapshot: Digest) -> bool:
    # A build that finds everything says that it can be read: the little that it would write is read for that.
    kinds = [*((page, "page") for page in pages), (snapshot, "snapshot")]
    return all(store.objects.is_sound(digest, "meta", kind=kind) for digest, kind in kinds)


def record_of(
    store: Store, assembled: Assembled, plan: BuildPlan, recipe: Digest | None, *, parent: Digest | None,
    durations: Mapping[str, float], circumstance: Mapping[str, Any],
) -> Record:  # fmt: skip
    """Who, when, how long, on what: beside the snapshot, never inside it."""
    fields: dict[str, Any] = {
        "recipe": recipe.raw if recipe else None,
        "user": user_name(os.getuid()),
        "host": socket.gethostname(),
        "versions": dict(_versions()),
        "platforms": _platforms(plan),
        "hardware": {"cpus": os.cpu_count() or 0, "machine": host.machine(), "system": host.system()},
        "durations": {name: float(seconds) for name, seconds in durations.items()},
        "parent": parent.raw if parent else None,
        "statistics": {
            wanted.name: _statistics(_present(actions))
            for wanted, actions in zip(plan.columns, plan.found, strict=True)
        },
        "keys": {wanted.name: dict(wanted.parts) for wanted in plan.columns},
        **circumstance,
    }
    return Record(assembled.digest, store.now(), fields)


def _present(actions: Sequence[Found | None]) -> list[Found]:
    return [action for action in actions if action is not None]


@functools.cache
def _versions() -> Mapping[str, str]:
    """Read once: it means parsing each package's description."""
    found = {"python": host.python_version()}
    for name in _VERSIONED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _platforms(plan: BuildPlan) -> list[dict[str, str]]:
    """The platforms of the teacher's columns, each once."""
    unique: dict[tuple[tuple[str, str], ...], None] = {}
    for wanted, actions in zip(plan.columns, plan.found, strict=True):
        if wanted.source == "teacher":
            unique.update((tuple(sorted(action.platform.items())), None) for action in _present(actions))
    return [dict(each) for each in sorted(unique)]


def _statistics(actions: Sequence[Found]) -> dict[str, Any]:
    """A column's statistics over its shards; rms weighted by rows."""
    mine = [action for action in actions if action.statistics]
    result: dict[str, Any] = {"nonfinite": sum(len(action.nonfinite) for action in actions)}
    if mine:
        rows = sum(action.rows for action in mine) or 1
        result |= {
            "rms": (sum(a.statistics["rms"] ** 2 * a.rows for a in mine) / rows) ** 0.5,
            "min": min(action.statistics["min"] for action in mine),
            "max": max(action.statistics["max"] for action in mine),
        }
        if any("error" in action.statistics for action in mine):
            result["error"] = max(action.statistics.get("error", 0.0) for action in mine)
    return result
