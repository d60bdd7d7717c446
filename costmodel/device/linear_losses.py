"""Seconds of a cross entropy with its product under every strategy.

    products   = x Wᵀ [n, h] [h, v] forward, and with it those of both gradients
    passes     of each score: read twice as it was multiplied and written in single precision, its
               exponential taken in place, and its chance written; a cap is applied in place, and
               its slope made, kept and applied

The backward pass scales the gradients (`autopar/torch_operators/linear_cross_entropy.py`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from autopar.ir import DTYPE_BYTES
from autopar.sharding.notation import Rule
from autopar.sharding.rules import Call

from .device import Device
from .elementwise import memory_seconds
from .kernel_seconds import product_seconds
from .products import Product

Floats = NDArray[np.float64]

SINGLE = 4 * 4.0
"""Bytes of a score that are written and read in single precision."""
CAPPED = 14 * 4.0
"""Further bytes of a capped one."""


def linear_loss_seconds(
    call: Call, rule: Rule, local: Floats, device: Device, gradients: frozenset[str]
) -> tuple[Floats, Floats]:
    """Seconds of the forward and of the backward pass, arrays [strategies].

    `local`: sizes of factors, array [strategies, factors].
    """
    size = {factor.name: local[:, place] for place, factor in enumerate(rule.factors)}
    h = size.pop("h")
    v = size.pop("v")
    n = np.prod([np.ones(len(local)), *size.values()], axis=0)
    dtype = call.inputs[0].dtype
    itemsize = float(DTYPE_BYTES[dtype])
    product = Product(batch=np.ones(len(local)), m=n, n=v, k=h)
    forward = product_seconds(product, dtype, device, itemsize=itemsize)
    each = 3 * itemsize + SINGLE + CAPPED * bool(call.get("cap"))
    forward = forward + memory_seconds(each * n * v, device)
    backward = np.zeros(len(local))
    sides = zip(product.turned(), (n * h, v * h), call.inputs[:2], strict=True)
    for turned, elements, tensor in sides:
        if tensor.name in gradients:
            forward = forward + product_seconds(turned, dtype, device, itemsize=itemsize)
            backward = backward + memory_seconds(2 * itemsize * elements, device)
    return forward, backward
