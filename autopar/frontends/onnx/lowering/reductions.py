"""Reductions, softmaxes, scans and sorting."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from .elementwise import signed, truncated
from .symbols import Symbol, cat
from .trace import Asked

Axes = tuple[int, ...]
Reducer = Callable[[Symbol, Axes, bool], Symbol]


def _reduce(function: Reducer, alone: Callable[[Symbol], Symbol]) -> Callable[..., Symbol]:
    """A reduction over `axes`; over none of them each element is reduced `alone`."""

    def call(
        *, data: Symbol, axes: Axes | None = None, keepdims: int = 1, noop_with_empty_axes: int = 0
    ) -> Symbol:
        if not axes:
            axes = () if noop_with_empty_axes else tuple(range(data.rank))
        dims = tuple(sorted({axis % data.rank for axis in axes}))
        return function(data, dims, bool(keepdims)) if dims else alone(data)

    return call


def _sum(x: Symbol, axes: Axes, keep: bool) -> Symbol:
    return signed(lambda y: y.sum(*axes, keep=keep))(x)


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
        return signed(lambda y: y.reduced(f"{name}.default", axes, keep))(x)

    return call


def _product(x: Symbol, axes: Axes, keep: bool) -> Symbol:
    """The product over `axes`, one after another: torch has it for a single dim only."""

    def product(y: Symbol) -> Symbol:
        for axis in sorted(axes, reverse=True):
            y = y.prod(axis, keep)
        return y

    return signed(product)(x)


def _norm2(x: Symbol, axes: Axes, keep: bool) -> Symbol:
    wide = x if x.floating else x.to("float64")
    return wide.reduced("linalg_vector_norm.default", axes, keep).to(x.dtype)


def _same(x: Symbol) -> Symbol:
    return x


def _flattened(function: Callable[[Symbol, int], Symbol]) -> Callable[..., Symbol]:
    """A function over one dim, or before version 13 over all dims from `axis` on."""

    def call(asked: Asked, *, input: Symbol, axis: int = -1) -> Symbol:
        axis %= max(input.rank, 1)
        if asked.version >= 13 or axis == input.rank - 1:
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
    *, X: Symbol, axis: int = -1, largest: int = 1, sorted: int = 1, **count: int
) -> tuple[Symbol, Symbol]:
    """The K largest or smallest values along a dim, and their places.

    Of equal values the first ones are taken.
    """
    (K,) = count.values()
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
    "ReduceL1": _reduce(
        lambda x, axes, keep: _sum(x.map("abs"), axes, keep), lambda x: x.map("abs")
    ),
    "ReduceL2": _reduce(_norm2, lambda x: x.map("abs")),
    "ReduceLogSum": _reduce(
        lambda x, axes, keep: _sum(x, axes, keep).map("log"), lambda x: x.map("log")
    ),
    "ReduceLogSumExp": _reduce(
        lambda x, axes, keep: x.reduced("logsumexp.default", axes, keep), _same
    ),
    "ReduceSumSquare": _reduce(lambda x, axes, keep: _sum(x * x, axes, keep), lambda x: x * x),
    "ArgMax": _place("argmax"),
    "ArgMin": _place("argmin"),
    "CumSum": _scan("cumsum", 0),
    "CumProd": _scan("cumprod", 1),
    "TopK": top_k,
}
ASKING: Mapping[str, Callable[..., Symbol]] = {
    "Softmax": _flattened(lambda x, axis: x.along("softmax.int", axis)),
    "LogSoftmax": _flattened(lambda x, axis: x.along("log_softmax.int", axis)),
    "Hardmax": _flattened(_hardmax),
}
