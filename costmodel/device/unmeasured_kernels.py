"""Products and attention of a device without measured kernels, from a few fractions of its peak.

A matrix product [m, k] x [k, n] (a `batch` of them) is computed in tiles by the `units` of a
device, wave after wave, each tile with a prologue as long as `half_size` steps of k (tile and wave
quantisation: NVIDIA, Matrix Multiplication Background User's Guide):

    waves = ceil(batch * ceil(m / tile_m) * ceil(n / tile_n) * s / units)
    flops / fraction = waves * units * tile_m * tile_n * 2 (k / s + half_size) / (matmul_fraction *
    efficiency(tile))

at the best tile and the best split s of k. Where the number of units is not known, the smallest
side d stands for all of this: fraction = matmul_fraction * d / (d + half_size). Attention in one
kernel reaches a fraction of its own, by kernel and direction.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .attention_kernels import standing_for
from .device import Device
from .products import Product

Floats = NDArray[np.float64]

# Rows and columns of a tile, and its share of the largest tile's rate (smaller tiles read operands
# more often). Assumed, after cuBLAS's kernels for half precision.
_TILES = (
    (256, 128, 1.0),
    (128, 256, 1.0),
    (128, 128, 0.95),
    (128, 64, 0.8),
    (64, 128, 0.8),
    (64, 64, 0.6),
    (128, 32, 0.5),
    (32, 128, 0.5),
)
_SPLITS = (1, 2, 4, 8, 16, 32)
# Every tile with every split: rows, columns, efficiency, split.
_WAYS = np.array([(*tile, split) for tile in _TILES for split in _SPLITS], dtype=np.float64).T[
    :, :, None
]


def contraction_fraction(smallest: ArrayLike, device: Device) -> Floats:
    """Return the fraction of the peak of a matrix product with this smallest local dimension.

    It serves where the number of units is not known.

    >>> from autopar.costmodel import load_cluster
    >>> device = load_cluster("local-cpu").device
    >>> [round(float(contraction_fraction(d, device)), 2) for d in (8, 64, 1024)]
    [0.4, 0.71, 0.79]
    """
    size = np.maximum(np.asarray(smallest, dtype=np.float64), 1.0)
    return np.asarray(device.matmul_fraction * size / (size + device.half_size), dtype=np.float64)


def plain_arithmetic(product: Product, dtype: str, device: Device) -> Floats:
    """Seconds of the arithmetic of a matrix product, without traffic and launch."""
    peak = device.flops(dtype)
    batch = product.batch
    m = product.m
    n = product.n
    k = product.k
    if not device.units:
        smallest = np.minimum(np.minimum(m, n), k)
        return np.asarray(
            2 * batch * m * n * k / (peak * contraction_fraction(smallest, device)),
            dtype=np.float64,
        )
    rows, columns, efficiency, split = _WAYS
    waves = np.ceil(batch * np.ceil(m / rows) * np.ceil(n / columns) * split / device.units)
    work = waves * (2 * device.units * rows * columns / efficiency) * (k / split + device.half_size)
    return np.asarray(work.min(axis=0) / (peak * device.matmul_fraction), dtype=np.float64)


def attention_fraction(kernel: str, direction: str, device: Device) -> float:
    """The fraction of the peak of an attention kernel, or of the nearest one of the device.

    A device without any figure of attention reaches the fraction of its products.
    """
    known = [name.partition(".")[0] for name in device.attention if name.endswith(direction)]
    if not known:
        return device.matmul_fraction
    stand_in = standing_for(kernel, known, f"device {device.name!r}")
    return device.attention[f"{stand_in}.{direction}"]


def attention_arithmetic(
    flops: ArrayLike, kernel: str, direction: str, dtype: str, device: Device
) -> Floats:
    """Return the seconds of the arithmetic of attention in one `kernel` (flash1, flash2).

    `direction`: forward or backward.
    """
    return np.asarray(
        np.asarray(flops, dtype=np.float64)
        / (device.flops(dtype) * attention_fraction(kernel, direction, device))
    )
