"""Recognises weights that Constant and ConstantOfShape nodes make in place of initializers."""

from __future__ import annotations

import math

from onnx import GraphProto, NodeProto, TensorProto, numpy_helper

_SLOTS = {
    "Conv": (1, 2),
    "ConvTranspose": (1, 2),
    "Gemm": (1, 2),
    "MatMul": (1,),
    "BatchNormalization": (1, 2, 3, 4),
    "PRelu": (1,),
    "InstanceNormalization": (1, 2),
    "LayerNormalization": (1, 2),
    "RMSNormalization": (1,),
    "GroupNormalization": (1, 2),
    "LSTM": (1, 2, 3),
    "GRU": (1, 2, 3),
    "RNN": (1, 2, 3),
}
_PASS = frozenset({"Reshape", "Unsqueeze", "Squeeze", "Transpose", "Identity", "Cast"})
_PER_CHANNEL = frozenset({"Mul", "Add"})
_FLOATS = frozenset(
    {TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16}
)


def _roots(graph: GraphProto) -> dict[str, bool]:
    """The float tensors that nodes spell out, and for each whether it is a filled vector."""
    stored: dict[str, TensorProto] = {tensor.name: tensor for tensor in graph.initializer}
    roots: dict[str, bool] = {}
    for node in graph.node:
        if node.op_type == "Constant":
            value = next((item.t for item in node.attribute if item.name == "value"), None)
            if value is not None:
                stored[node.output[0]] = value
                if value.data_type in _FLOATS and math.prod(value.dims) > 1:
                    roots[node.output[0]] = False
        elif node.op_type == "ConstantOfShape" and node.input and node.input[0] in stored:
            shape = stored[node.input[0]]
            fill = next((item.t for item in node.attribute if item.name == "value"), None)
            if (
                (fill is None or fill.data_type in _FLOATS)
                and _finite(fill)
                and math.prod(shape.dims) <= 8
                and _product(shape) > 1
            ):
                roots[node.output[0]] = math.prod(shape.dims) == 1
    return roots


def _finite(fill: TensorProto | None) -> bool:
    return fill is None or bool(abs(float(numpy_helper.to_array(fill).ravel()[0])) < math.inf)


def _product(shape: TensorProto) -> int:
    if shape.data_location != TensorProto.EXTERNAL:
        return math.prod(numpy_helper.to_array(shape).ravel().tolist())
    return 0


def _slots(node: NodeProto, name: str, vector: bool) -> bool:
    if node.op_type in _PER_CHANNEL and vector:
        return True
    return any(
        node.input[slot] == name for slot in _SLOTS.get(node.op_type, ()) if slot < len(node.input)
    )


def weight_like(graph: GraphProto) -> frozenset[str]:
    """Names of created values that serve as weights: they reach a weight's input, reshaped or not.

    A vector of one repeated value that is unsqueezed and then multiplied or added is a per-channel
    scale or bias.
    """
    vectors = _roots(graph)
    root = {name: name for name in vectors}
    moved: set[str] = set()
    slots: set[str] = set()
    for node in graph.node:
        for name in node.input:
            if name not in root:
                continue
            if node.op_type in _PASS and node.input[0] == name:
                root[node.output[0]] = root[name]
                moved.add(node.output[0])
            elif _slots(node, name, vectors[root[name]] and name in moved):
                slots.add(root[name])
    return frozenset(slots)
