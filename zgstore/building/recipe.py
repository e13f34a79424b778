"""The recipe: TOML to pins and factories.

A recipe names two factories, what pins them, and what of the teacher is kept. It is read strictly: an unknown key is
an error that names the nearest known one, because a key that is silently ignored is a cache of something else.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from zgstore.building.sections import Section, Target, inside, nearest
from zgstore.errors import Invalid
from zgstore.format import canonical
from zgstore.format.manifest import CODECS, FLOATING

MUTABLE_REVISIONS: Final = frozenset(
    {"main", "master", "latest", "head", "dev", "develop", "trunk", "nightly", "stable", "tip", "current", "default"}
)
DTYPE_NAMES: Final = {
    "bfloat16": "BF16", "float16": "F16", "half": "F16", "float32": "F32", "float": "F32", "float64": "F64",
    "double": "F64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "bf16": "BF16", "fp16": "F16",
    "fp32": "F32", "fp64": "F64",
}  # fmt: skip
DEFAULT_BATCHES_PER_SHARD: Final = 16
RESERVED_COLUMNS: Final = ("id", "start")

_POINT = re.compile(r"(?P<module>[^:\s]+):(?P<side>in|out)")


@dataclass(frozen=True, slots=True)
class TeacherSpec:
    """Section ``[teacher]``."""

    factory: Target
    id: str
    revision: str
    args: Mapping[str, Any] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    skeleton: Target | None = None

    def load(self) -> Any:
        """The teacher: a ``torch.nn.Module`` made by the factory. The capture puts it into eval mode."""
        return self.factory.call(self.args)

    def load_skeleton(self) -> Any:
        """The module without weights; the caller stands in FakeTensorMode."""
        if self.skeleton is None:
            raise Invalid("the recipe has no teacher.skeleton", hint="name a function that makes it without weights")
        return self.skeleton.call(self.args)


@dataclass(frozen=True, slots=True)
class DataSpec:
    """Section ``[data]``: ``revision``, or ``files`` whose digest is the revision."""

    factory: Target
    id: str
    revision: str | None = None
    args: Mapping[str, Any] = field(default_factory=dict)
    files: tuple[str, ...] = ()

    def batches(self) -> Batches:
        """A new reading of the stream."""
        return Batches(self.factory.call(self.args), self.factory)


@dataclass(frozen=True, slots=True)
class CaptureSpec:
    """Section ``[capture]``: what of the teacher and of the batch is kept."""

    boundaries: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    context: tuple[str, ...] = ()
    lengths: str | None = None
    sequence: tuple[str, ...] = ()
    extractor: Target | None = None
    args: Mapping[str, Any] = field(default_factory=dict)
    code: tuple[str, ...] = ()
    constants: tuple[str, ...] = ()
    inputs: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class ColumnStorage:
    """Section ``[storage.columns."NAME"]``; None: as the whole section says."""

    dtype: str | None = None
    codec: str = "raw"


@dataclass(frozen=True, slots=True)
class StorageSpec:
    """Section ``[storage]``; dtypes by their safetensors names."""

    dtype: str | None = None
    batches_per_shard: int = DEFAULT_BATCHES_PER_SHARD
    columns: Mapping[str, ColumnStorage] = field(default_factory=dict)

    def of(self, name: str) -> ColumnStorage:
        """How that column is stored."""
        column = self.columns.get(name, ColumnStorage())
        return column if column.dtype else replace(column, dtype=self.dtype)


@dataclass(frozen=True, slots=True)
class Recipe:
    """A whole recipe.

    Args:
        path: The file it was read from; its stem is the default ref, its directory is first on the import path.
    """

    path: Path
    teacher: TeacherSpec
    data: DataSpec
    capture: CaptureSpec
    storage: StorageSpec = field(default_factory=StorageSpec)

    @property
    def directory(self) -> Path:
        """Where its relative paths start, and its factories run."""
        return self.path.parent

    @property
    def name(self) -> str:
        """The file's stem: the ref it builds unless another is named."""
        return self.path.stem

    @classmethod
    def parse(cls, value: Mapping[str, Any], *, path: Path) -> Recipe:
        """Read a recipe that is already a mapping, as ``tomllib`` returns it.

        Raises:
            Invalid: for anything a recipe may not say; the message names the key.
        """
        path = Path(path).absolute()
        top = Section(value, "", path)
        everywhere = top.take("allow_mutable_revision", bool, default=False)
        teacher = _teacher(top.section("teacher"), everywhere=everywhere)
        data = _data(top.section("data"), everywhere=everywhere)
        capture = _capture(top.section("capture"))
        storage = _storage(top.section("storage", optional=True), capture)
        top.done()
        return cls(path, teacher, data, capture, storage)


class Batches:
    """One reading of the data stream: what the factory returned, iterated in the recipe's directory.

    Args:
        source: Whatever the factory returned.
        factory: Who, for the messages.
    """

    def __init__(self, source: Any, factory: Target) -> None:
        if not isinstance(source, Iterable):
            raise Invalid(
                f"{factory.text!r} returned a {type(source).__name__}, not an iterable of batches",
                hint="return a list of mappings of tensors, or write it as a generator",
            )
        self.source = source
        self.factory = factory

    @property
    def pins(self) -> dict[str, Any]:
        """The named sub-pins that the factory reports: tokenizer, chat template, maximum length."""
        pins = getattr(self.source, "pins", None)
        if pins is None:
            return {}
        if not isinstance(pins, Mapping):
            raise Invalid(
                f"the pins of {self.factory.text!r} are a {type(pins).__name__}",
                hint="make `.pins` a mapping of names to text, numbers or bytes",
            )
        plain = dict(pins)
        canonical.encode(plain)
        return plain

    def __iter__(self) -> Iterator[Any]:
        # A generator opens its files when it is first asked, so each step runs where the recipe is.
        with inside(self.factory.directory):
            steps = iter(self.source)
        while True:
            with inside(self.factory.directory):
                try:
                    batch = next(steps)
                except StopIteration:
                    return
            yield batch


def load_recipe(path: str | Path, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """Read a recipe file.

    Args:
        path: The TOML file.
        overrides: Dotted keys (quoted where a name has dots, as in TOML) to the values that replace the file's, as
            ``{"storage.batches_per_shard": 4}``.

    Raises:
        Invalid: if the file is not there, is not TOML, or says something a recipe may not.
    """
    path = Path(path).absolute()
    value = Section.read(path, kind="recipe", hint="`zgstore init --example chat` writes one")
    for key, replacement in (overrides or {}).items():
        Section.override(value, key, replacement)
    return Recipe.parse(value, path=path)


# ---- sections ----


def _teacher(section: Section, *, everywhere: bool) -> TeacherSpec:
    mutable = section.take("allow_mutable_revision", bool, default=False) or everywhere
    factory, args = section.target("factory"), section.arguments()
    spec = TeacherSpec(
        factory=factory,
        args=args,
        id=section.text("id", pin=True),
        revision=_revision(section, section.text("revision", pin=True), mutable=mutable),
        files=section.texts("files"),
        skeleton=section.target("skeleton") if section.has("skeleton") else None,
    )
    section.done()
    return spec


def _data(section: Section, *, everywhere: bool) -> DataSpec:
    mutable = section.take("allow_mutable_revision", bool, default=False) or everywhere
    files = section.texts("files")
    if files and section.has("revision"):
        section.fail("revision", "is given beside files, whose digest is the revision", "keep one of the two")
    if not files and not section.has("revision"):
        section.fail("revision", "is missing", "pin the data: revision = a full commit digest, or files = [ … ]")
    revision = None if files else _revision(section, section.text("revision", pin=True), mutable=mutable)
    spec = DataSpec(section.target("factory"), section.text("id", pin=True), revision, section.arguments(), files)
    section.done()
    return spec


def _revision(section: Section, revision: str, *, mutable: bool) -> str:
    if revision.lower() in MUTABLE_REVISIONS and not mutable:
        section.fail(
            "revision",
            f"is {revision!r}, which moves",
            "give the full commit digest, or set allow_mutable_revision = true",
        )
    return revision


def _capture(section: Section) -> CaptureSpec:
    spec = CaptureSpec(
        boundaries=section.texts("boundaries"),
        outputs=section.texts("outputs"),
        context=tuple(name for name in section.texts("context") if name != "id"),
        lengths=section.text("lengths") if section.has("lengths") else None,
        sequence=section.texts("sequence"),
        extractor=section.target("extractor") if section.has("extractor") else None,
        args=section.arguments(),
        code=section.texts("code"),
        constants=section.texts("constants"),
        inputs=section.texts("inputs") if section.has("inputs") else None,
    )
    section.done()
    _check_kind(section, spec)
    _check_names(section, spec)
    for path in spec.code:
        if not _is_there(section.path.parent / path):
            section.fail("code", f"has {path!r}, which is not there", "paths are relative to the recipe")
    return spec


def _is_there(path: Path) -> bool:
    with contextlib.suppress(OSError):  # a name may be too long for the system
        return path.exists()
    return False


def _check_kind(section: Section, spec: CaptureSpec) -> None:
    """Hook points or an extractor, and what belongs to each."""
    if spec.extractor is not None and (spec.boundaries or spec.outputs):
        section.fail("extractor", "stands beside hook points", "use either boundaries and outputs, or an extractor")
    if spec.extractor is not None and spec.inputs is not None:
        section.fail("inputs", "belongs to hook points", "an extractor calls the teacher itself")
    if spec.extractor is None and (spec.args or spec.code):
        section.fail("args" if spec.args else "code", "belongs to an extractor", "name the extractor, or remove it")
    if spec.extractor is None and not spec.boundaries and not spec.outputs:
        section.fail("boundaries", "is missing", "list hook points (`zgstore points` shows them) or an extractor")
    if spec.sequence and spec.lengths is None:
        section.fail("sequence", "needs lengths", 'name the mask: lengths = "attention_mask"')
    for key, sides in (("boundaries", ("in", "out")), ("outputs", ("out",))):
        for point in getattr(spec, key):
            match = _POINT.fullmatch(point)
            if match is None:
                modules = (point.partition(":")[0], point.rpartition(".")[0])
                near = nearest(point, [f"{module}:{side}" for module in modules for side in sides])
                written = "write MODULE:in or MODULE:out; `zgstore points` lists them"
                section.fail(key, f"has {point!r}, which is no hook point", near or written)
            if match["side"] not in sides:
                section.fail(key, f"has {point!r}", "an output is MODULE:out")


def _check_names(section: Section, spec: CaptureSpec) -> None:
    names = Counter([*spec.boundaries, *spec.outputs, *spec.context, *spec.constants])
    for name, count in names.items():
        if count > 1:
            section.fail("boundaries" if ":" in name else "context", f"has {name!r} twice", "name each column once")
        if name in RESERVED_COLUMNS:
            section.fail("context", f"has {name!r}", "that column is made by itself where it is needed")


def _storage(section: Section, capture: CaptureSpec) -> StorageSpec:
    dtype = _dtype(section)
    batches = section.whole("batches_per_shard", default=DEFAULT_BATCHES_PER_SHARD, least=1)
    known = dict.fromkeys([*capture.boundaries, *capture.outputs])
    columns: dict[str, ColumnStorage] = {}
    table = section.section("columns", optional=True)
    for name in list(table.value):
        one = table.section(name)
        if capture.extractor is None and name not in known:
            table.fail(name, "is no boundary or output of this recipe", nearest(name, [*known]) or "remove it")
        codec = one.text("codec") if one.has("codec") else "raw"
        if codec not in CODECS:
            one.fail("codec", f"is {codec!r}", nearest(codec, CODECS) or f"one of {', '.join(CODECS)}")
        columns[name] = ColumnStorage(_dtype(one), codec)
        one.done()
    section.done()
    return StorageSpec(dtype, batches, columns)


def _dtype(section: Section) -> str | None:
    if not section.has("dtype"):
        return None
    text = section.text("dtype")
    name = DTYPE_NAMES.get(text.lower(), text)
    if name not in FLOATING:
        known = sorted(DTYPE_NAMES)
        section.fail("dtype", f"is {text!r}", nearest(text, known) or f"one of {', '.join(known)}")
    return name
