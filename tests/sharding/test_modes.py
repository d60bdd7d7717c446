"""A graph in training, made one in evaluation: the attribute that tells the two apart, and the
outputs that training alone has.
"""

from __future__ import annotations

from typing import Any

import pytest

from autopar.ir import Graph, Operator, Ref, Role, Tensor
from autopar.sharding.rules.modes import evaluated

STATISTICS = "aten._native_batch_norm_legit_functional.default"


def graph(kind: str, attributes: dict[str, Any], outputs: int) -> Graph:
    """One operator of x."""
    names = tuple(f"y{i}" for i in range(outputs))
    operator = Operator(
        name="op",
        kind=kind,
        inputs=("x",),
        outputs=names,
        attributes={"input": Ref(0), **attributes},
    )
    roles = {"x": Role.INPUT, **dict.fromkeys(names, Role.ACTIVATION)}
    tensors = {
        name: Tensor(name=name, shape=(4, 6), dtype="float32", role=role)
        for name, role in roles.items()
    }
    return Graph(name="g", tensors=tensors, operators=(operator,), inputs=("x",), outputs=("y0",))


@pytest.mark.parametrize(
    ("kind", "given", "outputs", "now", "left"),
    [
        ("aten.dropout.default", {"train": True}, 1, {"train": False}, 1),
        ("aten.dropout.default", {"train": False}, 1, {"train": False}, 1),
        ("aten.batch_norm.default", {"training": True}, 1, {"training": False}, 1),
        ("aten.instance_norm.default", {"use_input_stats": True}, 1, {"use_input_stats": True}, 1),
        ("aten.relu.default", {}, 1, {}, 1),
    ],
)
def test_what_tells_training_is_turned_off(
    kind: str, given: dict[str, Any], outputs: int, now: dict[str, Any], left: int
) -> None:
    (actual,) = evaluated(graph(kind, given, outputs)).operators
    assert actual.kind == kind and len(actual.outputs) == left
    assert actual.attributes == {"input": Ref(0), **now}


def test_a_norm_that_gives_its_statistics_is_a_plain_norm_in_evaluation() -> None:
    plain = evaluated(graph(STATISTICS, {"training": True}, 3))
    (actual,) = plain.operators
    assert (
        actual.kind == "aten.batch_norm.default"
        and actual.outputs == ("y0",)
        and "y1" not in plain.tensors
    )
    assert actual.attributes["training"] is False and actual.attributes["cudnn_enabled"] is False
