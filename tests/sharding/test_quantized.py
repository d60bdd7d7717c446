"""Rules of quantised products: which zero points and scales go with rows, which with columns, and
which are for all.
"""

from __future__ import annotations

import pytest

from autopar.ir import Graph, Operator, Ref, Role, Tensor
from autopar.sharding.rules import Call, rule_of

Shapes = dict[str, tuple[int, ...]]


def call(kind: str, inputs: Shapes, out: tuple[int, ...]) -> Call:
    """A call of named inputs."""
    tensors = {
        name: Tensor(name=name, shape=shape, dtype="uint8", role=Role.INPUT)
        for name, shape in inputs.items()
    }
    tensors["out"] = Tensor(name="out", shape=out, dtype="int32")
    attributes = {name: Ref(place) for place, name in enumerate(inputs)}
    operator = Operator(
        name="op", kind=kind, inputs=tuple(inputs), outputs=("out",), attributes=attributes
    )
    return Call.of(
        Graph(
            name="g", tensors=tensors, operators=(operator,), inputs=tuple(inputs), outputs=("out",)
        ),
        operator,
    )


@pytest.mark.parametrize(
    ("left", "right", "rule"),
    [
        ((), (), "m k, k n, ,  -> m n | k: sum"),
        ((1,), (1,), "m k, k n, 1, 1 -> m n | k: sum"),
        ((4,), (8,), "m k, k n, m, n -> m n | k: sum"),
        ((4,), (), "m k, k n, m,  -> m n | k: sum"),
        ((4, 1), (1, 8), "m k, k n, * m 1, * 1 n -> m n | k: sum"),
    ],
)
def test_zero_points_of_a_product_of_integers(
    left: tuple[int, ...], right: tuple[int, ...], rule: str
) -> None:
    inputs = {"A": (4, 6), "B": (6, 8), "a_zero_point": left, "b_zero_point": right}
    assert rule_of(call("onnx.MatMulInteger", inputs, (4, 8))).text == rule
