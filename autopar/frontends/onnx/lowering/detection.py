"""Operators of object detection: deformed windows, sampled regions and chosen boxes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .normalization import per_channel
from .symbols import Symbol
from .trace import Asked
from .windows import Windows


def _between(images: Symbol, y: Symbol, x: Symbol) -> Symbol:
    """Every image (n, c, h, w) at places (n, p) between its pixels, interpolated; zero outside."""
    height, width = images.shape[2:]
    flat = images.reshape(*images.shape[:2], height * width)
    total: Symbol | None = None
    for down in (0, 1):
        for right in (0, 1):
            # The corner is fixed; the gradient of a place flows through the weights alone.
            row = y.map("floor") + down
            column = x.map("floor") + right
            weight = (1 - (y - row).map("abs")) * (1 - (x - column).map("abs"))
            inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
            weight = weight * inside.to(weight.dtype)
            # Places outside read a pixel of the border, which their weight of zero takes away.
            inner_row = row.clamp(0, height - 1).to("int64")
            inner_column = column.clamp(0, width - 1).to("int64")
            index = (inner_row * width + inner_column).unsqueeze(1)
            corner = flat.gather(2, index.expand(index.shape[0], flat.shape[1], index.shape[2]))
            part = corner * weight.unsqueeze(1)
            total = part if total is None else total + part
    assert total is not None
    return total


def deformable_convolution(
    *,
    X: Symbol,
    W: Symbol,
    offset: Symbol,
    B: Symbol | None = None,
    mask: Symbol | None = None,
    group: int = 1,
    offset_group: int = 1,
    **options: Any,
) -> Symbol:
    """A 2-D convolution whose taps are moved by offsets, and weighted by a mask if there is one.

    Taps between pixels are interpolated.
    """
    w = Windows(X, W.shape[2:], **options)
    n, channels, *sizes = X.shape
    kernel = w.kernel
    out = offset.shape[2:]
    taps = math.prod(kernel)
    moved = offset.reshape(n * offset_group, *kernel, 2, *out)
    places = []
    for axis in range(2):
        corner = np.arange(out[axis]) * w.strides[axis] - w.before[axis]
        tap = np.arange(kernel[axis]) * w.dilations[axis]
        # Dims: taps down, taps across, rows of the result, its columns.
        base = np.expand_dims(tap, [d for d in range(4) if d != axis])
        base = base + np.expand_dims(corner, [d for d in range(4) if d != 2 + axis])
        steps = X.constant(base.astype(np.float32)).to(X.dtype)
        places.append((moved.select(3, axis) + steps).reshape(n * offset_group, -1))
    # Channels that share their offsets are one image each.
    images = X.reshape(n * offset_group, channels // offset_group, *sizes)
    picked = _between(images, places[0], places[1])
    picked = picked.reshape(n, offset_group, -1, taps, *out)
    if mask is not None:
        picked = picked * mask.reshape(n, offset_group, 1, taps, *out)
    columns = picked.reshape(n, group, channels // group * taps, math.prod(out))
    y = W.reshape(group, W.shape[0] // group, -1) @ columns
    y = y.reshape(n, W.shape[0], *out)
    return y if B is None else y + per_channel(B, y)


def region_align(asked: Asked, *, X: Symbol, **arguments: object) -> Symbol:
    """The regions of images divided into bins, each with the mean of the samples in it."""
    if asked.version < 16:
        arguments["coordinate_transformation_mode"] = "output_half_pixel"
    return X.new("autopar.region_align", asked.shape, X=X, **arguments)


def non_max_suppression(asked: Asked, *, boxes: Symbol, **arguments: object) -> Symbol:
    """Rows of sample, class and box: the boxes of the highest scores."""
    shape = asked.shape
    return boxes.new("autopar.non_max_suppression", shape, "int64", boxes=boxes, **arguments)


FUNCTIONS: Mapping[str, Callable[..., Symbol]] = {"DeformConv": deformable_convolution}
ASKING: Mapping[str, Callable[..., Symbol]] = {
    "RoiAlign": region_align,
    "NonMaxSuppression": non_max_suppression,
}
