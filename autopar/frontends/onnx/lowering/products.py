"""Matrix products, other contractions, and losses over scores of classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .symbols import Symbol
from .trace import Asked


def gemm(
    *,
    A: Symbol,
    B: Symbol,
    C: Symbol | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Symbol:
    """The product alpha A' B' + beta C, where A' and B' are A and B, transposed if so asked."""
    rows = A.t if transA else A
    width = B.shape[0] if transB else B.shape[1]
    fits = C is None or C.shape == (width,)
    shape = (rows.shape[0], width)
    plain = fits and alpha == 1.0 and beta == 1.0 and A.floating
    if plain and transB:
        return rows.new("linear.default", shape, input=rows, weight=B, bias=C)
    columns = B.t if transB else B
    if plain and C is not None:
        return rows.new("addmm.default", shape, self=C, mat1=rows, mat2=columns)
    product = rows @ columns
    # A factor of one costs a pass over the product: skipped, since it is the default.
    if alpha != 1.0:
        product = (product * alpha).to(A.dtype)
    if C is None:
        return product
    return product + (C if beta == 1.0 else (C * beta).to(A.dtype))


def einsum(asked: Asked, *, Inputs: tuple[Symbol, ...], equation: str) -> Symbol:
    """The contraction that the equation spells."""
    return Inputs[0].new("einsum.default", asked.shape, equation=equation, tensors=Inputs)


_NUMBERS = {"none": 0, "mean": 1, "sum": 2}
"""Torch's numbers of the reductions."""


def negative_log_likelihood(
    *,
    input: Symbol,
    target: Symbol,
    weight: Symbol | None = None,
    ignore_index: int | None = None,
    reduction: str = "mean",
    name: str = "nll_loss_nd",
) -> Symbol:
    """Minus the log-probability of each target class, weighted by class."""
    if weight is None:
        return input.new(
            f"{name}.default",
            target.shape if reduction == "none" else (),
            self=input,
            target=target.to("int64"),
            reduction=_NUMBERS[reduction],
            ignore_index=-100 if ignore_index is None else ignore_index,
        )
    # Torch's own loss gives class weights no gradient, and in a file they are weights like others.
    safe = target.to("int64")
    if ignore_index is not None:
        # An ignored target may be no class at all: it reads class 0, with a weight of zero.
        safe = safe.masked_fill(target.equals(ignore_index), 0)
    weights = weight.index_select(0, safe.reshape(safe.size)).reshape(*safe.shape)
    if ignore_index is not None:
        weights = weights.masked_fill(target.equals(ignore_index), 0)
    loss = -(input.gather(1, safe.unsqueeze(1)).squeeze(1) * weights)
    every = range(loss.rank)
    if reduction == "mean":
        return loss.sum(*every) / weights.sum(*every)
    return loss if reduction == "none" else loss.sum(*every)


def softmax_cross_entropy(
    asked: Asked, *, scores: Symbol, labels: Symbol, weights: Symbol | None = None, **options: Any
) -> tuple[Symbol, ...]:
    """The negative log-likelihood of the softmax, and the log-probabilities."""
    if len(asked.outputs) == 1 and weights is None:
        name = "cross_entropy_loss"
        return (negative_log_likelihood(input=scores, target=labels, name=name, **options),)
    log_prob = scores.along("log_softmax.int", 1)
    loss = negative_log_likelihood(input=log_prob, target=labels, weight=weights, **options)
    return loss, log_prob


FUNCTIONS: Mapping[str, Callable[..., Symbol | tuple[Symbol, ...]]] = {
    "MatMul": lambda *, A, B: A @ B,
    "Gemm": gemm,
    "Det": lambda *, X: X.new("linalg_det.default", X.shape[:-2], A=X),
    "NegativeLogLikelihoodLoss": negative_log_likelihood,
}
ASKING: Mapping[str, Callable[..., Symbol | tuple[Symbol, ...]]] = {
    "Einsum": einsum,
    "SoftmaxCrossEntropyLoss": softmax_cross_entropy,
}
