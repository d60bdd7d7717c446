"""Normalisations with mean and variance over split dims: batch norm, and group norm over space.

Every rank takes the mean m_i and the sum of squared differences q_i of its n elements; of p ranks
together

    m = sum_i m_i / p,   q = sum_i q_i + n · sum_i (m_i - m)²,   variance = q / (p n)

(Chan, Golub and LeVeque 1979), which is as exact as two passes over the whole. Backward two sums
for each mean are all-reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from autopar.ir import Value
from autopar.runtime.operators.local_call import LocalCall
from autopar.runtime.operators.registry import register
from autopar.runtime.ranks.collectives import all_gather, all_reduce
from autopar.runtime.ranks.device_groups import AxisGroup

Groups = Sequence[AxisGroup]


class _Normalise(torch.autograd.Function):
    """The value (x - mean) / sqrt(variance + eps) · weight + bias per channel (dim 1).

    The statistics are over all ranks.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: Groups, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        # Mean and variance have a gradient only where someone uses them: zeros would cost a pass.
        ctx.set_materialize_grads(False)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        dims = [dim for dim in range(x.dim()) if dim != 1]
        count = x.numel() // x.shape[1]
        mean = wide.mean(dims)
        # From the mean of this rank: a sum of plain squares loses the variance of large values.
        squares = (wide - _along(mean, x)).square_().sum(dims)
        for group in groups:
            # Means and squares go in one message; axis after axis, each with larger counts.
            ranks = all_gather(torch.stack([mean, squares]).unsqueeze(0), 0, 1, group)
            mean = ranks[:, 0].mean(0)
            squares = ranks[:, 1].sum(0) + count * (ranks[:, 0] - mean).square().sum(0)
            count *= group.size
        variance = squares / count
        scale = torch.rsqrt(variance + eps)
        y = (wide - _along(mean, x)) * _along(scale if weight is None else scale * weight, x)
        if bias is not None:
            y = y + _along(bias, x)
        ctx.groups = groups
        ctx.count = count
        ctx.biased = bias is not None
        ctx.save_for_backward(x, weight, mean, scale)
        # What follows may draw in the order of memory, which is that of torch's own batch norm.
        y = y.contiguous(memory_format=suggest_memory_format(x))
        return y.to(x.dtype), mean, variance

    @staticmethod
    def backward(
        ctx: Any, *gradients: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        gradient, of_mean, of_variance = gradients
        x, weight, mean, scale = ctx.saved_tensors
        dims = [dim for dim in range(x.dim()) if dim != 1]
        centred = x.to(mean.dtype) - _along(mean, x)
        gradient = torch.zeros_like(centred) if gradient is None else gradient.to(mean.dtype)
        sums = torch.stack([gradient.sum(dims), (gradient * centred).sum(dims)])
        of_bias = sums[0].to(x.dtype if weight is None else weight.dtype) if ctx.biased else None
        of_weight = None if weight is None else (sums[1] * scale).to(weight.dtype)
        # The first layer's input needs no gradient, and then nothing is communicated; gradients of
        # weight and bias are this rank's shares.
        if not ctx.needs_input_grad[0]:
            return None, of_weight, of_bias, None, None
        for group in reversed(ctx.groups):
            sums = all_reduce(sums, group)
        factor = scale if weight is None else scale * weight
        plain = -factor * sums[0]
        tilt = -factor * scale.square() * sums[1]
        if of_mean is not None:
            plain = plain + of_mean
        if of_variance is not None:
            tilt = tilt + 2 * of_variance
        back = (
            gradient * _along(factor, x)
            + _along(plain / ctx.count, x)
            + centred * _along(tilt / ctx.count, x)
        )
        return back.to(x.dtype), of_weight, of_bias, None, None


def _along(vector: Tensor, x: Tensor) -> Tensor:
    """A value for each channel, broadcast over all other dims."""
    return vector.reshape(1, -1, *(1,) * (x.dim() - 2))


def _normalised(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: Groups, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The values, and the mean and variance (without Bessel's correction) over all ranks."""
    out: tuple[Tensor, Tensor, Tensor] = _Normalise.apply(  # type: ignore[no-untyped-call]
        x, weight, bias, groups, eps
    )
    return out


def _elements(x: Tensor, groups: Groups) -> int:
    """The number of elements over which a channel's mean is taken, on all ranks."""
    count = x.numel() // x.shape[1]
    for group in groups:
        count *= group.size
    return count


def _running(old: Tensor, new: Tensor, momentum: float) -> Tensor:
    """A running statistic after one more batch."""
    return (old * (1 - momentum) + new.detach() * momentum).to(old.dtype)


def batch_norm(
    input: Tensor,
    groups: Groups,
    training: bool,
    momentum: float,
    eps: float,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    cudnn_enabled: bool = False,
) -> Tensor:
    """Batch norm with the batch's statistics.

    The running ones are updated in place, alike on every rank.
    """
    assert training
    y, mean, variance = _normalised(input, weight, bias, groups, eps)
    if running_mean is not None and running_var is not None:
        count = _elements(input, groups)
        running_mean.copy_(_running(running_mean, mean, momentum))
        running_var.copy_(_running(running_var, variance * (count / (count - 1)), momentum))
    return y


def functional_batch_norm(
    input: Tensor,
    groups: Groups,
    training: bool,
    momentum: float,
    eps: float,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """As `batch_norm`, also with the mean and the inverse deviation.

    Behind these it returns the new running statistics, where there are any.
    """
    assert training
    y, mean, variance = _normalised(input, weight, bias, groups, eps)
    results = (y, mean.detach(), torch.rsqrt(variance.detach() + eps))
    if running_mean is None or running_var is None:
        return results
    count = _elements(input, groups)
    # The running variance is an estimate, with Bessel's correction; the batch's own has none.
    unbiased = variance * (count / (count - 1))
    new_mean = _running(running_mean, mean, momentum)
    return *results, new_mean, _running(running_var, unbiased, momentum)


def group_norm(
    input: Tensor,
    groups: Groups,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    """Each group of channels of each image by its own statistics.

    This is a batch norm in which every such group is a channel.
    """
    channels = input.reshape(1, input.shape[0] * num_groups, -1)
    y, _, _ = _normalised(channels, None, None, groups, eps)
    y = y.reshape(input.shape)
    if weight is not None:
        y = y * _along(_each_channel(weight, input), input)
    return y if bias is None else y + _along(_each_channel(bias, input), input)


def _each_channel(vector: Tensor, x: Tensor) -> Tensor:
    """Scales by channel, where ONNX may give them by group."""
    if vector.numel() == x.shape[1]:
        return vector
    return vector.repeat_interleave(x.shape[1] // vector.numel())


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "aten.batch_norm.default": batch_norm,
    "aten._native_batch_norm_legit_functional.default": functional_batch_norm,
    "aten._native_batch_norm_legit.no_stats": functional_batch_norm,
    "aten.group_norm.default": group_norm,
}


def split_statistics(
    call: LocalCall, group: AxisGroup
) -> tuple[Callable[..., Any], Mapping[str, Value]]:
    """The local form for all the axes on which something that the statistics run over is split."""
    options = enumerate(call.decision.options)
    axes = sorted(
        (o.factor, axis)
        for axis, o in options
        if o.communication == "statistics" and call.mesh[axis] > 1
    )
    return FUNCTIONS[call.operator.kind], {"groups": tuple(call.groups[axis] for _, axis in axes)}


register("statistics", talks=split_statistics)
