"""Seconds of an operator under every strategy, forward and backward, on its local shapes.

forward    the roofline of its products and of the bytes that it reads and writes
backward   an equally large product for every operand with a gradient; else the bytes of gradients and kept values
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.ir import DTYPE_BYTES, Role, Tensor
from autopar.sharding.candidates import Strategies
from autopar.sharding.communication import visited
from autopar.sharding.notation import local_elements
from autopar.sharding.rules import RULES, Call
from autopar.sharding.rules.experts import EXPERTS
from autopar.sharding.rules.saved_for_backward import Keeps, keeps

from ..cluster.model import Cluster
from . import Device
from .attention import Scores
from .elementwise import memory_seconds, with_launch
from .experts import Layer
from .model import ITEMSIZE, TF32
from .prices import attention_seconds, product_seconds
from .products import Product

Floats = NDArray[np.float64]

CAST_TRAFFIC = 2.5
"""Bytes moved per byte of a 16-bit operand cast to 8 bits: read for its maximum, read again, half written."""
DEFAULT_KERNEL = "flash2"
SOFTMAX = "aten.softmax.int"
NORMS = frozenset(("aten.layer_norm.default", "aten.native_layer_norm.default", "aten.rms_norm.default", "aten._fused_rms_norm.default"))
NORM_BACKWARD = 2.4
"""Slowdown of a norm's backward pass against its traffic, as it sums the gradients of its weights over all rows.

Median over 74 sizes on A100, A10G, L4 and V100, 2.1 to 2.8 (Dazz993/Mist@d69e530a, profiled operators), without the sum
of residual gradients.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSeconds:
    """Arrays [strategies]; `weight` is the part of `backward` that makes the gradients of parameters."""

    forward: Floats
    backward: Floats
    weight: Floats


def operator_parts(
    call: Call,
    strategies: Strategies,
    mesh: Sequence[int],
    cluster: Cluster,
    gradients: frozenset[str],
    inside: frozenset[str] = frozenset(),
) -> OperatorSeconds:
    """Seconds of every strategy of an operator; tensors `inside` a fused chain are neither written nor read."""
    degrees = strategies.degrees(tuple(mesh))
    local = np.array([factor.size for factor in strategies.rule.factors], dtype=np.float64) / degrees
    if call.operator.kind == EXPERTS:
        layer = Layer(call, strategies, mesh, local, cluster.device, gradients)
        return OperatorSeconds(forward=layer.forward(), backward=layer.backward(), weight=layer.weight())
    found = _Operator(call, strategies, local, cluster.device, gradients, inside, strategies.travel_degree(tuple(mesh)))
    rounds = visited(strategies, tuple(mesh))
    return OperatorSeconds(forward=rounds * found.forward(), backward=rounds * found.backward(), weight=rounds * found.weight())


def operator_seconds(
    call: Call, strategies: Strategies, mesh: Sequence[int], cluster: Cluster, gradients: frozenset[str]
) -> tuple[Floats, Floats]:
    """Forward and backward seconds of every strategy of an operator: two arrays [strategies]."""
    parts = operator_parts(call, strategies, mesh, cluster, gradients)
    return parts.forward, parts.backward


class _Operator:
    """The local work of one operator: its products, and the bytes of each of its tensors."""

    def __init__(
        self, call: Call, strategies: Strategies, local: Floats, device: Device, gradients: frozenset[str], inside: frozenset[str],
        come: NDArray[np.int64],
    ) -> None:  # fmt: skip
        self.call, self.rule, self.local, self.device, self.gradients = call, strategies.rule, local, device, gradients
        self.entry = RULES[call.operator.kind]
        self.count, self.come = len(local), come
        self.launches = 0.0 if any(t.name in inside for t in call.outputs) else 1.0
        tensors = (*call.inputs, *call.outputs)
        sizes = (
            np.zeros(self.count) if t.name in inside else local_elements(dims, local) * DTYPE_BYTES[t.dtype]
            for t, dims in zip(tensors, (*self.rule.inputs, *self.rule.outputs), strict=True)
        )
        self.bytes = [np.broadcast_to(size, (self.count,)) for size in sizes]
        self.ins, self.outs = self.bytes[: len(call.inputs)], self.bytes[len(call.inputs) :]
        cast = call.get("compute")
        self.dtype = cast if isinstance(cast, str) else _computed_in(tensors)
        self.is_cast = isinstance(cast, str) and cast != TF32
        # Measured products of narrow operands include making them.
        self.casts = CAST_TRAFFIC if self.is_cast and device.kernels is None else 0.0
        summed = call.get("accumulates", default=0)
        self.summed = float(summed) if isinstance(summed, int) else 0.0
        self.is_attention = len(self.entry.products) > 1
        # A causal softmax writes all of its result, and reads nothing that the mask hides.
        self.seen = 0.5 if call.operator.kind == SOFTMAX and call.get("is_causal") is True else 1.0
        self.product = self._product() if self.entry.products and not self.is_attention else None
        self.trained = any(t.name in gradients for t in call.outputs)
        self.kept = keeps(call, tuple(t.name in gradients for t in call.inputs)) if self.trained else Keeps()

    def forward(self) -> Floats:
        if self.entry.view:
            return np.zeros(self.count)
        if self.is_attention:
            return self._attention("forward")
        looked_up = {f for f, factor in enumerate(self.rule.factors) if factor.special == "masked"}
        # A look-up reads the rows that it gives, not the table.
        read = [size for size, dims in zip(self.ins, self.rule.inputs, strict=True) if self.product or looked_up.isdisjoint(_members(dims))]
        moved = self.seen * sum(read, np.zeros(self.count)) + sum((*self.outs, *self._made()), np.zeros(self.count))
        return self._cast(self.ins) + (self._stream(moved) if self.product is None else self._seconds(self.product, moved))

    def backward(self) -> Floats:
        wanted = [i for i, t in enumerate(self.call.inputs) if t.name in self.gradients]
        if self.entry.view or not self.trained:
            return np.zeros(self.count)
        if self.is_attention:
            return self._attention("backward")
        if self.product is None:
            kept = [*(self.ins[i] for i in self.kept.inputs), *(self.outs[i] for i in self.kept.outputs), *self._made()]
            read = self.seen * sum((*self.outs, *kept), np.zeros(self.count))
            slower = NORM_BACKWARD if self.call.operator.kind in NORMS and self.device.kernels is not None else 1.0
            passes = self.call.get("backward_passes", default=1)
            slower *= passes if isinstance(passes, int) else 1
            return self._stream(slower * (read + sum((self.ins[i] for i in wanted), np.zeros(self.count))))
        left, right = self.product.turned()
        whole = sum(self.bytes, np.zeros(self.count))
        ways = ((self.left, left, whole), (self.right, right, whole + self._sums()))
        seconds = [self._seconds(product, moved) for i, product, moved in ways if i in wanted]
        return sum(seconds, self._cast(self.outs)) if seconds else self._seconds(right, whole)

    def weight(self) -> Floats:
        """The product for a parameter's gradient; an operator on parameters alone counts its whole backward pass."""
        trained = [i for i, t in enumerate(self.call.inputs) if t.role is Role.PARAMETER and t.name in self.gradients]
        if self.product is None or self.right not in trained:
            only = trained and all(self.call.inputs[i].role is Role.PARAMETER for i in range(len(self.ins)) if self.call.inputs[i].is_float)
            return self.backward() if only else np.zeros(self.count)
        return self._seconds(self.product.turned()[1], sum(self.bytes, np.zeros(self.count)) + self._sums())

    def _sums(self) -> Floats:
        """Bytes that a product moves more where it adds its result to a sum of wider elements."""
        own = DTYPE_BYTES[self.call.inputs[self.right].dtype]
        return self.ins[self.right] * ((2 * self.summed - own) / own if self.summed else 0.0)

    def _cast(self, sizes: Sequence[Floats]) -> Floats:
        """Seconds of bringing operands to a narrower type."""
        return memory_seconds(self.casts * sum(sizes, np.zeros(self.count)), self.device)

    def _made(self) -> list[Floats]:
        """Bytes of buffers that the kernel keeps besides its tensors (masks, statistics)."""
        found = []
        for made in self.kept.made:
            tensors, sizes = (self.call.outputs, self.outs) if made.output else (self.call.inputs, self.ins)
            found.append(sizes[made.position] * (made.nbytes / DTYPE_BYTES[tensors[made.position].dtype]))
        return found

    def _stream(self, nbytes: Floats) -> Floats:
        """Seconds of reading and writing alone."""
        return with_launch(0.0, memory_seconds(nbytes, self.device), self.device, launches=self.launches)

    def _seconds(self, product: Product, nbytes: Floats) -> Floats:
        """Seconds of a product; where operands are cast before it, it reads them in their narrower type."""
        if self.is_cast:
            size = ITEMSIZE[self.dtype]
            # Operands are narrow, results are not; the remaining bytes are a wider sum.
            wider = np.maximum(nbytes - sum(self.bytes, np.zeros(self.count)), 0.0)
            moved = product.traffic(size, DTYPE_BYTES[self.call.outputs[0].dtype]) + wider
            return product_seconds(product, self.dtype, self.device, itemsize=size, nbytes=moved)
        itemsize = min((DTYPE_BYTES[t.dtype] for t in self.call.inputs if t.is_float), default=4)
        return product_seconds(product, self.dtype, self.device, itemsize=itemsize, nbytes=nbytes, launches=self.launches)

    def _attention(self, direction: str) -> Floats:
        """Seconds of attention in one kernel; backward it moves the forward bytes twice, for the gradients."""
        flops = np.zeros(self.count)
        for left_out in self.entry.products:
            members = [i for i, f in enumerate(self.rule.factors) if not f.name.startswith(tuple(left_out))]
            flops += 2 * np.prod(self.local[:, members], axis=1)
        causal = self.call.get("is_causal") is True
        moved = (2 if direction == "backward" else 1) * sum(self.bytes, np.zeros(self.count))
        kernel = str(self.call.get("kernel", default=DEFAULT_KERNEL))
        done = flops * (0.5 if causal else 1.0)
        return attention_seconds(self._scores(causal=causal), done, moved, kernel, direction, self.dtype, self.device)

    def _scores(self, *, causal: bool) -> Scores:
        """Local sizes of attention by its rule's letters: g r heads, q queries, k keys, w e widths, the rest batch."""
        found = {letter: np.ones(self.count) for letter in "grqkweb"}
        for i, factor in enumerate(self.rule.factors):
            # The dims of a mask (x, xm) are no loops of the products.
            letter = factor.name[0] if factor.name[0] == "x" or len(factor.name.rstrip("0123456789")) == 1 else "b"
            if letter != "x":
                found[letter if letter in found else "b"] = found.get(letter, found["b"]) * self.local[:, i]
        window = self.call.get("window", default=0)
        # With keys and values of different widths, a kernel's two products take as long as at their mean.
        width = np.where(found["e"] > 1, (found["w"] + found["e"]) / 2, found["w"])
        return Scores(
            batch=found["b"], heads=found["g"] * found["r"], kv_heads=found["g"], queries=found["q"], keys=found["k"], width=width,
            causal=causal, window=float(window) if isinstance(window, int) else 0.0, itemsize=DTYPE_BYTES[self.dtype],
        )  # fmt: skip

    def _product(self) -> Product:
        """Rows m, columns n and inner size k of the local product, from factors that operands and output share."""
        members = [_members(dims) for dims in (*self.rule.inputs, self.rule.outputs[0])]
        out = members[-1]
        operands = [i for i, found in enumerate(members[:-1]) if len(found) > 1][:2]
        self.left, self.right = operands if len(operands) == 2 else (0, min(1, len(members) - 2))
        left, right = members[self.left], members[self.right]
        left_out = self.entry.products[0]
        shared = {i for i, f in enumerate(self.rule.factors) if left_out.startswith("/") and f.name.startswith(left_out[1:])}
        sides = [(out & left & right) | shared, out - right - shared, (out & right) - left - shared, right - out - shared]
        batch, m, n, k = (np.prod(self.local[:, sorted(side)], axis=1) for side in sides)
        if shared:  # each row meets one expert; rows of other ranks come too
            m = m * self.come / math.prod(self.rule.factors[i].size for i in shared)
        return Product(batch=batch, m=m, n=n, k=k)


def _members(dims: Sequence[Sequence[int]]) -> set[int]:
    return {factor for dim in dims for factor in dim}


def _computed_in(tensors: Sequence[Tensor]) -> str:
    dtype = next((t.dtype for t in reversed(tensors) if t.is_float), "float32")
    return dtype.replace("complex64", "float32").replace("complex128", "float64")
