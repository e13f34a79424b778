"""What can go wrong, the exit code it means, and what to do about it.

One class for each thing a caller would do differently::

    ZgError
    ├── NotFound     10   no such store, ref, tag or digest: name another
    ├── Busy         11   somebody holds it: wait, or ask who
    ├── Conflict     13   somebody else moved it first: look again, retry
    ├── Corrupt      20   bytes are not what their name says: repair
    ├── Missing      21   an object that is referred to is not there: repair
    ├── Partial      22   only a part was asked for or is there: fetch the rest
    ├── NoSpace      24   the disk cannot hold it: free some
    ├── Refused      25   it is not what was pinned: decide which is right
    ├── NonFinite    26   NaN or Inf where numbers were promised: fix or drop
    ├── Invalid       2   a recipe, argument or input that makes no sense: correct it
    ├── Transient    30   the system failed in a way that may pass: retry
    └── Interrupted 130   a signal asked to stop: run again to resume
"""

from __future__ import annotations

import json
from typing import Any, ClassVar, Final, Self

_CARRIED: Final = "\nzgstore error: "
MAX_CHARACTERS: Final = 2000  # of a message, or a hint: what it quotes may be as long as its author liked


class ZgError(Exception):
    """A fault with its kind, its exit code and its remedy.

    Args:
        message: What happened, in one line, naming the thing it happened to.
        hint: What to do next; a command where there is one. Left out, it is looked for in the message: a DataLoader
            raises its worker's error again by class and text alone, and ``carried`` puts everything into the text.
        **fields: What a program may want to know (digests, paths, numbers); printed under ``error`` by ``--json``.
    """

    kind: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 2

    def __init__(self, message: str, *, hint: str | None = None, **fields: object) -> None:
        if hint is None:
            super().__init__(message)
            message, hint, carried = _unpacked(message)
            fields |= carried
        else:
            message, hint = _bounded(message), _bounded(hint)
            super().__init__(message)
        self.message = message
        self.hint = hint
        self.fields = fields
        # So that a traceback tells it too.
        self.add_note(f"hint: {hint}")

    def carried(self) -> Self:
        """The same error with hint and fields in its text."""
        value = {"message": self.message, "hint": self.hint, "fields": self.fields}
        return type(self)(self.message + _CARRIED + json.dumps(value, default=str))

    def as_json(self) -> dict[str, Any]:
        """What ``--json`` prints under ``error``: the fields that say something, kind, message and hint."""
        fields = {name: value for name, value in self.fields.items() if value not in (None, "")}
        return {**fields, "kind": self.kind, "message": self.message, "hint": self.hint}

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle by keyword, so that a worker process can raise it in its parent."""
        return (_rebuild, (type(self), self.message, self.hint, self.fields))


def _rebuild(error: type[ZgError], message: str, hint: str, fields: dict[str, object]) -> ZgError:
    return error(message, hint=hint, **fields)


def _bounded(text: str) -> str:
    """The text, without its middle where it is too long."""
    return text if len(text) <= MAX_CHARACTERS else f"{text[: MAX_CHARACTERS - 203]} … {text[-200:]}"


def _unpacked(text: str) -> tuple[str, str, dict[str, Any]]:
    """Message, hint and fields of an error that was raised again by its text."""
    _, _, packed = text.rpartition(_CARRIED)
    try:
        value, _ = json.JSONDecoder().raw_decode(packed)  # a traceback's notes may follow
        return value["message"], value["hint"], value["fields"]
    except (ValueError, KeyError, TypeError):
        return text, "the message says where it comes from; run `zgstore verify`", {}


class NotFound(ZgError):
    kind, exit_code = "not_found", 10


class Busy(ZgError):
    kind, exit_code = "busy", 11


class Conflict(ZgError):
    kind, exit_code = "conflict", 13


class Corrupt(ZgError):
    """Bytes that are not what their name says.

    Args:
        object: The object's digest as text, or the file's name where it has none.
        expected: What its name or its reference promises.
        actual: What was found.
        path: Where.
    """

    kind, exit_code = "corrupt", 20

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        object: str = "",
        expected: object = None,
        actual: object = None,
        path: str = "",
        **fields: object,
    ) -> None:
        super().__init__(message, hint=hint, object=object, expected=expected, actual=actual, path=path, **fields)
        self.object = str(self.fields["object"])
        self.expected = self.fields["expected"]
        self.actual = self.fields["actual"]
        self.path = str(self.fields["path"])


class Missing(ZgError):
    kind, exit_code = "missing", 21


class Partial(ZgError):
    kind, exit_code = "partial", 22


class NoSpace(ZgError):
    kind, exit_code = "no_space", 24


class Refused(ZgError):
    kind, exit_code = "refused", 25


class NonFinite(ZgError):
    kind, exit_code = "non_finite", 26


class Invalid(ZgError):
    kind, exit_code = "invalid", 2


class Transient(ZgError):
    kind, exit_code = "transient", 30


class Interrupted(ZgError):
    kind, exit_code = "interrupted", 130
