"""Values that are folded without onnx's reference evaluator equal those that it gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from autopar.frontends.onnx import folding as onnx_folding
from autopar.frontends.onnx.folding import evaluate

X = np.arange(24, dtype=np.int64).reshape(2, 3, 4) - 7
F = X.astype(np.float32) / 3
FILL = numpy_helper.from_array(np.array([3], np.int64))
ROWS: list[tuple[str, list[np.ndarray], dict[str, Any]]] = [
    ("Abs", [X], {}),
    ("Log", [np.abs(F) + 1], {}),
    ("Min", [F, F.T.reshape(2, 3, 4), np.float32(1.5)], {}),
    ("Max", [X, np.array([[0], [1], [2]], np.int64)], {}),
    ("Transpose", [X], {}),
    ("Transpose", [X], {"perm": (2, 0, 1)}),
    ("Expand", [X[:, :1], np.array([5, 1, 3, 4], np.int64)], {}),
    ("Trilu", [X], {"upper": 0}),
    ("Trilu", [X], {"upper": 1}),
    ("Trilu", [X, np.array(-1, np.int64)], {"upper": 0}),
    ("Trilu", [X, np.array(2, np.int64)], {}),
    ("CumSum", [X, np.array(1, np.int64)], {}),
    ("CumSum", [F, np.array(-1, np.int64)], {"reverse": 1}),
    ("CumSum", [X, np.array(0, np.int64)], {"exclusive": 1}),
    ("GatherND", [X, np.array([[0, 1], [1, 2]], np.int64)], {}),
    ("GatherND", [X, np.array([[[0], [1]]], np.int64)], {}),
    ("GatherND", [X, np.array([[1], [0]], np.int64)], {"batch_dims": 1}),
    ("ConstantOfShape", [np.array([2, 3], np.int64)], {}),
    ("ConstantOfShape", [np.array([], np.int64)], {"value": FILL}),
    ("ConstantOfShape", [np.array([0, 4], np.int64)], {"value": FILL}),
]


@pytest.mark.parametrize(
    ("kind", "inputs", "attributes"), ROWS, ids=[f"{n}-{row[0]}" for n, row in enumerate(ROWS)]
)
def test_folded_values_are_those_of_the_reference(
    kind: str, inputs: list[np.ndarray], attributes: dict[str, Any]
) -> None:
    node = helper.make_node(kind, [f"x{i}" for i in range(len(inputs))], ["y"], **attributes)
    given = {
        name: value for name, value in attributes.items() if not isinstance(value, TensorProto)
    }
    (value,) = evaluate(node, inputs, given, {"": 22})
    (wanted,) = onnx_folding.evaluate_by_reference(node, inputs, {"": 22})
    assert (value.dtype, value.shape) == (wanted.dtype, wanted.shape)
    np.testing.assert_array_equal(value, wanted)


def test_the_shapes_of_a_decoder_need_no_reference_evaluator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Importing it takes longer than to read a small model."""

    def refused(*arguments: object) -> list[np.ndarray]:
        raise AssertionError(arguments)

    monkeypatch.setattr(onnx_folding, "evaluate_by_reference", refused)
    for kind, inputs, attributes in ROWS:
        if kind in ("Trilu", "Transpose", "ConstantOfShape", "Abs", "Min"):
            node = helper.make_node(
                kind, [f"x{i}" for i in range(len(inputs))], ["y"], **attributes
            )
            evaluate(
                node,
                inputs,
                {name: value for name, value in attributes.items() if name != "value"},
                {"": 22},
            )
