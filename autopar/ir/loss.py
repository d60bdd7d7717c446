"""Gives a graph the scalar loss that training differentiates."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from .graph import Graph, Operator, Ref, Tensor, Value


def with_loss(graph: Graph, outputs: Iterable[str] | None = None) -> Graph:
    """The graph with `loss` set.

    It is the model's own scalar float output, or else the sum of its outputs' mean squares.

    `outputs` restricts the mean squares to these outputs (those that depend on a parameter).
    """
    wanted = [
        name
        for name in graph.outputs
        if graph.tensors[name].is_float and (outputs is None or name in set(outputs))
    ]
    scalars = [name for name in wanted if graph.tensors[name].shape == ()]
    if graph.loss or not wanted:
        return graph
    if scalars:
        return replace(graph, loss=scalars[0])
    tensors = dict(graph.tensors)
    operators = list(graph.operators)
    total = ""
    for index, name in enumerate(wanted):
        source = graph.tensors[name]
        square = f"loss/mean_square.{index}"
        attributes: dict[str, Value] = {"x": Ref(0), "count": max(source.size, 1)}
        tensors[square] = Tensor(name=square, shape=(), dtype=source.dtype)
        operators.append(
            Operator(
                name=square,
                kind="autopar.mean_square",
                inputs=(name,),
                outputs=(square,),
                attributes=attributes,
            )
        )
        if total:
            joined = f"loss/add.{index}"
            tensors[joined] = Tensor(name=joined, shape=(), dtype=tensors[total].dtype)
            sides: dict[str, Value] = {"a": Ref(0), "b": Ref(1)}
            operators.append(
                Operator(
                    name=joined,
                    kind="autopar.add",
                    inputs=(total, square),
                    outputs=(joined,),
                    attributes=sides,
                )
            )
        total = joined if total else square
    return replace(graph, tensors=tensors, operators=tuple(operators), loss=total)
