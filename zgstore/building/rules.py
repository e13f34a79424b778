"""What a batch says about rows and positions, and how it becomes context, lengths and constants."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from zgstore.building.rows import ID, LABELS, Batch, check_batch, ids_of, lengths_of, pieces_of, strip
from zgstore.errors import Invalid

NOT_FOR_THE_TEACHER: Final = frozenset({ID, LABELS})


@dataclass(frozen=True, slots=True)
class View:
    """What a batch says about rows and positions."""

    rows: int
    positions: frozenset[int]  # the T that a boundary may have; empty if the batch does not say
    lengths: Tensor | None
    starts: Tensor | None
    sequence: frozenset[str]

    def pieces(self, name: str, tensor: Tensor, *, boundary: bool) -> list[Tensor] | None:
        """Its rows without padding, or None if it has no sequence axis; Invalid if it disagrees with the batch."""
        shape = list(tensor.shape)
        if not shape or shape[0] != self.rows:
            raise Invalid(
                f"{name!r} has the shape {shape} for a batch of {self.rows} rows",
                hint="the first axis of a column is the samples'; choose a point that keeps it",
            )
        # Padded states may have their positions on any axis; those that lose their padding have them on the second.
        axes = shape[1:] if self.lengths is None else shape[1:2]
        if boundary and len(shape) > 2 and self.positions and self.positions.isdisjoint(axes):
            said = " or ".join(map(str, sorted(self.positions)))
            raise Invalid(
                f"{name!r} has the shape {shape} for a batch of {self.rows} rows and {said} positions: "
                "lengths must agree",
                hint="choose a point that keeps every position",
            )
        if self.lengths is None or self.starts is None:
            return None
        if boundary or name in self.sequence or (len(shape) > 2 and shape[1] in self.positions):
            return pieces_of(tensor, self.lengths, self.starts, what=f"{name!r}")
        return None


@dataclass(frozen=True, slots=True)
class Rules:
    """How batches become context, lengths and constants: the part of a capture that knows no teacher.

    Args:
        context: Entries of the batch that become columns.
        lengths: The entry that says how long rows are, if rows are ragged.
        sequence: The context and output columns that have the sequence axis.
        constants: Entries without a row axis.
    """

    context: tuple[str, ...] = ()
    lengths: str | None = None
    sequence: frozenset[str] = frozenset()
    constants: tuple[str, ...] = ()

    def view(self, batch: Any) -> View:
        """Check a batch and see its rows and positions."""
        rows = check_batch(batch, constants=self.constants)
        lengths, starts = (None, None) if self.lengths is None else lengths_of(batch, self.lengths)
        integers = [
            value.shape[1]
            for key, value in batch.items()
            if key not in NOT_FOR_THE_TEACHER
            and key not in self.constants
            and isinstance(value, Tensor)
            and value.dim() == 2
            and not value.is_floating_point()
        ]
        if self.lengths is not None and batch[self.lengths].dim() == 2:
            integers = [batch[self.lengths].shape[1]]
        return View(rows, frozenset(integers), lengths, starts, self.sequence)

    def beside(
        self,
        batch: Batch,
        view: View,
        *,
        first: int,
        packed: Collection[str],
        more: Mapping[str, Tensor] | None = None,
        rows: Sequence[int] | None = None,
    ) -> dict[str, Any]:
        """All of a sample batch but its captured columns.

        Args:
            batch: As the factory gave it.
            view: Of that batch.
            first: Stream index of its first row.
            packed: Captured columns that are ragged and without padding.
            more: Context from an extractor, which has the kept rows only.
            rows: The rows kept; None: all.
        """
        more = more or {}
        kept = None if rows is None else torch.tensor(list(rows), dtype=torch.int64, device="cpu")
        lengths = kept_rows(view.lengths, kept)
        starts = kept_rows(view.starts, kept)
        context, ragged = {}, set(packed)
        for name in dict.fromkeys((*self.context, *more)):
            if name == ID:
                continue
            if name not in more and name not in batch:
                raise Invalid(f"the batch has no {name!r} for the context", hint=f"it has {', '.join(sorted(batch))}")
            tensor = more[name] if name in more else kept_rows(batch[name], kept)
            assert tensor is not None
            tensor = tensor.detach().cpu()
            if lengths is not None and starts is not None and self._ragged(name, tensor):
                tensor = strip(tensor, lengths, starts, what=f"the context {name!r}")
                ragged.add(name)
            context[name] = tensor
        return {
            "context": context,
            "constants": {name: batch[name].detach().cpu() for name in self.constants if name in batch},
            "lengths": lengths,
            "starts": starts,
            "ids": kept_rows(ids_of({key: value for key, value in batch.items() if key not in self.constants},
                                first=first), kept),
            "packed": frozenset(ragged),
        }  # fmt: skip

    def _ragged(self, name: str, tensor: Tensor) -> bool:
        return name in self.sequence or (name == self.lengths and tensor.dim() > 1)


def kept_rows(tensor: Tensor | None, rows: Tensor | None) -> Tensor | None:
    """Some rows of a tensor; all of them if ``rows`` is None."""
    return tensor if tensor is None or rows is None else tensor[rows.to(tensor.device)]
