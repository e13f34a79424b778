"""The trained blocks of a job, seen to belong together, and the whole student made of them."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torch import Tensor, nn

import zgstore
from zgtrain.blockreport import CHECKPOINT, REPORT, BlockReport, behind, command, command_for_all, read_report, shown
from zgtrain.blocks import boundaries_of, ends_of, make_block, resolve_snapshot
from zgtrain.checkpoint import load, restore_block, state_digest
from zgtrain.files import disk_heard, read_json, sync_folder, write_json
from zgtrain.job import Job
from zgtrain.noise import diffusion
from zgtrain.prefixes import prefix_pins
from zgtrain.pretrained import loading, share
from zgtrain.sharded import FIRST_RANK, gathered_state, newest
from zgtrain.source import LIVE

MANIFEST: Final = "zgtrain.json"
WEIGHTS: Final = "model.safetensors"


@dataclass(frozen=True, slots=True)
class Gathered:
    """The blocks of a job as they were trained.

    Args:
        blocks: In depth order.
        reports: Theirs.
    """

    blocks: tuple[nn.Module, ...]
    reports: tuple[BlockReport, ...]


@dataclass(frozen=True, slots=True)
class Assembled:
    """The whole student.

    Args:
        student: The module, in eval mode.
        manifest: What it is made of: snapshot, job, blocks, digests.
        output: Where it was written; None if it was not.
    """

    student: nn.Module
    manifest: Mapping[str, Any]
    output: Path | None = None


def assemble(job: Job, output: Path | str | None = None) -> Assembled:
    """Join the trained blocks of a job.

    Args:
        job: All of its blocks are trained.
        output: A directory to write: ``save_pretrained`` of a student that has it, else ``model.safetensors``; what
            its ``save_beside`` writes, if it has that; and ``zgtrain.json``. One that an earlier assembly wrote is
            replaced, if nothing else lies in it.

    Raises:
        zgstore.NotFound: if a block is not trained to its end.
        zgstore.Refused: if blocks are of different snapshots, jobs or sources, or share a trained parameter.
        zgstore.Corrupt: if a block is not what its report says.
        zgstore.Invalid: if the job has no ``assemble``, or ``output`` holds something else.
    """
    if job.student.assemble is None:
        raise zgstore.Invalid(
            f"{job.path.name}: student.assemble is missing",
            hint='name what joins the blocks: assemble = "module:function" under [student]',
        )
    place = None if output is None else _place(Path(output))
    gathered = gather(job)
    student = joined_student(job, gathered.blocks)
    manifest = _manifest(job, student, gathered.reports)
    if place is not None:
        _write(student, manifest, place)
    return Assembled(student, manifest, place)


def joined_student(job: Job, blocks: Sequence[nn.Module]) -> nn.Module:
    """What the job's ``assemble`` makes of blocks, in eval mode; of diffusion it is given their ``noise`` too.

    Raises:
        zgstore.Invalid: if it is no module.
    """
    assert job.student.assemble is not None  # who calls has seen to it
    args = job.student.args
    if job.train.diffusion:
        args = {**args, "noise": diffusion(job.train.noise, blocks=len(blocks))}
    student = job.student.assemble.call(args, list(blocks))
    if not isinstance(student, nn.Module):
        raise zgstore.Invalid(
            f"{job.student.assemble.text!r} returned a {type(student).__name__}, not a torch.nn.Module",
            hint="return the whole student",
        )
    return student.eval()


def gather(job: Job) -> Gathered:
    """The trained blocks of a job, each what its report says, and all of one snapshot, job and kind of source.

    Raises:
        zgstore.NotFound: if a block is not trained to its end.
        zgstore.Refused: if blocks do not belong together, or share a trained parameter.
        zgstore.Corrupt: if a block is not what its report says.
    """
    store = zgstore.Store.open(job.snapshot.store)
    names = boundaries_of(job, store)
    found = [read_report(job, block) for block in range(len(names) - 1)]
    _see_trained(job, found)
    reports = [report for report in found if report is not None]
    _see_together(job, reports, str(resolve_snapshot(job, store)), names)
    if job.relay:
        _see_chained(job, store, reports)
    blocks = [load_block(job, block, report) for block, report in enumerate(reports)]
    _see_apart(blocks)
    return Gathered(tuple(blocks), tuple(reports))


def load_block(job: Job, block: int, report: BlockReport) -> nn.Module:
    """A block as it was trained.

    Args:
        job: The job.
        block: b.
        report: Its own.

    Raises:
        zgstore.Missing: if its checkpoint is gone.
        zgstore.Refused: if its checkpoint went on without its report.
        zgstore.Corrupt: if it is another.
    """
    folder = job.folder(block)
    module = make_block(job, block)
    state, passing, step = _saved(job, block)
    if step > report.steps:
        raise behind(job, block, report.steps, step)
    restore_block(module, state, passing=passing)
    actual = state_digest(module)
    if actual != report.state_digest:
        raise zgstore.Corrupt(
            f"block {block} is not the one that its report is of",
            hint=f"remove {folder / REPORT} and train it again, it resumes from its checkpoint: {command(job, block)}",
            object=f"block {block}", expected=report.state_digest, actual=actual, path=str(folder),
        )  # fmt: skip
    return module.eval()


def _saved(job: Job, block: int) -> tuple[Mapping[str, Tensor], Sequence[str], int]:
    """A block's tensors as they were saved, which of them are passing buffers, and the step."""
    folder = job.folder(block)
    last = newest(folder)
    saved = load(folder / CHECKPOINT if last is None else last / FIRST_RANK)
    if saved is None:
        raise zgstore.Missing(
            f"block {block} has a report and no checkpoint", hint=f"train it again: `{command(job, block, fresh=True)}`"
        )
    step: int = saved["ledger"]["step"]
    return (saved["block_state"] if last is None else gathered_state(folder)), saved.get("passing", ()), step


# ---- what belongs together ----


def _see_trained(job: Job, reports: Sequence[BlockReport | None]) -> None:
    taken_over = {0} if job.relay else set()  # the first block has no predecessor: it is the parallel job's
    lacking = [
        block
        for block, report in enumerate(reports)
        if report is None
        or not report.snapshot
        or (report.job == job.identity() and report.steps < job.train.steps and block not in taken_over)
    ]
    if lacking:
        which = "block " if len(lacking) == 1 else "blocks "
        raise zgstore.NotFound(
            f"{which}{', '.join(map(str, lacking))} of {len(reports)} not trained to the end",
            hint=f"`{command_for_all(job)}` trains what is left",
            blocks=lacking,
        )


def _see_together(job: Job, reports: Sequence[BlockReport], snapshot: str, names: Sequence[str]) -> None:
    hint = f"train the odd ones again: `{command(job, 'B', fresh=True)}`"

    def see(what: str, of: Callable[[BlockReport], str], expected: str | None) -> None:
        by: dict[str, list[int]] = {}
        for block, report in enumerate(reports):
            by.setdefault(of(report), []).append(block)
        if set(by) <= ({expected} if expected is not None else {next(iter(by), "")}):
            return
        listed = "; ".join(f"{_listed(blocks)} of {shown(value)}" for value, blocks in by.items())
        wanted = "" if expected is None else f"; the job's is {shown(expected)}"
        raise zgstore.Refused(
            f"the blocks are of different {what}: {listed}{wanted}"
            if len(by) > 1
            else f"the blocks are not of this {what.removesuffix('s')}: {listed}{wanted}",
            hint=hint,
            field=what,
            blocks={value: blocks for value, blocks in by.items() if value != expected},
        )

    see("snapshots", lambda report: report.snapshot, None)
    see("snapshots", lambda report: report.snapshot, snapshot)
    see("jobs", lambda report: report.job, job.identity())
    # A build that was followed gave bitwise the targets of its snapshot.
    see("sources", lambda report: "live" if report.targets == LIVE else "the snapshot", None)
    for block, report in enumerate(reports):
        wanted = ends_of(job, names, block)
        if (report.source, report.target) != wanted:
            raise zgstore.Refused(
                f"block {block} maps {report.source!r} to {report.target!r}, and the job wants "
                f"{wanted[0]!r} to {wanted[1]!r}",
                hint=hint,
            )


def _see_chained(job: Job, store: zgstore.Store, reports: Sequence[BlockReport]) -> None:
    """Of a relay: each block learned from what the blocks before it are now."""
    snapshot = store.snapshot(resolve_snapshot(job, store))
    for block in range(1, len(reports)):
        before = [report.state_digest for report in reports[:block]]
        if reports[block].pins != str(prefix_pins(job, snapshot, reports[block].source, before).digest()):
            raise zgstore.Refused(
                f"block {block} was trained on the states of other blocks than those before it now",
                hint=f"`{command(job, block, fresh=True)}` trains them anew, in depth order",
                block=block,
            )


def _see_apart(blocks: Sequence[nn.Module]) -> None:
    owner: dict[int, tuple[int, str]] = {}
    for block, module in enumerate(blocks):
        mine = {}
        for name, parameter in module.named_parameters():
            if id(parameter) in owner and parameter.requires_grad:
                other, theirs = owner[id(parameter)]
                raise zgstore.Refused(
                    f"the parameter {name!r} of block {block} is also {theirs!r} of block {other}",
                    hint="blocks train apart: freeze it (requires_grad = False), or give each block its own",
                    parameter=name,
                )
            mine[id(parameter)] = (block, name)
        owner |= mine


def _listed(blocks: Iterable[int]) -> str:
    numbers = list(blocks)
    return f"block{'' if len(numbers) == 1 else 's'} {', '.join(map(str, numbers))}"


# ---- writing ----


def _manifest(job: Job, student: nn.Module, reports: Sequence[BlockReport]) -> dict[str, Any]:
    wanted = ("block", "source", "target", "targets", "steps", "initial_digest", "state_digest")
    return {
        "format": 1,
        "snapshot": reports[0].snapshot,
        "pins": reports[0].pins,
        "job": job.identity(),
        "relay": job.relay,
        "blocks": [{name: getattr(report, name) for name in wanted} for report in reports],
        "parameters": sum(parameter.numel() for parameter in student.parameters()),
        "state_digest": state_digest(student),
    }


def _place(output: Path) -> Path:
    """Where to write; nothing but an earlier student is replaced.

    Raises:
        zgstore.Invalid: if anything lies there that no assembly wrote.
    """
    output = output.resolve()  # behind a link, so that the link stays
    if not output.is_dir():
        strange = output.name if os.path.lexists(output) else None
    else:
        earlier = read_json(output / MANIFEST, {"files": dict}, remedy="name another directory, or remove it first")
        ours = set() if earlier is None else {MANIFEST, *earlier["files"]}
        names = (str(path.relative_to(output)) for path in output.rglob("*") if path.is_symlink() or not path.is_dir())
        strange = next((name for name in names if name not in ours), None)
    if strange is not None:
        raise zgstore.Invalid(
            f"{output} is no student of ours alone: no assembly wrote {strange!r}, and it would be gone",
            hint="name another directory, or move that away first",
        )
    return output


def _write(student: nn.Module, manifest: Mapping[str, Any], place: Path) -> None:
    """The whole directory beside its place, then put there by a rename."""
    place.parent.mkdir(parents=True, exist_ok=True)
    new, old = (place.with_name(f".{place.name}.{word}.{os.getpid()}") for word in ("new", "old"))
    _sweep(place, "new")
    new.mkdir()
    mine = os.open(new, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(mine, fcntl.LOCK_EX)  # so that nobody takes it for what a kill left
        with disk_heard():
            _save(student, new)
        files = {
            str(path.relative_to(new)): str(zgstore.digest_of(None, path.read_bytes()))
            for path in sorted(new.rglob("*"))
            if path.is_file()
        }
        write_json(new / MANIFEST, {**manifest, "files": files})
        share(new)
        for path in new.rglob("*"):
            if path.is_file():
                _sync(path)
        sync_folder(new)
        if place.exists():
            place.rename(old)
        new.rename(place)
        sync_folder(place.parent)
        _sweep(place, "old")
    finally:
        if old.exists() and not place.exists():
            old.rename(place)
        shutil.rmtree(new, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
        os.close(mine)


def _sweep(place: Path, word: str) -> None:
    """Remove what assemblies to this place left that were killed: nobody has it locked."""
    for left in place.parent.glob(f".{glob.escape(place.name)}.{word}.*"):
        with contextlib.suppress(OSError):
            handle = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left)
            finally:
                os.close(handle)


def _save(student: nn.Module, folder: Path) -> None:
    save: Any = getattr(student, "save_pretrained", None)
    if save is not None:
        with loading() if "transformers" in sys.modules else contextlib.nullcontext():  # it shows no bars
            save(folder)
    else:
        from safetensors.torch import save_model  # noqa: PLC0415 - only where it is needed

        save_model(student, str(folder / WEIGHTS))
    beside: Any = getattr(student, "save_beside", None)
    if beside is not None:
        beside(folder)


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
