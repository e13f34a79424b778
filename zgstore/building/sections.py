"""TOML tables taken key by key, so that what is left over is unknown; and the functions that they name.

Read strictly: an unknown key is an error that names the nearest known one, because a key that is silently ignored is a
cache, or a training, of something else.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.machinery
import inspect
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from zgstore.errors import Invalid
from zgstore.format import canonical, foreign

# What TOML calls them.
_KINDS: Final = {
    str: "a string in quotes", int: "a whole number", float: "a number", bool: "true or false", dict: "a table",
    list: "an array",
}  # fmt: skip
_SHAPES: Final[dict[type, str]] = {dict: ", as { key = value }", list: ', as ["one", "two"]'}
# By which it can be told what a file is.
_TABLES: Final = {"recipe": {"teacher", "data", "capture"}, "job": {"snapshot", "student", "train"}}
MAX_COMPARED: Final = 200  # characters, with each known name: the comparison takes the square of them
MAX_TEXT: Final = 4095  # as long as a path can be
FINITE: Final = (-sys.float_info.max, sys.float_info.max)
MAX_COUNT: Final = 10**9  # of steps, rows, shards: a second each would be thirty years
_TARGET: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


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
                hint=f"put it into {self.directory}, or install it",
            ) from error
        _check_origin(module_name.partition(".")[0], self.directory)
        for part in attribute.split("."):
            if not hasattr(found, part):
                near = nearest(part, [name for name in dir(found) if not name.startswith("_")])
                raise Invalid(f"{module_name} has no {part!r} for {self.text!r}", hint=near or "define it there")
            found = getattr(found, part)
        if not callable(found):
            raise Invalid(f"{self.text!r} is a {type(found).__name__}, not a function", hint="name a function")
        return found  # type: ignore[no-any-return]

    def call(self, args: Mapping[str, Any], *first: Any) -> Any:
        """Call the function with ``first``, and ``args`` as keywords, in the file's directory."""
        function = self.resolve()
        self._check_args(function, args, first)
        with inside(self.directory):
            return function(*first, **args)

    def _check_args(self, function: Callable[..., Any], args: Mapping[str, Any], first: tuple[Any, ...]) -> None:
        """A keyword that it does not take is the recipe's fault, not the function's."""
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):
            return
        try:
            signature.bind(*first, **args)
        except TypeError as error:
            names = ", ".join(list(signature.parameters)[len(first) :]) or "nothing"
            raise Invalid(
                f"{self.text!r} does not take its args: {error}", hint=f"it takes {names}", factory=self.text
            ) from error


class Section:
    """One table of a file, taken key by key, so that what is left over is unknown.

    Args:
        value: The table.
        name: Dotted; empty for the whole file.
        path: The file, for messages and for the directory of its functions.
        kind: What the file is: ``recipe``, ``job``.
    """

    def __init__(self, value: Any, name: str, path: Path, *, kind: str = "recipe") -> None:
        if not isinstance(value, Mapping):
            raise Invalid(f"[{name}] in {path.name} is not a table", hint=f"write it as [{name}] with keys below")
        self.value = dict(value)
        self.name = name
        self.path = path
        self.kind = kind
        self._known: list[str] = []
        self._places: dict[str, str] = {}  # of keys in this table, and in the others of the file as they are taken

    def fail(self, key: str, what: str, hint: str) -> NoReturn:
        dotted = self._dotted(key)
        raise Invalid(f"{dotted} {what} ({self.path.name})", hint=hint, key=dotted, **{self.kind: str(self.path)})

    def _dotted(self, key: str) -> str:
        return f"{self.name}.{key}" if self.name else key

    def has(self, key: str) -> bool:
        self._known.append(key)
        self._places.setdefault(key, self._dotted(key))
        return key in self.value

    def take(self, key: str, kind: type, *, default: Any) -> Any:
        if not self.has(key):
            return default
        value = self.value[key]
        if type(value) is not kind:
            what = _KINDS.get(kind, kind.__name__)
            self.fail(key, f"is {value!r:.80}, not {what}", f"write {what}{_SHAPES.get(kind, '')}")
        return value

    def number(self, key: str, *, default: float, within: tuple[float, float] = FINITE, off: bool = False) -> float:
        """A finite number, whole or not.

        Args:
            key: Its key.
            default: Where the key is not there.
            within: The least and the greatest that it may be.
            off: Whether 0 is allowed beside them, where it says that something is left out.
        """
        least, most = within
        kind = int if self.has(key) and type(self.value[key]) is int else float
        value = self.take(key, kind, default=default)
        if not (least <= value <= most or (off and value == 0)):
            bounds = [f"at least {least:g}" * (least > FINITE[0]), f"at most {most:g}" * (most < FINITE[1])]
            said = " and ".join(filter(None, bounds))
            finite = f"give a finite number{', ' * bool(said)}{said}"
            self.fail(key, f"is {value!r:.80}", f"{finite}; or 0 for none" if off else finite)
        return float(value)

    def whole(self, key: str, *, default: int, least: int = 0, most: int = MAX_COUNT) -> int:
        """A whole number."""
        value = int(self.take(key, int, default=default))
        if not least <= value <= most:
            self.fail(key, f"is {value}", f"at least {least}" if value < least else f"at most {most}")
        return value

    def one_of(self, key: str, known: Sequence[str], *, default: str) -> str:
        """One of the known texts."""
        text = str(self.take(key, str, default=default))
        if text not in known:
            self.fail(key, f"is {text!r:.80}", nearest(text, known) or f"one of {', '.join(known)}")
        return text

    def section(self, key: str, *, optional: bool = False) -> Section:
        if not self.has(key) and not optional:
            self._missing(key, f"add a section [{self._dotted(key)}]")
        one = Section(self.value.get(key, {}), self._dotted(key), self.path, kind=self.kind)
        one._places = self._places
        return one

    def _missing(self, key: str, remedy: str) -> NoReturn:
        left = [name for name in self.value if name not in self._known]
        near = difflib.get_close_matches(key, [name[:MAX_COMPARED] for name in left], n=1)
        self.fail(key, "is missing", f"is {near[0]!r} meant to be {key!r}? Else {remedy}" if near else remedy)

    def text(self, key: str, *, pin: bool = False) -> str:
        value = self.take(key, str, default="")
        if not value:
            why = "a cache whose origin is not pinned cannot be trusted: give it" if pin else "give it"
            self._missing(key, why)
        self._see_text(key, value)
        return str(value)

    def texts(self, key: str) -> tuple[str, ...]:
        value = self.take(key, list, default=[])
        for item in value:
            if not isinstance(item, str) or not item:
                self.fail(key, f"has {item!r:.80}", "list strings in quotes")
            self._see_text(key, item)
        return tuple(value)

    def _see_text(self, key: str, text: str) -> None:
        """That the system can take it for a path, which many texts are."""
        if "\0" in text or len(text) > MAX_TEXT:
            self.fail(key, f"is {text!r:.80}", f"give at most {MAX_TEXT} characters, and none of them NUL")

    def target(self, key: str) -> Target:
        text = self.text(key)
        if not _TARGET.fullmatch(text):
            self.fail(key, f"is {text!r:.80}", 'name a function as "module:function"')
        return Target(text, self.path.parent)

    def arguments(self) -> Mapping[str, Any]:
        return self.plain("args", self.take("args", dict, default={}))

    def plain(self, key: str, table: Mapping[str, Any]) -> Mapping[str, Any]:
        """The table, whose values can be part of an identity: times cannot."""
        try:
            canonical.encode(table)
        except Invalid as error:
            self.fail(key, f"cannot be kept: {error.message}", error.hint or "")
        return dict(table)

    def done(self) -> None:
        for key in self.value:
            if key not in self._known:
                place = self._places.get(key)
                near = f"did you mean {place!r}?" if place else nearest(key, self._known)
                self.fail(key, f"is not a key of a {self.kind}", near or "remove it")

    @staticmethod
    def read(path: Path, *, kind: str, hint: str) -> dict[str, Any]:
        """A TOML file as a mapping.

        Raises:
            Invalid: if it is not there, not TOML, or of another kind.
        """
        try:
            found = foreign.parse_toml(path.read_bytes())
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
            raise Invalid(f"there is no {kind} {path}", hint=hint) from error
        except ValueError as error:
            raise Invalid(f"{path} is not TOML: {error}", hint="correct the line it names") from error
        other = next((name for name, tables in _TABLES.items() if name != kind and tables <= found.keys()), None)
        if other is not None and kind in _TABLES and not _TABLES[kind] <= found.keys():
            tables = ", ".join(f"[{table}]" for table in sorted(_TABLES[kind]))
            raise Invalid(f"{path} is a {other}, not a {kind}", hint=f"name the {kind}: the file with {tables}")
        return found

    @staticmethod
    def literal(text: str) -> Any:
        """A value as TOML writes it; where it is none, the text itself."""
        try:
            (value,) = foreign.parse_toml(f"value = {text}").values()
        except ValueError:
            return text.strip()
        return value

    @staticmethod
    def override(value: dict[str, Any], key: str, replacement: Any) -> None:
        """Set a dotted key, quoted where a name has dots as in TOML, making the tables that it goes through."""
        try:
            place: Any = foreign.parse_toml(f"{key} = 0")
            ((part, rest),) = place.items()  # a comment is none, and a line break may be two
        except ValueError as error:
            raise Invalid(
                f"{key!r:.80} is not a key", hint="write it as TOML does: storage.batches_per_shard"
            ) from error
        while True:
            ((part, rest),) = place.items()
            if not isinstance(rest, dict):
                value[part] = replacement
                return
            inner = value.setdefault(part, {})
            if not isinstance(inner, dict):
                raise Invalid(f"{key!r} goes through {part!r}, which is no table", hint="name a key of a table")
            value, place = inner, rest


def nearest(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name[:MAX_COMPARED], known, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else ""


# ---- the import path ----

_current = threading.RLock()


@contextlib.contextmanager
def inside(directory: Path) -> Iterator[None]:
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
