"""Resolves sequences of tensors while importing: only the tensors in them reach the graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from onnx import NodeProto

from .nodes import refuse
from .values import FOLD_LIMIT, Val
from .writer import Importer, Writer


def _sequence(importer: Importer, node: NodeProto) -> list[Val]:
    entry = importer.env.get(node.input[0])
    if not isinstance(entry, list):
        refuse(node, f"reads {node.input[0]!r}, which is not a sequence made inside the graph")
    return entry


def _position(importer: Importer, node: NodeProto, place: int, count: int, default: int) -> int:
    if len(node.input) <= place or not node.input[place]:
        return default
    array = importer.value(node, node.input[place]).known()
    if array is None or array.size != 1 or not -count <= int(array.reshape(())) <= count:
        refuse(node, "takes a position that is not known, or lies outside the sequence")
    position = int(array.reshape(()))
    return position + count if position < 0 else position


def _construct(importer: Importer, node: NodeProto) -> None:
    importer.env[node.output[0]] = [importer.value(node, name) for name in node.input]


def _at(importer: Importer, node: NodeProto) -> None:
    items = _sequence(importer, node)
    position = _position(importer, node, 1, len(items), 0)
    if position >= len(items):
        refuse(node, f"reads element {position} of {len(items)}")
    importer.env[node.output[0]] = items[position]


def _length(importer: Importer, node: NodeProto) -> None:
    count = Writer(importer, node).constant(len(_sequence(importer, node)))
    importer.env[node.output[0]] = importer.value(node, count)


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
            refuse(node, "takes 'split' from a value that depends on the model's inputs")
        step = int(given) if given.ndim == 0 else 0
        sizes = (
            [min(step, size - start) for start in range(0, size, step)] if step else given.tolist()
        )
        keep = True
    if len(sizes) > FOLD_LIMIT >> 4:
        refuse(node, f"makes a sequence of {len(sizes)} tensors")
    w = Writer(importer, node)
    pieces = w.split(node.input[0], sizes, axis)
    if not keep:
        pieces = [w("Squeeze", piece, w.constant([axis])) for piece in pieces]
    importer.env[node.output[0]] = [importer.value(node, piece) for piece in pieces]


def _concat(importer: Importer, node: NodeProto) -> None:
    w = Writer(importer, node)
    names = [w.hold(item) for item in _sequence(importer, node)]
    axis = w.attribute("axis", 0)
    if w.attribute("new_axis", 0):
        names = [w("Unsqueeze", name, w.constant([axis])) for name in names]
    w.last("Concat", *names, axis=axis)


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
