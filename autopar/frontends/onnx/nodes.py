"""Small helpers over the nodes of an ONNX graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NoReturn

import numpy as np
from onnx import AttributeProto, GraphProto, NodeProto, TensorProto

from autopar.errors import ModelError
from autopar.ir.graph import Value

from .calls import OPTIONAL, REQUIRED, Argument, folded
from .model import domain_of, kind_of
from .values import Signature, Val, signature

SPELLING = 23  # opset of the default domain whose names and defaults all older ones get


def refuse(node: NodeProto, reason: str) -> NoReturn:
    """Raise a `ModelError` that names the node and the reason."""
    raise ModelError(f"node {label(node)!r} ({kind_of(node)}) {reason}")


def label(node: NodeProto) -> str:
    """The node's own name, else its first output's."""
    return node.name or next((name for name in node.output if name), node.op_type)


def names_read(graph: GraphProto) -> Iterator[str]:
    """Every name that a node of the graph or of its subgraphs reads."""
    for node in graph.node:
        yield from node.input
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                yield from names_read(attribute.g)
                yield from (value.name for value in attribute.g.output)


def without_gaps(node: NodeProto) -> NodeProto:
    """Name every output of a node but unused trailing ones, and drop empty trailing inputs."""
    count = max((i + 1 for i, name in enumerate(node.output) if name), default=0)
    if count == len(node.output) and all(node.output):
        return node
    copy = NodeProto()
    copy.CopyFrom(node)
    del copy.output[:]
    copy.output.extend(
        name or f"{label(node)}/output_{i}" for i, name in enumerate(node.output[:count])
    )
    return copy


def call_arguments(
    node: NodeProto,
    spec: Signature,
    inputs: list[Val | None],
    attributes: Mapping[str, Value],
    read: Callable[[TensorProto], np.ndarray],
) -> dict[str, Argument]:
    """All arguments of the operator by formal name.

    Tensors come first, then folded inputs and attributes with defaults.
    """
    domain = domain_of(node)
    if _has_newest(domain, node.op_type):
        newest = signature(domain, node.op_type, max(spec.schema.since_version, SPELLING))
    else:
        newest = spec
    names = spec.inputs if node.op_type in ("Resize", "Upsample") else newest.inputs
    foldable = (*REQUIRED.get(node.op_type, ()), *OPTIONAL.get(node.op_type, ()))
    arguments: dict[str, Argument] = {}
    constants: dict[str, Argument] = {}
    for position, val in enumerate(inputs):
        if spec.variadic and position >= len(spec.inputs) - 1:
            rest = tuple(item for item in inputs[position:] if item is not None)
            arguments[names[len(spec.inputs) - 1]] = rest
            break
        if position >= len(names):
            raise ModelError(
                f"node {label(node)!r} ({kind_of(node)}) has {len(inputs)} inputs, its schema "
                f"{len(names)}"
            )
        if val is None:
            continue
        array = None
        if names[position] in foldable:
            array = val.known()
            if array is None and names[position] in REQUIRED.get(node.op_type, ()):
                array = val.decode(read)
        if array is not None:
            constants[names[position]] = folded(names[position], array)
        elif val.size or names[position] not in foldable:
            arguments[names[position]] = val
    return {**arguments, **newest.defaults, **spec.defaults, **constants, **attributes}


def _has_newest(domain: str, op_type: str) -> bool:
    return domain == "" and op_type != "Upsample"


def handed_on(
    op_type: str, arguments: Mapping[str, Argument], outputs: list[Val], wanted: list[bool]
) -> Val | None:
    """The input of an operator that changes nothing; None for another one."""
    source = next(iter(arguments.values()), None)
    if isinstance(source, tuple) and len(source) == 1:
        source = source[0]
    if not isinstance(source, Val):
        return None
    if op_type == "Dropout":
        plain = not arguments.get("training_mode", 0) and not any(wanted[1:])
    else:
        alone = op_type in ("Sum", "Max", "Min", "Mean", "Concat")
        alike = (source.shape, source.dtype) == (outputs[0].shape, outputs[0].dtype)
        several = isinstance(arguments[next(iter(arguments))], tuple)
        plain = alike and (op_type in ("Identity", "Cast", "CastLike") or (alone and several))
    return source if plain else None
