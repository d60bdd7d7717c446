"""Reductions, softmaxes, scans and sorting."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from .unsigned import choosing, wrapping

Tensor = torch.Tensor
Reducer = Callable[[Tensor, tuple[int, ...], bool], Tensor]


def _reduce(function: Reducer, alone: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """A reduction over `axes`; over none of them each element is reduced `alone`."""

    def call(*, data: Tensor, axes: tuple[int, ...], keepdims: int = 1) -> Tensor:
        return function(data, axes, bool(keepdims)) if axes else alone(data)

    return call


def _sum(x: Tensor, axes: tuple[int, ...], keep: bool) -> Tensor:
    return wrapping(lambda y: torch.sum(y, dim=axes, keepdim=keep, dtype=y.dtype))(x)


def _mean(x: Tensor, axes: tuple[int, ...], keep: bool) -> Tensor:
    """The mean; of integers rounded towards zero."""
    if x.is_floating_point():
        return torch.mean(x, dim=axes, keepdim=keep)
    count = math.prod(x.shape[axis] for axis in axes)
    return torch.div(torch.sum(x, dim=axes, keepdim=keep), count, rounding_mode="trunc").to(x.dtype)


def _extremum(function: Callable[..., Tensor], fill: float) -> Reducer:
    """A reduction by maximum or minimum; `fill` is its value over no elements."""

    def call(x: Tensor, axes: tuple[int, ...], keep: bool) -> Tensor:
        # A boolean has no limits that could be its `fill`, so it is reduced as a number.
        if x.dtype == torch.bool:
            return call(x.to(torch.uint8), axes, keep).bool()
        if any(x.shape[axis] == 0 for axis in axes):
            shape = [1 if i in axes else n for i, n in enumerate(x.shape) if keep or i not in axes]
            # Torch refuses to reduce nothing; ONNX gives the neutral value.
            neutral = fill
            if not x.is_floating_point():
                integers = torch.iinfo(x.dtype)
                neutral = integers.min if fill < 0 else integers.max
            return torch.full(shape, neutral, dtype=x.dtype, device=x.device)
        return choosing(function)(x, dim=axes, keepdim=keep)

    return call


def _product(x: Tensor, axes: tuple[int, ...], keep: bool) -> Tensor:
    """The product over `axes`, one after another: torch has it for a single dim only."""

    def product(y: Tensor) -> Tensor:
        for axis in sorted(axes, reverse=True):
            y = torch.prod(y, dim=axis, keepdim=keep, dtype=y.dtype)
        return y

    return wrapping(product)(x)


def _norm1(x: Tensor, axes: tuple[int, ...], keep: bool) -> Tensor:
    return _sum(x.abs(), axes, keep)


def _norm2(x: Tensor, axes: tuple[int, ...], keep: bool) -> Tensor:
    wide = x if x.is_floating_point() else x.to(torch.float64)
    norm: Tensor = torch.linalg.vector_norm(wide, dim=axes, keepdim=keep)
    return norm.to(x.dtype)


def _log_sum(x: Tensor, axes: tuple[int, ...], keep: bool) -> Tensor:
    return torch.log(_sum(x, axes, keep))


def _log_sum_exp(x: Tensor, axes: tuple[int, ...], keep: bool) -> Tensor:
    return torch.logsumexp(x, dim=axes, keepdim=keep)


def _sum_square(x: Tensor, axes: tuple[int, ...], keep: bool) -> Tensor:
    return _sum(x * x, axes, keep)


def _alone(x: Tensor) -> Tensor:
    return x


def _flattened(function: Callable[[Tensor, int], Tensor]) -> Callable[..., Tensor]:
    """A function over one dim, or with `flatten` over all dims from `axis` on.

    Opsets before 13 flatten.
    """

    def call(*, input: Tensor, axis: int = -1, flatten: int = 0) -> Tensor:
        if not flatten:
            return function(input, axis)
        # The dims from `axis` on are one, over which the function runs.
        outer = math.prod(input.shape[:axis])
        return function(input.reshape(outer, math.prod(input.shape[axis:])), 1).reshape(input.shape)

    return call


def _hardmax(x: Tensor, axis: int) -> Tensor:
    return torch.zeros_like(x).scatter(axis, x.argmax(axis, keepdim=True), 1.0)


def _argument(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The place of an extremum; of equal values the first, or the last if so asked."""

    def call(
        *, data: Tensor, axis: int = 0, keepdims: int = 1, select_last_index: int = 0
    ) -> Tensor:
        # Torch returns the first of equal values: the last is the first from the end.
        x = data.flip(axis) if select_last_index else data
        place: Tensor = function(x, dim=axis, keepdim=bool(keepdims))
        return data.shape[axis] - 1 - place if select_last_index else place

    return call


def _scan(function: Callable[..., Tensor], neutral: float) -> Callable[..., Tensor]:
    """A running sum or product; `neutral` is its value before the first element."""

    def call(*, x: Tensor, axis: int, exclusive: int = 0, reverse: int = 0) -> Tensor:
        y = x.flip(axis) if reverse else x
        y = function(y, dim=axis, dtype=x.dtype)
        if exclusive:
            # An exclusive scan starts from the neutral value, and drops the total.
            first = torch.full_like(y.narrow(axis, 0, 1), neutral)
            y = torch.cat((first, y.narrow(axis, 0, y.shape[axis] - 1)), dim=axis)
        return y.flip(axis) if reverse else y

    return call


def top_k(
    *, X: Tensor, K: int, axis: int = -1, largest: int = 1, sorted: int = 1
) -> tuple[Tensor, Tensor]:
    """The K largest or smallest values along a dim, and their places.

    Of equal values the first ones are taken.
    """
    # A stable sort, since `torch.topk` takes any of equal values, and others on another device.
    values, indices = torch.sort(X, dim=axis, descending=bool(largest), stable=True)
    return values.narrow(axis, 0, K), indices.narrow(axis, 0, K)


FUNCTIONS: Mapping[str, Callable[..., Tensor | tuple[Tensor, ...]]] = {
    "ReduceSum": _reduce(_sum, _alone),
    "ReduceMean": _reduce(_mean, _alone),
    "ReduceProd": _reduce(_product, _alone),
    "ReduceMax": _reduce(_extremum(torch.amax, -math.inf), _alone),
    "ReduceMin": _reduce(_extremum(torch.amin, math.inf), _alone),
    "ReduceL1": _reduce(_norm1, torch.abs),
    "ReduceL2": _reduce(_norm2, torch.abs),
    "ReduceLogSum": _reduce(_log_sum, torch.log),
    "ReduceLogSumExp": _reduce(_log_sum_exp, _alone),
    "ReduceSumSquare": _reduce(_sum_square, torch.square),
    "Softmax": _flattened(torch.softmax),
    "LogSoftmax": _flattened(torch.log_softmax),
    "Hardmax": _flattened(_hardmax),
    "ArgMax": _argument(torch.argmax),
    "ArgMin": _argument(torch.argmin),
    "CumSum": _scan(torch.cumsum, 0),
    "CumProd": _scan(torch.cumprod, 1),
    "TopK": top_k,
}
