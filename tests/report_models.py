"""A small stack of two-layer perceptrons as an ONNX model, and its account under a few plans."""

from __future__ import annotations

import onnx
from onnx import TensorProto, helper

from autopar.analysis.program.account import Account, account_of
from autopar.api import Planned, plan_loaded
from autopar.frontends.load import ModelOptions, load_model
from autopar.sharding.analysis import analyse

MEGATRON = ("*/up/*=gpu:n", "*/act/*=gpu:d1", "*/down/*=gpu:k")


def perceptrons(layers: int = 2, hidden: int = 16) -> onnx.ModelProto:
    """`layers` times x -> relu(x up) down."""
    nodes = []
    weights = []
    x = "x"
    for i in range(layers):
        for name, shape in (("up", (hidden, 4 * hidden)), ("down", (4 * hidden, hidden))):
            weights.append(
                helper.make_tensor(
                    f"layers.{i}.{name}.weight",
                    TensorProto.FLOAT,
                    shape,
                    [0.0] * (4 * hidden * hidden),
                )
            )
        made = [
            f"/layers.{i}/up/MatMul_output_0",
            f"/layers.{i}/act/Relu_output_0",
            f"/layers.{i}/down/MatMul_output_0",
        ]
        nodes.append(
            helper.make_node(
                "MatMul", [x, weights[-2].name], [made[0]], name=f"/layers.{i}/up/MatMul"
            )
        )
        nodes.append(helper.make_node("Relu", [made[0]], [made[1]], name=f"/layers.{i}/act/Relu"))
        nodes.append(
            helper.make_node(
                "MatMul", [made[1], weights[-1].name], [made[2]], name=f"/layers.{i}/down/MatMul"
            )
        )
        x = made[2]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [32, hidden])]
    outputs = [helper.make_tensor_value_info(x, TensorProto.FLOAT, [32, hidden])]
    graph = helper.make_graph(nodes, "perceptrons", inputs, outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def planned(layers: int = 2, hidden: int = 16, **options: object) -> Planned:
    """The stack planned on four GPUs."""
    model = load_model(perceptrons(layers, hidden), ModelOptions())
    given = {"cluster": "dgx-h100", "devices": 4, "mesh": (4,), **options}
    return plan_loaded(model, **given)  # type: ignore[arg-type]


def account(planned_model: Planned) -> Account:
    """The account of the plan's step."""
    analysis = analyse(planned_model.model.graph, train=planned_model.plan.model.mode == "train")
    return account_of(planned_model.plan, analysis, planned_model.cluster)
