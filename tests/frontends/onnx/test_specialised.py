"""Inputs with known values, and other outputs than a file's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import parser

import autopar
from autopar.errors import ModelError, PlanError, UsageError
from autopar.frontends.onnx import import_onnx, load_weights
from autopar.plan import Plan
from autopar.plan_origin import model_of_plan
from autopar.runtime.models.onnx_module import OnnxModule

MODEL = """<ir_version: 9, opset_import: ["" : 18]>
g (float[4,3] x, bool flag, float[3] shift, int64 rate) => (float[4,3] y, int64[2,k] z)
<int64 known = {16000}, float[3,3] w = {2,0,0,0,2,0,0,0,2}> {
  p = MatMul (x, w)
  a = Add (p, shift)
  right = Equal (rate, known)
  b = If (right) <then_branch = t () => (float[4,3] r) { r = Tanh (a) },
                  else_branch = e () => (float[4,3] q) { q = Neg (a) }>
  y = If (flag) <then_branch = u () => (float[4,3] v) { v = Sin (b) },
                 else_branch = w () => (float[4,3] s) { s = Identity (b) }>
  z = NonZero (b)
}"""
VALUES: dict[str, Any] = {"flag": 1, "rate": 16000, "shift": (1.0, 2.0, 3.0)}


def file() -> onnx.ModelProto:
    """The file."""
    return parser.parse_model(MODEL)


def test_known_values_choose_branches_and_are_constants() -> None:
    graph = import_onnx(file(), values=VALUES, outputs=["y"])
    assert graph.inputs == ("x",) and graph.outputs == ("y",)
    assert [tensor.name for tensor in graph.parameters] == ["w"]
    x = torch.randn(4, 3)
    (y,) = OnnxModule(graph, load_weights(file()))(x)
    assert torch.allclose(y, torch.sin(torch.tanh(2 * x + torch.tensor([1.0, 2.0, 3.0]))))
    graph = import_onnx(file(), values={**VALUES, "rate": 8000, "flag": 0}, outputs=["y"])
    (y,) = OnnxModule(graph, load_weights(file()))(x)
    assert torch.allclose(y, -(2 * x + torch.tensor([1.0, 2.0, 3.0])))


def test_the_tail_is_cut_off() -> None:
    graph = import_onnx(file(), outputs=["a"])
    assert graph.inputs == ("x", "flag", "shift", "rate") and graph.outputs == ("a",)
    assert [operator.kind for operator in graph.operators] == [
        "aten.matmul.default",
        "aten.add.Tensor",
    ]
    with pytest.raises(ModelError, match=r"end the model before it by --outputs NAME .*reads b"):
        import_onnx(file(), values=VALUES)
    with pytest.raises(ModelError, match="give them by --value"):
        import_onnx(file())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"values": {"speed": 1}}, "--value: unknown input 'speed': valid are x, flag"),
        ({"values": {"shift": (1, 2)}}, "--value shift: 2 numbers for an input of the shape"),
        ({"outputs": ["yy"]}, "--outputs: unknown tensor 'yy'"),
    ],
)
def test_names_and_sizes_are_checked(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        import_onnx(file(), **options)


def test_a_plan_keeps_them(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(file(), path)
    given = {"values": VALUES, "outputs": ["y"]}
    plan = autopar.plan(path, devices=2, cluster="local-cpu", **given)
    plan.save(tmp_path / "plan.json")
    read = Plan.load(tmp_path / "plan.json")
    assert read.model.onnx and read.model.values == VALUES and read.model.outputs == ("y",)
    assert model_of_plan(path, read).graph.inputs == ("x",)


def test_modules_have_neither() -> None:
    with pytest.raises(UsageError, match="values= and outputs= apply to ONNX models"):
        autopar.plan(torch.nn.Linear(4, 4), (torch.ones(4, 4),), devices=1, values={"x": 1})


def test_dims_without_a_name_are_named_by_their_place() -> None:
    model = parser.parse_model(
        '<ir_version: 9, opset_import: ["" : 18]> g (float[4,3] x) => (float[4,3] y) '
        "{ y = Relu (x) }"
    )
    first, second = model.graph.input[0].type.tensor_type.shape.dim
    first.dim_value = -1
    second.dim_param = "?"
    del model.graph.output[0].type.tensor_type.shape.dim[:]
    with pytest.raises(ModelError, match=r"give --dim x\.0=SIZE --dim x\.1=SIZE"):
        import_onnx(model)
    assert import_onnx(model, dims={"x.1": 5}, batch=2).tensors["y"].shape == (2, 5)


def test_folding_leaves_what_it_cannot_fold() -> None:
    model = parser.parse_model(
        '<ir_version: 9, opset_import: ["" : 13]> g (float[4] x) => (float[4] y) '
        "<int8[4] q = {1,-2,3,4}, float s = {0.5}> { z = DequantizeLinear (q, s) "
        "y = Add (x, z) }"
    )
    (y,) = OnnxModule(import_onnx(model))(torch.zeros(4))
    np.testing.assert_allclose(y.numpy(), [0.5, -1.0, 1.5, 2.0])


def test_a_plan_in_onnx_s_own_kinds_is_found_by_its_nodes(tmp_path: Path) -> None:
    """Plans of version 3 were written with such kinds."""
    path = tmp_path / "model.onnx"
    onnx.save(file(), path)
    given: dict[str, Any] = {"values": VALUES, "outputs": ["y"], "devices": 2, "scheme": "data"}
    plan = autopar.plan(path, cluster="local-cpu", **given)
    old = plan.model_copy(
        update={
            "operators": {
                name: op.model_copy(update={"kind": "onnx.Node", "fingerprint": "0" * 16})
                for name, op in plan.operators.items()
            }
        }
    )
    again = autopar.plan(path, cluster="local-cpu", reuse_from=old, **{**given, "scheme": None})
    assert {n: op.strategy for n, op in again.operators.items()} == {
        n: op.strategy for n, op in plan.operators.items()
    }
    with pytest.raises(PlanError, match="with other shapes or attributes"):
        model_of_plan(path, old)
