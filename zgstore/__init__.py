"""Git for a teacher's hidden states."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zgstore import capture as capture
    from zgstore.building.builder import build as build
    from zgstore.building.estimator import estimate as estimate
    from zgstore.building.estimator import points as points
    from zgstore.building.lockfile import lock as lock
    from zgstore.building.lockfile import locked as locked
    from zgstore.building.recipe import Recipe as Recipe
    from zgstore.building.recipe import load_recipe as load_recipe
    from zgstore.building.rows import SampleBatch as SampleBatch
    from zgstore.building.rows import row_digests as row_digests
    from zgstore.building.sections import Section as Section
    from zgstore.building.sections import Target as Target
    from zgstore.building.writer import writer as writer
    from zgstore.errors import Busy as Busy
    from zgstore.errors import Conflict as Conflict
    from zgstore.errors import Corrupt as Corrupt
    from zgstore.errors import Interrupted as Interrupted
    from zgstore.errors import Invalid as Invalid
    from zgstore.errors import Missing as Missing
    from zgstore.errors import NonFinite as NonFinite
    from zgstore.errors import NoSpace as NoSpace
    from zgstore.errors import NotFound as NotFound
    from zgstore.errors import Partial as Partial
    from zgstore.errors import Refused as Refused
    from zgstore.errors import Transient as Transient
    from zgstore.errors import ZgError as ZgError
    from zgstore.format.digest import Digest as Digest
    from zgstore.format.digest import digest_of as digest_of
    from zgstore.format.manifest import Column as Column
    from zgstore.format.manifest import Pins as Pins
    from zgstore.format.manifest import Snapshot as Snapshot
    from zgstore.format.tensorfile import decode as decode
    from zgstore.format.tensorfile import encode as encode
    from zgstore.reading.opening import follow as follow
    from zgstore.reading.opening import read as read
    from zgstore.reading.reader import Reader as Reader
    from zgstore.reading.recapture import Recapture as Recapture
    from zgstore.reading.sampler import Sampler as Sampler
    from zgstore.storage.store import Store as Store
    from zgstore.upkeep.accounts import why as why
    from zgstore.upkeep.collector import collect as collect
    from zgstore.upkeep.copier import copy as copy
    from zgstore.upkeep.differ import diff as diff
    from zgstore.upkeep.exporter import export as export
    from zgstore.upkeep.importer import import_safetensors as import_safetensors
    from zgstore.upkeep.importer import import_zerograph as import_zerograph
    from zgstore.upkeep.inspector import log as log
    from zgstore.upkeep.inspector import show as show
    from zgstore.upkeep.keeper import hold as hold
    from zgstore.upkeep.keeper import tag as tag
    from zgstore.upkeep.recomputer import recompute as recompute
    from zgstore.upkeep.repairer import repair as repair
    from zgstore.upkeep.verifier import verify as verify

# Public name → where it lives. Loaded when first asked for, so that a command that reads no tensor loads no torch.
_HOMES = {
    "building.builder": ("build",),
    "building.estimator": ("estimate", "points"),
    "building.lockfile": ("lock", "locked"),
    "building.recipe": ("Recipe", "load_recipe"),
    "building.rows": ("SampleBatch", "row_digests"),
    "building.sections": ("Section", "Target"),
    "building.writer": ("writer",),
    "errors": (
        "Busy", "Conflict", "Corrupt", "Interrupted", "Invalid", "Missing", "NoSpace", "NonFinite", "NotFound",
        "Partial", "Refused", "Transient", "ZgError",
    ),
    "format.digest": ("Digest", "digest_of"),
    "format.manifest": ("Column", "Pins", "Snapshot"),
    "format.tensorfile": ("decode", "encode"),
    "reading.opening": ("follow", "read"),
    "reading.reader": ("Reader",),
    "reading.recapture": ("Recapture",),
    "reading.sampler": ("Sampler",),
    "storage.store": ("Store",),
    "upkeep.collector": ("collect",),
    "upkeep.copier": ("copy",),
    "upkeep.differ": ("diff",),
    "upkeep.exporter": ("export",),
    "upkeep.importer": ("import_safetensors", "import_zerograph"),
    "upkeep.inspector": ("log", "show"),
    "upkeep.keeper": ("hold", "tag"),
    "upkeep.accounts": ("why",),
    "upkeep.recomputer": ("recompute",),
    "upkeep.repairer": ("repair",),
    "upkeep.verifier": ("verify",),
}  # fmt: skip
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [*sorted(_HOME_OF), "capture"]  # noqa: PLE0604 - the table above is the one list of the names


def __getattr__(name: str) -> Any:
    if name == "capture":
        found: Any = import_module("zgstore.capture")
    elif name in _HOME_OF:
        found = getattr(import_module(f"zgstore.{_HOME_OF[name]}"), name)
    else:
        raise AttributeError(f"module 'zgstore' has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
