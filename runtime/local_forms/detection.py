"""Operators of object detection that loop over values: boxes chosen, and regions sampled."""

from __future__ import annotations

import math

import torch

from autopar.runtime.operators.registry import register

Tensor = torch.Tensor


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


register("autopar.region_align", function=region_align)
register("autopar.non_max_suppression", function=non_max_suppression)
