"""Memory traffic and launches: the roofline of every operator that is no measured product.

    seconds = max(arithmetic, bytes / (memory_bandwidth memory_fraction)) + launch

An optimizer's step reads the same few tensors again and again, so its share of the bandwidth is its
own where it was measured. An operator without arithmetic and bytes (a view) launches nothing and
takes no time.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autopar.ir.recipes import RECIPES

from .device import Device

Floats = NDArray[np.float64]

CAST_TRAFFIC = RECIPES["fp8"].traffic
"""Bytes moved per byte of a 16-bit operand that others cast to 8 bits, as with a scale for each
tensor. Frameworks cast parameters once a step, which is not counted. The casts of plans are those
of their recipe (`Recipe.traffic`), parameters' in every pass.
"""


def memory_seconds(nbytes: ArrayLike, device: Device) -> Floats:
    """Seconds of reading and writing `nbytes` in a stream."""
    return np.asarray(
        np.asarray(nbytes, dtype=np.float64) / (device.memory_bandwidth * device.memory_fraction)
    )


def update_traffic_seconds(nbytes: ArrayLike, device: Device) -> Floats:
    """Seconds in which an optimizer's step reads and writes `nbytes`."""
    fraction = device.memory_fraction if device.update_fraction is None else device.update_fraction
    return np.asarray(np.asarray(nbytes, dtype=np.float64) / (device.memory_bandwidth * fraction))


def with_launch(
    arithmetic: ArrayLike, traffic: ArrayLike, device: Device, *, launches: ArrayLike = 1.0
) -> Floats:
    """Return the roofline: the longer of both, and a kernel's launch where there is work at all."""
    busy = np.maximum(arithmetic, traffic)
    started = device.launch * np.asarray(launches, dtype=np.float64)
    return np.asarray(np.where(busy > 0, busy + started, 0.0), dtype=np.float64)
