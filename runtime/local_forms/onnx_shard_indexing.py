"""Local forms of ONNX operators that read or write at places in split dims.

Pools are among them: ONNX counts the places of their maxima over the whole tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.ir import Ref, Value
from autopar.runtime.operators.functions import function_of
from autopar.runtime.operators.local_call import Cuts, LocalCall
from autopar.runtime.operators.registry import register
from autopar.runtime.ranks.cuts import Cut, shard_of

from .shard_lookup import wrapped_shard_index


def gather(data: Tensor, indices: Tensor, rows: int, cuts: Cuts, axis: int = 0) -> Tensor:
    """`Gather` along a split dim: elements of other shards read as zero."""
    local, inside = wrapped_shard_index(indices, rows, cuts)
    out = function_of("onnx.Gather")(data=data, indices=local, axis=axis)
    behind = data.dim() - 1 - axis % data.dim()
    return torch.where(inside.reshape(*inside.shape, *(1,) * behind), out, 0.0)


def gather_elements(data: Tensor, indices: Tensor, rows: int, cuts: Cuts, axis: int = 0) -> Tensor:
    """`GatherElements` along a split dim: elements of other shards read as zero."""
    local, inside = wrapped_shard_index(indices, rows, cuts)
    out = function_of("onnx.GatherElements")(data=data, indices=local, axis=axis)
    return torch.where(inside, out, 0.0)


def scatter_elements(
    data: Tensor,
    indices: Tensor,
    updates: Tensor,
    rows: int,
    cuts: Cuts,
    axis: int = 0,
    reduction: str = "none",
) -> Tensor:
    """`ScatterElements` along a split dim.

    Elements of other shards go to a row past the end, which is cut off.
    """
    local, inside = wrapped_shard_index(indices, rows, cuts)
    own = data.shape[axis]
    wide = torch.cat((data, torch.zeros_like(data.narrow(axis, 0, 1))), dim=axis)
    places = torch.where(inside, local, own)
    out = function_of("onnx.ScatterElements")(
        data=wide, indices=places, updates=updates, axis=axis, reduction=reduction
    )
    return out.narrow(axis, 0, own)  # type: ignore[no-any-return]


def max_pool(
    X: Tensor, planes: Sequence[int], cuts: Cuts, **attributes: Any
) -> tuple[Tensor, Tensor]:
    """`MaxPool` with the places of the maxima.

    They are counted over all planes (samples and channels) of the whole tensor.
    """
    y, places = function_of("onnx.MaxPool")(X=X, **attributes)
    numbers = torch.arange(math.prod(planes), device=X.device).reshape(tuple(planes))
    number = shard_of(numbers, [Cut(*cut) for cut in cuts])
    size = math.prod(X.shape[2:])
    return y, places % size + number.reshape(*number.shape, *(1,) * (X.dim() - 2)) * size


def max_unpool(
    X: Tensor,
    I: Tensor,  # noqa: E741 - the name that ONNX gives it
    planes: Sequence[int],
    cuts: Cuts,
    **attributes: Any,
) -> Tensor:
    """`MaxUnpool` with places counted over all planes of the whole tensor."""
    count = len(attributes["kernel_shape"])
    steps = attributes.get("strides") or (1,) * count
    pads = attributes.get("pads") or (0,) * (2 * count)
    kernels = attributes["kernel_shape"]
    windows = zip(X.shape[2:], steps, kernels, pads[:count], pads[count:], strict=True)
    size = math.prod(
        (n - 1) * step + kernel - before - after for n, step, kernel, before, after in windows
    )
    # Every value stays in its own plane: its place in the plane and the plane's place here.
    number = torch.arange(X.shape[0] * X.shape[1], device=X.device)
    number = number.reshape(*X.shape[:2], *(1,) * count)
    out: Tensor = function_of("onnx.MaxUnpool")(X=X, I=I % size + number * size, **attributes)
    return out


def _rows(call: LocalCall) -> Mapping[str, Value] | None:
    """The size of the indexed dim and the place of this rank's shard, if it is split."""
    data = call.operator.attributes["data"]
    axis = call.operator.attributes.get("axis", 0)
    assert isinstance(data, Ref) and isinstance(axis, int)
    shape = call.inputs[data.index].shape
    axis %= max(len(shape), 1)
    cuts = tuple(
        tuple(cut) for cut in call.cuts(call.decision.inputs[data.index]) if cut.dim == axis
    )
    return {"rows": shape[axis], "cuts": cuts} if cuts else None


def _planes(call: LocalCall) -> Mapping[str, Value] | None:
    """The numbers of samples and channels, and this rank's place in them, where they count."""
    cuts = tuple(tuple(cut) for cut in call.cuts(call.decision.inputs[0]))
    # A pool gives places as its second output, an unpool takes them as its second input.
    counted = len(call.inputs) + len(call.outputs) > 2
    return {"planes": call.inputs[0].shape[:2], "cuts": cuts} if cuts and counted else None


register("onnx.Gather", knows=_rows, local=gather)
register("onnx.GatherElements", knows=_rows, local=gather_elements)
register("onnx.ScatterElements", knows=_rows, local=scatter_elements)
register("onnx.MaxPool", knows=_planes, local=max_pool)
register("onnx.MaxUnpool", knows=_planes, local=max_unpool)
