"""Reads the scores of sparse attention, which layers write as two products, as one operator.

    matmul(weights, relu(matmul(query, key) * scale))    ->    autopar.index_scores

The layer keeps a product of every query, head and key between; the operator does not.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.ir import Graph, Operator, Ref, Tensor, Value, needed_operators

_MATMUL = "aten.matmul.default"
_SCALED = frozenset({"aten.mul.Tensor", "aten.mul.Scalar"})
_CASTS = frozenset({"aten._to_copy.default", "aten.to.dtype"})
_NARROW = ("bfloat16", "float16", "float32")
KIND = "autopar.index_scores.default"


def read_index_scores(graph: Graph) -> Graph:
    """The graph with one operator in place of each pair of products that gives scores of keys."""
    reader = _Reader(graph)
    operators = [reader.read(operator) for operator in graph.operators]
    if not reader.any_read:
        return graph
    wanted = {*graph.outputs, *graph.updates.values(), *((graph.loss,) if graph.loss else ())}
    return replace(graph, operators=needed_operators(operators, wanted))


class _Reader:
    """Makers of a graph's tensors; `any_read`: whether any scores are one operator now."""

    def __init__(self, graph: Graph) -> None:
        self.tensors = graph.tensors
        self.makers = {name: op for op in graph.operators for name in op.outputs}
        self.any_read = False

    def read(self, operator: Operator) -> Operator:
        """The operator that gives scores in place of the last squeeze behind both products."""
        if operator.kind not in ("aten.squeeze.dim", "aten.squeeze.dims"):
            return operator
        outer = self._maker(operator.inputs[0], _MATMUL)
        given = self._products(outer) if outer is not None else None
        if given is None:
            return operator
        *inputs, scale = given
        self.any_read = True
        attributes: dict[str, Value] = {
            name: Ref(place) for place, name in enumerate(("query", "key", "weights"))
        }
        names = tuple(str(name) for name in inputs)
        return replace(operator, kind=KIND, inputs=names, attributes={**attributes, "scale": scale})

    def _products(self, outer: Operator) -> tuple[str, str, str, float] | None:
        """Query, key, weights and scale of `weights relu(scale query key)`, if it is that."""
        row = self._maker(outer.inputs[0], "aten.unsqueeze.default")
        relu = self._maker(outer.inputs[1], "aten.relu.default")
        if row is None or relu is None:
            return None
        scale = 1.0
        inner = self.makers.get(relu.inputs[0])
        if inner is not None and inner.kind in _SCALED and len(inner.inputs) == 1:
            factor = inner.attributes.get("other")
            if not isinstance(factor, int | float):
                return None
            scale = float(factor)
            inner = self.makers.get(inner.inputs[0])
        if inner is None or inner.kind != _MATMUL:
            return None
        key = self._key(inner.inputs[1])
        query = inner.inputs[0]
        weights = row.inputs[0]
        if key is None or not self._fit(query, key, weights, outer.outputs[0]):
            return None
        return self._uncast(query), key, weights, scale

    def _key(self, name: str) -> str | None:
        """The keys [b, t, d] of a tensor [b, 1, d, t], before it was cast and turned."""
        turned = self._maker(name, "aten.unsqueeze.default")
        if turned is None:
            return None
        transposed = self._maker(self._uncast(turned.inputs[0]), "aten.transpose.int")
        if transposed is None:
            return None
        dims = {transposed.attributes.get("dim0"), transposed.attributes.get("dim1")}
        return self._uncast(transposed.inputs[0]) if dims in ({-1, -2}, {1, 2}) else None

    def _fit(self, query: str, key: str, weights: str, result: str) -> bool:
        """Whether shapes are [b, s, h, d], [b, t, d], [b, s, h] and [b, s, 1, t], in float32."""
        tensors = [self.tensors[name] for name in (query, key, weights, result)]
        if [len(one.shape) for one in tensors] != [4, 3, 3, 4] or not self._is_single(*tensors):
            return False
        b, s, h, d = tensors[0].shape
        t = tensors[1].shape[1]
        shapes = [one.shape for one in tensors[1:]]
        return shapes == [(b, t, d), (b, s, h), (b, s, 1, t)]

    @staticmethod
    def _is_single(query: Tensor, key: Tensor, weights: Tensor, result: Tensor) -> bool:
        # The keys are those before a cast, of another type.
        return {query.dtype, weights.dtype, result.dtype} == {"float32"}

    def _maker(self, name: str, kind: str) -> Operator | None:
        maker = self.makers.get(name)
        return maker if maker is not None and maker.kind == kind else None

    def _uncast(self, name: str) -> str:
        """The tensor of which `name` is a cast to single precision, or `name` itself."""
        maker = self.makers.get(name)
        if maker is None or maker.kind not in _CASTS or self.tensors[name].dtype != "float32":
            return name
        source = maker.inputs[0]
        # The operator computes in single precision by itself, unless it is given more.
        return source if self.tensors[source].dtype in _NARROW else name
