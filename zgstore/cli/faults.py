"""Any exception as an error of ours: its kind, its exit code, and what to do about it."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Final

import typer

from zgstore.errors import Invalid, Transient, ZgError

# The classes of click, which some versions of typer carry inside themselves.
USAGE_ERROR: Final[type[Exception]] = typer.BadParameter.__mro__[1]
_HOME: Final = Path(__file__).parents[1]

_Folders = tuple[Path, ...]


def explain(error: BaseException, *, program: str = "zgstore") -> ZgError:
    """Any exception as one of ours: what it is called, the exit code, and what to do about it.

    Args:
        error: Whatever was raised.
        program: Who ran; the code of the package of that name is its own too.
    """
    if isinstance(error, ZgError):
        return error
    if isinstance(error, KeyboardInterrupt):
        from zgstore.cli.session import interrupted  # noqa: PLC0415

        return interrupted()
    if isinstance(error, USAGE_ERROR | typer.Abort):
        return _explain_usage(error, program)
    own = (_HOME, _HOME.with_name(program))
    if isinstance(error, OSError) and not _is_theirs(error, own):
        return _explain_system(error)
    return _explain_unknown(error, program, own)


def _explain_usage(error: BaseException, program: str) -> Invalid:
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else program
    message = error.format_message() if hasattr(error, "format_message") else str(error) or "aborted"
    message = message[:1].lower() + message[1:].rstrip(".")
    return Invalid(message, hint=f"run `{command} --help` to see what it takes")


def _explain_system(error: OSError) -> ZgError:
    from zgstore.storage.files import fault  # noqa: PLC0415 - the help need not load it

    said = fault(error, str(error.filename or ""))
    if isinstance(error, FileNotFoundError):
        return Invalid(said.message, hint="check the path: a part of it is not there")
    return said


def _explain_unknown(error: BaseException, program: str, own: _Folders) -> ZgError:
    """An exception nobody foresaw: a recipe's own code, or a fault of ours; say which and where."""
    if isinstance(error, MemoryError):
        return Transient("memory ran out", hint="close other programs, or use smaller batches")
    hint = "run it again with --debug to see the traceback"
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if isinstance(error, SystemExit):
        what, hint = f"exit({error.code})", "let it return or raise instead of ending the program"
    frame = _guilty_frame(error, own)
    where = f"{frame.filename}:{frame.lineno}" if frame else "an unknown place"
    if factory := _factory_of(error, own):
        return Invalid(f"{factory} raised {what} ({where})", hint=hint, factory=factory)
    if frame is None or not _is_own(frame.filename, own):
        return Invalid(f"{frame.name if frame else 'something'} raised {what} ({where})", hint=hint)
    if traceback.extract_tb(error.__traceback__)[-1].filename != frame.filename:  # a library refused what it was given
        return Invalid(f"{what} ({where})", hint=hint)
    return Invalid(f"{program} failed by {what} ({where})", hint=f"{hint}, and report it")


def _is_theirs(error: BaseException, own: _Folders) -> bool:
    frame = _guilty_frame(error, own)
    return _factory_of(error, own) is not None or (frame is not None and not _is_own(frame.filename, own))


def _factory_of(error: BaseException, own: _Folders) -> str | None:
    """The recipe's function that the exception came out of, as the recipe names it."""
    found = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if type(owner).__name__ in {"Target", "Batches"} and _is_own(frame.f_code.co_filename, own):
            found = getattr(owner, "text", None) or getattr(getattr(owner, "factory", None), "text", None) or found
    return found


def _guilty_frame(error: BaseException, own: _Folders) -> traceback.FrameSummary | None:
    """The deepest frame of code that is neither ours nor installed; where there is none, the deepest of ours."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not _is_own(frame.filename, own) and not _is_installed(frame.filename)]
    ours = [frame for frame in frames if _is_own(frame.filename, own)]
    return theirs[-1] if theirs else ours[-1] if ours else None


def _is_own(filename: str, own: _Folders) -> bool:
    return any(Path(filename).is_relative_to(folder) for folder in own)


def _is_installed(filename: str) -> bool:
    return (
        filename.startswith("<")
        or Path(filename).is_relative_to(sys.prefix)
        or Path(filename).is_relative_to(Path(os.__file__).parent)
    )
