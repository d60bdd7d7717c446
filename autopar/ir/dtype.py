"""Rewrites a graph to another floating-point type."""

from __future__ import annotations

from dataclasses import replace

from .graph import Graph, Operator

HALVES = ("float16", "bfloat16")
"""The types of 16 bits."""
FLOATS = ("float64", "float32", *HALVES)


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
    if op.attributes.get("dtype") not in FLOATS:
        return op
    return replace(op, attributes={**op.attributes, "dtype": dtype})
