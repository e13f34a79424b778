"""Trajectories: states that a function of the recipe takes from a teacher, where hooks cannot."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from zgstore.building.hooks import moved, said
from zgstore.building.pool import Pool, copied
from zgstore.building.recipe import RESERVED_COLUMNS
from zgstore.building.rows import Batch, SampleBatch, own
from zgstore.building.rules import Rules, View, kept_rows
from zgstore.building.statistics import Seen
from zgstore.building.teacher import device_of
from zgstore.errors import Invalid


@dataclass(frozen=True, slots=True)
class Trajectory:
    """What an extractor gives for one batch.

    Args:
        boundaries: Name → tensor, in depth order, first axis = the rows kept.
        outputs: Further columns, of role output.
        context: Columns of role context that the batch does not have; they replace the batch's of the same name.
        constants: Tensors without a row axis.
        rows: The rows of the batch that were kept, ascending; None: all that ``left_out`` does not name.
        left_out: Row of the batch → why it was left out.
    """

    boundaries: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor] = field(default_factory=dict)
    context: Mapping[str, Tensor] = field(default_factory=dict)
    constants: Mapping[str, Tensor] = field(default_factory=dict)
    rows: Sequence[int] | None = None
    left_out: Mapping[int, str] = field(default_factory=dict)


class Extraction:
    """An extractor: a function that makes trajectories of batches.

    Args:
        teacher: Put into eval mode.
        extractor: ``(teacher, batch, **args) -> Trajectory``.
        args: For it.
        context: Entries of the batch that become columns.
        dtype: What floating boundaries are stored as; None: as they come.
        lengths: As in `Capture`.
        sequence: As in `Capture`.
        constants: Entries of the batch or the trajectory without a row axis.
    """

    def __init__(
        self,
        teacher: nn.Module,
        extractor: Callable[..., Trajectory],
        args: Mapping[str, Any] | None = None,
        *,
        context: Sequence[str] = (),
        dtype: torch.dtype | None = None,
        lengths: str | None = None,
        sequence: Collection[str] = (),
        constants: Collection[str] = (),
        pool: Pool | None = None,
    ) -> None:
        self.pool = pool or Pool()
        self._teacher = teacher.eval()
        self._extractor = extractor
        self._args = dict(args or {})
        self._dtype = dtype
        self._constants = tuple(constants)
        self._rules = Rules(tuple(context), lengths, frozenset(sequence), tuple(constants))

    def __call__(self, batch: Batch, *, first: int = 0) -> SampleBatch:
        """Extract one batch.

        Raises:
            Invalid: for what is no batch, or no trajectory of it.
        """
        view = self._rules.view(batch)
        device = device_of(self._teacher)
        if self._teacher.training:
            self._teacher.eval()
        with torch.inference_mode():
            found = self._extractor(
                self._teacher, {key: moved(value, device) for key, value in batch.items()}, **self._args
            )
            rows, left_out = _checked(found, view.rows)
            _check_names(found, self._rules.context)
            kept = None if rows is None else torch.tensor(rows, dtype=torch.int64, device="cpu")
            count = view.rows if rows is None else len(rows)
            short = dataclasses.replace(
                view, rows=count, lengths=kept_rows(view.lengths, kept), starts=kept_rows(view.starts, kept)
            )
            packed: set[str] = set()
            seen: dict[str, Seen] = {}
            columns = self._taken(found.boundaries, short, packed, seen, boundary=True)
            outputs = self._taken(found.outputs, short, packed, seen, boundary=False)
        beside = self._rules.beside(batch, view, first=first, packed=packed, more=own(found.context), rows=rows)
        beside["constants"] |= {name: tensor.cpu() for name, tensor in own(found.constants).items()}
        return SampleBatch(columns=columns, outputs=outputs, rows=rows, left_out=left_out, seen=seen, **beside)

    def close(self) -> None:
        """Nothing stands in the teacher."""

    def _taken(
        self, found: Mapping[str, Tensor], view: View, packed: set[str], seen: dict[str, Seen], *, boundary: bool
    ) -> dict[str, Tensor]:
        taken = {}
        for name, tensor in found.items():
            if not isinstance(tensor, Tensor):
                raise Invalid(f"the extractor's {name!r} is {said(tensor)}, not a tensor", hint="give tensors only")
            pieces = view.pieces(name, tensor, boundary=boundary)
            if pieces is not None:
                packed.add(name)
            dtype = self._dtype if boundary and self._dtype and tensor.is_floating_point() else tensor.dtype
            # Not to pinned memory, and waited for: an extractor's tensors may be its own to overwrite.
            source = tensor.cpu() if pieces is None else torch.cat(pieces).cpu()
            taken[name], looked = copied(source, None, dtype, self.pool, name)
            if looked is not None:
                seen[name] = looked
        return taken


def _checked(found: Any, rows: int) -> tuple[tuple[int, ...] | None, dict[int, str]]:
    """The rows that a trajectory keeps, None for all, and why others are left out."""
    if not isinstance(found, Trajectory):
        raise Invalid(
            f"the extractor returned {said(found)} where a Trajectory was expected",
            hint="return zgstore.capture.Trajectory(boundaries={name: tensor, …})",
        )
    left_out = {int(row): str(why) for row, why in found.left_out.items()}
    if found.rows is None and not left_out:
        return None, {}
    kept = tuple(row for row in range(rows) if row not in left_out) if found.rows is None else tuple(found.rows)
    kept = tuple(int(row) for row in kept)
    if list(kept) != sorted(set(kept)) or any(not 0 <= row < rows for row in (*kept, *left_out)):
        raise Invalid(
            f"the extractor kept the rows {list(kept)} of a batch of {rows}", hint="name rows of the batch, ascending"
        )
    both = sorted(set(kept) & set(left_out))
    if both:
        raise Invalid(f"the extractor both kept and left out row {both[0]}", hint="do one of them")
    left_out |= {row: "left out by the extractor" for row in range(rows) if row not in kept and row not in left_out}
    return (None, {}) if not left_out else (kept, left_out)


def _check_names(found: Trajectory, context: Collection[str]) -> None:
    if not found.boundaries and not found.outputs:
        raise Invalid("the extractor gave no boundary and no output", hint="give the states that are to be kept")
    names = [*found.boundaries, *found.outputs, *{*context, *found.context}]
    for name in names:
        if names.count(name) > 1:
            raise Invalid(f"{name!r} is more than one column of the trajectory", hint="name each column once")
    for name in RESERVED_COLUMNS:
        if name in {*found.boundaries, *found.outputs, *found.context}:
            raise Invalid(f"the extractor gave a column {name!r}", hint="it is made by itself where it is needed")


def topk_logits(k: int) -> Callable[[Tensor], dict[str, Tensor]]:
    """A function that keeps the k largest logits: a piece for extractors.

    Args:
        k: How many to keep of each distribution.

    Returns:
        A function of logits ``[…, V]`` that gives ``topk_values`` ``[…, k]`` (their dtype, falling), ``topk_ids``
        ``[…, k]`` (int32), and ``logsumexp`` ``[…, 1]`` (fp32) over all V: log p of a kept id is its value − logsumexp.
    """

    def keep(logits: Tensor) -> dict[str, Tensor]:
        if not 0 < k <= logits.shape[-1]:
            raise Invalid(f"{logits.shape[-1]} logits have no top {k}", hint="choose k from 1 to the vocabulary's size")
        values, ids = logits.topk(k, dim=-1)
        whole = torch.logsumexp(logits.to(torch.float32), dim=-1, keepdim=True)
        return {"topk_values": values, "topk_ids": ids.to(torch.int32), "logsumexp": whole}

    return keep
