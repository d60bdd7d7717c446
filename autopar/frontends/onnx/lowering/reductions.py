"""Reductions, softmaxes, scans and sorting."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from .symbols import Symbol, cat
from .unsigned import choosing, truncated, wrapping

Axes = tuple[int, ...]
Reducer = Callable[[Symbol, Axes, bool], Symbol]


def _reduce(function: Reducer, alone: Callable[[Symbol], Symbol]) -> Callable[..., Symbol]:
    """A reduction over `axes`; over none of them each element is reduced `alone`."""

    def call(*, data: Symbol, axes: Axes, keepdims: int = 1) -> Symbol:
        return function(data, axes, bool(keepdims)) if axes else alone(data)

    return call


def _sum(x: Symbol, axes: Axes, keep: bool) -> Symbol:
    return wrapping(lambda y: y.sum(*axes, keep=keep))(x)


def _mean(x: Symbol, axes: Axes, keep: bool) -> Symbol:
    """The mean; of integers rounded towards zero."""
    if x.floating:
        return x.mean(*axes, keep=keep)
    count = math.prod(x.shape[axis] for axis in axes)
    return truncated(x.to("int64").sum(*axes, keep=keep), count).to(x.dtype)


def _extremum(name: str) -> Reducer:
    """A reduction by maximum or minimum."""

    def call(x: Symbol, axes: Axes, keep: bool) -> Symbol:
        if x.dtype == "bool":
            return call(x.to("uint8"), axes, keep).to("bool")
        if any(x.shape[axis] == 0 for axis in axes):
            shape = [1 if i in axes else n for i, n in enumerate(x.shape) if keep or i not in axes]
            # Torch refuses to reduce nothing; ONNX gives the neutral value.
            if x.floating:
                neutral = -math.inf if name == "amax" else math.inf
            else:
                integers = np.iinfo(x.dtype)
                neutral = integers.min if name == "amax" else integers.max
            return x.constant(np.full(shape, neutral, x.dtype))
        return choosing(lambda y: y.reduced(f"{name}.default", axes, keep))(x)

    return call


def _product(x: Symbol, axes: Axes, keep: bool) -> Symbol:
    """The product over `axes`, one after another: torch has it for a single dim only."""

    def product(y: Symbol) -> Symbol:
        for axis in sorted(axes, reverse=True):
            y = y.prod(axis, keep)
        return y

    return wrapping(product)(x)


def _norm1(x: Symbol, axes: Axes, keep: bool) -> Symbol:
    return _sum(x.map("abs"), axes, keep)


def _norm2(x: Symbol, axes: Axes, keep: bool) -> Symbol:
    wide = x if x.floating else x.to("float64")
    return wide.reduced("linalg_vector_norm.default", axes, keep).to(x.dtype)


def _log_sum(x: Symbol, axes: Axes, keep: bool) -> Symbol:
    return _sum(x, axes, keep).map("log")


def _log_sum_exp(x: Symbol, axes: Axes, keep: bool) -> Symbol:
    return x.reduced("logsumexp.default", axes, keep)


def _sum_square(x: Symbol, axes: Axes, keep: bool) -> Symbol:
    return _sum(x * x, axes, keep)


def _same(x: Symbol) -> Symbol:
    return x


def _flattened(function: Callable[[Symbol, int], Symbol]) -> Callable[..., Symbol]:
    """A function over one dim, or with `flatten` over all dims from `axis` on.

    Opsets before 13 flatten.
    """

    def call(*, input: Symbol, axis: int = -1, flatten: int = 0) -> Symbol:
        if not flatten:
            return function(input, axis)
        # The dims from `axis` on are one, over which the function runs.
        shape = input.shape
        flat = input.reshape(math.prod(shape[:axis]), math.prod(shape[axis:]))
        return function(flat, 1).reshape(*shape)

    return call


def _argument(x: Symbol, name: str, axis: int, keep: bool) -> Symbol:
    axis %= x.rank
    shape = (*x.shape[:axis], *((1,) if keep else ()), *x.shape[axis + 1 :])
    return x.new(f"{name}.default", shape, "int64", self=x, dim=axis, keepdim=keep or None)


def _hardmax(x: Symbol, axis: int) -> Symbol:
    axis %= x.rank
    places = np.arange(x.shape[axis]).reshape(-1, *[1] * (x.rank - axis - 1))
    return _argument(x, "argmax", axis, True).equals(x.constant(places)).to(x.dtype)


def _place(name: str) -> Callable[..., Symbol]:
    """The place of an extremum; of equal values the first, or the last if so asked."""

    def call(
        *, data: Symbol, axis: int = 0, keepdims: int = 1, select_last_index: int = 0
    ) -> Symbol:
        # Torch returns the first of equal values: the last is the first from the end.
        place = _argument(
            data.flip(axis) if select_last_index else data, name, axis, bool(keepdims)
        )
        return data.shape[axis] - 1 - place if select_last_index else place

    return call


def _scan(name: str, neutral: float) -> Callable[..., Symbol]:
    """A running sum or product; `neutral` is its value before the first element."""

    def call(*, x: Symbol, axis: int, exclusive: int = 0, reverse: int = 0) -> Symbol:
        axis %= x.rank
        y = x.flip(axis) if reverse else x
        given = {} if x.floating else {"dtype": x.dtype}
        y = y.new(f"{name}.default", self=y, dim=axis, **given)
        if exclusive:
            # An exclusive scan starts from the neutral value, and drops the total.
            first = y.cut(axis, 0, 1).map("full_like", fill_value=neutral)
            y = cat((first, y.cut(axis, 0, y.shape[axis] - 1)), axis)
        return y.flip(axis) if reverse else y

    return call


def top_k(
    *, X: Symbol, K: int, axis: int = -1, largest: int = 1, sorted: int = 1
) -> tuple[Symbol, Symbol]:
    """The K largest or smallest values along a dim, and their places.

    Of equal values the first ones are taken.
    """
    # A stable sort, since `topk` takes any of equal values, and others on another device.
    values, indices = X.several(
        "sort.stable",
        [(X.shape, X.dtype), (X.shape, "int64")],
        self=X,
        stable=True,
        dim=axis % X.rank,
        descending=bool(largest) or None,
    )
    return values.cut(axis, 0, K), indices.cut(axis, 0, K)


FUNCTIONS: Mapping[str, Callable[..., Symbol | tuple[Symbol, ...]]] = {
    "ReduceSum": _reduce(_sum, _same),
    "ReduceMean": _reduce(_mean, _same),
    "ReduceProd": _reduce(_product, _same),
    "ReduceMax": _reduce(_extremum("amax"), _same),
    "ReduceMin": _reduce(_extremum("amin"), _same),
    "ReduceL1": _reduce(_norm1, lambda x: x.map("abs")),
    "ReduceL2": _reduce(_norm2, lambda x: x.map("abs")),
    "ReduceLogSum": _reduce(_log_sum, lambda x: x.map("log")),
    "ReduceLogSumExp": _reduce(_log_sum_exp, _same),
    "ReduceSumSquare": _reduce(_sum_square, lambda x: x * x),
    "Softmax": _flattened(lambda x, axis: x.along("softmax.int", axis)),
    "LogSoftmax": _flattened(lambda x, axis: x.along("log_softmax.int", axis)),
    "Hardmax": _flattened(_hardmax),
    "ArgMax": _place("argmax"),
    "ArgMin": _place("argmin"),
    "CumSum": _scan("cumsum", 0),
    "CumProd": _scan("cumprod", 1),
    "TopK": top_k,
}
