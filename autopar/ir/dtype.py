"""Rewrites a graph to another floating-point type."""

from __future__ import annotations

from dataclasses import replace

from .graph import Graph, Operator, Value

HALVES = ("float16", "bfloat16")
"""The types of 16 bits."""
FLOATS = ("float64", "float32", *HALVES)
# Numbers of the ONNX element types, as in onnx.TensorProto.DataType.
_ONNX_TYPES = {"float32": 1, "float16": 10, "float64": 11, "bfloat16": 16}


def cast_graph(graph: Graph, dtype: str) -> Graph:
    """The graph with every real floating-point tensor, constant and cast in `dtype`."""
    if dtype not in FLOATS:
        raise ValueError(f"dtype {dtype!r} is none of {', '.join(FLOATS)}")
    tensors = {
        name: replace(t, dtype=dtype) if t.dtype in FLOATS else t
        for name, t in graph.tensors.items()
    }
    operators = tuple(_cast_operator(op, dtype) for op in graph.operators)
    return replace(graph, tensors=tensors, operators=operators)


def _cast_operator(op: Operator, dtype: str) -> Operator:
    changed: dict[str, Value] = {}
    for name, value in op.attributes.items():
        if name == "dtype" and value in FLOATS:
            changed[name] = dtype
        elif (
            op.kind.startswith("onnx.")
            and name in ("to", "dtype", "stash_type")
            and value in _ONNX_TYPES.values()
        ):
            changed[name] = _ONNX_TYPES[dtype]
    return replace(op, attributes={**op.attributes, **changed}) if changed else op
