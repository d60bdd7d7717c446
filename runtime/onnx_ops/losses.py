"""Losses over scores of classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

Tensor = torch.Tensor


def negative_log_likelihood(
    *,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Minus the log-probability of each target class, weighted by class."""
    ignored = torch.zeros_like(target, dtype=torch.bool)
    if ignore_index is not None:
        ignored = target == ignore_index
    # An ignored target may be no class at all: it reads class 0, with a weight of zero.
    safe = torch.where(ignored, torch.zeros_like(target), target).to(torch.int64)
    picked = -torch.gather(input, 1, safe.unsqueeze(1)).squeeze(1)
    weights = torch.ones_like(picked) if weight is None else weight[safe]
    weights = weights.masked_fill(ignored, 0)
    loss = picked * weights
    if reduction == "none":
        return loss
    return loss.sum() / weights.sum() if reduction == "mean" else loss.sum()


def softmax_cross_entropy(
    *,
    scores: Tensor,
    labels: Tensor,
    weights: Tensor | None = None,
    ignore_index: int | None = None,
    reduction: str = "mean",
) -> tuple[Tensor, Tensor]:
    """The negative log-likelihood of the softmax, and the log-probabilities."""
    log_prob = torch.log_softmax(scores, dim=1)
    loss = negative_log_likelihood(
        input=log_prob,
        target=labels,
        weight=weights,
        ignore_index=ignore_index,
        reduction=reduction,
    )
    return loss, log_prob


FUNCTIONS: Mapping[str, Callable[..., Tensor | tuple[Tensor, ...]]] = {
    "NegativeLogLikelihoodLoss": negative_log_likelihood,
    "SoftmaxCrossEntropyLoss": softmax_cross_entropy,
}
