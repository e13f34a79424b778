"""Which teacher and which data it is: measured once, known again without loading, refused when it is another one.

Measurements are kept by the declared pins (id, revision, factory, args): a build that loads no teacher finds there what
was measured when the same files and the same code last ran; a build that measures something else under the same pins
is refused, for one of the two is not what it is called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from zgstore.building.files import FileDigests, SourcePin, changed_sources, file_digest, files_digest
from zgstore.building.inputs import Inputs
from zgstore.building.planner import TeacherIdentity, ragged_pin
from zgstore.building.recipe import Recipe
from zgstore.building.teacher import Measured, arithmetic, device_of, differences, measure, platform, sources
from zgstore.errors import Corrupt, Missing, Refused
from zgstore.format import canonical
from zgstore.format.digest import DIGEST_BYTES, Digest, digest_of
from zgstore.format.fields import nth_digest
from zgstore.format.pages import ROWS_PER_PAGE, RowsPage, RowsRoot, rows_tree
from zgstore.storage.index import FileDigest
from zgstore.storage.objects import Stat
from zgstore.storage.store import Store

ENTRIES_KEPT: Final = 16
_LISTED_DIFFERENCES: Final = 5


def stamped(store: Store) -> FileDigests:
    """Digests of files outside the store, through the index's stat stamps: an unchanged file is not read again."""

    def digests(paths: Sequence[Path]) -> list[Digest]:
        whole = [path.resolve() for path in paths]
        now = store.now()
        known = store.index.file_digests(whole, now=now)
        fresh, result = [], []
        for path, stamp in zip(whole, known, strict=True):
            if stamp is not None:
                result.append(stamp)
                continue
            stat = Stat.of(path.stat()) if path.exists() else None
            result.append(file_digest(path))
            if stat is not None and stat == Stat.of(path.stat()):
                fresh.append(FileDigest(path, stat, result[-1], now))
        if fresh:
            store.index.put_file_digests(fresh)
        return result

    return digests


# ---- the teacher ----


@dataclass(frozen=True, slots=True)
class TeacherMemo:
    """What a build finds, and leaves, under the teacher's declared pins.

    Args:
        key: Name of the measurement.
        before: Its value; None if there is none.
        files: 32 bytes over ``teacher.files`` now; None where the recipe lists none.
    """

    key: Digest
    before: Mapping[str, Any] | None
    files: bytes | None


def teacher_memo(store: Store, recipe: Recipe) -> TeacherMemo:
    """Look up what is known of the recipe's teacher."""
    teacher = recipe.teacher
    key = digest_of(
        "measurement",
        canonical.encode(
            {
                "kind": "teacher",
                "id": teacher.id,
                "revision": teacher.revision,
                "factory": teacher.factory.text,
                "args": teacher.args,
            }
        ),
    )
    files = files_digest(teacher.files, base=recipe.directory, digests=stamped(store)).raw if teacher.files else None
    return TeacherMemo(key, store.memos.measurement(key), files)


def known_teacher(store: Store, recipe: Recipe, memo: TeacherMemo, *, device: str | None) -> TeacherIdentity | None:
    """The teacher as an earlier run measured it, if its files and its code are still the same; nothing is loaded.

    Args:
        store: Whose index has stamps of the files.
        recipe: Where its code is looked for first.
        memo: From `teacher_memo`.
        device: Where it would run; None: where it ran when it was measured.
    """
    if memo.before is None:
        return None
    for entry in reversed(memo.before["entries"]):
        if memo.files is not None and entry["files"] != memo.files:
            continue
        if entry["ambient"] != ambient() or not _is_on(entry["device"], device):
            continue
        pin = SourcePin.from_value(entry["sources"])
        if changed_sources(pin, search=[recipe.directory], digests=stamped(store)):
            continue
        return TeacherIdentity(
            measured=memo.before["measured"],
            sources=pin.digest().raw,
            arithmetic=entry["arithmetic"],
            platform=_platform(entry["device"]),
            certainty="declared" if memo.files is None else "measured",
        )
    return None


def measure_teacher(
    store: Store, recipe: Recipe, module: nn.Module, memo: TeacherMemo, *, ambient: Mapping[str, Any]
) -> tuple[TeacherIdentity, dict[str, Any]]:
    """Measure a loaded teacher.

    Args:
        store: Whose index has stamps of the source files.
        recipe: Who declares it.
        module: The teacher.
        memo: From `teacher_memo`.
        ambient: From `ambient`, before the factory ran.

    Returns:
        What it is, and the measurement's new value, to be kept once something made with it is durable.

    Raises:
        Refused: if an earlier build measured another teacher under the same pins; the message says what changed.
    """
    measured = measure(module)
    pin = sources(module, recipe.teacher.factory.resolve(), digests=stamped(store))
    before = memo.before
    if before is not None and before["measured"] != measured.digest.raw:
        changes = differences(Measured.from_value(before["parts"]), measured)
        listed = "; ".join(changes[:_LISTED_DIFFERENCES]) or "how it is described"
        more = f"; and {len(changes) - _LISTED_DIFFERENCES} more" if len(changes) > _LISTED_DIFFERENCES else ""
        raise Refused(
            f"the teacher {recipe.teacher.id!r} at revision {recipe.teacher.revision!r} is not the one that an earlier "
            f"build measured: {listed}{more}",
            hint="give the changed teacher a revision of its own, or restore the one that this revision names",
            changed=changes,
            expected=str(Digest(before["measured"])),
            actual=str(measured.digest),
        )
    entry: dict[str, Any] = {
        "files": memo.files,
        "sources": pin.as_value(),
        "arithmetic": arithmetic(module),
        "ambient": dict(ambient),
        "device": str(device_of(module)),
    }
    others = [each for each in (before["entries"] if before else []) if each != entry]
    value = {
        "kind": "teacher",
        "measured": measured.digest.raw,
        "parts": measured.as_value(),
        "entries": [*others[1 - ENTRIES_KEPT :], entry],
    }
    identity = TeacherIdentity(
        measured=measured.digest.raw,
        sources=pin.digest().raw,
        arithmetic=entry["arithmetic"],
        platform=platform(device_of(module)),
        certainty="measured",
    )
    return identity, value


def ambient() -> dict[str, Any]:
    """The process's own settings of arithmetic, before a factory changes them."""
    return {
        "tf32": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "autocast": [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)],
        "dtype": str(torch.get_default_dtype()),
    }


def _is_on(ran: str, wanted: str | None) -> bool:
    """Whether a teacher that ran on a device would run on the same one now."""
    if wanted is None:
        return True
    then, now = torch.device(ran), torch.device(wanted)
    return then.type == now.type and (then.index or 0) == (now.index or 0)


def _platform(device: str) -> dict[str, str]:
    # A host without that device can still use what others computed on theirs.
    return platform(device if torch.device(device).type != "cuda" or torch.cuda.is_available() else "cpu")


def extractor_pin(store: Store, recipe: Recipe) -> dict[str, Any] | None:
    """The extractor as the capture pins it: its name, the digest of its module's source and files, its args."""
    capture = recipe.capture
    if capture.extractor is None:
        return None
    function = capture.extractor.resolve()
    pin = sources(nn.Module(), function, digests=stamped(store))
    (source,) = pin.factory.values()
    code = files_digest(capture.code, base=recipe.directory, digests=stamped(store)).raw if capture.code else None
    return {
        "function": capture.extractor.text,
        "source": None if source is None else source.raw,
        "code": code,
        "args": dict(capture.args),
    }


# ---- the data ----


@dataclass(frozen=True, slots=True)
class DataMemo:
    """What a build finds, and leaves, under the data's declared pins.

    Args:
        key: Name of the measurement.
        root: The tree over this stream's row digests.
        pages: Its pages.
        pin: The data pins of the snapshot.
    """

    key: Digest
    root: RowsRoot
    pages: tuple[RowsPage, ...]
    pin: Mapping[str, Any]

    @property
    def tree(self) -> tuple[RowsPage | RowsRoot, ...]:
        """The pages and their root."""
        return (*self.pages, self.root)

    def value(self) -> dict[str, Any]:
        """The measurement's value."""
        return {"kind": "data", "rows": digest_of("page", self.root.encode()).raw, "count": self.root.count}

    def grows(self, store: Store) -> bool:
        """Whether this stream is longer than the longest seen by now, and is to be kept."""
        known = _known_rows(store, self.key)
        return known is None or self.root.count > known.count


def data_memo(store: Store, recipe: Recipe, inputs: Inputs) -> DataMemo:
    """See that the rows are those that earlier builds saw under the same pins, as far as both go.

    Raises:
        Refused: naming the first row that differs.
    """
    data = recipe.data
    revision = data.revision
    if revision is None:
        revision = str(files_digest(data.files, base=recipe.directory, digests=stamped(store)))
    key = digest_of(
        "measurement",
        canonical.encode(
            {
                "kind": "data",
                "id": data.id,
                "revision": revision,
                "factory": data.factory.text,
                "args": data.args,
                "pins": inputs.pins,
                "ragged": ragged_pin(recipe),
                "constants": sorted(recipe.capture.constants),
            }
        ),
    )
    root, pages = rows_tree(inputs.row_digests)
    known = _known_rows(store, key)
    if known is not None:
        row = _first_difference(store, known, root, inputs.row_digests)
        if row is not None:
            raise Refused(
                f"row {row} of {data.id!r} at revision {revision!r} is not the one that an earlier build measured "
                "under the same pins",
                hint="give the changed data a revision of its own (or let the factory report what changed in its "
                "`.pins`), or restore the data that this revision names",
                row=row,
            )
    pin = {
        "id": data.id,
        "revision": revision,
        "pins": dict(inputs.pins),
        "digest": digest_of("page", root.encode()).raw,
    }
    return DataMemo(key, root, tuple(pages), pin)


def _known_rows(store: Store, key: Digest) -> RowsRoot | None:
    value = store.memos.measurement(key)
    if value is None or value.get("kind") != "data":
        return None
    try:
        return RowsRoot.decode(store.objects.read_meta(Digest(value["rows"]), RowsRoot.KIND))
    except (Missing, Corrupt):
        # What cannot be read again can refuse nobody: this build's rows take its place, and `verify` names the page.
        return None


def _first_difference(store: Store, known: RowsRoot, root: RowsRoot, rows: bytes) -> int | None:
    """The first row that differs in the common prefix; whole equal pages are told by their digests."""
    common = min(known.count, root.count)
    for page in range(-(-common // ROWS_PER_PAGE)):
        theirs = nth_digest(known.pages, page)
        if theirs == nth_digest(root.pages, page):
            continue
        first = page * ROWS_PER_PAGE
        last = min(first + ROWS_PER_PAGE, common)
        try:
            seen = RowsPage.decode(store.objects.read_meta(theirs, RowsPage.KIND)).digests
        except (Missing, Corrupt):
            continue
        mine = rows[first * DIGEST_BYTES : last * DIGEST_BYTES]
        seen = seen[: len(mine)]
        if seen != mine:
            return first + next(
                at for at in range(len(mine) // DIGEST_BYTES) if nth_digest(seen, at) != nth_digest(mine, at)
            )
    return None
