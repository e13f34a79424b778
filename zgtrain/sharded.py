"""A sharded block's whole state: one directory by torch.distributed.checkpoint, made visible by one rename.

Beside the shards each process has a file of its own: its generators, and all that is not a tensor of the block's.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

import zgstore
from zgtrain.checkpoint import block_state, load, restore_block, save
from zgtrain.files import sync_folder
from zgtrain.ranks import Ranks

PREFIX: Final = "checkpoint-"
FIRST_RANK: Final = "rank-0.pt"  # what is in it of a training, each of the others has too
_BLOCK, _OPTIMIZER, _INITIAL = "block", "optimizer", "initial"


def save_sharded(
    folder: Path, fields: Mapping[str, Any], block: nn.Module, optimizer: torch.optim.Optimizer,
    *, initial: Mapping[str, Tensor], ranks: Ranks,
) -> None:  # fmt: skip
    """Write a state together; the previous one goes when the new one is durable."""
    from torch.distributed.checkpoint import state_dict_saver  # noqa: PLC0415 - a second that others need not pay

    last = newest(folder)
    temporary = folder / ".checkpoint.new"
    final = folder / f"{PREFIX}{int(last.name.removeprefix(PREFIX)) + 1 if last else 1:08d}"
    if ranks.rank == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    ranks.barrier()
    tensors, rest = _split(block, optimizer)
    with _failures_raised():
        state_dict_saver.save(
            {_BLOCK: block_state(block), _OPTIMIZER: tensors, _INITIAL: dict(initial)}, checkpoint_id=temporary
        )
    save(temporary / f"rank-{ranks.rank}.pt", {**fields, "optimizer": rest, "has_initial": bool(initial)})
    ranks.barrier()
    if ranks.rank == 0:
        for path in temporary.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        sync_folder(temporary)
        temporary.rename(final)
        sync_folder(folder)
        for old in _numbered(folder)[:-1]:  # one that a kill left half removed, too
            shutil.rmtree(old)
    ranks.barrier()


def load_fields(folder: Path, ranks: Ranks) -> dict[str, Any] | None:
    """What this process wrote beside the shards; None if there is no checkpoint.

    Raises:
        zgstore.Refused: if fewer processes wrote it; in all of them alike.
    """
    last = newest(folder)
    if last is None:
        return None
    saved = sum(1 for _ in last.glob("rank-*.pt"))
    if saved < ranks.world:
        raise zgstore.Refused(
            f"{last} was saved by {saved} processes, and {ranks.world} train now",
            hint="train on with as many processes as before, or begin anew with --fresh",
        )
    return load(last / f"rank-{ranks.rank}.pt")


def load_sharded(
    folder: Path, fields: Mapping[str, Any], block: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, Tensor]:
    """Put the newest state back, in place and together; the tensors that an anchor pulls to."""
    from torch.distributed.checkpoint import state_dict_loader  # noqa: PLC0415 - a second that others need not pay

    last = newest(folder)
    assert last is not None  # its fields were read from it
    rest: Mapping[str, Any] = fields["optimizer"]
    tensors: dict[str, Tensor] = {}
    names = dict(block.named_parameters())
    for name, keys in rest["tensors"].items():
        tensors |= {f"{name}\0{key}": torch.zeros_like(names[name]).detach() for key in keys}
    initial = {name: torch.zeros_like(t) for name, t in block_state(block).items()} if fields["has_initial"] else {}
    # Parameters in place, as each process holds a part of them; buffers as they were saved, which may be longer.
    state = _empty(last) | {name: each.detach() for name, each in names.items()}
    with _failures_raised():
        state_dict_loader.load({_BLOCK: state, _OPTIMIZER: tensors, _INITIAL: initial}, checkpoint_id=last)
    restore_block(block, state, passing=fields.get("passing", ()))
    for name, plain in rest["plain"].items():
        held = {key: tensors[f"{name}\0{key}"] for key in rest["tensors"].get(name, ())}
        optimizer.state[names[name]] = {**plain, **held}
    for group, saved in zip(optimizer.param_groups, rest["groups"], strict=True):
        group.update(saved)
    return initial


def gathered_state(folder: Path) -> dict[str, Tensor]:
    """The block's tensors of the newest state, whole, read by one process alone.

    Raises:
        zgstore.NotFound: if there is none.
    """
    from torch.distributed.checkpoint import state_dict_loader  # noqa: PLC0415 - a second that others need not pay

    last = newest(folder)
    if last is None:
        raise zgstore.NotFound(f"there is no sharded checkpoint in {folder}", hint="run the block first")
    block = _empty(last)
    with warnings.catch_warnings(), _failures_raised():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is what is meant
        state_dict_loader.load({_BLOCK: block}, checkpoint_id=last, no_dist=True)
    return block


def _empty(checkpoint: Path) -> dict[str, Tensor]:
    """The block's tensors of a checkpoint, whole and without their values."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader  # noqa: PLC0415 - a second, as above
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata  # noqa: PLC0415

    stored = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    return {
        name.removeprefix(f"{_BLOCK}."): torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in stored.items()
        if name.startswith(f"{_BLOCK}.") and isinstance(entry, TensorStorageMetadata)
    }


def newest(folder: Path) -> Path | None:
    """The newest whole checkpoint of a folder."""
    found = _numbered(folder)
    return found[-1] if found else None


def _numbered(folder: Path) -> list[Path]:
    """The checkpoints of a folder, oldest first; of the older ones a part may be gone."""
    return sorted(each for each in folder.glob(f"{PREFIX}*") if each.name.removeprefix(PREFIX).isdecimal())


@contextlib.contextmanager
def _failures_raised() -> Iterator[None]:
    """Raise the first failure itself: torch wraps it in what is no Exception, so that nobody would catch it."""
    from torch.distributed.checkpoint.api import CheckpointException  # noqa: PLC0415 - a second, as above

    try:
        yield
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from error


def _split(block: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """An optimiser's state: the tensors that lie as its parameters do, and all the rest."""
    names = {id(parameter): name for name, parameter in block.named_parameters()}
    tensors: dict[str, Tensor] = {}
    rest: dict[str, Any] = {"tensors": {}, "plain": {}}
    for parameter, state in optimizer.state.items():
        name = names[id(parameter)]
        alike = [k for k, v in state.items() if isinstance(v, Tensor) and v.shape == parameter.shape and v.dim()]
        tensors |= {f"{name}\0{key}": state[key] for key in alike}
        rest["tensors"][name] = alike
        rest["plain"][name] = {key: value for key, value in state.items() if key not in alike}
    rest["groups"] = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return tensors, rest
