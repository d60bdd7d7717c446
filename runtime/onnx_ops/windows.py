"""Convolutions, pools and other operators over neighbourhoods."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from .dtypes import float_limits

Tensor = torch.Tensor
Sizes = tuple[int, ...]
_CONVOLUTIONS: Mapping[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED: Mapping[int, Callable[..., Tensor]] = {
    1: F.conv_transpose1d,
    2: F.conv_transpose2d,
    3: F.conv_transpose3d,
}
_POOLS: Mapping[int, Callable[..., Any]] = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}


def _spatial(pads: Sizes | None, count: int) -> tuple[Sizes, Sizes]:
    """Padding before and after every spatial dim."""
    pads = pads or (0,) * (2 * count)
    return tuple(pads[:count]), tuple(pads[count:])


def _padded(x: Tensor, before: Sizes, after: Sizes, value: float = 0.0) -> Tensor:
    """The tensor grown (or, where negative, cropped) at the ends of its spatial dims."""
    flat = [
        amount for pair in zip(reversed(before), reversed(after), strict=True) for amount in pair
    ]
    return F.pad(x, flat, value=value) if any(flat) else x


def convolution(
    *,
    X: Tensor,
    W: Tensor,
    B: Tensor | None = None,
    group: int = 1,
    pads: Sizes | None = None,
    strides: Sizes | None = None,
    dilations: Sizes | None = None,
    kernel_shape: Sizes | None = None,
    auto_pad: str = "NOTSET",
) -> Tensor:
    """A convolution over one, two or three spatial dims."""
    count = X.dim() - 2
    # ONNX lists all starts, then all ends.
    before, after = _spatial(pads, count)
    padding: Sizes = before
    if before != after:
        # Torch's convolutions pad both ends alike.
        X = _padded(X, before, after)
        padding = (0,) * count
    return _CONVOLUTIONS[count](X, W, B, strides or 1, padding, dilations or 1, group)


def transposed_convolution(
    *,
    X: Tensor,
    W: Tensor,
    B: Tensor | None = None,
    group: int = 1,
    pads: Sizes | None = None,
    strides: Sizes | None = None,
    dilations: Sizes | None = None,
    output_padding: Sizes | None = None,
    kernel_shape: Sizes | None = None,
    auto_pad: str = "NOTSET",
) -> Tensor:
    """The gradient of a convolution with respect to its input."""
    count = X.dim() - 2
    before, after = _spatial(pads, count)
    extra = output_padding or (0,) * count
    y = _TRANSPOSED[count](X, W, None, strides or 1, 0, 0, group, dilations or 1)
    # Torch crops both ends alike, too: the whole result is computed, then cut.
    grown = tuple(e - a for e, a in zip(extra, after, strict=True))
    y = _padded(y, tuple(-b for b in before), grown)
    return y if B is None else y + B.reshape(1, -1, *([1] * count))


def _pool_sizes(
    size: int, kernel: int, stride: int, dilation: int, before: int, after: int, ceil_mode: int
) -> int:
    """The number of windows along one dim."""
    span = size + before + after - dilation * (kernel - 1) - 1
    steps = math.ceil(span / stride) if ceil_mode else span // stride
    # A last window that would begin in the padding behind does not count.
    if ceil_mode and steps * stride >= size + before:
        steps -= 1
    return steps + 1


def _pool_padding(
    X: Tensor, kernel: Sizes, strides: Sizes, dilations: Sizes, pads: Sizes | None, ceil_mode: int
) -> tuple[Sizes, Sizes]:
    """Padding before, and padding after with which a floor pool gives every output."""
    before, after = _spatial(pads, len(kernel))
    ends = []
    for i, size in enumerate(X.shape[2:]):
        out = _pool_sizes(size, kernel[i], strides[i], dilations[i], before[i], after[i], ceil_mode)
        needed = (out - 1) * strides[i] + dilations[i] * (kernel[i] - 1) + 1
        ends.append(needed - size - before[i])
    return before, tuple(ends)


def max_pool(
    *,
    X: Tensor,
    kernel_shape: Sizes,
    strides: Sizes | None = None,
    pads: Sizes | None = None,
    dilations: Sizes | None = None,
    ceil_mode: int = 0,
    storage_order: int | None = None,
    auto_pad: str = "NOTSET",
) -> Tensor | tuple[Tensor, Tensor]:
    """The largest value of every window, and with `storage_order` its place."""
    count = len(kernel_shape)
    strides = strides or (1,) * count
    dilations = dilations or (1,) * count
    before, after = _pool_padding(X, kernel_shape, strides, dilations, pads, ceil_mode)
    # Torch pools floats only; float64 holds the eight-bit integers that ONNX pools.
    floating = X.is_floating_point()
    x = X if floating else X.to(torch.float64)
    padded = _padded(x, before, after, float_limits(x.dtype)[0])
    if storage_order is None:
        largest: Tensor = _POOLS[count](padded, kernel_shape, strides, 0, dilations)
        return largest.to(X.dtype)
    y, places = _POOLS[count](padded, kernel_shape, strides, 0, dilations, return_indices=True)
    return y.to(X.dtype), _global_indices(places, X, padded, before, storage_order)


def _global_indices(
    places: Tensor, X: Tensor, padded: Tensor, before: Sizes, storage_order: int
) -> Tensor:
    """Places in a padded plane as places in the whole tensor, as ONNX counts them."""
    sizes = X.shape[2:]
    coordinates = []
    for size, front in reversed(list(zip(padded.shape[2:], before, strict=True))):
        coordinates.append(places % size - front)
        places = places // size
    coordinates.reverse()
    flat = torch.zeros_like(places)
    # In column-major order (`storage_order` 1) the first dim runs fastest, else the last one.
    for axis in reversed(range(len(sizes))) if storage_order else range(len(sizes)):
        flat = flat * sizes[axis] + coordinates[axis]
    # Torch counts places in each plane, ONNX over all samples and channels.
    plane = torch.arange(X.shape[0] * X.shape[1], device=X.device).reshape(
        X.shape[0], X.shape[1], *([1] * len(sizes))
    )
    return flat + plane * math.prod(sizes)


def _window_sums(x: Tensor, kernel: Sizes, strides: Sizes, dilations: Sizes) -> Tensor:
    """The sum of every window, channel by channel."""
    # Each channel is a sample of its own: one kernel of ones serves all.
    n, c = x.shape[:2]
    ones = torch.ones(1, 1, *kernel, dtype=x.dtype, device=x.device)
    y = _CONVOLUTIONS[len(kernel)](
        x.reshape(n * c, 1, *x.shape[2:]), ones, None, strides, 0, dilations
    )
    return y.reshape(n, c, *y.shape[2:])


def average_pool(
    *,
    X: Tensor,
    kernel_shape: Sizes,
    strides: Sizes | None = None,
    pads: Sizes | None = None,
    dilations: Sizes | None = None,
    ceil_mode: int = 0,
    count_include_pad: int = 0,
    auto_pad: str = "NOTSET",
) -> Tensor:
    """The mean of every window, with or without the padding."""
    count = len(kernel_shape)
    strides = strides or (1,) * count
    dilations = dilations or (1,) * count
    before, after = _pool_padding(X, kernel_shape, strides, dilations, pads, ceil_mode)
    total = _window_sums(_padded(X, before, after), kernel_shape, strides, dilations)
    # How many places of a window are in the image is the same for all samples and channels.
    inside = torch.ones(1, 1, *X.shape[2:], dtype=X.dtype, device=X.device)
    if count_include_pad:
        # Written padding counts as members of a window; what a ceiled window reaches beyond does
        # not.
        written = _spatial(pads, count)[1]
        inside = _padded(inside, before, written, 1.0)
        missing = tuple(a - w for a, w in zip(after, written, strict=True))
        members = _window_sums(
            _padded(inside, (0,) * count, missing), kernel_shape, strides, dilations
        )
    else:
        members = _window_sums(_padded(inside, before, after), kernel_shape, strides, dilations)
    return total / members


def lp_pool(
    *,
    X: Tensor,
    kernel_shape: Sizes,
    p: int = 2,
    strides: Sizes | None = None,
    pads: Sizes | None = None,
    dilations: Sizes | None = None,
    ceil_mode: int = 0,
    auto_pad: str = "NOTSET",
) -> Tensor:
    """The p-norm of every window."""
    count = len(kernel_shape)
    strides = strides or (1,) * count
    dilations = dilations or (1,) * count
    before, after = _pool_padding(X, kernel_shape, strides, dilations, pads, ceil_mode)
    powers = _padded(X.abs() ** p, before, after)
    return _window_sums(powers, kernel_shape, strides, dilations) ** (1 / p)


def global_average_pool(*, X: Tensor) -> Tensor:
    """The mean over all spatial dims."""
    return X.mean(tuple(range(2, X.dim())), keepdim=True)


def global_max_pool(*, X: Tensor) -> Tensor:
    """The maximum over all spatial dims."""
    return X.amax(tuple(range(2, X.dim())), keepdim=True)


def global_lp_pool(*, X: Tensor, p: int = 2) -> Tensor:
    """The p-norm over all spatial dims."""
    norm: Tensor = torch.linalg.vector_norm(X, ord=p, dim=tuple(range(2, X.dim())), keepdim=True)
    return norm


def max_unpool(
    *,
    X: Tensor,
    I: Tensor,  # noqa: E741 - the name that ONNX gives it
    output_shape: Sizes,
    kernel_shape: Sizes,
    strides: Sizes | None = None,
    pads: Sizes | None = None,
) -> Tensor:
    """Values back at the places that a max pool took them from; zeros elsewhere."""
    count = len(kernel_shape)
    before, after = _spatial(pads, count)
    steps = strides or (1,) * count
    sizes = [
        (n - 1) * s + k - b - a
        for n, s, k, b, a in zip(X.shape[2:], steps, kernel_shape, before, after, strict=True)
    ]
    shape = (*X.shape[:2], *sizes)
    flat = torch.zeros(math.prod(shape), dtype=X.dtype, device=X.device)
    y = flat.scatter(0, I.reshape(-1), X.reshape(-1)).reshape(shape)
    return _padded(
        y, (0,) * count, tuple(o - n for o, n in zip(output_shape[2:], sizes, strict=True))
    )


def columns_to_image(
    *,
    input: Tensor,
    image_shape: Sizes,
    block_shape: Sizes,
    strides: Sizes | None = None,
    pads: Sizes | None = None,
    dilations: Sizes | None = None,
) -> Tensor:
    """Sum overlapping blocks into an image."""
    count = len(image_shape)
    strides = strides or (1,) * count
    dilations = dilations or (1,) * count
    before, after = _spatial(pads, count)
    channels = input.shape[1] // math.prod(block_shape)
    padded = tuple(b + n + a for b, n, a in zip(before, image_shape, after, strict=True))
    # Flat places of (tap, block), grown by one spatial dim at a time.
    place = torch.zeros(1, 1, dtype=torch.int64, device=input.device)
    for n, k, s, d in zip(padded, block_shape, strides, dilations, strict=True):
        starts = torch.arange(0, n - d * (k - 1), s, device=input.device)
        offsets = torch.arange(0, d * k, d, device=input.device)
        grid = offsets.unsqueeze(1) + starts
        place = (place.unsqueeze(1).unsqueeze(3) * n + grid.unsqueeze(0).unsqueeze(2)).reshape(
            place.shape[0] * k, -1
        )
    flat = torch.zeros(
        input.shape[0], channels, math.prod(padded), dtype=input.dtype, device=input.device
    )
    values = input.reshape(input.shape[0], channels, -1)
    image = flat.scatter_add(2, place.reshape(1, 1, -1).expand(values.shape), values).reshape(
        *flat.shape[:2], *padded
    )
    return _padded(image, tuple(-b for b in before), tuple(-a for a in after))


FUNCTIONS: Mapping[str, Callable[..., Tensor | tuple[Tensor, ...]]] = {
    "Conv": convolution,
    "ConvTranspose": transposed_convolution,
    "MaxPool": max_pool,
    "AveragePool": average_pool,
    "LpPool": lp_pool,
    "GlobalAveragePool": global_average_pool,
    "GlobalMaxPool": global_max_pool,
    "GlobalLpPool": global_lp_pool,
    "MaxUnpool": max_unpool,
    "Col2Im": columns_to_image,
}
