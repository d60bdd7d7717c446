"""Which stored floats of an ONNX file are parameters: frequencies and masks are not, weights are,
and a user may overrule it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

import autopar
from autopar.errors import UsageError
from autopar.frontends.load import ModelOptions, load_model
from autopar.frontends.onnx import Roles, import_onnx
from autopar.ir import Graph

TABLE = np.ones((16, 8), np.float32)
VECTOR = np.linspace(1, 2, 8, dtype=np.float32)
MATRIX = np.ones((8, 8), np.float32)


def model(nodes: list[NodeProto], stored: dict[str, np.ndarray]) -> ModelProto:
    """A model of token numbers, positions and pixels; its output is the last node's."""
    inputs = [
        helper.make_tensor_value_info("tokens", TensorProto.INT64, [2, 8]),
        helper.make_tensor_value_info(
            "positions", TensorProto.FLOAT if "floats" in stored else TensorProto.INT64, [8, 1]
        ),
        helper.make_tensor_value_info("pixels", TensorProto.FLOAT, [8, 8]),
    ]
    output = helper.make_empty_tensor_value_info(nodes[-1].output[0])
    initializers = [
        numpy_helper.from_array(array, name) for name, array in stored.items() if name != "floats"
    ]
    graph = helper.make_graph(nodes, "stored", inputs, [output], initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def node(kind: str, *names: str, **attributes: object) -> NodeProto:
    """A node whose last name is its output."""
    return helper.make_node(kind, list(names[:-1]), [names[-1]], **attributes)


def parameters(graph: Graph) -> set[str]:
    """Names of the parameters."""
    return {tensor.name for tensor in graph.parameters}


LOOKED_UP = node("Gather", "table", "tokens", "embedded")
CAST = node("Cast", "positions", "places", to=TensorProto.FLOAT)
ANGLES = [CAST, node("Mul", "places", "freq", "angles"), node("Cos", "angles", "cosine")]
ROTARY = [LOOKED_UP, *ANGLES, node("Mul", "embedded", "cosine", "turned")]


@pytest.mark.parametrize("product", ["Mul", "MatMul"])
def test_frequencies_that_meet_positions_before_a_cosine_are_no_parameters(product: str) -> None:
    nodes = [
        node(product, *n.input, *n.output) if n.op_type == "Mul" and "freq" in n.input else n
        for n in ROTARY
    ]
    stored = {"table": TABLE, "freq": VECTOR.reshape(1, 8)}
    graph = import_onnx(model(nodes, stored))
    assert parameters(graph) == {"table"}
    assert graph.tensors["freq"].shape == (1, 8)


def test_stored_positions_are_no_parameters_either() -> None:
    nodes = [
        LOOKED_UP,
        node("Mul", "counted", "freq", "angles"),
        node("Concat", "angles", "angles", "both", axis=1),
    ]
    nodes += [
        node("Sin", "both", "sine"),
        node("Slice", "sine", "from", "to", "axis", "half"),
        node("Mul", "embedded", "half", "turned"),
    ]
    stored = {
        "table": TABLE,
        "freq": VECTOR,
        "counted": np.arange(8, dtype=np.float32).reshape(8, 1),
    }
    stored |= {"from": np.array([0]), "to": np.array([8]), "axis": np.array([1])}
    assert parameters(import_onnx(model(nodes, stored))) == {"table"}


def test_a_wave_of_data_keeps_its_weights() -> None:
    """A first layer with a sine: its input is data, or its weights are a matrix, or two vectors are
    added.
    """
    wave = [
        node("MatMul", "pixels", "weight", "y"),
        node("Add", "y", "bias", "z"),
        node("Sin", "z", "out"),
    ]
    assert parameters(import_onnx(model(wave, {"weight": MATRIX, "bias": VECTOR}))) == {
        "weight",
        "bias",
    }
    scaled = [node("Mul", "pixels", "freq", "y"), node("Sin", "y", "out")]
    assert parameters(import_onnx(model(scaled, {"freq": VECTOR}))) == {"freq"}
    learned = [
        CAST,
        node("MatMul", "places", "row", "y"),
        node("Add", "y", "phase", "z"),
        node("Sin", "z", "out"),
    ]
    assert parameters(
        import_onnx(model(learned, {"row": VECTOR.reshape(1, 8), "phase": VECTOR}))
    ) == {"row", "phase"}


def test_a_vector_with_a_second_use_is_a_parameter() -> None:
    nodes = [*ROTARY, node("Add", "turned", "freq", "shifted")]
    assert parameters(import_onnx(model(nodes, {"table": TABLE, "freq": VECTOR}))) == {
        "table",
        "freq",
    }
    leaves = [*ANGLES[:2], node("Identity", "angles", "out")]
    assert parameters(import_onnx(model(leaves, {"freq": VECTOR}))) == {"freq"}


@pytest.mark.parametrize("lowest", [-np.inf, np.finfo(np.float32).min, np.nan])
def test_a_mask_is_no_parameter(lowest: float) -> None:
    mask = np.triu(np.full((8, 8), lowest, np.float32), 1)
    nodes = [
        node("MatMul", "pixels", "weight", "scores"),
        node("Add", "scores", "mask", "masked"),
        node("Softmax", "masked", "out"),
    ]
    assert parameters(import_onnx(model(nodes, {"weight": MATRIX, "mask": mask}))) == {"weight"}
    bias = np.triu(np.full((8, 8), -1e4, np.float32), 1)
    assert parameters(import_onnx(model(nodes, {"weight": MATRIX, "mask": bias}))) == {
        "weight",
        "mask",
    }


def test_a_user_overrules() -> None:
    proto = model(ROTARY, {"table": TABLE, "freq": VECTOR})
    assert parameters(import_onnx(proto, roles=Roles(trained=("fr*",)))) == {"table", "freq"}
    assert parameters(import_onnx(proto, roles=Roles(frozen=("table",)))) == set()
    assert parameters(import_onnx(proto, roles=Roles(exactly={"freq"}))) == {"freq"}
    with pytest.raises(UsageError, match=r"--frozen 'tab'.*there are freq, table"):
        import_onnx(proto, roles=Roles(frozen=("tab",)))


def test_a_plan_remembers_its_parameters(tmp_path: Path) -> None:
    path = tmp_path / "rotary.onnx"
    onnx.save(model(ROTARY, {"table": TABLE, "freq": VECTOR}), path)
    plan = autopar.plan(path, devices=2, cluster="local-cpu", trained=["freq"])
    assert set(plan.parameters) == {"table", "freq"}
    assert parameters(autopar.plan_origin.model_of_plan(path, plan).graph) == {"table", "freq"}
    assert parameters(load_model(path, ModelOptions()).graph) == {"table"}
