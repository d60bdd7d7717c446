"""Seconds of a layer of experts under every strategy, from its inner calls on a rank's rows.

    rows of a rank = tokens of the rank * k * (ranks from which rows come)
                     * (its experts / all experts)

This assumes equally many rows for every expert. Products are grouped; each other inner call is a
roofline of its own. Sorting the rows and restoring their order move each row twice. Weighing the
results and adding up those of a token are passes over them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autopar.costmodel.cluster.cluster import Cluster
from autopar.ir import DTYPE_BYTES, Role
from autopar.ir.recipes import recipe_of
from autopar.sharding.communication import places_on_the_way
from autopar.sharding.rules import RULES, Call
from autopar.sharding.rules.experts import (
    BIAS,
    PRODUCTS,
    Inner,
    Result,
    is_biased,
    is_weighed,
    network_of,
    per_token,
    result_of,
)
from autopar.sharding.strategies import Strategies

from .device import ITEMSIZE, TF32
from .elementwise import CAST_TRAFFIC, memory_seconds, with_launch
from .kernel_seconds import grouped_seconds
from .products import Product

Floats = NDArray[np.float64]
BIAS_FORWARD = 28.0
BIAS_BACKWARD = 40.0
"""Bytes moved for an element of the results where last biases are added in pieces (`biases_apart`).

Forward a bias is weighed (4 written), added (10), joined with those of other experts (8) and cast
(6), in float32; backward the gradients are cast both ways (12), multiplied by weights and by
biases, each with its sum (24), and joined (4).
"""
COPYING = 12.0
"""Launches in which rows are chosen, packed and unpacked along an axis (`experts_once`)."""


def _number(call: Call, name: str, default: float) -> float:
    """An attribute of a layer that a known configuration gives it."""
    value = call.get(name, default=default)
    return float(value) if isinstance(value, int | float) else default


class Layer:
    """The local work of a layer of experts: arrays [strategies]."""

    def __init__(
        self,
        call: Call,
        strategies: Strategies,
        mesh: Sequence[int],
        local: Floats,
        cluster: Cluster,
        gradients: frozenset[str],
    ) -> None:
        self.call = call
        self.device = cluster.device
        cast = call.get("compute")
        self.cast = cast if isinstance(cast, str) else ""
        self.summed = cluster.framework.summed
        # A plan's program makes gradients of weights in the type of the values (`Recipe`).
        self.recipe = recipe_of(call.operator)
        self.casts = CAST_TRAFFIC if self.cast not in ("", TF32) else 0.0
        if self.recipe is not None:
            self.casts = self.recipe.traffic
        self.network = network_of(call)
        self.biases_apart = cluster.framework.kernels.biases_apart and is_biased(call)
        names = [factor.name for factor in strategies.rule.factors]
        sizes = {factor.name: factor.size for factor in strategies.rule.factors}
        own = {name: local[:, i] for i, name in enumerate(names)}
        come = strategies.travel_degree(tuple(mesh))
        self.experts = own["e"]
        self.tokens = own["t"]
        self.rows = self.tokens * per_token(call) * come * self.experts / sizes["e"]
        # Experts of a fixed capacity are padded to it.
        self.rows = self.rows * (_number(call, "capacity", 0.0) or 1.0)
        self.inner = own["f"] / sizes["f"] if "f" in own else np.ones(len(local))
        # Rows that go once to each place are copied for all of them, on every axis.
        self.copies = self.tokens * places_on_the_way(call, strategies, mesh)
        # Others are sorted before they leave and again where they arrive.
        self.passes = np.where((come > 1) & (self.copies == 0), 2.0, 1.0)
        # A dispatcher's own kernels copy while they send.
        if cluster.framework.kernels.dispatcher == "node":
            self.copies = np.zeros(len(local))
        self.trained = any(t.name in gradients for t in call.outputs)
        self.wanted = [t.name in gradients for t in call.inputs]
        self.stored = [t.role is Role.PARAMETER for t in call.inputs]
        # A network's inputs are called %rows, %w0, %w1, ..., the results of its calls %0, %1, ...
        self.values: dict[str, Result] = {
            "%rows": Result(width=call.inputs[0].shape[1], dtype=call.inputs[0].dtype, dims="!h")
        }
        for inner in self.network:
            self.values.update((f"%{len(self.values) - 1}", result) for result in inner.results)

    def forward(self) -> Floats:
        """Sorting, the calls in order, and back."""
        return self._moving(weighing=3.0) + sum(
            (self._ahead(inner) for inner in self.network), self._biases(BIAS_FORWARD)
        )

    def backward(self) -> Floats:
        """Return the seconds of the backward pass.

        A product has two of its kind there; any other call reads and writes the gradients of its
        inputs and results, and what it saved.
        """
        if not self.trained:
            return np.zeros(len(self.rows))
        return self._moving(weighing=4.0) + sum(
            (self._back(inner) for inner in self.network), self._biases(BIAS_BACKWARD)
        )

    def weight(self) -> Floats:
        """The products that make the gradients of stored weights."""
        trained = [
            inner
            for inner in self.network
            if self.trained and inner.kind in PRODUCTS and self._trains(inner)
        ]
        return sum((self._weight(inner) for inner in trained), np.zeros(len(self.rows)))

    def _bytes(self, name: str) -> Floats:
        """Bytes of the rows of a value, or of a weight."""
        if name.startswith("%w"):
            tensor = self.call.inputs[2 + int(name[2:])]
            inside = tensor.bytes / tensor.shape[0] * self.experts
            return np.asarray(inside * self.inner)
        if name not in self.values:
            return np.zeros(len(self.rows))
        return np.asarray(
            self.rows * self._width(self.values[name]) * DTYPE_BYTES[self.values[name].dtype]
        )

    def _width(self, result: Result) -> Floats:
        return result.width * (self.inner if result.inner else np.ones(len(self.rows)))

    def _made(self, inner: Inner) -> Floats:
        return sum(
            (self.rows * self._width(r) * DTYPE_BYTES[r.dtype] for r in inner.results),
            np.zeros(len(self.rows)),
        )

    def _moved(self, inner: Inner) -> Floats:
        return sum((self._bytes(name) for name in inner.given), np.zeros(len(self.rows)))

    def _weights(self, inner: Inner) -> str:
        return next(name for name in inner.given if name.startswith("%w"))

    def _held(self, inner: Inner) -> bool:
        """Whether a product's weights come as a narrow copy."""
        return self.call.inputs[2 + int(self._weights(inner)[2:])].narrow is not None

    def _rows_moved(self, inner: Inner) -> Floats:
        return self._moved(inner) - self._bytes(self._weights(inner))

    def _weights_cast(self, inner: Inner) -> Floats:
        """Seconds of casting a product's weights, where that is done in every pass."""
        # Frameworks cast them once a step, which is not counted.
        if self._held(inner) or self.recipe is None:
            return np.zeros(len(self.rows))
        return self._cast(self._bytes(self._weights(inner)))

    def _turned(self, inner: Inner) -> Floats:
        """Seconds of transposing weights that come narrow (see `operator_seconds`)."""
        return memory_seconds(2 * self._bytes(self._weights(inner)), self.device)

    def _sorting(self) -> Floats:
        """Return the seconds of sorting rows by expert, and their results back by token."""
        last = result_of(self.call)
        # Each pass reads a row and writes it.
        there = self.passes * self.rows * self._token_bytes(0)
        back = self.passes * self.rows * last.width * DTYPE_BYTES[last.dtype]
        return self._time(0.0, 2 * (there + back), launches=4.0)

    def _moving(self, weighing: float) -> Floats:
        """Sorting, weighing results in so many passes over them, and copies on rows' way."""
        seconds = self._sorting()
        if not is_weighed(self.call):
            return seconds
        sums = self._token_bytes(None)
        seconds = seconds + self._time(0.0, weighing * self.rows * sums, launches=2.0)
        copied = self._time(0.0, 2 * self.copies * (self._token_bytes(0) + sums), launches=COPYING)
        return np.asarray(seconds + np.where(self.copies > 0, copied, 0.0))

    def _biases(self, nbytes: float) -> Floats:
        """Seconds of adding last biases in pieces, which moves `nbytes` of each element."""
        if not self.biases_apart:
            return np.zeros(len(self.rows))
        return self._time(0.0, nbytes * self.rows * result_of(self.call).width)

    def _token_bytes(self, index: int | None) -> float:
        """Bytes of a token of an input, or of the results."""
        tensor = self.call.outputs[0] if index is None else self.call.inputs[index]
        return float(tensor.shape[1] * DTYPE_BYTES[tensor.dtype])

    def _ahead(self, inner: Inner) -> Floats:
        if inner.kind in PRODUCTS:
            return (
                self._grouped(inner, *self._sides(inner))
                + self._cast(self._rows_moved(inner))
                + self._weights_cast(inner)
            )
        if inner.kind != BIAS and RULES[inner.kind].view:
            return np.zeros(len(self.rows))
        return self._time(0.0, self._moved(inner) + self._made(inner))

    def _back(self, inner: Inner) -> Floats:
        moved = self._moved(inner)
        made = self._made(inner)
        if inner.kind not in PRODUCTS:
            # It reads gradients of results and kept inputs, and writes gradients of inputs; a view
            # keeps none.
            return self._time(0.0, made + (2 * moved if not self._views(inner) else moved))
        n, k = self._sides(inner)
        rows = self._grouped(inner, k, n) + self._cast(made)
        rows = rows + (self._turned(inner) if self._held(inner) else self._weights_cast(inner))
        return rows + (self._weight(inner) if self._trains(inner, stored=False) else 0.0)

    def _views(self, inner: Inner) -> bool:
        return inner.kind != BIAS and RULES[inner.kind].view

    def _weight(self, inner: Inner) -> Floats:
        """A product [k, rows] x [rows, n] for each expert that a rank has."""
        product = self._product(inner).turned()[1]
        dtype = self.dtype(inner) if self.recipe is None else inner.results[0].dtype
        # A sum over micro-batches is read and written.
        out = 2.0 * self.summed if self.summed else float(DTYPE_BYTES[inner.results[0].dtype])
        return grouped_seconds(
            product, dtype, self.device, nbytes=product.traffic(ITEMSIZE[dtype], out)
        )

    def dtype(self, inner: Inner) -> str:
        """The dtype to which a product's operands are cast, or their own."""
        return self.cast or inner.results[0].dtype

    def _trains(self, inner: Inner, *, stored: bool = True) -> bool:
        """Whether a product's weight has a gradient.

        `stored`: only weights that are parameters count.
        """
        places = [2 + int(name[2:]) for name in inner.given if name.startswith("%w")]
        return any(self.wanted[i] and (self.stored[i] or not stored) for i in places)

    def _sides(self, inner: Inner) -> tuple[Floats, Floats]:
        """Columns n and inner size k of a product of rows."""
        source = self.values[str(inner.arguments[PRODUCTS[inner.kind][0]])]
        ones = np.ones(len(self.rows))
        return self._width(inner.results[0]) * ones, self._width(source) * ones

    def _product(self, inner: Inner) -> Product:
        """One product for each expert that a rank has."""
        n, k = self._sides(inner)
        return Product(batch=self.experts, m=self.rows / self.experts, n=n, k=k)

    def _grouped(self, inner: Inner, n: Floats, k: Floats) -> Floats:
        product = Product(batch=self.experts, m=self.rows / self.experts, n=n, k=k)
        return grouped_seconds(product, self.dtype(inner), self.device)

    def _cast(self, nbytes: Floats) -> Floats:
        """Seconds of bringing a product's operands to narrow types."""
        return memory_seconds(self.casts * nbytes, self.device)

    def _time(self, arithmetic: Floats | float, nbytes: Floats, *, launches: float = 1.0) -> Floats:
        return with_launch(
            arithmetic, memory_seconds(nbytes, self.device), self.device, launches=launches
        )
