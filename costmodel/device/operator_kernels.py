"""Kernels of one operator under every strategy: its products, and the bytes of its tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autopar.costmodel.cluster.cluster import Cluster
from autopar.ir import DTYPE_BYTES, Ref, Role, Tensor
from autopar.ir.bodies import POINTWISE, body_of
from autopar.ir.recipes import recipe_of
from autopar.sharding.notation import local_elements
from autopar.sharding.rules import RULES, Call
from autopar.sharding.rules.elementwise import ROTATE
from autopar.sharding.rules.saved_for_backward import Keeps, keeps
from autopar.sharding.strategies import Strategies

from .bodies import eager
from .device import ITEMSIZE, TF32
from .elementwise import CAST_TRAFFIC, memory_seconds, with_launch
from .kernel_seconds import AttentionWork, attention_seconds, product_seconds
from .local_attention import attention_flops, local_scores, moved_scores
from .products import Product

Floats = NDArray[np.float64]

SOFTMAX = "aten.softmax.int"
KERNELS = {ROTATE: (4.0, 2.5)}
"""Operators of several kernels: their number, and their traffic beside reading and writing once."""
NORMS = frozenset(
    (
        "aten.layer_norm.default",
        "aten.native_layer_norm.default",
        "aten.rms_norm.default",
        "aten._fused_rms_norm.default",
    )
)
NORM_BACKWARD = 2.4
"""Slowdown of a norm's backward pass against its traffic, as it sums the gradients of its weights
over all rows.

Median over 74 sizes on A100, A10G, L4 and V100, 2.1 to 2.8 (Dazz993/Mist@d69e530a, profiled
operators), without the sum of residual gradients.
"""


class OperatorKernels:
    """The local work of one operator: its products, and the bytes of each of its tensors."""

    def __init__(
        self,
        call: Call,
        strategies: Strategies,
        mesh: Sequence[int],
        cluster: Cluster,
        gradients: frozenset[str],
    ) -> None:
        local = local_sizes(strategies, mesh)
        self.call = call
        self.rule = strategies.rule
        self.local = local
        self.device = cluster.device
        self.kernel = cluster.framework.attention
        self.gradients = gradients
        self.entry = RULES[call.operator.kind]
        self.count = len(local)
        self.come = strategies.travel_degree(tuple(mesh))
        self.launches, self.passes = KERNELS.get(call.operator.kind, (1.0, 1.0))
        tensors = (*call.inputs, *call.outputs)
        sizes = (
            local_elements(dims, local) * DTYPE_BYTES[t.dtype]
            for t, dims in zip(tensors, (*self.rule.inputs, *self.rule.outputs), strict=True)
        )
        self.bytes = [np.broadcast_to(size, (self.count,)) for size in sizes]
        self.ins = self.bytes[: len(call.inputs)]
        self.outs = self.bytes[len(call.inputs) :]
        self.parts = None
        if call.operator.kind == POINTWISE and not cluster.fuses:
            self.parts = eager(body_of(call.operator), self.ins, self.outs[0])
        cast = call.get("compute")
        self.dtype = cast if isinstance(cast, str) else computed_in(tensors)
        self.is_cast = isinstance(cast, str) and cast != TF32
        self.recipe = recipe_of(call.operator)
        self.casts = CAST_TRAFFIC if self.is_cast else 0.0
        if self.recipe is not None:
            self.casts = self.recipe.traffic
        self.keeps_narrow = call.get("keeps_narrow") is True
        self.summed = cluster.framework.summed
        self.is_attention = "attention" in call.operator.kind and len(self.entry.products) > 1
        # A causal softmax writes all of its result, and reads nothing that the mask hides.
        self.seen = 0.5 if call.operator.kind == SOFTMAX and call.get("is_causal") is True else 1.0
        self.product = self._product() if self.entry.products and not self.is_attention else None
        self.trained = any(t.name in gradients for t in call.outputs)
        self.saved = (
            keeps(call, tuple(t.name in gradients for t in call.inputs))
            if self.trained
            else Keeps()
        )

    def forward(self) -> Floats:
        if self.entry.view:
            return np.zeros(self.count)
        if self.is_attention:
            return self._attention("forward")
        if self.parts is not None:
            return self._stream(*self.parts[0])
        looked_up = {f for f, factor in enumerate(self.rule.factors) if factor.special == "masked"}
        # A look-up reads the rows that it gives, not the table.
        read = [
            size
            for size, dims in zip(self.ins, self.rule.inputs, strict=True)
            if self.product or looked_up.isdisjoint(_members(dims))
        ]
        moved = self.seen * sum(read, np.zeros(self.count)) + sum(
            (*self.outs, *self._made()), np.zeros(self.count)
        )
        values = [
            size
            for size, tensor in zip(self.ins, self.call.inputs, strict=True)
            if tensor.role is not Role.PARAMETER
        ]
        if self.recipe is not None:
            # Blocks of columns are rounded apart from those of rows.
            copied = self.keeps_narrow and bool(self.recipe.block)
            values = [self.ins[0], *self._cast_weights(), *self.ins[:copied]]
        return self._cast(values) + (
            self._stream(moved) if self.product is None else self._seconds(self.product, moved)
        )

    def backward(self) -> Floats:
        wanted = [i for i, t in enumerate(self.call.inputs) if t.name in self.gradients]
        if self.entry.view or not self.trained:
            return np.zeros(self.count)
        if self.is_attention:
            return self._attention("backward")
        if self.parts is not None:
            return self._stream(*self.parts[1])
        if self.product is None:
            saved = [
                *(self.ins[i] for i in self.saved.inputs),
                *(self.outs[i] for i in self.saved.outputs),
                *self._made(),
            ]
            read = self.seen * sum((*self.outs, *saved), np.zeros(self.count))
            slower = (
                NORM_BACKWARD
                if self.call.operator.kind in NORMS and self.device.kernels is not None
                else 1.0
            )
            passes = self.call.get("backward_passes", default=1)
            slower *= passes if isinstance(passes, int) else 1
            return self._stream(
                slower * (read + sum((self.ins[i] for i in wanted), np.zeros(self.count)))
            )
        # Each operand's gradient is a product of the result's gradient with the other operand.
        left, right = self.product.turned()
        whole = sum(self.bytes, np.zeros(self.count))
        ways = ((self.left, left, whole), (self.right, right, whole + self._sums()))
        seconds = [self._seconds(product, moved) for i, product, moved in ways if i in wanted]
        cast = [*self.outs]
        if self.recipe is not None:
            # Values that something else keeps have no narrow copy.
            cast += self.ins[:1] if self.right in wanted and not self.keeps_narrow else []
            cast += self._cast_weights() if self.left in wanted else []
            cast += self.outs if self.recipe.block and len(seconds) > 1 else []
            if self.left in wanted:
                seconds.append(self._turned())
        return sum(seconds, self._cast(cast)) if seconds else self._seconds(right, whole)

    def weight(self) -> Floats:
        """Return the seconds of the product for a parameter's gradient.

        An operator on parameters alone counts its whole backward pass.
        """
        trained = [
            i
            for i, t in enumerate(self.call.inputs)
            if t.role is Role.PARAMETER and t.name in self.gradients
        ]
        if self.product is None or self.right not in trained:
            only = trained and all(
                self.call.inputs[i].role is Role.PARAMETER
                for i in range(len(self.ins))
                if self.call.inputs[i].is_float
            )
            return self.backward() if only else np.zeros(self.count)
        return self._seconds(
            self.product.turned()[1], sum(self.bytes, np.zeros(self.count)) + self._sums()
        )

    def _sums(self) -> Floats:
        """Bytes that a product moves more where it adds its result to a sum of wider elements."""
        own = DTYPE_BYTES[self.call.inputs[self.right].dtype]
        return self.ins[self.right] * ((2 * self.summed - own) / own if self.summed else 0.0)

    def _cast_weights(self) -> list[Floats]:
        """The weights where they are cast in every pass: where they do not come narrow."""
        return self.ins[1:2] if self.call.inputs[1].narrow is None else []

    def _turned(self) -> Floats:
        """Seconds of transposing weights that come narrow.

        Tensor units read operands of 8 bits or fewer along the dim that is summed over (NVIDIA,
        cuBLAS, cublasLtMatmul: the first is transposed, the second is not), which is the other one
        in the product for the values' gradient.
        """
        weight = self.call.inputs[1]
        if weight.narrow is None:
            return np.zeros(self.count)
        moved = 2 * self.ins[1] * (weight.bytes / weight.own_bytes)
        return memory_seconds(moved, self.device)

    def _cast(self, sizes: Sequence[Floats]) -> Floats:
        """Seconds of bringing operands to a narrower type."""
        return memory_seconds(self.casts * sum(sizes, np.zeros(self.count)), self.device)

    def _made(self) -> list[Floats]:
        """Bytes of buffers that the kernel keeps besides its tensors (masks, statistics)."""
        buffers = []
        for made in self.saved.made:
            tensors, sizes = (
                (self.call.outputs, self.outs) if made.output else (self.call.inputs, self.ins)
            )
            buffers.append(
                sizes[made.position] * (made.nbytes / DTYPE_BYTES[tensors[made.position].dtype])
            )
        return buffers

    def _stream(self, nbytes: Floats, kernels: int = 1) -> Floats:
        """Seconds of reading and writing alone."""
        return with_launch(
            0.0,
            memory_seconds(self.passes * nbytes, self.device),
            self.device,
            launches=kernels * self.launches,
        )

    def _seconds(self, product: Product, nbytes: Floats) -> Floats:
        """Return the seconds of a product.

        Where operands are cast before it, it reads them in their narrower type.
        """
        if self.is_cast:
            size = ITEMSIZE[self.dtype]
            # Operands are narrow, results are not; the remaining bytes are a wider sum.
            wider = np.maximum(nbytes - sum(self.bytes, np.zeros(self.count)), 0.0)
            moved = product.traffic(size, DTYPE_BYTES[self.call.outputs[0].dtype]) + wider
            return product_seconds(product, self.dtype, self.device, itemsize=size, nbytes=moved)
        itemsize = min((DTYPE_BYTES[t.dtype] for t in self.call.inputs if t.is_float), default=4)
        return product_seconds(
            product,
            self.dtype,
            self.device,
            itemsize=itemsize,
            nbytes=nbytes,
            launches=self.launches,
        )

    def _attention(self, direction: str) -> Floats:
        """Return the seconds of attention in one kernel.

        Backward it moves the forward bytes twice, for the gradients.
        """
        passes = 2 if direction == "backward" else 1
        work = AttentionWork(
            scores=local_scores(self.call, self.rule, self.local, self.dtype),
            flops=attention_flops(self.call, self.rule, self.local),
            nbytes=passes * sum(self.bytes, np.zeros(self.count)),
        )
        kernel = str(self.call.get("kernel", default=self.kernel))
        seconds = attention_seconds(work, kernel, direction, self.dtype, self.device)
        # Capped scores, and masks beside sinks, have no kernel: scores go to memory and back.
        moved = passes * moved_scores(self.call, work.scores)
        return seconds + memory_seconds(moved, self.device) if np.any(moved) else seconds

    def _product(self) -> Product:
        """Return rows m, columns n and inner size k of the local product.

        They are the factors that operands and output share.
        """
        members = [_members(dims) for dims in (*self.rule.inputs, self.rule.outputs[0])]
        if len(self.entry.products) > 1:
            return self._recurrent(members)
        out = members[-1]
        operands = [i for i, factors in enumerate(members[:-1]) if len(factors) > 1][:2]
        self.left, self.right = operands if len(operands) == 2 else (0, min(1, len(members) - 2))
        left = members[self.left]
        right = members[self.right]
        left_out = self.entry.products[0]
        shared = {
            i
            for i, f in enumerate(self.rule.factors)
            if left_out.startswith("/") and f.name.startswith(left_out[1:])
        }
        sides = [
            (out & left & right) | shared,
            out - right - shared,
            (out & right) - left - shared,
            right - out - shared,
        ]
        batch, m, n, k = (np.prod(self.local[:, sorted(side)], axis=1) for side in sides)
        if shared:  # each row meets one expert; rows of other ranks come too
            m = m * self.come / math.prod(self.rule.factors[i].size for i in shared)
        return Product(batch=batch, m=m, n=n, k=k)

    def _recurrent(self, members: Sequence[set[int]]) -> Product:
        """Return the products of a recurrent layer's rows, of all steps, with its matrices."""
        given = self.call.get("params") or (self.call.get("w_ih"), self.call.get("w_hh"))
        assert isinstance(given, tuple)
        places = [value.index for value in given if isinstance(value, Ref)]
        shapes = [self.call.inputs[place].shape for place in places]
        matrices = [shape for shape in shapes if len(shape) == 2]
        columns = sum(shape[0] for shape in matrices)
        self.left = 0
        self.right = places[0]
        # The width of the input is the one factor of it that its rows do not have.
        rows = sorted(members[0] - {max(_members(self.rule.inputs[0][-1:]))})
        one = np.ones(self.count)
        inner = sum(math.prod(shape) for shape in matrices) / columns
        m = np.prod(self.local[:, rows], axis=1)
        return Product(batch=one, m=m, n=one * columns, k=one * inner)


def local_sizes(strategies: Strategies, mesh: Sequence[int]) -> Floats:
    """Return the local size of every factor under every strategy: array [strategies, factors]."""
    sizes = np.array([factor.size for factor in strategies.rule.factors], dtype=np.float64)
    return np.asarray(sizes / strategies.degrees(tuple(mesh)))


def _members(dims: Sequence[Sequence[int]]) -> set[int]:
    return {factor for dim in dims for factor in dim}


def computed_in(tensors: Sequence[Tensor]) -> str:
    """Return the type in which an operator on some tensors computes."""
    dtype = next((t.dtype for t in reversed(tensors) if t.is_float), "float32")
    return dtype.replace("complex64", "float32").replace("complex128", "float64")
