"""One block of a job, run: what it is trained on, made of and judged by, from the job file to its report.

B blocks; block b maps boundary b to b + 1. Each runs in a process of its own, and writes into a folder of its own.
"""

from __future__ import annotations

import gc
import shutil
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from torch import nn

import zgstore
from zgtrain.blockreport import CHECKPOINT, LOCK, REPORT, BlockReport, command, differing, finished, note_of, say_job
from zgtrain.checkpoint import seed_all
from zgtrain.devices import device_of
from zgtrain.files import read_json, write_json
from zgtrain.job import BlockLaunch, Job, LossSpec
from zgtrain.journal import FILE_NAME as LOG_NAME
from zgtrain.journal import Journal
from zgtrain.ledger import Log
from zgtrain.locks import held
from zgtrain.noise import Noise, make_noise
from zgtrain.optimizing import make_optimizer
from zgtrain.ranks import Ranks
from zgtrain.sharded import newest
from zgtrain.source import CACHED, LIVE, Source, cached, following, interrupted, live
from zgtrain.trainer import train_block

NOT_READ: Final = ("id", "start")
_PRIVATE: Final = "private.json"
_LOOK_SECONDS: Final = 0.1


class _Seen(NamedTuple):
    """A parameter of a block that was made and let go."""

    parameter: weakref.ref[nn.Parameter]
    block: int
    name: str


def run(
    job: Job,
    *,
    block: int,
    device: str | None = None,
    source: str = CACHED,
    follow: str | bool = False,
    patience_seconds: float = 0.0,
    fresh: bool = False,
    stop: Callable[[], bool] | None = None,
    progress: Log | None = None,
) -> BlockReport:
    """Train one block, from its checkpoint if there is one; a block that is done is left as it is.

    Args:
        job: The job.
        block: b, from 0.
        device: Where; default CUDA if there is one.
        source: ``cached`` or ``live``.
        follow: The UUID of a build that grows beside; True: the one that grows in the job's store now.
        patience_seconds: With ``follow=True``: how long to wait for a build to begin.
        fresh: Begin anew.
        stop: Asked before each step whether to save and end.
        progress: Called with each line of the log.

    Returns:
        The report, which also lies in the block's folder, as JSON.

    Raises:
        zgstore.Refused: if the lock file, the snapshot, a checkpoint or a neighbour's parameters do not belong.
        zgstore.Busy: if another process trains this block.
        zgstore.Interrupted: if asked to stop, or if the build that is followed ended unpublished; the state is saved.
        zgstore.ZgError: what `train_block` raises; a damaged shard with the command that mends it.
    """
    began = time.perf_counter()
    store = zgstore.Store.open(job.snapshot.store)
    folder = job.folder(block)
    build = growing_build(store, patience_seconds=patience_seconds, stop=stop) if follow is True else follow or ""
    with alone(folder, block), mending(job), open_source(
        job, store, block, kind=source, build=build, devices=[device] if device else []
    ) as data:  # fmt: skip
        done = None if fresh else finished(job, block)
        if done is not None and done.snapshot == data.snapshot and (done.targets == LIVE) == (data.kind == LIVE):
            return done
        blocks = len(boundaries_of(job, store, data)) - 1
        if Ranks.here().world == 1:  # before several are started, their launcher has looked
            refuse_shared(job, blocks)
        return train(
            job, data, make_block(job, block), block=block, blocks=blocks, folder=folder, fresh=fresh, device=device,
            stop=stop, progress=progress, began=began,
        )  # fmt: skip


def train(
    job: Job,
    data: Source,
    module: nn.Module,
    *,
    block: int,
    blocks: int,
    folder: Path,
    fresh: bool = False,
    device: str | None = None,
    stop: Callable[[], bool] | None = None,
    progress: Log | None = None,
    began: float = 0.0,
) -> BlockReport:
    """Train a block that is made, on a source that is open, as the job says; checkpoint, log and report in a folder.

    Args:
        job: The job.
        data: Its source.
        module: The block as it begins.
        block: b.
        blocks: B; the last one alone has token losses.
        folder: Where everything goes.
        fresh: Begin anew; what is there goes when all that can be refused before the first step has been seen.
        device: Where; default CUDA if there is one.
        stop: Asked before each step whether to save and end.
        progress: Called with each line of the log.
        began: When the making of all this began, by ``time.perf_counter``.
    """
    interface, spec, loss = None, job.train, job.train.loss
    if block < blocks - 1:
        loss = LossSpec(loss.name, loss.boundary_weight, function=loss.function)
    elif loss.token_ce or loss.token_kl:
        assert job.student.interface is not None  # `load_job` saw to it
        interface = job.student.interface.call(job.student.args)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    place = device_of(device)
    module.to(place)
    setup = time.perf_counter() - began if began else 0.0
    replicas = job.launch.blocks.get(block, BlockLaunch()).data_parallel
    ranks = Ranks.here(replicas=replicas)
    optimizer = make_optimizer(spec.optimizer, trained)
    forward = None if spec.forward is None else spec.forward.resolve()
    noise = noise_of(job, block, blocks)
    if ranks.rank == 0:
        if fresh:
            _clear(folder)
        if not (folder / CHECKPOINT).exists() and newest(folder) is None:
            say_job(job, block)
    ranks.barrier()
    with _journal(job, folder, block, ranks) as journal, _told_apart(job, block):

        def log(line: Mapping[str, Any]) -> None:
            journal(line)
            if progress is not None:
                progress(line)

        report = train_block(
            module, data,
            optimizer=optimizer, steps=spec.steps, forward=forward, loss=loss, seed=spec.seed,
            batch_size=spec.batch_size, order=spec.order, schedule=spec.schedule,
            max_grad_norm=spec.max_grad_norm, precision=spec.precision, accumulate=spec.accumulate,
            deterministic=spec.deterministic, anchor=spec.anchor, noise=noise,
            gradient=spec.gradient,
            validate_every=job.validate.every, validate_rows=job.validate.rows, checkpoint=folder / CHECKPOINT,
            checkpoint_every=spec.checkpoint_every, workers=spec.workers, log=log, log_every=job.log.every,
            stop=stop or (lambda: False), device=place, interface=interface, block_id=block,
            job=job.identity(), replicas=replicas,
        )  # fmt: skip
    report = replace(report, seconds={"setup": setup, **report.seconds})
    if ranks.rank == 0:
        report.write(folder)
    return report


@contextmanager
def _told_apart(job: Job, block: int) -> Iterator[None]:
    """Where a checkpoint cannot be gone on with: the command that begins anew, and what its job says otherwise."""
    try:
        yield
    except zgstore.ZgError as error:
        error.hint = error.hint.replace("--fresh", f"`{command(job, block, fresh=True)}`")  # a launch has no --fresh
        if error.fields.get("field") == "job" and (what := differing(job, block, str(error.fields["actual"]))):
            error.hint = f"{what}: say it as it was, {error.hint}"
        raise


def noise_of(job: Job, block: int, blocks: int) -> Noise | None:
    """The noise of a block of a job; None if its targets are clean."""
    return make_noise(job.train.noise, block=block, blocks=blocks) if job.train.noise else None


# ---- what it is trained on ----


def resolve_snapshot(job: Job, store: zgstore.Store) -> zgstore.Digest:
    """The job's snapshot; its pins are those of the lock file, if that knows the name.

    Raises:
        zgstore.Refused: if they are not.
    """
    rev = job.snapshot.rev
    name = rev.removeprefix("lock:")
    try:
        locked = zgstore.locked(name, job.directory)
    except zgstore.NotFound:
        if rev != name:
            raise
        return store.resolve(rev)
    digest = locked.snapshot if rev != name else store.resolve(rev)
    pins = store.snapshot(digest).pins.digest()
    if pins != locked.pins:
        raise zgstore.Refused(
            f"the pins of {rev!r} are not those that the lock file has under {name!r}",
            hint=f'train on what is locked (rev = "lock:{name}"), or lock this one: `zgstore lock {name}`',
            expected=str(locked.pins),
            actual=str(pins),
        )
    return digest


@contextmanager
def open_source(
    job: Job, store: zgstore.Store, block: int, *, kind: str = CACHED, build: str = "",
    devices: Sequence[str] = (),
) -> Iterator[Source]:  # fmt: skip
    """A block's source, closed at the end; with the UUID of a build, that build as it grows.

    Raises:
        zgstore.Invalid: if there is no such block, or live targets have no recipe.
    """
    refuse_source(kind)
    if build:
        found = store.memos.build(build)
        columns: Sequence[zgstore.Column] = () if found is None else found.columns
        source, target = ends_of(job, boundaries_among(job, columns), block)
        with following(store, build, source, target, context=_context(columns)) as data:
            yield data
        return
    digest = resolve_snapshot(job, store)
    snapshot = store.snapshot(digest)
    source, target = ends_of(job, boundaries_among(job, snapshot.columns), block)
    context = _context(snapshot.columns)
    if kind == LIVE:
        if job.snapshot.recipe is None:
            raise zgstore.Invalid("live targets need the recipe", hint='name it: [snapshot] recipe = "cache.toml"')
        opened = live(store, str(digest), job.snapshot.recipe, source, target, context=context, devices=devices)
    else:
        reader = zgstore.read(store, digest, [*dict.fromkeys((source, target, *context))])
        opened = cached(reader, source, target, pins=str(snapshot.pins.digest()))
    with opened:
        yield opened


def refuse_source(kind: str) -> None:
    """See that targets can be had so. Raises Invalid."""
    if kind not in {CACHED, LIVE}:
        raise zgstore.Invalid(f"there is no source {kind!r}", hint="cached or live")


def growing_build(
    store: zgstore.Store, *, patience_seconds: float = 0.0, stop: Callable[[], bool] | None = None
) -> str:
    """The UUID of the build that grows in a store now; where none does, one that begins while patience lasts.

    Raises:
        zgstore.NotFound: if none does.
        zgstore.Interrupted: if asked to stop while waiting.
    """
    give_up = time.monotonic() + patience_seconds
    while not (found := _growing(store)):
        if stop is not None and stop():
            raise interrupted()
        if time.monotonic() >= give_up:
            raise zgstore.NotFound(
                "no build grows in the store",
                hint="start `zgstore build RECIPE` (--wait 5m waits for it), or leave --follow out: what a build "
                "published is there to be read",
            )
        time.sleep(_LOOK_SECONDS)
    return found[-1]


def _growing(store: zgstore.Store) -> list[str]:
    alive = {lease.uuid for lease in store.leases.all() if lease.alive}
    return [uuid for uuid in store.memos.builds() if uuid in alive]


def boundaries_of(job: Job, store: zgstore.Store, data: Source | None = None) -> list[str]:
    """The job's boundary columns in depth order: B + 1 names."""
    if data is not None and data.reader.build:
        found = store.memos.build(data.reader.build)
        return boundaries_among(job, () if found is None else found.columns)
    return boundaries_among(job, store.snapshot(resolve_snapshot(job, store)).columns)


def boundaries_among(job: Job, columns: Sequence[zgstore.Column]) -> list[str]:
    """The same among the columns of a snapshot or of a growing build. Raises Invalid."""
    known = sorted((column for column in columns if column.role == "boundary"), key=lambda column: column.depth or 0)
    names = list(job.student.boundaries) or [column.name for column in known]
    lacking = [name for name in names if name not in {column.name for column in columns}]
    if lacking:
        raise zgstore.Invalid(
            f"the snapshot has no column {lacking[0]!r} for [student] boundaries",
            hint=f"its boundaries are {', '.join(column.name for column in known)}",
        )
    if len(names) < 2:
        raise zgstore.Invalid(f"{len(names)} boundaries make no block", hint="capture at least two")
    return names


def ends_of(job: Job, names: Sequence[str], block: int) -> tuple[str, str]:
    """Source and target of a block: boundaries b and b + 1; of diffusion the first and the last, whatever b is.

    Raises:
        zgstore.Invalid: if there is no such block.
    """
    if not 0 <= block < len(names) - 1:
        raise zgstore.Invalid(
            f"{job.path.name} has no block {block}", hint=f"its blocks are 0 to {len(names) - 2}", block=block
        )
    return (names[0], names[-1]) if job.train.diffusion else (names[block], names[block + 1])


def _context(columns: Sequence[zgstore.Column]) -> list[str]:
    return [column.name for column in columns if column.role == "context" and column.name not in NOT_READ]


# ---- what it is made of ----


def make_block(job: Job, block: int) -> nn.Module:
    """The student's block as its factory makes it; generators are seeded first, so that it is the same each time.

    Raises:
        zgstore.Invalid: if the factory gives no module.
    """
    seed_all(job.train.seed + block)
    module = job.student.block.call(job.student.args, block)
    if not isinstance(module, nn.Module):
        raise zgstore.Invalid(
            f"{job.student.block.text!r} returned a {type(module).__name__}, not a torch.nn.Module",
            hint="return the block itself",
        )
    return module


def refuse_shared(job: Job, blocks: int) -> None:
    """See that no trained parameter is in two blocks; once a job, for it makes every block, one after the other.

    Raises:
        zgstore.Refused: naming the parameter.
    """
    marker = job.output / _PRIVATE
    mark = {"job": job.identity(), "blocks": blocks}
    with suppress(zgstore.Corrupt):  # it is looked for again, and said again
        if read_json(marker, {}, remedy="") == mark:
            return
    earlier: list[_Seen] = []
    for block in range(blocks):
        earlier += _see_private(make_block(job, block), block, earlier)
    write_json(marker, mark)


def _see_private(module: nn.Module, block: int, earlier: Sequence[_Seen]) -> list[_Seen]:
    """A block's parameters; none may be one of a block before that is still alive although that block is gone."""
    if any(seen.parameter() is not None for seen in earlier):
        gc.collect()  # perhaps only garbage that nobody has collected yet
    held = {id(alive): seen for seen in earlier if (alive := seen.parameter()) is not None}
    for name, parameter in module.named_parameters():
        if id(parameter) in held and parameter.requires_grad:
            theirs = held[id(parameter)]
            raise zgstore.Refused(
                f"the parameter {name!r} of block {block} is also {theirs.name!r} of block {theirs.block}",
                hint="blocks train apart: freeze it (requires_grad = False), or give each block a copy of its own",
                parameter=name,
            )
    return [_Seen(weakref.ref(parameter), block, name) for name, parameter in module.named_parameters()]


# ---- who runs it ----


@contextmanager
def _journal(job: Job, folder: Path, block: int, ranks: Ranks) -> Iterator[Log]:
    """The block's log; of several processes the first one writes it."""
    if ranks.rank:
        yield lambda _line: None
        return
    with Journal(folder, job.log, name=f"block {block}") as journal:
        yield journal


def _clear(folder: Path) -> None:
    for path in (folder / CHECKPOINT, note_of(folder / CHECKPOINT), folder / REPORT, folder / LOG_NAME):
        path.unlink(missing_ok=True)
    while (last := newest(folder)) is not None:
        shutil.rmtree(last)


@contextmanager
def alone(folder: Path, block: int) -> Iterator[None]:
    """One process at a time has a block's folder; of several processes of one block, the first has it for all."""
    if Ranks.here().rank:
        yield
        return
    with held(
        folder / LOCK, f"block {block} is being trained",
        hint="wait for it, or stop it; `zgtrain status` shows how far it is",
    ):  # fmt: skip
        yield


@contextmanager
def mending(job: Job) -> Iterator[None]:
    """A damaged shard, or a build that died, is named with the command that mends it here."""
    try:
        yield
    except zgstore.ZgError as error:
        recipe, store = job.snapshot.recipe or "RECIPE", f"--store {job.snapshot.store}"
        for named in ("--recipe RECIPE", "`zgstore build RECIPE"):
            error.hint = error.hint.replace(named, f"{named.replace('RECIPE', str(recipe))} {store}")
        if isinstance(error, zgstore.Corrupt | zgstore.Missing) and "zgstore" in error.hint:
            error.hint += "; then run the block again: it resumes"
        raise
