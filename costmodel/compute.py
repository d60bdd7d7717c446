"""The roofline: an operator takes as long as its arithmetic or its traffic with memory, whichever is longer, and a launch.

    time     = max(flops / (peak(dtype) * fraction), bytes / (memory_bandwidth * memory_fraction)) + launch
    fraction = matmul_fraction * d / (d + half_size)

with d the smallest dimension of the *local* matrix product: where one dimension is small, tiles of the library's kernels are partly empty
and operands are read again for little work; d = half_size leaves half of what large products reach. An operator that is no contraction has
no d, and fraction = matmul_fraction (its bytes bound it). One without arithmetic and bytes (a view) launches nothing and takes no time.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .cluster import Device


def contraction_fraction(smallest: ArrayLike, device: Device) -> NDArray[np.float64]:
    """The fraction of the peak that a matrix product with this smallest local dimension reaches.

    >>> from autopar.costmodel import load_cluster
    >>> device = load_cluster("dgx-h100").device
    >>> [round(float(contraction_fraction(d, device)), 2) for d in (16, 128, 1024, 8192)]
    [0.09, 0.4, 0.71, 0.79]
    """
    size = np.maximum(np.asarray(smallest, dtype=np.float64), 1.0)
    return np.asarray(device.matmul_fraction * size / (size + device.half_size), dtype=np.float64)


def operator_time(
    flops: ArrayLike, nbytes: ArrayLike, dtype: str, device: Device, *, smallest: ArrayLike | None = None, launch: bool = True
) -> NDArray[np.float64]:
    """Seconds of operators with local `flops` and `nbytes` (read and written), for arrays element by element.

    `smallest`: the smallest local dimension, for contractions. `launch=False`: the operator is fused into another, which launches.
    """
    work = np.asarray(flops, dtype=np.float64)
    moved = np.asarray(nbytes, dtype=np.float64)
    fraction = device.matmul_fraction if smallest is None else contraction_fraction(smallest, device)
    busy = np.maximum(work / (device.flops(dtype) * fraction), moved / (device.memory_bandwidth * device.memory_fraction))
    return np.asarray(np.where(busy > 0, busy + (device.launch if launch else 0.0), 0.0), dtype=np.float64)
