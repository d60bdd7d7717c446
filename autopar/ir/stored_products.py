"""Products of values with a stored matrix, in two spellings for all those of their sources.

    LINEAR: y = x W^T + b, W [out, in]        AFFINE: y = x W + b, W [in, out]

So whoever treats them apart from other products (`recipes`) knows two kinds of operators. Layers of
experts read the stored matrices of all experts, transposed or not.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .graph import Graph, Operator, Ref, Role, Tensor, Value

LINEAR = "aten.linear.default"
AFFINE = "autopar.affine"
STORED = frozenset((LINEAR, AFFINE))
EXPERTS = "autopar.experts"
LINEAR_LOSS = "autopar.linear_cross_entropy.default"
"""A product with a stored matrix of classes, and the cross entropy of its rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Names:
    """The formal names of a product's values, matrix and bias ("" where it has none)."""

    values: str
    matrix: str
    bias: str = ""


_SOURCES: Mapping[str, _Names] = {
    "aten.mm.default": _Names(values="self", matrix="mat2"),
    "aten.matmul.default": _Names(values="self", matrix="other"),
    "aten.addmm.default": _Names(values="mat1", matrix="mat2", bias="self"),
}
_PLAIN: Mapping[str, float] = {"alpha": 1.0, "beta": 1.0, "transA": 0}
"""Further arguments of those operators, where they change nothing."""
_TRANSPOSING = frozenset(
    (
        *("aten.t.default", "aten.mT.default", "aten.numpy_T.default"),
        *("aten.transpose.int", "aten.permute.default"),
    )
)


def with_stored_products(graph: Graph) -> Graph:
    """The graph whose products with a stored matrix are LINEAR or AFFINE.

    A matrix that is transposed for one product alone is read as it is stored.
    """
    views = _views(graph, dims=2)
    products = (_respelled(graph, operator, views) for operator in graph.operators)
    return _reading(graph, [product for product in products if product is not None], views)


def with_stored_experts(graph: Graph, layers: Collection[str]) -> Graph:
    """The graph in which these layers of experts read weights as they are stored, turned or not.

    So nothing stands between a parameter and the products that read its narrow copy. The attribute
    `turned` has the numbers of the operands that such a layer reads transposed.
    """
    views = _views(graph, dims=3)
    read = []
    for layer in graph.operators:
        if layer.kind == EXPERTS and layer.name in layers:
            places = [place for place, name in enumerate(layer.inputs) if name in views]
            # Operands stand behind the rows and their experts.
            turned: Value = tuple(place - 2 for place in places)
            inputs = tuple(
                views[name].inputs[0] if place in places else name
                for place, name in enumerate(layer.inputs)
            )
            attributes = {**layer.attributes, "turned": turned}
            read.append(replace(layer, inputs=inputs, attributes=attributes))
    return _reading(graph, read, views)


def _reading(graph: Graph, readers: Sequence[Operator], views: Mapping[str, Operator]) -> Graph:
    """The graph with operators in place of those of their names, and without views for these."""
    by_name = {operator.name: operator for operator in readers}
    gone = {
        name
        for operator in graph.operators
        if operator.name in by_name
        for name in operator.inputs
        if name in views and name not in by_name[operator.name].inputs
    }
    return replace(
        graph,
        operators=tuple(
            by_name.get(op.name, op) for op in graph.operators if gone.isdisjoint(op.outputs)
        ),
        tensors={name: tensor for name, tensor in graph.tensors.items() if name not in gone},
    )


def _views(graph: Graph, dims: int) -> dict[str, Operator]:
    """The operators that transpose stored matrices for one reader, by their results.

    `dims`: of a matrix 2, of those of all experts 3.
    """
    readers = graph.consumers()
    return {
        op.outputs[0]: op
        for op in graph.operators
        if op.kind in _TRANSPOSING
        and _is_stored(graph.tensors[op.inputs[0]], dims)
        and _swaps(op, dims)
        and len(readers.get(op.outputs[0], ())) == 1
        and op.outputs[0] not in graph.outputs
    }


def _swaps(operator: Operator, dims: int) -> bool:
    """Whether an operator exchanges the last two of so many dims, and no others."""
    given: Any = operator.attributes
    last = (dims - 2, dims - 1)
    if "dim0" in given:
        return {given["dim0"] % dims, given["dim1"] % dims} == {*last}
    # Without an order all dims are reversed, but by `mT`.
    order = given.get("perm") or given.get("dims")
    if order is None:
        return dims == 2 or operator.kind == "aten.mT.default"
    return tuple(dim % dims for dim in order) == (*range(dims - 2), *reversed(last))


def _is_stored(tensor: Tensor, dims: int = 2) -> bool:
    return tensor.role is Role.PARAMETER and len(tensor.shape) == dims


def _respelled(graph: Graph, operator: Operator, views: Mapping[str, Operator]) -> Operator | None:
    """A product in the spelling of this module; None for what multiplies by no stored matrix."""
    names = _SOURCES.get(operator.kind)
    if names is None:
        return None
    given = operator.attributes
    if any(given.get(name, plain) != plain for name, plain in _PLAIN.items()):
        return None
    transposed = given.get("transB", 0) == 1
    operands = {}
    for role, name in (("input", names.values), ("weight", names.matrix), ("bias", names.bias)):
        place = given.get(name)
        if isinstance(place, Ref):
            operands[role] = operator.inputs[place.index]
    if (view := views.get(operands["weight"])) is not None:
        operands["weight"] = view.inputs[0]
        transposed = not transposed
    width = graph.tensors[operator.outputs[0]].shape[-1:]
    bias = operands.get("bias")
    if not _is_stored(graph.tensors[operands["weight"]]) or (
        bias is not None and graph.tensors[bias].shape != width
    ):
        return None
    return replace(
        operator,
        kind=LINEAR if transposed else AFFINE,
        inputs=tuple(operands.values()),
        attributes={role: Ref(index) for index, role in enumerate(operands)},
    )
