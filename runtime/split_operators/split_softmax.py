"""Softmax along a split dim.

    y = exp(x - m) / sum exp(x - m),   m = max x

Each row's maximum and sum of exponentials are all-reduced, backward its inner product.
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

SUM = Move("all_reduce")


def _rows(x: Tensor, dim: int, group: AxisGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Scores minus their row's maximum, their exponentials, and the sum of these over the row."""
    # The maximum cancels out of the result, so no gradient flows through it.
    shifted = x - all_reduce(x.detach().amax(dim, keepdim=True), group, "max")
    weights = shifted.exp()
    return shifted, weights, step(weights.sum(dim, keepdim=True), SUM, SUM, group)


def softmax(x: Tensor, dim: int, group: AxisGroup) -> Tensor:
    """As `torch.softmax`."""
    _, weights, total = _rows(x, dim, group)
    return weights / total


def log_softmax(x: Tensor, dim: int, group: AxisGroup) -> Tensor:
    """As `torch.log_softmax`."""
    shifted, _, total = _rows(x, dim, group)
    return shifted - total.log()


def _called(function: Callable[[Tensor, int, AxisGroup], Tensor]) -> Callable[..., Tensor]:
    """The function under the argument names of torch, in single precision at least."""

    def call(*, group: AxisGroup, self: Tensor, dim: int = -1, dtype: str | None = None) -> Tensor:
        result = getattr(torch, dtype) if dtype else self.dtype
        wide = self.to(torch.promote_types(result, torch.float32))
        return function(wide, dim, group).to(result)

    return call


_FUNCTIONS = {"aten.softmax.int": _called(softmax), "aten.log_softmax.int": _called(log_softmax)}


def split_rows(call: LocalCall, group: AxisGroup) -> tuple[Callable[..., Any], Mapping[str, Value]]:
    """The local form of a softmax whose dim is split."""
    return _FUNCTIONS[call.operator.kind], {"group": group}


register("normalize", talks=split_rows)
