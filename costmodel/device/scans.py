"""Seconds of a scan of linear attention or of a state space under every strategy, in chunks.

Of a chunk of Q rows, with keys of width w and values of width e, for each head:

    scores    = q k^T                      [Q, w] [w, Q]
    system    = k k^T, solved for e + w    [Q, w] [w, Q] and [Q, Q] [Q, e + w], of delta rules only
    read      = q S, and of delta rules the same of the solved keys           [Q, w] [w, e]
    inside    = scores u                   [Q, Q] [Q, e]
    update    = k^T u                      [w, Q] [Q, e]

besides one pass over operands and results. The scores of state spaces are those of a group. The
backward pass computes all this again, with two products for each, and moves the bytes twice.
Sources: S. Yang et al. (arXiv:2412.06464), section 3.3, and T. Dao and A. Gu (arXiv:2405.21060),
section 6; kernels: fla-org/flash-linear-attention and state-spaces/mamba, ssd_combined.py. No table
has measurements of them, so they are priced as batched products: assumed.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from autopar.ir import DTYPE_BYTES
from autopar.sharding.notation import Rule, local_elements
from autopar.sharding.rules import Call
from autopar.sharding.rules.recurrent import DELTA_RULE, STATE_SPACE

from .device import Device
from .elementwise import memory_seconds
from .kernel_seconds import product_seconds
from .products import Product

Floats = NDArray[np.float64]

SCANS = frozenset((DELTA_RULE, STATE_SPACE))


class Scan:
    """The local work of a scan: arrays [strategies]. `dtype`: that of its products."""

    def __init__(self, call: Call, rule: Rule, local: Floats, dtype: str, device: Device) -> None:
        self.call = call
        self.device = device
        self.dtype = dtype
        self.sizes = {letter: np.ones(len(local)) for letter in "btgrwe"}
        self.sizes |= {f.name: local[:, i] for i, f in enumerate(rule.factors)}
        self.length = call.outputs[0].shape[1]
        tensors = zip((*call.inputs, *call.outputs), (*rule.inputs, *rule.outputs), strict=True)
        self.moved = sum(
            (local_elements(dims, local) * DTYPE_BYTES[t.dtype] for t, dims in tensors),
            np.zeros(len(local)),
        )

    def products(self) -> Iterator[Product]:
        """The products of a forward pass."""
        size = self.sizes
        rows = np.minimum(float(self.call.integer("chunk_size", default=64)), size["t"])
        chunks = size["b"] * size["g"] * np.ceil(size["t"] / rows)
        # Key groups have several heads of values, each with a state of its own.
        each = chunks * size["r"]
        width = size["w"]
        columns = size["e"]
        if self.call.operator.kind == DELTA_RULE:
            # A shard of the sequence also computes what a state before it becomes, [w, w].
            columns = columns + np.where(size["t"] < self.length, width, 0.0)
        if self.call.operator.kind == DELTA_RULE:
            yield Product(batch=each, m=rows, n=rows, k=width)
            yield Product(batch=each, m=rows, n=rows, k=width)
            # A triangular solve is priced as a product with a matrix of its size.
            yield Product(batch=each, m=rows, n=columns + width, k=rows)
            yield Product(batch=each, m=rows, n=columns, k=width)
        else:
            # Keys and queries of a state space are shared by the heads of a group.
            yield Product(batch=chunks, m=rows, n=rows, k=width)
        yield Product(batch=each, m=rows, n=columns, k=width)
        yield Product(batch=each, m=rows, n=columns, k=rows)
        yield Product(batch=each, m=width, n=columns, k=rows)

    def flops(self) -> Floats:
        """Operations of a forward pass."""
        each = (2 * p.batch * p.m * p.n * p.k for p in self.products())
        return sum(each, np.zeros(len(self.moved)))

    def forward(self) -> Floats:
        return self._products(self.products()) + memory_seconds(self.moved, self.device)

    def backward(self) -> Floats:
        turned = (product for p in self.products() for product in p.turned())
        passes = memory_seconds(2 * self.moved, self.device)
        return self.forward() + self._products(turned) + passes

    def _products(self, products: Iterator[Product]) -> Floats:
        itemsize = float(DTYPE_BYTES[self.dtype])
        seconds = (product_seconds(p, self.dtype, self.device, itemsize=itemsize) for p in products)
        return sum(seconds, np.zeros(len(self.moved)))
