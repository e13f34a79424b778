"""The recipe: TOML to pins and factories.

A recipe names two factories, what pins them, and what of the teacher is kept. It is read strictly: an unknown key is
an error that names the nearest known one, because a key that is silently ignored is a cache of something else.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.machinery
import re
import sys
import threading
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NoReturn

from zgstore.errors import Invalid
from zgstore.format import canonical
from zgstore.format.manifest import CODECS, DTYPES

MUTABLE_REVISIONS: Final = frozenset(
    {"main", "master", "latest", "head", "dev", "develop", "trunk", "nightly", "stable", "tip", "current", "default"}
)
DTYPE_NAMES: Final = {
    "bfloat16": "BF16", "float16": "F16", "half": "F16", "float32": "F32", "float": "F32", "float64": "F64",
    "double": "F64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "bf16": "BF16", "fp16": "F16",
    "fp32": "F32", "fp64": "F64",
}  # fmt: skip
FLOATING: Final = ("BF16", "F16", "F32", "F64", "F8_E4M3", "F8_E5M2")
DEFAULT_BATCHES_PER_SHARD: Final = 16
RESERVED_COLUMNS: Final = ("id", "start")

_POINT = re.compile(r"(?P<module>[^:\s]+):(?P<side>in|out)")
_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


@dataclass(frozen=True, slots=True)
class Target:
    """A function named ``module:name``, looked for in the recipe's directory first.

    Args:
        text: ``module:name``.
        directory: The recipe's directory: first on the import path, and the current one while the function runs.
    """

    text: str
    directory: Path

    def resolve(self) -> Callable[..., Any]:
        """Import the module and return the function.

        Raises:
            Invalid: if there is no such module or name (with the nearest), or if another recipe's module of the same
                name is already imported in this process.
        """
        module_name, _, attribute = self.text.partition(":")
        _enter(self.directory)
        try:
            found: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not (module_name == error.name or module_name.startswith(error.name + ".")):
                raise
            raise Invalid(
                f"there is no module {error.name!r} for {self.text!r}",
                hint=f"put it beside the recipe in {self.directory}, or install it",
            ) from error
        _check_origin(module_name.partition(".")[0], self.directory)
        for part in attribute.split("."):
            if not hasattr(found, part):
                near = _nearest(part, [name for name in dir(found) if not name.startswith("_")])
                raise Invalid(f"{module_name} has no {part!r} for {self.text!r}", hint=near or "define it there")
            found = getattr(found, part)
        if not callable(found):
            raise Invalid(f"{self.text!r} is a {type(found).__name__}, not a function", hint="name a function")
        return found  # type: ignore[no-any-return]

    def call(self, args: Mapping[str, Any]) -> Any:
        """Call the function with ``args`` as keywords, the recipe's directory being the current one."""
        function = self.resolve()
        with _inside(self.directory):
            return function(**args)


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
        top = _Section(value, "", path)
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
        with _inside(self.factory.directory):
            steps = iter(self.source)
        while True:
            with _inside(self.factory.directory):
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
    try:
        value = tomllib.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise Invalid(f"there is no recipe {path}", hint="`zgstore init --example chat` writes one") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise Invalid(f"{path} is not TOML: {error}", hint="correct the line it names") from error
    for key, replacement in (overrides or {}).items():
        _override(value, key, replacement)
    return Recipe.parse(value, path=path)


def split_point(text: str) -> tuple[str, str]:
    """``MODULE:in`` or ``MODULE:out`` as (module, side)."""
    match = _POINT.fullmatch(text)
    if match is None:
        raise Invalid(f"{text!r} is not a hook point", hint="write MODULE:in or MODULE:out; see `zgstore points`")
    return match["module"], match["side"]


# ---- sections ----


def _teacher(section: _Section, *, everywhere: bool) -> TeacherSpec:
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


def _data(section: _Section, *, everywhere: bool) -> DataSpec:
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


def _revision(section: _Section, revision: str, *, mutable: bool) -> str:
    if revision.lower() in MUTABLE_REVISIONS and not mutable:
        section.fail(
            "revision",
            f"is {revision!r}, which moves",
            "give the full commit digest, or set allow_mutable_revision = true",
        )
    return revision


def _capture(section: _Section) -> CaptureSpec:
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
        if not (section.path.parent / path).exists():
            section.fail("code", f"has {path!r}, which is not there", "paths are relative to the recipe")
    return spec


def _check_kind(section: _Section, spec: CaptureSpec) -> None:
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
            if split_point(point)[1] not in sides:
                section.fail(key, f"has {point!r}", "an output is MODULE:out")


def _check_names(section: _Section, spec: CaptureSpec) -> None:
    names = [*spec.boundaries, *spec.outputs, *spec.context, *spec.constants]
    for name in names:
        if names.count(name) > 1:
            section.fail("boundaries" if ":" in name else "context", f"has {name!r} twice", "name each column once")
        if name in RESERVED_COLUMNS:
            section.fail("context", f"has {name!r}", "that column is made by itself where it is needed")


def _storage(section: _Section, capture: CaptureSpec) -> StorageSpec:
    dtype = section.dtype("dtype")
    batches = section.take("batches_per_shard", int, default=DEFAULT_BATCHES_PER_SHARD)
    if batches < 1:
        section.fail("batches_per_shard", f"is {batches}", "at least 1")
    known = [*capture.boundaries, *capture.outputs]
    columns: dict[str, ColumnStorage] = {}
    table = section.section("columns", optional=True)
    for name in list(table.value):
        one = table.section(name)
        if capture.extractor is None and name not in known:
            table.fail(name, "is no boundary or output of this recipe", _nearest(name, known) or "remove it")
        codec = one.text("codec") if one.has("codec") else "raw"
        if codec not in CODECS:
            one.fail("codec", f"is {codec!r}", _nearest(codec, CODECS) or f"one of {', '.join(CODECS)}")
        columns[name] = ColumnStorage(one.dtype("dtype"), codec)
        one.done()
    section.done()
    return StorageSpec(dtype, batches, columns)


class _Section:
    """One table of the recipe, taken key by key, so that what is left over is unknown."""

    def __init__(self, value: Any, name: str, path: Path) -> None:
        if not isinstance(value, Mapping):
            raise Invalid(f"[{name}] in {path.name} is not a table", hint=f"write it as [{name}] with keys below")
        self.value = dict(value)
        self.name = name
        self.path = path
        self._known: list[str] = []

    def fail(self, key: str, what: str, hint: str) -> NoReturn:
        dotted = f"{self.name}.{key}" if self.name else key
        raise Invalid(f"{dotted} {what} ({self.path.name})", hint=hint, key=dotted, recipe=str(self.path))

    def has(self, key: str) -> bool:
        self._known.append(key)
        return key in self.value

    def take(self, key: str, kind: type, *, default: Any) -> Any:
        if not self.has(key):
            return default
        value = self.value[key]
        if type(value) is not kind:
            self.fail(key, f"is {value!r}, not {kind.__name__}", f"give a {kind.__name__}")
        return value

    def section(self, key: str, *, optional: bool = False) -> _Section:
        if not self.has(key) and not optional:
            self.fail(key, "is missing", f"add a section [{f'{self.name}.{key}' if self.name else key}]")
        return _Section(self.value.get(key, {}), f"{self.name}.{key}" if self.name else key, self.path)

    def text(self, key: str, *, pin: bool = False) -> str:
        value = self.take(key, str, default="")
        if not value:
            why = "a cache whose origin is not pinned cannot be trusted: give it" if pin else "give it"
            self.fail(key, "is missing", why)
        return str(value)

    def texts(self, key: str) -> tuple[str, ...]:
        value = self.take(key, list, default=[])
        for item in value:
            if not isinstance(item, str) or not item:
                self.fail(key, f"has {item!r}", "list texts")
        return tuple(value)

    def target(self, key: str) -> Target:
        text = self.text(key)
        if not _TARGET.fullmatch(text):
            self.fail(key, f"is {text!r}", 'name a function as "module:function"')
        return Target(text, self.path.parent)

    def arguments(self) -> Mapping[str, Any]:
        args = self.take("args", dict, default={})
        try:
            canonical.encode(args)
        except Invalid as error:
            self.fail("args", f"cannot be kept: {error.message}", error.hint)
        return dict(args)

    def dtype(self, key: str) -> str | None:
        if not self.has(key):
            return None
        text = self.text(key)
        name = DTYPE_NAMES.get(text.lower(), text)
        if name not in DTYPES or name not in FLOATING:
            known = sorted(DTYPE_NAMES)
            self.fail(key, f"is {text!r}", _nearest(text, known) or f"one of {', '.join(known)}")
        return name

    def done(self) -> None:
        for key in self.value:
            if key not in self._known:
                self.fail(key, "is not a key of a recipe", _nearest(key, self._known) or "remove it")


def _nearest(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else ""


def _override(value: dict[str, Any], key: str, replacement: Any) -> None:
    try:
        place: Any = tomllib.loads(f"{key} = 0")
    except tomllib.TOMLDecodeError as error:
        raise Invalid(f"{key!r} is not a key", hint="write it as TOML does: storage.batches_per_shard") from error
    while True:
        ((part, rest),) = place.items()
        if not isinstance(rest, dict):
            value[part] = replacement
            return
        inner = value.setdefault(part, {})
        if not isinstance(inner, dict):
            raise Invalid(f"{key!r} goes through {part!r}, which is no table", hint="name a key of the recipe")
        value, place = inner, rest


# ---- the import path ----

_current = threading.RLock()


@contextlib.contextmanager
def _inside(directory: Path) -> Iterator[None]:
    """The directory as the current one, which is the whole process's: one thread at a time."""
    with _current, contextlib.chdir(directory):
        yield


# Which directories of recipes have been put on the import path of this process.
_directories: list[Path] = []


def _enter(directory: Path) -> None:
    """Put the recipe's directory first on the import path; refuse what another recipe's modules would hide."""
    text = str(directory)
    if not sys.path or sys.path[0] != text:
        with contextlib.suppress(ValueError):
            sys.path.remove(text)
        sys.path.insert(0, text)
    importlib.invalidate_caches()
    if directory not in _directories:
        _directories.append(directory)
    if len(_directories) == 1:
        return
    for entry in directory.iterdir():
        name = entry.stem if entry.suffix == ".py" else entry.name
        loaded = sys.modules.get(name)
        origin = _origin(loaded) if loaded is not None and name.isidentifier() else None
        if origin is not None and any(origin.is_relative_to(other) for other in _directories if other != directory):
            _check_origin(name, directory)


def _check_origin(name: str, directory: Path) -> None:
    """Refuse if ``name`` is imported from elsewhere although the recipe's directory has a different one."""
    spec = importlib.machinery.PathFinder.find_spec(name, [str(directory)])
    module = sys.modules.get(name)
    if spec is None or spec.origin is None or module is None:
        return
    origin, here = _origin(module), Path(spec.origin)
    if origin is None or origin == here or origin.resolve() == here.resolve():
        return
    if not spec.submodule_search_locations and origin.is_file() and origin.read_bytes() == here.read_bytes():
        return
    raise Invalid(
        f"a module {name!r} is already imported from {origin}, and this recipe's own is {here}",
        hint="build the two recipes in two processes, or give the modules different names",
        module=name,
    )


def _origin(module: Any) -> Path | None:
    file = getattr(module, "__file__", None)
    return Path(file) if isinstance(file, str) else None
