"""Attributes that a user has given the operators of a module, carried over to the graph."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autopar.ir import Graph, Operator

CROSS_BATCH = "cross_batch"
MARK = "autopar_attributes"


def with_attributes(graph: Graph, module: Any) -> Graph:
    """The graph in which the operators of modules that are marked `cross_batch` say so.

    The innermost mark counts.
    """
    marks = {
        path: vars(part)[MARK].get(CROSS_BATCH)
        for path, part in module.named_modules()
        if MARK in vars(part)
    }
    paths = sorted(
        (path for path, value in marks.items() if value is not None), key=len, reverse=True
    )

    def marked(operator: Operator) -> Operator:
        path = next(
            (p for p in paths if not p or operator.name.startswith((f"{p}/", f"{p}."))), None
        )
        told = path is not None and marks[path]
        if told:
            return replace(operator, attributes={**operator.attributes, CROSS_BATCH: True})
        return operator

    if any(marks.values()):
        return replace(graph, operators=tuple(map(marked, graph.operators)))
    return graph
