"""Rewrites a graph to another floating-point type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from .graph import Graph, Operator

HALVES = ("float16", "bfloat16")
"""The types of 16 bits."""
FLOATS = ("float64", "float32", *HALVES)


def cast_graph(graph: Graph, dtype: str) -> Graph:
    """The graph with every floating-point tensor, constant and cast in `dtype`, or as wide."""
    if dtype not in FLOATS:
        raise ValueError(f"dtype {dtype!r} is none of {', '.join(FLOATS)}")
    types = dict.fromkeys(FLOATS, dtype)
    if dtype == "float64":
        types["complex64"] = "complex128"
    tensors = {
        name: replace(t, dtype=types.get(t.dtype, t.dtype)) for name, t in graph.tensors.items()
    }
    operators = tuple(_cast_operator(op, types) for op in graph.operators)
    return replace(graph, tensors=tensors, operators=operators)


def _cast_operator(op: Operator, types: Mapping[str, str]) -> Operator:
    given = types.get(str(op.attributes.get("dtype")))
    return op if given is None else replace(op, attributes={**op.attributes, "dtype": given})
