"""Takes the weights of experts' results, and the sum of each token's, into the layer of experts.

    results [t k, o] * scores [t k, 1] → [t, k, o] → sum over k → [t, o]

becomes the layer's own work, since a rank that holds some experts of a token can then add up what
it made of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from autopar.ir import Graph, Operator, Ref, needed_operators

from .routing import Finder

_VIEWS = frozenset({"aten.view.default", "aten.reshape.default"})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sum:
    """The sum of a layer's weighed results: its operator, and the scores [t k]."""

    operator: Operator
    scores: str


def weigh_experts(graph: Graph, kind: str) -> Graph:
    """The graph in which layers of experts, operators of `kind`, weigh and add up their results."""
    finder = Finder(graph)
    sums = {
        layer.name: total
        for layer in graph.operators
        if layer.kind == kind
        and "chosen" in layer.attributes
        and (total := _sum_of(finder, layer)) is not None
    }
    return _with_sums(graph, finder, sums) if sums else graph


def _sum_of(finder: Finder, layer: Operator) -> _Sum | None:
    """The weighed sum of a layer's results, if nothing else reads them."""
    made = layer.outputs[0]
    product = finder.reader(made)
    scores = _scores(finder, product, made)
    if product is None or scores is None:
        return None
    view = finder.reader(product.outputs[0])
    if view is None or view.kind not in _VIEWS:
        return None
    tokens = finder.graph.tensors[layer.inputs[0]].shape[0]
    rows, width = finder.graph.tensors[made].shape
    total = finder.reader(view.outputs[0])
    by_token = finder.graph.tensors[view.outputs[0]].shape == (tokens, rows // tokens, width)
    if total is None or not by_token or not _adds_up(total):
        return None
    return _Sum(operator=total, scores=scores)


def _adds_up(total: Operator) -> bool:
    """Whether an operator is the sum over the rows of each token."""
    plain = not total.attributes.get("keepdim") and total.attributes.get("dtype") is None
    return (
        total.kind == "aten.sum.dim_IntList"
        and plain
        and total.attributes.get("dim") in ((1,), (-2,))
    )


def _scores(finder: Finder, product: Operator | None, made: str) -> str | None:
    """The scores [rows] by which a product weighs the results `made`."""
    if product is None or product.kind != "aten.mul.Tensor" or len(product.inputs) != 2:
        return None
    other = next((name for name in product.inputs if name != made), "")
    column = finder.makers.get(other)
    if column is None or column.kind != "aten.unsqueeze.default":
        return None
    rows = finder.graph.tensors[made].shape[0]
    shapes = [finder.graph.tensors[name].shape for name in (*column.inputs, other)]
    return column.inputs[0] if shapes == [(rows,), (rows, 1)] else None


def _with_sums(graph: Graph, finder: Finder, sums: Mapping[str, _Sum]) -> Graph:
    """Put each layer where its sum stood, behind the scores, with the sums as its results."""
    layers = {op.name: op for op in graph.operators if op.name in sums}
    at = {total.operator.name: layers[name] for name, total in sums.items()}
    renamed = {
        total.operator.outputs[0]: layers[name].outputs[0]
        for name, total in sums.items()
        if total.operator.outputs[0] not in finder.wanted
    }
    operators = []
    for op in graph.operators:
        if op.name in at:
            op = _weighing(at[op.name], sums[at[op.name].name])
        if op.name not in layers or op is not layers[op.name]:
            inputs, outputs = (
                tuple(renamed.get(name, name) for name in names)
                for names in (op.inputs, op.outputs)
            )
            operators.append(replace(op, inputs=inputs, outputs=outputs))
    tensors = dict(graph.tensors) | {
        new: replace(graph.tensors[old], name=new) for old, new in renamed.items()
    }
    needed = needed_operators(operators, finder.wanted)
    return replace(graph, tensors=tensors, operators=needed)


def _weighing(layer: Operator, total: _Sum) -> Operator:
    """The layer with scores, which makes what the sum made."""
    return replace(
        layer,
        inputs=(*layer.inputs, total.scores),
        outputs=total.operator.outputs,
        attributes={**layer.attributes, "scores": Ref(len(layer.inputs))},
    )
