"""Cross entropy with split classes: each rank has some columns of the scores, and the whole loss.

    loss_i = -w[y_i] log p_i[y_i]
    log p_i[c] = s_ic - m_i - log sum_c exp(s_ic - m_i),   m_i = max_c s_ic

The maximum and the sums over the classes are all-reduced, as in Megatron-LM's parallel cross
entropy (arXiv:1909.08053, section 3).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from autopar.ir import Value
from autopar.runtime.operators.local_call import LocalCall
from autopar.runtime.operators.registry import register
from autopar.runtime.ranks.collectives import all_reduce
from autopar.runtime.ranks.device_groups import AxisGroup
from autopar.runtime.redistribution.steps import Move, step
from autopar.torch_operators.linear_cross_entropy import loss_and_gradients, scaled

# ATen's numbers for a loss's reduction; 0 is none.
MEAN = 1
SUM = 2


def sum_over(value: Tensor, group: AxisGroup) -> Tensor:
    """The sum over the group; its gradient is the same on every rank and passes unchanged."""
    return step(value, Move("all_reduce"), Move("nothing"), group)


def _pick(scores: Tensor, column: Tensor) -> Tensor:
    """Take `scores[..., column]` for every row.

    Unlike `gather`, indexing saves nothing of the scores for its gradient.
    """
    rank = column.dim()
    rows = [
        torch.arange(size, device=column.device).view(-1, *(1,) * (rank - 1 - i))
        for i, size in enumerate(column.shape)
    ]
    return scores[(*rows, column)]


def split_classes(
    call: LocalCall, group: AxisGroup
) -> tuple[Callable[..., Any], Mapping[str, Value]]:
    """The local form of a cross entropy with class indices, alone or with its product."""
    alone = call.operator.kind == "aten.cross_entropy_loss.default"
    return cross_entropy if alone else linear_cross_entropy, {"group": group}


def cross_entropy(
    self: Tensor,
    target: Tensor,
    group: AxisGroup,
    weight: Tensor | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """As `torch.nn.functional.cross_entropy` on this rank's classes, dim 1 (or 0 of one dim)."""
    place = 1 if self.dim() > 1 else 0
    scores = self.movedim(place, -1).to(torch.promote_types(self.dtype, torch.float32))
    counted = target != ignore_index
    own = scores.shape[-1]
    column = target - group.coordinate * own
    # One rank has the target's score; the others add zero.
    inside = (column >= 0) & (column < own) & counted
    column = torch.where(inside, column, 0)
    # Large scores would overflow in the exponentials. The maximum cancels out of the loss, so it
    # has no gradient.
    shifted = scores - all_reduce(scores.detach().amax(-1), group, "max").unsqueeze(-1)
    score = torch.where(inside, _pick(shifted, column), 0)
    # All that is summed over the classes goes into one collective: the sum of exponentials, the
    # target's score, its weight, and with smoothing the weighted scores and the weights.
    parts = [shifted.exp().sum(-1), score]
    columns = None if weight is None else weight.to(scores.dtype)
    if columns is not None:
        parts.append(torch.where(inside, columns[column], 0))
    if label_smoothing:
        parts.append((shifted if columns is None else shifted * columns).sum(-1))
        if columns is not None:
            parts.append(columns.sum().expand(target.shape))
    sums = list(sum_over(torch.stack(parts), group).unbind())
    normal = sums[0].log()
    score = sums[1]
    share = torch.ones_like(score) if columns is None else sums[2]
    loss = (normal - score) * share
    if label_smoothing:
        if columns is None:
            total = torch.full_like(score, float(own * group.size))
            smooth = total * normal - sums[-1]
        else:
            smooth = sums[-1] * normal - sums[-2]
        loss = (1 - label_smoothing) * loss + label_smoothing / (own * group.size) * smooth
    loss = torch.where(counted, loss, 0)
    if reduction == MEAN:
        loss = loss.sum() / torch.where(counted, share, 0).sum()
    elif reduction == SUM:
        loss = loss.sum()
    return loss.to(self.dtype)


class _Classes:
    """This rank's classes among those of a group."""

    def __init__(self, group: AxisGroup, own: int) -> None:
        self.group = group
        self.first = group.coordinate * own

    def greatest(self, value: Tensor) -> Tensor:
        """The maximum over the group."""
        return all_reduce(value, self.group, "max")

    def total(self, value: Tensor) -> Tensor:
        """The sum over the group."""
        return all_reduce(value, self.group, "sum")


class _WithProduct(torch.autograd.Function):
    """The loss of rows by this rank's classes; its gradients are made along with it."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        target: Tensor,
        numbers: tuple[int, float],
        group: AxisGroup,
    ) -> Tensor:
        classes = _Classes(group, weight.shape[0])
        wanted = (ctx.needs_input_grad[0], ctx.needs_input_grad[1])
        made = loss_and_gradients(input, weight, target, *numbers, wanted, classes)
        ctx.save_for_backward(*made[1:])
        return made[0]

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        return (*scaled(ctx.saved_tensors, upstream[0]), None, None, None)


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    group: AxisGroup,
    ignore_index: int = -100,
    cap: float = 0.0,
) -> Tensor:
    """As `autopar.linear_cross_entropy` on this rank's classes, the rows of its matrix."""
    numbers = (ignore_index, cap)
    given = (input, linear_weight, target, numbers, group)
    loss: Tensor = _WithProduct.apply(*given)  # type: ignore[no-untyped-call]
    return loss


register("vocabulary", talks=split_classes)
