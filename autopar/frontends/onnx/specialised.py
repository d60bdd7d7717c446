"""A model with values for some of its inputs, and with other outputs than its file has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, ValueInfoProto, helper, numpy_helper

from autopar.errors import UsageError, unknown

from .nodes import names_read
from .values import dtype_name

Known: TypeAlias = "float | bool | Sequence[float]"


def specialised(
    model: ModelProto, values: Mapping[str, Known], outputs: Sequence[str]
) -> ModelProto:
    """The model with constants in place of inputs, and the outputs named (none: its own).

    What no output needs is left out. Raise `UsageError` for a name that it does not have, and for
    values that do not fit their input.
    """
    if not values and not outputs:
        return model
    made = ModelProto()
    made.CopyFrom(model)
    graph = made.graph
    for name, value in values.items():
        _set(graph, name, value)
    if outputs:
        types = {item.name: item for item in (*graph.value_info, *graph.output)}
        present = {name for node in graph.node for name in node.output if name}
        for name in outputs:
            if name not in present:
                raise UsageError("--outputs: " + unknown("tensor", name, present))
        chosen = [types.get(name, ValueInfoProto(name=name)) for name in outputs]
        del graph.output[:]
        graph.output.extend(chosen)
    nodes = _needed(graph)
    del graph.node[:]
    graph.node.extend(nodes)
    return made


def _set(graph: GraphProto, name: str, value: Known) -> None:
    """Let an input be a constant."""
    inputs = {item.name: item for item in graph.input}
    if name not in inputs:
        raise UsageError("--value: " + unknown("input", name, inputs))
    kind = inputs[name].type.tensor_type
    dtype = dtype_name(kind.elem_type, f"the input {name!r}")
    array = np.asarray(value, dtype)
    dims = kind.shape.dim
    fixed = all(dim.HasField("dim_value") and dim.dim_value > 0 for dim in dims)
    shape = tuple(dim.dim_value for dim in dims) if fixed else array.shape
    if array.size != 1 and array.shape != shape and array.size != np.prod(shape):
        raise UsageError(f"--value {name}: {array.size} numbers for an input of the shape {shape}")
    array = np.broadcast_to(array, shape) if array.size == 1 else array.reshape(shape)
    tensor = numpy_helper.from_array(np.ascontiguousarray(array), name)
    graph.node.insert(0, helper.make_node("Constant", [], [name], name=name, value=tensor))
    graph.input.remove(inputs[name])


def _needed(graph: GraphProto) -> list[NodeProto]:
    """The nodes that lead to an output."""
    wanted = {item.name for item in graph.output}
    needed = []
    for node in reversed(graph.node):
        if not wanted.isdisjoint(node.output):
            needed.append(node)
            wanted.update(names_read(GraphProto(node=[node])))
    return needed[::-1]
