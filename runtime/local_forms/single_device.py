"""Functions of operator kinds on one device, where torch has none or its own fails on shards."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from autopar.runtime.operators.registry import register
from autopar.sharding.rules.windows import CAUSAL

from .shard_sizes import count, shape_as


def mean_square(x: Tensor, count: int) -> Tensor:
    """The sum of squares over the global number of elements.

    On shards the ranks' results add up to the mean square.
    """
    return (x * x).sum() / count


def add(**addends: Tensor) -> Tensor:
    """The sum of all arguments."""
    return functools.reduce(torch.add, addends.values())


def view(self: Tensor, size: Sequence[int]) -> Tensor:
    """A view, or a copy if a redistribution has changed the strides."""
    return self.reshape(tuple(size))


def copy(self: Tensor, src: Tensor) -> Tensor:
    """The tensor `self` with `src` written over it; torch's own operator has no gradient."""
    return src.to(self.dtype).expand_as(self).clone(memory_format=torch.contiguous_format)


def contiguous(self: Tensor) -> Tensor:
    """The same values in the default layout of memory."""
    return self.contiguous()


def causal_conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] = (1,),
    dilation: Sequence[int] = (1,),
    groups: int = 1,
) -> Tensor:
    """A convolution of each row and the rows before it; zeros lie before the first."""
    reach = (weight.shape[-1] - 1) * dilation[0]
    # Padding both ends takes no copy of the input; the rows behind its own are cut off.
    made = torch.conv1d(input, weight, bias, tuple(stride), (reach,), tuple(dilation), groups)
    return made[..., : input.shape[-1]]


register("autopar.add", function=add)
register(CAUSAL, function=causal_conv1d, sizes=count("groups", 1, 0))
register("autopar.mean_square", function=mean_square)
register("aten.view.default aten._unsafe_view.default", function=view, sizes=shape_as("size"))
register("aten.contiguous.default", function=contiguous)
register("aten.copy.default", function=copy)
