"""Graphs that are drawn by chance: trees of pointwise operators, views, reductions and products."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from autopar.ir import Graph
from tests.runtime.helpers import GraphBuilder

SHAPE = (4, 4, 8)


class Drawn(GraphBuilder):
    """Draws operators on values of one shape, as exporters spell them."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.rng = random.Random(seed)
        self.values = [self.input("x", *SHAPE), self.linear(self.input("y", *SHAPE))]

    def value(self) -> str:
        """One of the last values."""
        return self.rng.choice(self.values[-4:])

    def unary(self, word: str, x: str) -> str:
        return self.one(f"aten.{word}.default", self.tensors[x].shape, self=x)

    def binary(self, word: str, x: str, other: str | float, **given: float) -> str:
        if word == "mul" and isinstance(other, str) and self.rng.random() < 0.5:
            x, other = other, x
        shapes = [self.tensors[name].shape for name in (x, other) if isinstance(name, str)]
        return self.one(
            f"aten.{word}.Tensor", max(shapes, key=math.prod), self=x, other=other, **given
        )

    def power(self, x: str, exponent: int) -> str:
        if self.rng.random() < 0.5:
            shape = self.tensors[x].shape
            return self.one("aten.pow.Tensor_Scalar", shape, self=x, exponent=exponent)
        made = x
        for _ in range(exponent - 1):
            made = self.binary("mul", made, x)
        return made

    def weight(self, *shape: int) -> str:
        return self.parameter(f"w{len(self.tensors)}", *shape)

    def linear(self, x: str) -> str:
        return self.one("aten.linear.default", SHAPE, input=x, weight=self.weight(8, 8))

    def gelu(self, x: str) -> str:
        """Spelled by the error function, or by a hyperbolic tangent."""
        if self.rng.random() < 0.5:
            curve = self.unary("erf", self.binary("mul", x, math.sqrt(0.5)))
        else:
            cube = self.binary("mul", self.power(x, 3), 0.044715)
            inner = self.binary("add", *self.rng.sample([x, cube], 2))
            curve = self.unary("tanh", self.binary("mul", inner, math.sqrt(2 / math.pi)))
        return self.binary(
            "mul", self.binary("mul", x, 0.5), self.binary("add", curve, self.rng.choice((1, 1.0)))
        )

    def silu(self, x: str) -> str:
        return self.binary("mul", x, self.unary("sigmoid", x))

    def gate(self, x: str) -> str:
        word = self.rng.choice(("silu", "gelu", "tanh", "sigmoid", "softplus"))
        return self.binary("mul", self.unary(word, x), self.value())

    def norm(self, x: str) -> str:
        """A norm by mean squares, or by deviations from the mean."""
        if self.rng.random() < 0.5:
            x = self.binary("sub", x, self.mean(x))
        rows = (*SHAPE[:-1], 1)
        mean = self.binary("add", self.mean(self.power(x, 2)), 1e-5)
        made = self.binary("mul", x, self.one("aten.rsqrt.default", rows, self=mean))
        return self.binary("mul", made, self.weight(8))

    def mean(self, x: str) -> str:
        return self.one("aten.mean.dim", (*SHAPE[:-1], 1), self=x, dim=(-1,), keepdim=True)

    def cap(self, x: str) -> str:
        """A value that is kept below a number."""
        return self.binary("mul", self.unary("tanh", self.binary("div", x, 3.0)), 3.0)

    def residual(self, x: str) -> str:
        return self.binary(self.rng.choice(("add", "sub")), x, self.value())

    def scaled(self, x: str) -> str:
        return self.binary("mul", x, self.weight(*self.rng.choice(((8,), (4, 8), (1,)))))

    def decayed(self, x: str) -> str:
        """The decay of a scan's state."""
        fall = self.unary("softplus", self.binary("add", x, self.weight(8)))
        return self.unary("exp", self.unary("neg", fall))

    def shown(self, x: str) -> str:
        """A pointwise operator on the value in another shape."""
        flat = self.one("aten.view.default", (16, 8), self=x, size=(16, 8))
        turned = self.one("aten.transpose.int", (8, 16), self=flat, dim0=0, dim1=1)
        made = self.unary(self.rng.choice(("tanh", "silu")), turned)
        back = self.one("aten.transpose.int", (16, 8), self=made, dim0=0, dim1=1)
        return self.one("aten.reshape.default", SHAPE, self=back, shape=SHAPE)

    def reduced(self, x: str) -> str:
        total = self.one("aten.sum.dim_IntList", (4, 1, 8), self=x, dim=(1,), keepdim=True)
        return self.binary("mul", self.value(), self.unary("tanh", total))

    def softmax(self, x: str) -> str:
        return self.one("aten.softmax.int", SHAPE, self=x, dim=-1)

    def product(self, x: str) -> str:
        turned = self.one("aten.transpose.int", (4, 8, 4), self=self.value(), dim0=1, dim1=2)
        scores = self.one("aten.matmul.default", (4, 4, 4), self=self.softmax(x), other=turned)
        return self.one("aten.matmul.default", SHAPE, self=scores, other=x)


def drawn_graph(seed: int, steps: int = 7) -> Graph:
    """A graph of so many steps; the last value is its output."""
    b = Drawn(seed)
    ways: list[Callable[[str], str]] = [
        *(b.linear, b.gelu, b.silu, b.gate, b.gate, b.norm, b.cap, b.residual, b.scaled),
        *(b.decayed, b.shown, b.reduced, b.softmax, b.product),
    ]
    for _ in range(steps):
        b.values.append(b.rng.choice(ways)(b.value()))
    return b.finish(f"drawn {seed}", [b.binary("add", b.values[-1], b.linear(b.values[-2]))])
