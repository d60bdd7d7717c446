"""Products with a stored matrix have two spellings, whatever their source's."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from autopar.frontends.load import ModelOptions, load_model
from autopar.ir import Graph
from autopar.ir.stored_products import AFFINE, LINEAR, with_stored_products


def products(graph: Graph) -> list[tuple[str, tuple[str, ...]]]:
    """Kinds of operators of the respelled graph but its loss, and what they read."""
    return [
        (op.kind, op.inputs)
        for op in with_stored_products(graph).operators
        if not op.name.startswith("loss/")
    ]


class Forms(nn.Module):
    """One product with a matrix [8, 8] by a function of the test."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.w = nn.Parameter(torch.eye(8))
        self.b = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        """The product."""
        names = {"torch": torch, "x": x, "w": self.w, "b": self.b}
        made: Tensor = eval(self.form, names)
        return made


@pytest.mark.parametrize(
    ("form", "kind", "inputs"),
    [
        ("x @ w", AFFINE, ("x", "w")),
        ("x @ w.T", LINEAR, ("x", "w")),
        ("x @ w.mT", LINEAR, ("x", "w")),
        ("x @ w.permute(1, 0)", LINEAR, ("x", "w")),
        ("x @ w.transpose(-1, -2)", LINEAR, ("x", "w")),
        ("torch.mm(x, w)", AFFINE, ("x", "w")),
        ("torch.addmm(b, x, w)", AFFINE, ("x", "w", "b")),
        ("torch.addmm(b, x, w.t())", LINEAR, ("x", "w", "b")),
        ("torch.addmm(b, x, w, alpha=2)", "aten.addmm.default", ("b", "x", "w")),
        ("torch.addmm(b, x, w, beta=0.5)", "aten.addmm.default", ("b", "x", "w")),
        ("torch.addmm(x, x, w)", "aten.addmm.default", ("x", "x", "w")),
        ("x @ w.transpose(0, 1)", LINEAR, ("x", "w")),
        ("w @ x", "aten.matmul.default", ("w", "x")),
        ("x @ b", "aten.matmul.default", ("x", "b")),
    ],
)
def test_products_of_torch(form: str, kind: str, inputs: tuple[str, ...]) -> None:
    graph = load_model(Forms(form), ModelOptions(), (torch.randn(8, 8),)).graph
    assert products(graph) == [(kind, inputs)]


@pytest.mark.parametrize("view", ["w.transpose(0, 0)", "w.permute(0, 1)"])
def test_a_view_in_the_same_order_transposes_nothing(view: str) -> None:
    graph = load_model(Forms(f"x @ {view}"), ModelOptions(), (torch.randn(8, 8),)).graph
    assert LINEAR not in {kind for kind, _ in products(graph)}


def test_a_transposed_matrix_with_two_readers_stays() -> None:
    graph = load_model(Forms("(x @ (t := w.T)) @ t"), ModelOptions(), (torch.randn(8, 8),)).graph
    assert [kind for kind, _ in products(graph)] == ["aten.numpy_T.default"] + 2 * [
        "aten.matmul.default"
    ]


@pytest.mark.parametrize(
    ("attributes", "kind"),
    [
        ({}, AFFINE),
        ({"transB": 1}, LINEAR),
        ({"transA": 1}, AFFINE),
        ({"alpha": 2.0}, AFFINE),
        ({"beta": 0.5}, AFFINE),
    ],
)
@pytest.mark.parametrize("biased", [True, False])
def test_products_of_onnx(attributes: dict[str, float], kind: str, biased: bool) -> None:
    bias = ["b"] if biased else []
    stored = {"w": np.eye(8, dtype=np.float32), "b": np.zeros(8, np.float32)}
    graph = helper.make_graph(
        [helper.make_node("Gemm", ["x", "w", *bias], ["y"], name="gemm", **attributes)],
        "one",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [8, 8])],
        [numpy_helper.from_array(stored[name], name) for name in ("w", *bias)],
    )
    opset = [helper.make_opsetid("", 18)]
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=opset, ir_version=8)
    made = products(load_model(model, ModelOptions()).graph)
    (inputs,) = (names for name, names in made if name == kind)
    assert inputs[1] == "w"
    # What else a Gemm does stands beside its product.
    plain = not attributes.keys() - {"transB"}
    assert not plain or inputs == ("x", "w", *bias)
