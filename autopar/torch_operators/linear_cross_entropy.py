"""Cross entropy with the product that makes its scores, some rows at a time.

    s_i = x_i Wᵀ        l_i = log sum_c exp(s_ic)        loss = sum_i (l_i - s_i[y_i])
    p_i = exp(s_i - l_i) - [y_i]        dx_i = p_i W        dW = sum_i p_iᵀ x_i

The gradients are made along with the loss, so that no score is kept and no product is made twice
(P.-L. Hsu et al., Liger Kernel, arXiv:2410.10989, section 3.2). Capped scores are
cap tanh(s / cap), of the slope 1 - tanh². Sums are of single precision at least.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from .defining import LIBRARY, precise

SCORES_AT_ONCE = 2**27
"""The most scores in memory at once (at least those of one row)."""

Made = tuple[Tensor, Tensor, Tensor]
"""The loss, and its gradients of inputs and weights (empty: not wanted)."""


class Classes(Protocol):
    """The classes of this rank among those of others; `first`: the number of its first one."""

    first: int

    def greatest(self, value: Tensor) -> Tensor:
        """The maximum over all ranks."""

    def total(self, value: Tensor) -> Tensor:
        """The sum over all ranks."""


def loss_and_gradients(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    ignore_index: int,
    cap: float,
    wanted: tuple[bool, bool],
    classes: Classes | None = None,
) -> Made:
    """The summed loss of rows [..., h] by weights [classes, h], and its gradients if `wanted`.

    With some of the `classes` all rows are worked on at once, so that ranks meet twice.
    """
    rows = input.reshape(-1, input.shape[-1])
    targets = target.reshape(-1)
    each = max(1, SCORES_AT_ONCE // max(weight.shape[0], 1) if classes is None else len(rows))
    loss = rows.new_zeros((), dtype=precise(rows.dtype))
    d_rows = torch.empty_like(rows) if wanted[0] else rows.new_empty(0)
    d_weight = torch.zeros_like(weight) if wanted[1] else weight.new_empty(0)
    for start in range(0, len(rows), each):
        some = slice(start, start + each)
        scores = rows[some] @ weight.mT
        slope = None
        if cap:
            scores = (scores.to(loss.dtype) / cap).tanh_()
            slope = 1 - scores.square() if any(wanted) else None
            scores *= cap
        counted = targets[some] != ignore_index
        own, logs, told = _logs(scores, torch.where(counted, targets[some], 0), classes)
        loss -= torch.where(counted, told, 0).sum()
        if not any(wanted):
            continue
        chances = logs.exp_()
        # Where a row's target is another rank's class, `own` says so.
        chances[torch.arange(len(own[0]), device=rows.device), own[0]] -= own[1].to(chances.dtype)
        chances = (chances if slope is None else chances.mul_(slope)).to(rows.dtype)
        # Rows that count nothing are zeros among the few numbers of a row, not among its scores.
        counted = counted.unsqueeze(-1)
        if wanted[0]:
            d_rows[some] = (chances @ weight) * counted
        if wanted[1]:
            d_weight.addmm_(chances.mT, rows[some] * counted)
    return loss, d_rows.view(input.shape) if wanted[0] else d_rows, d_weight


def _logs(
    scores: Tensor, target: Tensor, classes: Classes | None
) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
    """The columns of the targets and whether they are here, log chances, and the targets' own."""
    wide = precise(scores.dtype)
    if classes is None:
        logs = torch.log_softmax(scores, -1, dtype=wide)
        return (target, torch.ones_like(target)), logs, logs.gather(-1, target[:, None])[:, 0]
    column = target - classes.first
    inside = (column >= 0) & (column < scores.shape[-1])
    column = torch.where(inside, column, 0)
    scores = scores.to(wide)
    scores = scores - classes.greatest(scores.amax(-1)).unsqueeze(-1)
    told = torch.where(inside, scores.gather(-1, column[:, None])[:, 0], 0)
    sums, told = classes.total(torch.stack((scores.exp().sum(-1), told))).unbind()
    normal = sums.log()
    return (column, inside), scores.sub_(normal.unsqueeze(-1)), told - normal


def scaled(made: Sequence[Tensor], upstream: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients that were made along with the loss, by the gradient of the loss."""
    return tuple(_times(value, upstream) if value.numel() else None for value in made)


def _times(value: Tensor, factor: Tensor) -> Tensor:
    """The product with a factor that is not rounded to the type of the value, some rows at once."""
    result = torch.empty_like(value)
    width = value.numel() // value.shape[0]
    each = max(1, SCORES_AT_ONCE // width)
    for start in range(0, value.shape[0], each):
        rows = slice(start, start + each)
        result[rows] = value[rows].to(factor.dtype) * factor
    return result


def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, ignore_index: int = -100, cap: float = 0.0
) -> Tensor:
    """The sum of `cross_entropy(linear(input, linear_weight), target)` over all rows, a scalar.

    `input` [..., h], `linear_weight` [classes, h], `target` [...] or flat, of class numbers;
    those that are `ignore_index` count nothing. `cap`: scores are cap tanh(score / cap) (0: as they
    are). As `torch.nn.functional.linear_cross_entropy`, which newer versions have.
    """
    wanted = (torch.is_grad_enabled() and x.requires_grad for x in (input, linear_weight))
    made = torch.ops.autopar.linear_cross_entropy_forward(
        input, linear_weight, target, ignore_index, cap, *wanted
    )
    loss: Tensor = made[0]
    return loss


def _forward(
    input: Tensor, weight: Tensor, target: Tensor, ignore_index: int, cap: float, *wanted: bool
) -> Made:
    return loss_and_gradients(
        input, weight, target, ignore_index, cap, (bool(wanted[0]), bool(wanted[1]))
    )


def _empty(
    input: Tensor, weight: Tensor, target: Tensor, ignore_index: int, cap: float, *wanted: bool
) -> Made:
    loss = input.new_empty((), dtype=precise(input.dtype))
    first, second = (
        torch.empty_like(x) if w else x.new_empty(0)
        for x, w in zip((input, weight), wanted, strict=True)
    )
    return loss, first, second


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Made) -> None:
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _differentiate(ctx: Any, upstream: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    return (*scaled(ctx.saved_tensors, upstream), None, None, None, None, None)


_INPUTS = "Tensor input, Tensor linear_weight, Tensor target, int ignore_index"
LIBRARY.define(f"linear_cross_entropy({_INPUTS}=-100, float cap=0.0) -> Tensor")
LIBRARY.define(
    f"linear_cross_entropy_forward({_INPUTS}, float cap, bool inputs, bool weights) "
    "-> (Tensor, Tensor, Tensor)"
)
LIBRARY.impl("linear_cross_entropy", linear_cross_entropy, "CompositeImplicitAutograd")
LIBRARY.impl("linear_cross_entropy_forward", _forward, "CompositeExplicitAutograd")
torch.library.register_fake("autopar::linear_cross_entropy_forward", _empty, lib=LIBRARY)
torch.library.register_autograd(
    "autopar::linear_cross_entropy_forward", _differentiate, setup_context=_keep, lib=LIBRARY
)
