"""Seconds of Mamba-2's scan as the kernels of state-spaces/mamba run it, forward and backward.

Of each chunk of Q rows and each head, with inputs x [Q, e], states [w, e] and, shared by the heads
of a group, keys B and queries C [Q, w], so many kernels run one behind the other:

    forward    sums of the steps | states = B^T x | states passed on over the chunks | CB = C B^T |
               y = [C, CB] [states; x]
    backward   the first four again | dstates = C^T dy | dstates passed back |
               dx = [B, CB^T] [dstates; dy] | dB = x dstates^T | dC = dy states^T | dCB = dy x^T |
               dB += dCB^T C | dC += dCB B | decays from dy x^T | sums back

States and their gradients are written in float32 and passed on in 16 bits, as CB is kept in
float32. A kernel is a batched product that moves its own operands and results once. Source: T. Dao
and A. Gu (arXiv:2405.21060), section 6; state-spaces/mamba, mamba_ssm/ops/triton/ssd_combined.py
(`_mamba_chunk_scan_combined_fwd`, `_mamba_chunk_scan_combined_bwd`). No table has measurements of
them: their rates are those of measured products that are written in Triton, too (`TRITON`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.ir import DTYPE_BYTES
from autopar.sharding.notation import Rule
from autopar.sharding.rules import Call

from .device import Device
from .elementwise import memory_seconds, with_launch
from .kernel_seconds import batched_seconds
from .products import Product

Floats = NDArray[np.float64]

TRITON = "sglang_fused_moe_triton bfloat16"
"""The measured kernel that stands for others written in Triton: products, many at once."""
FORWARD = 5
BACKWARD = 14
"""Kernels of a pass, as listed above."""
BLOCK = 128
"""Rows of a block of a kernel, which walks over a chunk up to its own diagonal."""
SINGLE = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One kernel: its batched product, if it has any, and the bytes that it moves."""

    nbytes: Floats
    product: Product | None = None


class ScanKernels:
    """The local kernels of a scan: arrays [strategies]. `dtype`: that of its operands."""

    def __init__(self, call: Call, rule: Rule, local: Floats, dtype: str, device: Device) -> None:
        self.device = device
        self.dtype = dtype
        size = {letter: np.ones(len(local)) for letter in "btgrwe"}
        size |= {f.name: local[:, i] for i, f in enumerate(rule.factors)}
        narrow = float(DTYPE_BYTES[dtype])
        rows = np.minimum(float(call.integer("chunk_size", default=BLOCK)), size["t"])
        self.rows = rows
        self.width = size["w"]
        self.columns = size["e"]
        self.chunks = size["b"] * size["g"] * np.ceil(size["t"] / rows)
        self.heads = self.chunks * size["r"]
        tokens = size["b"] * size["t"] * size["g"]
        self.x = tokens * size["r"] * size["e"] * narrow
        self.keys = tokens * size["w"] * narrow
        self.steps = tokens * size["r"] * SINGLE
        self.states = self.heads * size["w"] * size["e"] * SINGLE
        self.passed = self.states * (narrow / SINGLE)
        self.scores = self.chunks * rows * rows * SINGLE

    def forward(self) -> Floats:
        return self._seconds(self.ahead())

    def backward(self) -> Floats:
        return self._seconds(self.back())

    def ahead(self) -> tuple[Kernel, ...]:
        """The kernels of a forward pass."""
        return (*self._states(self.passed), self._read())

    def back(self) -> tuple[Kernel, ...]:
        """The kernels of a backward pass."""
        return (*self._states(self.states), *self._gradients())

    def _states(self, written: Floats) -> Iterator[Kernel]:
        """The kernels before the last one of a forward pass; `written`: bytes of passed states."""
        yield Kernel(nbytes=3 * self.steps)
        yield self._outer()
        yield Kernel(nbytes=self.states + written)
        yield self._of_groups(self.rows, self.width)

    def _read(self) -> Kernel:
        """The results, from a chunk's own rows and the state before it."""
        moved = 2 * self.x + self.keys + self.passed + self.scores
        return Kernel(nbytes=moved, product=self._inner(self.columns, self.width + self._seen()))

    def _gradients(self) -> Iterator[Kernel]:
        x = self.x
        states = self.passed
        yield self._outer()
        yield Kernel(nbytes=2 * (self.states + states))
        yield Kernel(
            nbytes=3 * x + self.keys + states + self.scores,
            product=self._inner(self.columns, self.width + self._seen()),
        )
        # Of keys and of queries.
        for _ in range(2):
            yield Kernel(
                nbytes=x + 2 * self.keys + states, product=self._inner(self.width, self.columns)
            )
        # Of scores and of decays.
        for _ in range(2):
            yield Kernel(nbytes=2 * x + self.scores, product=self._inner(self.rows, self.columns))
        for _ in range(2):
            yield self._of_groups(self.width, self.rows)
        yield Kernel(nbytes=4 * self.steps)

    def _seen(self) -> Floats:
        """Rows of a chunk that a block of it reads, on average."""
        return np.asarray((self.rows + np.minimum(self.rows, BLOCK)) / 2)

    def _outer(self) -> Kernel:
        """A product [e, Q] [Q, w] for each head, written as states are."""
        product = Product(batch=self.heads, m=self.columns, n=self.width, k=self.rows)
        return Kernel(nbytes=self.x + self.keys + self.states, product=product)

    def _inner(self, n: Floats, k: Floats) -> Product:
        """A product with the rows of a chunk, for each head."""
        return Product(batch=self.heads, m=self.rows, n=n, k=k)

    def _of_groups(self, n: Floats, k: Floats) -> Kernel:
        """A product of scores with keys or queries, or that makes them, for each group."""
        product = Product(batch=self.chunks, m=self.rows, n=n, k=k)
        return Kernel(nbytes=2 * self.keys + self.scores, product=product)

    def _seconds(self, kernels: tuple[Kernel, ...]) -> Floats:
        return sum((self._kernel(kernel) for kernel in kernels), np.zeros(len(self.x)))

    def _kernel(self, kernel: Kernel) -> Floats:
        if kernel.product is None:
            return with_launch(0.0, memory_seconds(kernel.nbytes, self.device), self.device)
        return batched_seconds(
            kernel.product, TRITON, self.dtype, self.device, nbytes=kernel.nbytes
        )
