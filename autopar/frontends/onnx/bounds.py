"""Refuses ONNX models that cannot be expanded.

Their names are not text, or their local functions call one another without an end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto

from autopar.errors import ModelError
from autopar.file_limits import GRAPH_BYTES, GRAPH_DEPTH, GRAPH_NODES

Key: TypeAlias = tuple[str, str, str]


def require_text(model: ModelProto) -> None:
    """Refuse names that are not UTF-8.

    Protobuf gives them as bytes, and nothing can be looked up by them.
    """
    for name in _names(model):
        if not isinstance(name, str):
            raise ModelError(f"the model holds the name {name!r}, which is not UTF-8")


def _names(model: ModelProto) -> Iterator[object]:
    yield from _graph_names(model.graph)
    for function in model.functions:
        yield from (function.name, function.domain, *function.input, *function.output)
        yield from _node_names(function.node)


def _graph_names(graph: GraphProto) -> Iterator[object]:
    yield graph.name
    for item in (*graph.input, *graph.output, *graph.value_info):
        yield item.name
        yield from (dim.dim_param for dim in item.type.tensor_type.shape.dim)
    for tensor in graph.initializer:
        yield tensor.name
        for entry in tensor.external_data:
            yield from (entry.key, entry.value)
    yield from _node_names(graph.node)


def _node_names(nodes: Sequence[NodeProto]) -> Iterator[object]:
    for node in nodes:
        yield from (node.name, node.op_type, node.domain, *node.input, *node.output)
        for attribute in node.attribute:
            yield attribute.name
            if attribute.type == AttributeProto.GRAPH:
                yield from _graph_names(attribute.g)


def nodes_within(nodes: Sequence[NodeProto]) -> Iterator[NodeProto]:
    """The nodes and, recursively, the nodes of their subgraphs."""
    for node in nodes:
        yield node
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                yield from nodes_within(attribute.g.node)


def require_bounded(model: ModelProto) -> None:
    """Count the operators and bytes that the model would have with all local functions inlined."""
    functions: dict[Key, FunctionProto] = {}
    for function in model.functions:
        key = (function.domain, function.name, function.overload)
        if key in functions:
            raise ModelError(
                f"the model has two local functions called {function.domain}::{function.name}"
            )
        functions[key] = function
    sizes: dict[Key, tuple[int, int]] = {}
    for key in _callees_first(functions):
        sizes[key] = _written_out(functions[key].node, functions[key].ByteSize(), sizes)
    count, size = _written_out(model.graph.node, model.ByteSize(), sizes)
    if count > GRAPH_NODES or size > GRAPH_BYTES:
        most = f"at most {GRAPH_NODES} of {GRAPH_BYTES} are read"
        raise ModelError(
            f"the model's local functions come to {count} operators of {size} bytes; {most}"
        )


def _written_out(
    nodes: Sequence[NodeProto], size: int, sizes: dict[Key, tuple[int, int]]
) -> tuple[int, int]:
    """Number and bytes of nodes with all functions that they call written out.

    `size`: bytes of the nodes themselves. `sizes`: number and bytes of each function written out.
    """
    # A call that is of no local function is one operator, and adds no bytes.
    calls = [sizes.get(_called(node), (1, 0)) for node in nodes_within(nodes)]
    return sum(count for count, _ in calls), size + sum(extra for _, extra in calls)


def _called(node: NodeProto) -> Key:
    return node.domain, node.op_type, node.overload


def _callees_first(functions: dict[Key, FunctionProto]) -> list[Key]:
    """The functions, each after its callees; `ModelError` for a cycle or a long chain of calls."""
    depths: dict[Key, int] = {}
    for first in functions:
        open_calls = [(first, _calls(functions[first], functions))]
        running = {first}
        while open_calls:
            key, left = open_calls[-1]
            callee = next((other for other in left if other not in depths), None)
            if callee is None:
                open_calls.pop()
                running.discard(key)
                depths[key] = 1 + max(
                    (depths[other] for other in _calls(functions[key], functions)), default=0
                )
            elif callee in running:
                raise ModelError(
                    f"the model's local function {callee[0]}::{callee[1]} calls itself"
                )
            else:
                open_calls.append((callee, _calls(functions[callee], functions)))
                running.add(callee)
            if len(open_calls) > GRAPH_DEPTH or depths.get(key, 0) > GRAPH_DEPTH:
                raise ModelError(
                    f"the model's local functions call one another {GRAPH_DEPTH} times in a row; "
                    "at most that many are read"
                )
    return list(depths)


def _calls(function: FunctionProto, functions: dict[Key, FunctionProto]) -> Iterator[Key]:
    return (key for node in nodes_within(function.node) if (key := _called(node)) in functions)
