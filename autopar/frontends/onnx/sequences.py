"""Resolves sequences of tensors while importing: only the tensors in them reach the graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
from onnx import NodeProto, helper

from autopar.errors import ModelError

from .values import FOLD_LIMIT, Val, constant


class Importer(Protocol):
    """The part of the importer that handlers use.

    It has values by name, and processes a node in place of another.
    """

    env: dict[str, Val | list[Val]]
    versions: Mapping[str, int]
    used: set[str]

    def value(self, node: NodeProto, name: str) -> Val: ...
    def apply(self, node: NodeProto) -> None: ...
    def unique(self, name: str) -> str: ...


def _refused(node: NodeProto, reason: str) -> ModelError:
    return ModelError(f"node {node.name or node.output[0]!r} (onnx.{node.op_type}) {reason}")


def _sequence(importer: Importer, node: NodeProto) -> list[Val]:
    entry = importer.env.get(node.input[0])
    if not isinstance(entry, list):
        raise _refused(
            node, f"reads {node.input[0]!r}, which is not a sequence made inside the graph"
        )
    return entry


def _position(importer: Importer, node: NodeProto, place: int, count: int, default: int) -> int:
    if len(node.input) <= place or not node.input[place]:
        return default
    array = importer.value(node, node.input[place]).known()
    if array is None or array.size != 1 or not -count <= int(array.reshape(())) <= count:
        raise _refused(
            node,
            "takes a position that depends on the values of the model's inputs, or lies outside "
            "the sequence",
        )
    position = int(array.reshape(()))
    return position + count if position < 0 else position


def _construct(importer: Importer, node: NodeProto) -> None:
    importer.env[node.output[0]] = [importer.value(node, name) for name in node.input]


def _at(importer: Importer, node: NodeProto) -> None:
    items = _sequence(importer, node)
    position = _position(importer, node, 1, len(items), 0)
    if position >= len(items):
        raise _refused(node, f"reads element {position} of {len(items)}")
    importer.env[node.output[0]] = items[position]


def _length(importer: Importer, node: NodeProto) -> None:
    count = len(_sequence(importer, node))
    importer.env[node.output[0]] = constant(
        importer.unique(node.output[0]), np.array(count, np.int64)
    )


def _insert(importer: Importer, node: NodeProto) -> None:
    items = list(_sequence(importer, node))
    items.insert(
        _position(importer, node, 2, len(items), len(items)), importer.value(node, node.input[1])
    )
    importer.env[node.output[0]] = items


def _erase(importer: Importer, node: NodeProto) -> None:
    items = list(_sequence(importer, node))
    position = _position(importer, node, 1, len(items), len(items) - 1)
    importer.env[node.output[0]] = items[:position] + items[position + 1 :]


def _argument(importer: Importer, name: str, numbers: list[int]) -> str:
    importer.env[name] = constant(importer.unique(name), np.array(numbers, np.int64))
    return name


def _process(importer: Importer, node: NodeProto, argument: str, numbers: list[int]) -> None:
    """Process a Split, Squeeze or Unsqueeze, whose list argument was an attribute before."""
    if importer.versions[""] < 13:
        node.attribute.append(helper.make_attribute(argument, numbers))
    else:
        node.input.append(_argument(importer, f"{node.name}/{argument}", numbers))
    importer.used.update(node.output)
    importer.apply(node)


def _split(importer: Importer, node: NodeProto) -> None:
    """Equal pieces of the size given, pieces of the sizes given, or single slices."""
    attributes = {item.name: item.i for item in node.attribute}
    source = importer.value(node, node.input[0])
    axis = attributes.get("axis", 0) % max(1, len(source.shape))
    size = source.shape[axis]
    sizes = [1] * size
    keep = bool(attributes.get("keepdims", 1))
    if len(node.input) > 1 and node.input[1]:
        given = importer.value(node, node.input[1]).known()
        if given is None or (given.ndim == 0 and int(given) < 1):
            raise _refused(node, "takes 'split' from a value that depends on the model's inputs")
        step = int(given) if given.ndim == 0 else 0
        sizes = (
            [min(step, size - start) for start in range(0, size, step)] if step else given.tolist()
        )
        keep = True
    if len(sizes) > FOLD_LIMIT >> 4:
        raise _refused(node, f"makes a sequence of {len(sizes)} tensors")
    name = node.name or node.output[0]
    names = [f"{node.output[0]}/{i}" for i in range(len(sizes))]
    split = helper.make_node("Split", [node.input[0]], names, name=name, axis=axis)
    _process(importer, split, "split", sizes)
    if not keep:
        for i, piece in enumerate(names):
            names[i] = f"{piece}/squeezed"
            squeeze = helper.make_node("Squeeze", [piece], [names[i]], name=f"{name}/squeeze_{i}")
            _process(importer, squeeze, "axes", [axis])
    importer.env[node.output[0]] = [importer.value(node, piece) for piece in names]


def _concat(importer: Importer, node: NodeProto) -> None:
    items = _sequence(importer, node)
    attributes = {item.name: item.i for item in node.attribute}
    axis = attributes["axis"]
    name = node.name or node.output[0]
    names = []
    for i, item in enumerate(items):
        piece = f"{node.output[0]}/{i}"
        importer.env[piece] = item
        if attributes.get("new_axis", 0):
            lifted = f"{piece}/unsqueezed"
            unsqueeze = helper.make_node(
                "Unsqueeze", [piece], [lifted], name=f"{name}/unsqueeze_{i}"
            )
            _process(importer, unsqueeze, "axes", [axis])
            piece = lifted
        names.append(piece)
    importer.apply(helper.make_node("Concat", names, list(node.output), name=name, axis=axis))


SEQUENCES: Mapping[str, Callable[[Importer, NodeProto], None]] = {
    "SequenceConstruct": _construct,
    "SequenceEmpty": _construct,
    "SequenceAt": _at,
    "SequenceLength": _length,
    "SequenceInsert": _insert,
    "SequenceErase": _erase,
    "SplitToSequence": _split,
    "ConcatFromSequence": _concat,
}
