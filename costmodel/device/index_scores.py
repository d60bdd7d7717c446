"""Seconds of the scores of sparse attention under every strategy.

    products   = q k^T                       [s h, d] [d, t], of every sample
    passes     scaled, and cut off below 0: read and written twice; weighed: read once

The backward pass computes this again, with two products for each, and moves the bytes twice. All
of it is in single precision, by the operator as it is run (`autopar/torch_operators/`). No
table has measurements of it: assumed.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from autopar.ir import DTYPE_BYTES
from autopar.sharding.notation import Rule

from .device import Device
from .elementwise import memory_seconds
from .kernel_seconds import product_seconds
from .products import Product

Floats = NDArray[np.float64]

DTYPE = "float32"
PASSES = 5
"""How often each product is read or written behind the kernel that makes it."""


def index_scores_seconds(rule: Rule, local: Floats, device: Device) -> tuple[Floats, Floats]:
    """Seconds of the forward and of the backward pass, arrays [strategies].

    `local`: sizes of factors, array [strategies, factors].
    """
    size = {factor.name: local[:, place] for place, factor in enumerate(rule.factors)}
    b, s, h, d, t = (size[name] for name in "bshdt")
    itemsize = float(DTYPE_BYTES[DTYPE])
    product = Product(batch=b, m=s * h, n=t, k=d)
    passes = memory_seconds(PASSES * itemsize * b * s * h * t, device)
    forward = product_seconds(product, DTYPE, device, itemsize=itemsize) + passes
    turned = sum(
        (product_seconds(one, DTYPE, device, itemsize=itemsize) for one in product.turned()),
        2 * passes,
    )
    return forward, forward + turned
