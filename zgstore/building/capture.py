"""Run a teacher with hooks or an extractor: batches in, sample batches out.

Shapes: B rows of a batch, T positions, S = the sum of the rows' lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from zgstore.building.extraction import Extraction, Trajectory, topk_logits
from zgstore.building.hooks import SIDES, call_teacher, place, said, stand
from zgstore.building.pool import Pool, copied
from zgstore.building.rows import Batch, SampleBatch
from zgstore.building.rules import Rules, View
from zgstore.building.statistics import Seen
from zgstore.errors import Invalid
from zgstore.format.tensorfile import NAME_OF

__all__ = ["Capture", "Capturer", "Extraction", "Point", "Pool", "Trajectory", "points", "run", "topk_logits"]


class _Stop(BaseException):
    """Ends a forward at the deepest point. Not an Exception, lest a teacher's own handlers take it for a fault."""


@dataclass(frozen=True, slots=True)
class Point:
    """A hook point that a teacher offers.

    Args:
        name: ``MODULE:in`` or ``MODULE:out``.
        shape: Of the tensor for the batch it was found with.
        dtype: Its safetensors name, or torch's where a blob cannot hold it.
        calls: How often it was met in one forward; a column needs exactly one.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    calls: int = 1


class Capturer(Protocol):
    """Batches in, sample batches out: by hooks (`Capture`) or an extractor (`Extraction`)."""

    def __call__(self, batch: Batch, *, first: int = 0) -> SampleBatch:
        """Capture one batch; ``first`` is the stream index of its first row."""

    def close(self) -> None:
        """Leave the teacher as it was."""


class Capture:
    """Hooks that stand at the chosen points of a teacher.

    The first batch runs through, which shows the points that are met twice or never; later ones end at the deepest
    point. A tensor is copied before its hook returns, for a residual ``h += f(h)`` would overwrite it later.

    Args:
        teacher: Put into eval mode, whatever its factory left.
        points: ``MODULE:in`` or ``MODULE:out``: the boundaries, in depth order.
        outputs: Points of role output.
        context: Entries of the batch that become columns.
        dtype: What floating boundaries are stored as; None: as the teacher computes. Outputs are left alone.
        lengths: The entry that says how long rows are; boundaries then lose their padding.
        sequence: With ``lengths``: the context and output columns that have the sequence axis. Outputs of three axes
            with as many positions as the mask have it anyway.
        constants: Entries of the batch without a row axis.
        inputs: The entries the teacher is called with; None: those that its forward names, but ``labels`` and ``id``.
        pool: Where copies are put; give them back there.

    Raises:
        Invalid: for a point the teacher lacks.
    """

    def __init__(
        self,
        teacher: nn.Module,
        points: Sequence[str],
        *,
        outputs: Sequence[str] = (),
        context: Sequence[str] = (),
        dtype: torch.dtype | None = None,
        lengths: str | None = None,
        sequence: Collection[str] = (),
        constants: Collection[str] = (),
        inputs: Sequence[str] | None = None,
        pool: Pool | None = None,
    ) -> None:
        self.pool = pool or Pool()
        self._teacher = teacher.eval()
        self._points = tuple(points)
        self._outputs = tuple(outputs)
        self._inputs = inputs
        self._rules = Rules(tuple(context), lengths, frozenset(sequence), tuple(constants))
        self._dtype = dtype
        self._run: _Run | None = None
        self._ran_through = False
        self._handles = self._stand([*points, *outputs])

    def _stand(self, points: Sequence[str]) -> list[Any]:
        double = sorted({point for point in points if points.count(point) > 1})
        if double:
            raise Invalid(f"the point {double[0]!r} is listed twice", hint="list each point once")
        modules = dict(self._teacher.named_modules(remove_duplicate=False))
        found = [(point, *place(point, modules)) for point in points]
        return [stand(module, side, partial(self._met, point)) for point, module, side in found]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def __call__(self, batch: Batch, *, first: int = 0) -> SampleBatch:
        """Run the teacher over one batch.

        Args:
            batch: A mapping of tensors.
            first: Stream index of its first row.

        Returns:
            Its tensors lie in CPU memory once `SampleBatch.wait` has returned.

        Raises:
            Invalid: for what is no batch; points met twice or never; tensors that disagree with the batch in rows
                or positions.
        """
        view = self._rules.view(batch)
        self._run = run = _Run(view, boundaries=frozenset(self._points), dtype=self._dtype, pool=self.pool)
        try:
            with torch.inference_mode():
                if self._teacher.training:
                    self._teacher.eval()
                call_teacher(self._teacher, batch, self._inputs)
        except _Stop:
            pass
        finally:
            self._run = None
        if run.fault is not None:
            raise run.fault
        for point in (*self._points, *self._outputs):
            if point not in run.taken:
                raise Invalid(
                    f"{point!r} is never met in a forward",
                    hint="its module is not called for these batches; `zgstore points RECIPE` lists those that are",
                )
        self._ran_through = True
        return SampleBatch(
            columns={point: run.taken[point] for point in self._points},
            outputs={point: run.taken[point] for point in self._outputs},
            ready=run.ready(),
            seen=run.seen,
            **self._rules.beside(batch, view, first=first, packed=run.packed),
        )

    def _met(self, point: str, tensor: Any) -> None:
        run = self._run
        if run is None:  # somebody else calls the teacher
            return
        try:
            run.meet(point, tensor)
        except Invalid as fault:  # carried past the teacher's own handlers
            run.fault = run.fault or fault
            raise _Stop from fault
        if self._ran_through and len(run.taken) == len(self._handles):
            raise _Stop


class _Run:
    """One forward: what its hooks have met so far."""

    def __init__(self, view: View, *, boundaries: Collection[str], dtype: torch.dtype | None, pool: Pool) -> None:
        self.taken: dict[str, Tensor] = {}
        self.seen: dict[str, Seen] = {}
        self.packed: set[str] = set()
        self.fault: Invalid | None = None
        self._view = view
        self._boundaries = boundaries
        self._dtype = dtype
        self._pool = pool
        self._devices: set[torch.device] = set()

    def meet(self, point: str, tensor: Any) -> None:
        if point in self.taken:
            raise Invalid(
                f"{point!r} is met twice in one forward",
                hint="its module is called more than once; choose points inside or around it (`zgstore points RECIPE`)",
            )
        if not isinstance(tensor, Tensor):
            raise Invalid(
                f"{point!r} holds no tensor: it is {said(tensor)}",
                hint="choose a module that takes and returns tensors (`zgstore points RECIPE`)",
            )
        boundary = point in self._boundaries
        dtype = self._dtype if boundary and tensor.is_floating_point() else None
        pieces = self._view.pieces(point, tensor, boundary=boundary)
        if pieces is not None:
            self.packed.add(point)
        self.taken[point], seen = copied(tensor, pieces, dtype or tensor.dtype, self._pool, point)
        if seen is not None:
            self.seen[point] = seen
        if tensor.device.type == "cuda":
            self._devices.add(tensor.device)

    def ready(self) -> Callable[[], None] | None:
        """Waits for the copies that devices still make; None if there are none."""
        if not self._devices:
            return None
        events = []
        for device in self._devices:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(device))
            events.append(event)

        def wait() -> None:
            for event in events:
                event.synchronize()

        return wait


def points(teacher: nn.Module, batch: Batch) -> list[Point]:
    """The points that a teacher offers for a batch, in the order in which they are met.

    Args:
        teacher: Put into eval mode; without weights in a FakeTensorMode, where the batch belongs too.
        batch: A mapping of tensors.
    """
    met: dict[str, tuple[tuple[int, ...], str, int]] = {}

    def meet(name: str, tensor: Any) -> None:
        if isinstance(tensor, Tensor):
            shape, dtype, calls = met.get(name, (tuple(tensor.shape), str(tensor.dtype), 0))
            met[name] = (shape, dtype, calls + 1)

    handles = [
        stand(module, side, partial(meet, f"{path}:{side}"))
        for path, module in teacher.named_modules(remove_duplicate=False)
        if path
        for side in SIDES
    ]
    try:
        with torch.inference_mode():
            call_teacher(teacher.eval(), batch, None)
    finally:
        for handle in handles:
            handle.remove()
    return [Point(name, shape, _stored(dtype), calls) for name, (shape, dtype, calls) in met.items()]


def _stored(dtype: str) -> str:
    found = getattr(torch, dtype.removeprefix("torch."))
    return NAME_OF.get(found, dtype)


def run(
    teacher: nn.Module,
    batch: Batch,
    points: Sequence[str],
    *,
    context: Sequence[str] = (),
    lengths: str | None = None,
    sequence: Collection[str] = (),
) -> SampleBatch:
    """Capture the states of one batch at the given points, as the teacher computes them.

    Args:
        teacher: Put into eval mode.
        batch: A mapping of tensors.
        points: ``MODULE:in`` or ``MODULE:out``, in depth order.
        context: Entries of the batch to keep beside them.
        lengths: The entry that says how long rows are, if padding is to be left out.
        sequence: With ``lengths``: the context that has the sequence axis.

    Raises:
        Invalid: see `Capture`.
    """
    with Capture(teacher, points, context=context, lengths=lengths, sequence=sequence) as capture:
        return capture(batch).wait()
