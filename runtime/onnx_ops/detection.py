"""Operators of object detection: choosing boxes, sampling regions and deformed windows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

Tensor = torch.Tensor
Sizes = tuple[int, ...]


def _between(images: Tensor, y: Tensor, x: Tensor) -> Tensor:
    """Every image (n, c, h, w) at places (n, p) between its pixels, interpolated; zero outside."""
    height, width = images.shape[2:]
    flat = images.flatten(2)
    total = torch.zeros((), dtype=images.dtype, device=images.device)
    for down in (0, 1):
        for right in (0, 1):
            # The corner is fixed; the gradient of a place flows through the weights alone.
            row = y.detach().floor() + down
            column = x.detach().floor() + right
            weight = (1 - (y - row).abs()) * (1 - (x - column).abs())
            weight = weight * ((row >= 0) & (row < height) & (column >= 0) & (column < width))
            # Places outside read a pixel of the border, which their weight of zero takes away.
            inner_row = row.clamp(0, height - 1).to(torch.int64)
            inner_column = column.clamp(0, width - 1).to(torch.int64)
            index = (inner_row * width + inner_column).unsqueeze(1)
            corner = torch.gather(flat, 2, index.expand(-1, flat.shape[1], -1))
            total = total + corner * weight.unsqueeze(1)
    return total


def _along(vector: Tensor, dim: int) -> Tensor:
    """A vector along one of four dims, of size 1 along the others."""
    return vector.reshape([-1 if i == dim else 1 for i in range(4)])


def deformable_convolution(
    *,
    X: Tensor,
    W: Tensor,
    offset: Tensor,
    B: Tensor | None = None,
    mask: Tensor | None = None,
    dilations: Sizes | None = None,
    group: int = 1,
    kernel_shape: Sizes | None = None,
    offset_group: int = 1,
    pads: Sizes | None = None,
    strides: Sizes | None = None,
    auto_pad: str = "NOTSET",
) -> Tensor:
    """A 2-D convolution whose taps are moved by offsets, and weighted by a mask if there is one.

    Taps between pixels are interpolated.
    """
    n, channels, *sizes = X.shape
    kernel = W.shape[2:]
    strides = strides or (1, 1)
    dilations = dilations or (1, 1)
    pads = pads or (0, 0, 0, 0)
    out = offset.shape[2:]
    taps = math.prod(kernel)
    moved = offset.reshape(n * offset_group, *kernel, 2, *out)
    places = []
    for axis in range(2):
        steps = torch.arange(out[axis], dtype=X.dtype, device=X.device)
        corner = steps * strides[axis] - pads[axis]
        tap = torch.arange(kernel[axis], dtype=X.dtype, device=X.device) * dilations[axis]
        # Dims: taps down, taps across, rows of the result, its columns.
        base = _along(tap, axis) + _along(corner, 2 + axis)
        places.append((moved[:, :, :, axis] + base).reshape(n * offset_group, -1))
    # Channels that share their offsets are one image each.
    images = X.reshape(n * offset_group, channels // offset_group, *sizes)
    picked = _between(images, places[0], places[1])
    picked = picked.reshape(n, offset_group, -1, taps, *out)
    if mask is not None:
        picked = picked * mask.reshape(n, offset_group, 1, taps, *out)
    columns = picked.reshape(n, group, channels // group * taps, math.prod(out))
    y = torch.matmul(W.reshape(group, W.shape[0] // group, -1), columns)
    y = y.reshape(n, W.shape[0], *out)
    return y if B is None else y + B.reshape(1, -1, 1, 1)


def _samples(
    start: Tensor, extent: Tensor, bins: int, count: int, size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The two pixels that every sample lies between along one dim, and their weights.

    A sample beyond the image has weights of zero.
    """
    index = torch.arange(bins * count, dtype=start.dtype, device=start.device)
    place = start + (index + 0.5) * (extent / bins / count)
    inside = (place >= -1) & (place <= size)
    place = place.clamp(min=0)
    # The last pixel has no next one: a sample there takes it alone.
    low = place.floor().clamp(max=size - 1)
    part = torch.where(low >= size - 1, torch.zeros_like(place), place - low)
    low = low.to(torch.int64)
    return low, (low + 1).clamp(max=size - 1), (1 - part) * inside, part * inside


def region_align(
    *,
    X: Tensor,
    rois: Tensor,
    batch_indices: Tensor,
    coordinate_transformation_mode: str = "half_pixel",
    mode: str = "avg",
    output_height: int = 1,
    output_width: int = 1,
    sampling_ratio: int = 0,
    spatial_scale: float = 1.0,
) -> Tensor:
    """The regions of images divided into bins, each with the mean of the samples in it.

    Under the mode "max" a bin has the largest weighted pixel instead, as ONNX defines it.
    """
    half = coordinate_transformation_mode == "half_pixel"
    bins = (output_height, output_width)
    regions = rois * spatial_scale - (0.5 if half else 0.0)
    aligned = []
    for region, image in zip(regions, batch_indices.tolist(), strict=True):
        axes = []
        for axis in range(2):
            start = region[1 - axis]
            extent = region[3 - axis] - region[1 - axis]
            extent = extent if half else extent.clamp(min=1)
            # Without a ratio a bin has a sample a pixel, so the count depends on the region.
            count = sampling_ratio if sampling_ratio > 0 else math.ceil(extent.item() / bins[axis])
            samples = _samples(start, extent, bins[axis], max(count, 0), X.shape[2 + axis])
            axes.append((samples, count))
        (top, bottom, up, down), rows = axes[0]
        (left, right, before, after), columns = axes[1]
        corners = [
            X[image].index_select(1, y).index_select(2, x) * (wy.unsqueeze(1) * wx)
            for y, wy in ((top, up), (bottom, down))
            for x, wx in ((left, before), (right, after))
        ]
        parts = torch.stack(corners).reshape(4, X.shape[1], bins[0], rows, bins[1], columns)
        aligned.append(parts.sum(0).mean((2, 4)) if mode == "avg" else parts.amax((0, 3, 5)))
    return torch.stack(aligned).to(X.dtype)


def _overlaps(boxes: Tensor, centred: int) -> Tensor:
    """The intersection over the union of every pair of boxes."""
    first = boxes[:, :2]
    second = boxes[:, 2:]
    if centred:
        # A box is its centre and its size.
        low = first - second / 2
        high = first + second / 2
    else:
        # A box is two opposite corners, in any order.
        low = torch.minimum(first, second)
        high = torch.maximum(first, second)
    extent = torch.minimum(high.unsqueeze(1), high) - torch.maximum(low.unsqueeze(1), low)
    shared = extent.clamp(min=0).prod(-1)
    area = (high - low).prod(-1)
    union = area.unsqueeze(1) + area - shared
    return torch.where((shared > 0) & (union > 0), shared / union, torch.zeros_like(shared))


def _number(value: Tensor | float | None, default: float) -> float:
    if isinstance(value, torch.Tensor):
        return float(value.reshape(-1)[0])
    return default if value is None else value


def non_max_suppression(
    *,
    boxes: Tensor,
    scores: Tensor,
    max_output_boxes_per_class: Tensor | int | None = None,
    iou_threshold: Tensor | float | None = None,
    score_threshold: Tensor | float | None = None,
    center_point_box: int = 0,
) -> Tensor:
    """Rows of sample, class and box: the boxes of the highest scores.

    A box is left out where it overlaps an earlier one of its class by more than the threshold.
    """
    most = int(_number(max_output_boxes_per_class, 0))
    threshold = _number(iou_threshold, 0.0)
    lowest = _number(score_threshold, -math.inf)
    rows: list[tuple[int, int, int]] = []
    for sample in range(boxes.shape[0]):
        close = _overlaps(boxes[sample], center_point_box) > threshold
        for label in range(scores.shape[1]):
            # Stable: of boxes with equal scores the first is taken, on any device.
            values, order = torch.sort(scores[sample, label], descending=True, stable=True)
            chosen: list[int] = []
            for box in order[values > lowest].tolist():
                if len(chosen) >= most:
                    break
                if not bool(close[box, chosen].any()):
                    chosen.append(box)
            rows += [(sample, label, box) for box in chosen]
    return torch.tensor(rows, dtype=torch.int64, device=boxes.device).reshape(-1, 3)


FUNCTIONS: Mapping[str, Callable[..., Tensor]] = {
    "DeformConv": deformable_convolution,
    "RoiAlign": region_align,
    "NonMaxSuppression": non_max_suppression,
}
