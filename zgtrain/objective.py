"""Losses as pure functions over real tokens, with masks; the anchor.

N rows, T tokens of a row, D width, V vocabulary. Where samples have no sequence axis, ``[N, T, D]`` reads ``[N, D]``.

Every term is a sum and a count. A step divides sums by the counts of its whole global batch, so that neither
accumulation nor data parallelism nor ragged rows change what is minimised: a mean of micro-batch means would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

import zgstore
from zgtrain.job import LossSpec
from zgtrain.jobfile import loss_of
from zgtrain.noise import WEIGHT
from zgtrain.source import IGNORED_LABEL, Batch

BOUNDARY, TOKEN_CE, TOKEN_KL = "boundary", "token_ce", "token_kl"

PerToken = Callable[[Tensor, Tensor], Tensor]
Context = Mapping[str, Any]

# ---- each token's loss: [N, T, D], [N, T, D] → [N, T], in fp32 ----


def mse(prediction: Tensor, target: Tensor) -> Tensor:
    """Mean squared error over the width."""
    return (prediction.float() - target.float()).square().mean(-1)


def relative_mse(prediction: Tensor, target: Tensor) -> Tensor:
    """Squared error over the target's mean square: a few tokens of enormous norm do not drown the others."""
    size = target.float().square().mean(-1)
    return mse(prediction, target) / size.clamp_min(torch.finfo(torch.float32).tiny ** 0.5)


def smooth_l1(prediction: Tensor, target: Tensor) -> Tensor:
    """Mean smooth L1 error over the width, β = 1."""
    return functional.smooth_l1_loss(prediction.float(), target.float(), reduction="none").mean(-1)


def cosine(prediction: Tensor, target: Tensor) -> Tensor:
    """One minus the cosine of the angle between them."""
    return 1.0 - functional.cosine_similarity(prediction.float(), target.float(), dim=-1)


BOUNDARY_LOSSES: Final[Mapping[str, PerToken]] = {
    "relative-mse": relative_mse, "mse": mse, "smooth-l1": smooth_l1, "cosine": cosine,
}  # fmt: skip


def token_ce(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy with the next token, in nats: 0 where the label is −100.

    Args:
        logits: ``[N, T, V]``.
        labels: int64 ``[N, T]``, aligned with the input as transformers has them: position t is scored by label t + 1.

    Returns:
        fp32 ``[N, T − 1]``.
    """
    flat = functional.cross_entropy(
        logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED_LABEL, reduction="none"
    )
    return flat.view(labels.shape[0], -1)


def token_kl(logits: Tensor, teacher: Tensor) -> Tensor:
    """KL(teacher ‖ student) of next-token distributions, in nats: ``[N, T, V]`` twice → fp32 ``[N, T]``."""
    student_log, teacher_log = logits.float().log_softmax(-1), teacher.float().log_softmax(-1)
    return (teacher_log.exp() * (teacher_log - student_log)).sum(-1)


def masked_sum(values: Tensor, mask: Tensor | None) -> Tensor:
    """The sum over real tokens; what a masked token holds, NaN too, does not enter."""
    return values.sum() if mask is None else values.masked_fill(~mask, 0.0).sum()


def residual_error(prediction: Tensor, source: Tensor, target: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Σ‖ĥ − h_{b+1}‖² and Σ‖h_{b+1} − h_b‖²: below 1 only if more is learned than to copy the residual.

    Their ratio is reported beside the loss, because copying scores well by itself.
    """
    error = (prediction.float() - target.float()).square().sum(-1)
    moved = (target.float() - source.float()).square().sum(-1)
    return masked_sum(error, mask), masked_sum(moved, mask)


# ---- the objective ----


@dataclass(frozen=True, slots=True)
class Objective:
    """What a block minimises: a weighted sum of terms, each a sum over a count.

    Args:
        weights: Term → weight; terms of weight 0 are not computed.
        per_token: The boundary loss; None: a function of the context too is ``custom``.
        custom: ``(prediction, target, context) -> [N, T]`` in place of ``per_token``.
        interface: The last boundary → logits, frozen; for the token terms.
        boundary: The target's column, which ``custom`` finds in its context under this name.
        weighted: Whether the boundary loss of each row has a weight, by how noisy its target is.
    """

    weights: Mapping[str, float]
    per_token: PerToken | None
    custom: Callable[[Tensor, Tensor, Context], Tensor] | None = None
    interface: nn.Module | None = None
    boundary: str = ""
    weighted: bool = False

    def counts(self, batches: Sequence[Batch]) -> dict[str, int]:
        """What each term is to be divided by: of a step's micro-batches in host memory, before anything runs."""
        tokens = sum(len(each) if (mask := each.context.get("mask")) is None else int(mask.sum()) for each in batches)
        counts = dict.fromkeys(self.weights, tokens)
        if TOKEN_CE in counts:
            if any("labels" not in batch.context for batch in batches):
                raise zgstore.Invalid(
                    "token_ce needs labels, and the snapshot has no context column 'labels'",
                    hint="list labels under [capture] context, or leave token_ce out",
                )
            counts[TOKEN_CE] = sum(int((batch.context["labels"][:, 1:] != IGNORED_LABEL).sum()) for batch in batches)
        return counts

    def sums(self, prediction: Tensor, target: Tensor, context: Context) -> dict[str, Tensor]:
        """Each term's sum over a batch: scalars, fp32."""
        mask = context.get("mask")
        sums = {}
        if BOUNDARY in self.weights:
            if self.custom is not None:
                values = _checked(self.custom(prediction, target, {**context, "boundary": self.boundary}), prediction)
            else:
                assert self.per_token is not None
                values = self.per_token(prediction, target)
            if self.weighted:
                values = values * context[WEIGHT].view(-1, *[1] * (values.dim() - 1))
            sums[BOUNDARY] = masked_sum(values, mask)
        if self.interface is None or not {TOKEN_CE, TOKEN_KL} & set(self.weights):
            return sums
        logits = self._logits(prediction)
        if TOKEN_CE in self.weights:
            sums[TOKEN_CE] = token_ce(logits, context["labels"]).sum()
        if TOKEN_KL in self.weights:
            with torch.no_grad():
                teacher = self._logits(target)
            sums[TOKEN_KL] = masked_sum(token_kl(logits, teacher), mask)
        return sums

    def _logits(self, states: Tensor) -> Tensor:
        """Through the interface, in the dtype that it computes in: what is stored may have another."""
        assert self.interface is not None
        dtype = next((p.dtype for p in self.interface.parameters() if p.is_floating_point()), states.dtype)
        logits: Tensor = self.interface(states.to(dtype))
        return logits

    def total(self, sums: Mapping[str, Tensor], counts: Mapping[str, int]) -> Tensor:
        """The loss: the part that these sums are of the global batch's, whose counts these are."""
        terms = [self.weights[name] / max(counts[name], 1) * value for name, value in sums.items()]
        return torch.stack(terms).sum() if len(terms) > 1 else terms[0]


def make_objective(
    loss: LossSpec | Mapping[str, Any] | str | Callable[..., Tensor] | None = None,
    interface: nn.Module | None = None,
    *,
    boundary: str = "",
    weighted: bool = False,
) -> Objective:
    """An objective of what a job, or a caller, says.

    Args:
        loss: A spec; a name; a job file's table; or a function ``(prediction, target, context) -> each token's loss``.
        interface: Frozen here.
        boundary: The target's column, for a function.
        weighted: See `Objective`.

    Raises:
        zgstore.Invalid: for an unknown name, no weight at all, or token terms without an interface.
    """
    custom: Callable[..., Tensor] | None = None
    if loss is None or isinstance(loss, LossSpec | Mapping | str):
        spec = loss_of(loss or LossSpec())
        custom = None if spec.function is None else spec.function.resolve()
    else:
        spec, custom = LossSpec(name="custom"), loss
    weights = {BOUNDARY: spec.boundary_weight, TOKEN_CE: spec.token_ce, TOKEN_KL: spec.token_kl}
    weights = {name: weight for name, weight in weights.items() if weight}
    if {TOKEN_CE, TOKEN_KL} & set(weights) and interface is None:
        raise zgstore.Invalid(
            "token_ce and token_kl need logits, and there is no interface",
            hint='give what makes logits of the last boundary: interface=…, or [student] interface = "module:function"',
        )
    if interface is not None:
        interface.requires_grad_(requires_grad=False).eval()
    return Objective(weights, BOUNDARY_LOSSES.get(spec.name), custom, interface, boundary, weighted)


def _checked(values: Any, prediction: Tensor) -> Tensor:
    if not isinstance(values, Tensor) or values.shape != prediction.shape[:-1]:
        said = f"{list(values.shape)}" if isinstance(values, Tensor) else f"a {type(values).__name__}"
        raise zgstore.Invalid(
            f"the loss function gave {said} for a prediction {list(prediction.shape)}",
            hint="return each token's loss, without a mean: masking and the mean over the global batch are done here",
        )
    return values.float()


# ---- the anchor ----


@torch.no_grad()
def anchor_(parameters: Iterable[Tensor], initial: Sequence[Tensor], *, lr: float, anchor: float) -> None:
    """Decoupled pull towards where training began: θ ← θ − lr · anchor · (θ − θ₀)."""
    for parameter, start in zip(parameters, initial, strict=True):
        parameter.lerp_(start, lr * anchor)
