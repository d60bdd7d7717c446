"""Normalisations by the mean and variance, or a norm, of some dims."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F

from .dtypes import wide

Tensor = torch.Tensor


def layer_normalization(
    *,
    X: Tensor,
    Scale: Tensor,
    B: Tensor | None = None,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise over the dims from `axis` on, then scale.

    Also returns the mean and the inverse deviation.
    """
    dims = tuple(range(axis % X.dim(), X.dim()))
    # Statistics of half precision lose digits over long rows.
    x = X.to(wide(X, stash_type))
    mean = x.mean(dims, keepdim=True)
    centred = x - mean
    inverse = torch.rsqrt((centred * centred).mean(dims, keepdim=True) + epsilon)
    y = (centred * inverse).to(X.dtype) * Scale
    return (y if B is None else y + B), mean, inverse


def rms_normalization(
    *, X: Tensor, scale: Tensor, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> Tensor:
    """Scaled values of unit mean square over the dims from `axis` on."""
    dims = tuple(range(axis % X.dim(), X.dim()))
    x = X.to(wide(X, stash_type))
    return (x * torch.rsqrt((x * x).mean(dims, keepdim=True) + epsilon)).to(X.dtype) * scale


def _per_channel(vector: Tensor, like: Tensor) -> Tensor:
    """A value for each channel, broadcast over all other dims."""
    return vector.reshape(1, -1, *([1] * (like.dim() - 2)))


def batch_normalization(
    *,
    X: Tensor,
    scale: Tensor,
    B: Tensor,
    input_mean: Tensor,
    input_var: Tensor,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    training_mode: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise each channel by the running statistics, or while training by the batch's own.

    Also returns the new running mean and variance.
    """
    mean = input_mean
    variance = input_var
    if training_mode:
        dims = tuple(i for i in range(X.dim()) if i != 1)
        mean = X.mean(dims)
        variance = X.var(dims, correction=0)
    inverse = torch.rsqrt(variance + epsilon) * scale
    y = (X - _per_channel(mean, X)) * _per_channel(inverse, X) + _per_channel(B, X)
    running = (
        input_mean * momentum + mean * (1 - momentum),
        input_var * momentum + variance * (1 - momentum),
    )
    return (y.to(X.dtype), *running) if training_mode else (y.to(X.dtype), input_mean, input_var)


def instance_normalization(
    *, input: Tensor, scale: Tensor, B: Tensor, epsilon: float = 1e-5
) -> Tensor:
    """Normalise each channel of each sample."""
    dims = tuple(range(2, input.dim()))
    x = input.to(wide(input))
    centred = x - x.mean(dims, keepdim=True)
    normal = centred * torch.rsqrt((centred * centred).mean(dims, keepdim=True) + epsilon)
    return normal.to(input.dtype) * _per_channel(scale, input) + _per_channel(B, input)


def group_normalization(
    *,
    X: Tensor,
    scale: Tensor,
    bias: Tensor,
    num_groups: int,
    epsilon: float = 1e-5,
    stash_type: int = 1,
) -> Tensor:
    """Normalise each group of channels of each sample.

    Opset 18 scales by group, later opsets by channel.
    """
    x = X.to(wide(X, stash_type)).reshape(X.shape[0], num_groups, -1)
    centred = x - x.mean(-1, keepdim=True)
    variance = (centred * centred).mean(-1, keepdim=True)
    normal = (centred * torch.rsqrt(variance + epsilon)).reshape(X.shape).to(X.dtype)
    if scale.numel() != X.shape[1]:
        repeats = X.shape[1] // scale.numel()
        scale = scale.repeat_interleave(repeats)
        bias = bias.repeat_interleave(repeats)
    return normal * _per_channel(scale, X) + _per_channel(bias, X)


def local_response_normalization(
    *, X: Tensor, size: int, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0
) -> Tensor:
    """Divide by a power of the mean square of the neighbouring channels."""
    # An even window has its longer half behind, as the operator's formula rounds.
    squares = F.pad(X * X, [0, 0] * (X.dim() - 2) + [(size - 1) // 2, size // 2])
    total = squares.unfold(1, size, 1).sum(-1)
    return X / (bias + alpha / size * total) ** beta


def lp_normalization(*, input: Tensor, axis: int = -1, p: int = 2) -> Tensor:
    """Divide by the p-norm along a dim; zero where the norm is zero."""
    norm = torch.linalg.vector_norm(input, ord=p, dim=axis, keepdim=True)
    # Divided by zero, a row of zeros would be NaN.
    return torch.where(norm == 0, torch.zeros_like(input), input / norm)


def mean_variance_normalization(*, X: Tensor, axes: tuple[int, ...] = (0, 2, 3)) -> Tensor:
    """Values of zero mean and unit variance over `axes`."""
    centred = X - X.mean(axes, keepdim=True)
    return centred / ((centred * centred).mean(axes, keepdim=True).sqrt() + 1e-9)


FUNCTIONS: Mapping[str, Callable[..., Tensor | tuple[Tensor, ...]]] = {
    "LayerNormalization": layer_normalization,
    "RMSNormalization": rms_normalization,
    "BatchNormalization": batch_normalization,
    "InstanceNormalization": instance_normalization,
    "GroupNormalization": group_normalization,
    "LRN": local_response_normalization,
    "LpNormalization": lp_normalization,
    "MeanVarianceNormalization": mean_variance_normalization,
}
