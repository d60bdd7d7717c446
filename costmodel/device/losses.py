"""Seconds of cross entropies, with their product or without, under every strategy.

In this project's own runtime a cross entropy with its product takes

    products   = x Wᵀ [n, h] [h, v] forward, and with it those of both gradients
    passes     of each score: read twice as it was multiplied and written in single precision, its
               exponential taken in place, and its chance written; a cap is applied in place, and
               its slope made, kept and applied

and its backward pass scales the gradients (`autopar/torch_operators/linear_cross_entropy.py`).
Other frameworks move the bytes of their kernels for each score (`frameworks.LOSSES`), and make the
gradients in the backward pass.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from autopar.costmodel.cluster.cluster import Cluster
from autopar.costmodel.frameworks import LOSSES, OWN
from autopar.ir import DTYPE_BYTES
from autopar.sharding.notation import Rule
from autopar.sharding.rules import Call

from .elementwise import memory_seconds
from .kernel_seconds import product_seconds
from .products import Product

Floats = NDArray[np.float64]

SINGLE = 4 * 4.0
"""Bytes of a score that are written and read in single precision."""
CAST = 6.0
"""Bytes of a score of 16 bits that is cast to single precision."""
CAPPED = 14 * 4.0
"""Further bytes of a capped one."""


def linear_loss_seconds(
    call: Call, rule: Rule, local: Floats, cluster: Cluster, gradients: frozenset[str]
) -> tuple[Floats, Floats]:
    """Seconds of the forward and of the backward pass, arrays [strategies].

    `local`: sizes of factors, array [strategies, factors].
    """
    device = cluster.device
    size = {factor.name: local[:, place] for place, factor in enumerate(rule.factors)}
    h = size.pop("h")
    v = size.pop("v")
    n = np.prod([np.ones(len(local)), *size.values()], axis=0)
    dtype = call.inputs[0].dtype
    itemsize = float(DTYPE_BYTES[dtype])
    product = Product(batch=np.ones(len(local)), m=n, n=v, k=h)
    forward = product_seconds(product, dtype, device, itemsize=itemsize)
    capped = CAPPED * bool(call.get("cap"))
    sides = [
        (product_seconds(turned, dtype, device, itemsize=itemsize), elements)
        for turned, elements, tensor in zip(
            product.turned(), (n * h, v * h), call.inputs[:2], strict=True
        )
        if tensor.name in gradients
    ]
    products = sum((seconds for seconds, _ in sides), np.zeros(len(local)))
    if cluster.framework.name == OWN:
        passes = memory_seconds((3 * itemsize + SINGLE + capped) * n * v, device)
        scaled = (memory_seconds(2 * itemsize * elements, device) for _, elements in sides)
        return forward + passes + products, sum(scaled, np.zeros(len(local)))
    loss = LOSSES[cluster.framework.habits.loss]
    passes = memory_seconds((loss.forward + capped) * n * v, device)
    return forward + passes, products + memory_seconds(loss.backward * n * v, device)


def loss_seconds(scores: Floats, cluster: Cluster) -> tuple[Floats, Floats]:
    """Seconds of both passes of another framework's cross entropy over so many scores.

    Their cast is an operator of its own, if there is one.
    """
    loss = LOSSES[cluster.framework.habits.loss]
    cast = CAST if loss.wide else 0.0
    forward, backward = (
        memory_seconds(max(nbytes - cast, 0.0) * scores, cluster.device)
        for nbytes in (loss.forward, loss.backward)
    )
    return forward, backward
