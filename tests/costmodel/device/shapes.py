"""Shapes of kernels, one at a time."""

from __future__ import annotations

import numpy as np

from autopar.costmodel.device.products import Product


def product(m: float, n: float, k: float, batch: float = 1.0) -> Product:
    """A matrix product of one shape."""
    return Product(
        batch=np.array([batch]),
        m=np.array([float(m)]),
        n=np.array([float(n)]),
        k=np.array([float(k)]),
    )
