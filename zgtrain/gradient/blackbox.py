"""Black boxes in an autograd graph: forward they answer, backward they are queried, and nobody looks into them.

A core is a function of rows, and gets a cotangent for each of its inputs. A whole block is a function of its source and
of its parameters, which are probed apart: jointly, each would be noise to the other.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call

import zgstore
from zgtrain.gradient.estimate import estimate, reach
from zgtrain.gradient.probes import key_of
from zgtrain.job import GradientSpec

Forward = Callable[[nn.Module, Tensor, Mapping[str, Any]], Any]


@dataclass(slots=True)
class Asking:
    """One forward pass and the queries that its backward pass takes.

    Args:
        spec: How is asked.
        at: Seed, step, block and whatever else tells this pass from others.
        nodes: Black boxes met so far.
        queries: Forward queries so far; the forward pass itself is none.
    """

    spec: GradientSpec
    at: tuple[int, ...]
    nodes: int = 0
    queries: int = 0

    def next_key(self) -> tuple[int, int]:
        """The key of the next node's probes."""
        self.nodes += 1
        return key_of(*self.at, self.nodes)


class Box(Protocol):
    """What stands behind a node of the graph."""

    def answer(self, *inputs: Tensor) -> Tensor:
        """The forward pass."""
        ...

    def cotangents(self, inputs: Sequence[Tensor], cotangent: Tensor, wanted: Sequence[bool]) -> list[Tensor | None]:
        """One for each input that wants one, from queries."""
        ...


def put_in(box: Box, *inputs: Tensor) -> Tensor:
    """The box's answer as a node of the graph."""
    found: Tensor = _Node.apply(box, *inputs)  # type: ignore[no-untyped-call]
    return found


class _Node(torch.autograd.Function):
    """Autograd runs both under ``no_grad``; where it would not, somebody asks for more than an estimate."""

    @staticmethod
    def forward(ctx: Any, box: Box, *inputs: Tensor) -> Tensor:
        ctx.box = box
        ctx.save_for_backward(*inputs)
        return box.answer(*inputs)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        refuse_autograd()
        return None, *ctx.box.cotangents(ctx.saved_tensors, cotangent, ctx.needs_input_grad[1:])

    @staticmethod
    def jvp(_ctx: Any, *_tangents: Any) -> Any:
        raise _forward_only()


def refuse_autograd() -> None:
    """See that nothing here is recorded.

    Raises:
        zgstore.Invalid: if autograd would.
    """
    if torch.is_grad_enabled():
        raise _forward_only()


def refuse_complex(what: str, tensor: Tensor) -> None:
    """See that a probe, which is real, can move it.

    Raises:
        zgstore.Invalid: if it is complex.
    """
    if tensor.is_complex():
        raise zgstore.Invalid(
            f"{what} is complex, and probes are real",
            hint='keep its real and its imaginary part as real tensors, or train with gradient = "backprop"',
        )


def _forward_only() -> zgstore.Invalid:
    return zgstore.Invalid(
        "autograd was called through a black box, which answers forward queries only",
        hint='ask for first derivatives alone, by backward(); or train with gradient = { name = "backprop" }',
    )


# ---- a core ----


@dataclass(frozen=True, slots=True)
class Core:
    """A function of rows: its last axis is what a row is made of, and no row sees another.

    It is asked in fp32 whatever the block computes in: a probe would be lost in the rounding of bf16.

    Args:
        function: Of as many tensors as there are inputs, whose leading axes are alike; of one more axis in front too.
        asking: The pass that it belongs to.
        key: Of the probes.
        chunk: Probes that are queried at a time.
        active: bool, broadcasting to the one input: what it depends on.
    """

    function: Callable[..., Tensor]
    asking: Asking
    key: tuple[int, int]
    chunk: int
    active: Tensor | None = None

    def answer(self, *inputs: Tensor) -> Tensor:
        refuse_autograd()
        for each in inputs:
            refuse_complex("an input of a physical core", each)
        with _as_it_is(inputs[0].device):
            return self.function(*map(_at_least_fp32, inputs)).to(inputs[0].dtype)

    def cotangents(self, inputs: Sequence[Tensor], cotangent: Tensor, wanted: Sequence[bool]) -> list[Tensor | None]:
        lead, widths = inputs[0].shape[:-1], [each.shape[-1] for each in inputs]
        x = torch.cat([_at_least_fp32(each) for each in inputs], dim=-1).flatten(0, -2)
        active = None if self.active is None else self.active.expand(inputs[0].shape).flatten(0, -2)

        def query(rows: Tensor) -> Tensor:
            self.asking.queries += len(rows)
            with _as_it_is(rows.device):
                answer = self.function(*torch.split(rows.view(-1, *lead, sum(widths)), widths, dim=-1))
            return answer.flatten(1, -2)

        found = estimate(
            query, x, cotangent.flatten(0, -2), self.asking.spec, self.key, chunk=self.chunk, active=active
        )
        parts = torch.split(found.view(*lead, -1), widths, dim=-1)
        return [part.to(each.dtype) if want else None for part, each, want in zip(parts, inputs, wanted, strict=True)]


def _at_least_fp32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _as_it_is(device: torch.device) -> Any:
    return torch.autocast(device.type, enabled=False)


# ---- a whole block ----


class Whole:
    """A block of which nothing is known: its source is probed row by row, its parameters as one row of all.

    Every query has the draws of the forward pass, dropout's, and buffers of its own: it leaves no trace.

    Args:
        block: The block; sharded ones are refused.
        forward: ``(block, source, context) -> prediction``.
        context: Of the batch.
        asking: The pass that it belongs to.
    """

    def __init__(self, block: nn.Module, forward: Forward, context: Mapping[str, Any], asking: Asking) -> None:
        self._called = _Called(block, forward)
        self._context, self._asking = context, asking
        self._keys = asking.next_key(), asking.next_key()
        self._trained = [each for each in self._called.parameters() if each.requires_grad]
        self._names: Mapping[int, list[str]] = {}
        device = self._trained[0].device
        self._draws = _Draws(device)
        self._autocast = (
            device.type, torch.get_autocast_dtype(device.type), torch.is_autocast_enabled(device.type)
        )  # fmt: skip
        self._computed = self._coarsest()
        reach(asking.spec, self._computed)  # before anything is asked

    def _coarsest(self) -> torch.dtype:
        """Of the dtypes that it computes in: what is smaller than its numbers' distance is lost."""
        dtypes = {each.dtype for each in self._called.parameters() if each.is_floating_point()}
        _, lower, enabled = self._autocast
        return max(dtypes | ({lower} if enabled else set()), key=lambda dtype: torch.finfo(dtype).eps)

    def predict(self, source: Tensor) -> Tensor:
        """The block's answer as a node of the graph."""
        return put_in(self, source, *self._trained)

    def answer(self, *inputs: Tensor) -> Tensor:
        refuse_autograd()
        # What is asked again later, and held against the target, must not be what a block writes over.
        found: Any = self._called(inputs[0].clone(), self._context)
        if not isinstance(found, Tensor):
            raise zgstore.Invalid(
                f"the block gave a {type(found).__name__}", hint="return one tensor: the state after its last layer"
            )
        return found

    def cotangents(self, inputs: Sequence[Tensor], cotangent: Tensor, wanted: Sequence[bool]) -> list[Tensor | None]:
        source, *parameters = inputs
        self._names = _names_of(self._called)  # after the forward pass, which may have made buffers, or replaced them
        sizes = [each.numel() for each in parameters]
        vector = torch.cat([each.flatten() for each in parameters]).unsqueeze(0)

        def of_parameters(rows: Tensor) -> Tensor:
            parts = torch.split(rows[0, 0], sizes)
            moved = [part.view_as(each).to(each.dtype) for part, each in zip(parts, parameters, strict=True)]
            return self._query(source.clone(), moved).reshape(1, 1, -1)

        def of_source(rows: Tensor) -> Tensor:
            return self._query(rows.view_as(source).to(source.dtype, copy=True), parameters).reshape(1, len(source), -1)

        spec = self._asking.spec
        by_row = cotangent.reshape(len(source), -1)
        found: list[Tensor | None] = [None] * len(inputs)
        if wanted[0]:
            rows = estimate(
                of_source, source.flatten(1), by_row, spec, self._keys[0], chunk=1, computed=self._computed
            )  # fmt: skip
            found[0] = rows.view_as(source).to(source.dtype)
        if any(wanted[1:]):
            whole = estimate(
                of_parameters, vector, by_row.view(1, -1), spec, self._keys[1], chunk=1, computed=self._computed
            )  # fmt: skip
            if not whole.any() and by_row.any():
                raise _unmoved(spec, self._computed)
            parts = torch.split(whole[0], sizes)
            found[1:] = [part.view_as(each).to(each.dtype) for part, each in zip(parts, parameters, strict=True)]
        return found

    def _query(self, source: Tensor, parameters: Sequence[Tensor]) -> Tensor:
        self._asking.queries += 1
        instead: list[tuple[Tensor, Tensor]] = [*zip(self._trained, parameters, strict=True)]
        instead += [(each, each.clone()) for each in self._called.buffers()]
        moved = {name: other for each, other in instead for name in self._names[id(each)]}
        kind, dtype, enabled = self._autocast
        with self._draws.again(), torch.autocast(kind, dtype, enabled=enabled, cache_enabled=False):
            found: Tensor = functional_call(self._called, moved, (source, self._context), tie_weights=False)
        return found


def _unmoved(spec: GradientSpec, computed: torch.dtype) -> zgstore.Invalid:
    return zgstore.Invalid(
        f"none of {spec.probes} probes of its parameters changed what the block gave",
        hint=f"let its answer depend on the parameters that it trains; or, if the probes were lost in the rounding of "
        f"{computed}, give a train.gradient.epsilon above {reach(spec, computed):g}",
    )


def _names_of(module: nn.Module) -> dict[int, list[str]]:
    """Of each parameter and buffer, by its id, the names that it has; of a module with several names, under one.

    ``functional_call`` would put a tensor in under each name of its module, and take the first out again last.
    """
    names: dict[int, list[str]] = defaultdict(list)
    for path, each in module.named_modules():
        kept = (
            each.named_parameters(recurse=False, remove_duplicate=False),
            each.named_buffers(recurse=False, remove_duplicate=False),
        )
        for name, tensor in itertools.chain(*kept):
            names[id(tensor)].append(f"{path}.{name}" if path else name)
    return names


class _Called(nn.Module):
    """A block as the job calls it, for ``functional_call``."""

    def __init__(self, block: nn.Module, forward: Forward) -> None:
        super().__init__()
        self.block, self._call = block, forward

    def forward(self, source: Tensor, context: Mapping[str, Any]) -> Any:
        return self._call(self.block, source, context)


class _Draws:
    """Torch's generators as they are now, for a function that shall draw the same numbers again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._states = torch.get_rng_state(), None if self._device is None else torch.cuda.get_rng_state(self._device)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        with torch.random.fork_rng(devices=[] if self._device is None else [self._device]):
            torch.set_rng_state(self._states[0])
            if self._device is not None:
                assert self._states[1] is not None
                torch.cuda.set_rng_state(self._states[1], self._device)
            yield
