"""Products of values with a stored matrix, in two spellings for all those of their sources.

    LINEAR: y = x W^T + b, W [out, in]        AFFINE: y = x W + b, W [in, out]

So whoever treats them apart from other products (`recipes`) knows two kinds of operators.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from .graph import Graph, Operator, Ref, Role, Tensor

LINEAR = "aten.linear.default"
AFFINE = "autopar.affine"
STORED = frozenset((LINEAR, AFFINE))


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
    "onnx.MatMul": _Names(values="A", matrix="B"),
    "onnx.Gemm": _Names(values="A", matrix="B", bias="C"),
}
_PLAIN: Mapping[str, float] = {"alpha": 1.0, "beta": 1.0, "transA": 0}
"""Further arguments of those operators, where they change nothing."""
_TRANSPOSING = frozenset(
    (
        *("aten.t.default", "aten.mT.default", "aten.numpy_T.default"),
        *("aten.transpose.int", "aten.permute.default", "onnx.Transpose"),
    )
)


def with_stored_products(graph: Graph) -> Graph:
    """The graph whose products with a stored matrix are LINEAR or AFFINE.

    A matrix that is transposed for one product alone is read as it is stored.
    """
    readers = graph.consumers()
    # A view that others read, too, stays.
    views = {
        op.outputs[0]: op
        for op in graph.operators
        if _transposes(graph, op)
        and len(readers.get(op.outputs[0], ())) == 1
        and op.outputs[0] not in graph.outputs
    }
    operators = []
    read: set[str] = set()
    for operator in graph.operators:
        product = _respelled(graph, operator, views)
        operators.append(product or operator)
        if product is not None:
            read.update(name for name in operator.inputs if name in views)
    return replace(
        graph,
        operators=tuple(op for op in operators if read.isdisjoint(op.outputs)),
        tensors={name: tensor for name, tensor in graph.tensors.items() if name not in read},
    )


def _transposes(graph: Graph, operator: Operator) -> bool:
    """Whether an operator transposes a stored matrix."""
    if operator.kind not in _TRANSPOSING or len(operator.inputs) != 1:
        return False
    matrix = graph.tensors[operator.inputs[0]]
    turned = graph.tensors[operator.outputs[0]].shape == matrix.shape[::-1]
    order = operator.attributes.get("perm", operator.attributes.get("dims", (1, 0)))
    return turned and order in ((1, 0), (-1, -2), (-1, 0), (1, -2)) and _is_stored(matrix)


def _is_stored(tensor: Tensor) -> bool:
    return tensor.role is Role.PARAMETER and len(tensor.shape) == 2


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
