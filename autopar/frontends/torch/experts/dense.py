"""Reads experts that all work on all tokens, most of them on zeros, as those that are chosen.

    scores = sigmoid(-inf, but for the k highest logits)            [t, e]
    sum over e of  down[e] (up[e] x * activation(gate[e] x)),  x = tokens * scores[:, e]

An expert without biases makes zeros of zeros, whose gradients are zeros as well. So only the
experts of a token's k highest logits do anything, which are then written as grouped products of
rows that are sorted by expert: the form that `layers.py` reads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from autopar.ir import Graph, Operator, Ref, Role, Value, needed_operators

from .layers import KIND, PARTED, join_experts
from .routing import Finder

_VIEWS = frozenset({"aten.view.default", "aten.reshape.default"})
_CASTS = frozenset({"aten.to.dtype", "aten._to_copy.default"})
_OF_ZERO = frozenset({"aten.silu.default", "aten.gelu.default", "aten.relu.default"}) | _CASTS
"""Operators that make zeros of zeros."""
_PRODUCT = "aten.bmm.default"
_GROUPED = "transformers.grouped_mm_fallback.default"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """Experts on all tokens: the `tokens` [t, h], `scores` [t, e], and the places of the `chosen`.

    `body`: the operators on [e, t, ...], the first products before the last one; `total`: the sum.
    """

    tokens: str
    scores: str
    chosen: str
    body: tuple[Operator, ...]
    total: Operator


def choose_experts(graph: Graph) -> Graph:
    """The graph with experts that work on all tokens as layers of those that are chosen."""
    finder = Finder(graph)
    layers = {op.name: layer for op in graph.operators if (layer := _layer_of(finder, op))}
    if not layers:
        return graph
    writer = _Writer(graph)
    for operator in graph.operators:
        writer.add(operator, layers.get(operator.name))
    needed = needed_operators(writer.operators, finder.wanted)
    chosen = join_experts(replace(graph, tensors=writer.tensors, operators=needed))
    # What is not read as a layer would be run as it is written here.
    read = [operator.kind for operator in chosen.operators].count(KIND)
    before = [operator.kind for operator in graph.operators].count(KIND)
    return chosen if read == before + len(layers) else graph


def _layer_of(finder: Finder, total: Operator) -> _Layer | None:
    """The layer of experts whose results `total` adds up."""
    alone = not total.attributes.get("keepdim") and total.attributes.get("dtype") is None
    if total.kind != "aten.sum.dim_IntList" or not alone or total.attributes.get("dim") != (0,):
        return None
    last = _maker(finder, _unviewed(finder, total.inputs[0]), _PRODUCT)
    shapes = finder.graph.tensors
    if last is None or shapes[total.inputs[0]].shape != shapes[last.outputs[0]].shape:
        return None
    body = tuple(_body(finder, last))
    sources = {op.inputs[0] for op in body if op.kind == _PRODUCT and op is not last}
    if not body or len(sources) != 1:
        return None
    return _with_routing(finder, sources.pop(), body, total)


def _body(finder: Finder, last: Operator) -> Iterator[Operator]:
    """The operators of the experts, in order; nothing where one may make no zeros of zeros."""
    own = {last.name: last}
    todo = [last.inputs[0]]
    while todo:
        op = finder.makers.get(todo.pop())
        if op is None:
            return
        if op.name in own:
            continue
        own[op.name] = op
        if op.kind == _PRODUCT:
            continue
        is_product = op.kind == "aten.mul.Tensor" and len(op.inputs) == 2
        parted = op.kind in PARTED and op.attributes.get("dim") in (-1, 2)
        if not (is_product or parted or op.kind in _OF_ZERO):
            return
        todo += op.inputs
    inside = (name for op in own.values() for name in op.outputs if op is not last)
    users = (user for name in inside for user in finder.users.get(name, ()))
    if all(user.name in own for user in users):
        yield from (op for op in finder.graph.operators if op.name in own)


def _with_routing(
    finder: Finder, source: str, body: tuple[Operator, ...], total: Operator
) -> _Layer | None:
    """The layer whose experts work on `source`: on all tokens, weighed by scores that choose."""
    tensors = finder.graph.tensors
    weighed = _maker(finder, _unviewed(finder, source), "aten.mul.Tensor")
    if weighed is None or len(weighed.inputs) != 2:
        return None
    repeated = _maker(finder, weighed.inputs[0], "aten.repeat.default")
    turned = _maker(finder, _unviewed(finder, weighed.inputs[1]), "aten.transpose.int")
    if repeated is None or turned is None:
        return None
    tokens = repeated.inputs[0]
    scores = turned.inputs[0]
    count, width = tensors[tokens].shape
    experts = tensors[source].shape[0]
    fits = (
        tensors[scores].shape == (count, experts)
        and tensors[source].shape == (experts, count, width)
        and repeated.attributes.get("repeats") == (experts, 1)
    )
    chosen = _chosen(finder, scores) if fits else None
    if chosen is None:
        return None
    return _Layer(tokens=tokens, scores=scores, chosen=chosen, body=body, total=total)


def _chosen(finder: Finder, scores: str) -> str | None:
    """The places [t, k] of the scores that are not 0, if all others are."""
    sigmoid = _maker(finder, _uncast(finder, scores), "aten.sigmoid.default")
    if sigmoid is None:
        return None
    put = _maker(finder, _uncast(finder, sigmoid.inputs[0]), "aten.scatter.src")
    if put is None or put.attributes.get("dim") not in (1, -1):
        return None
    empty, index, values = (finder.given(put, name) for name in ("self", "index", "src"))
    filled = _maker(finder, empty or "", "aten.full_like.default")
    if filled is None or filled.attributes.get("fill_value") != -math.inf:
        return None
    top = _maker(finder, index or "", "aten.topk.default")
    is_top = top is not None and top.outputs == (values, index)
    return index if is_top else None


def _maker(finder: Finder, name: str, kind: str) -> Operator | None:
    maker = finder.makers.get(name)
    return maker if maker is not None and maker.kind == kind else None


def _unviewed(finder: Finder, name: str) -> str:
    while (maker := finder.makers.get(name)) is not None and maker.kind in _VIEWS:
        name = maker.inputs[0]
    return name


def _uncast(finder: Finder, name: str) -> str:
    while (maker := finder.makers.get(name)) is not None and maker.kind in _CASTS:
        name = maker.inputs[0]
    return name


class _Writer:
    """Writes layers as grouped products in the place of their sums."""

    def __init__(self, graph: Graph) -> None:
        self.tensors = dict(graph.tensors)
        self.operators: list[Operator] = []
        self.place = ""
        self.count = 0

    def add(self, operator: Operator, layer: _Layer | None) -> None:
        """Add an operator; the sum over experts becomes one over those of each token."""
        if layer is None:
            self.operators.append(operator)
            return
        self.place = operator.name
        self.count = 0
        rows = self._products(layer, self._rows(layer))
        shape = (*self.tensors[layer.chosen].shape, self.tensors[rows].shape[1])
        by_token = self._view(rows, shape)
        attributes = {**operator.attributes, "dim": (1,)}
        self.operators.append(replace(operator, inputs=(by_token,), attributes=attributes))

    def _rows(self, layer: _Layer) -> str:
        """The tokens of each chosen place, weighed: [t k, h]."""
        count, width = self.tensors[layer.tokens].shape
        places = self.tensors[layer.chosen].shape
        given = {"self": layer.scores, "index": layer.chosen}
        picked = self._write("aten.gather.default", places, given, dim=1)
        column = self._view(picked, (*places, 1))
        row = self._view(layer.tokens, (count, 1, width))
        both = {"self": row, "other": column}
        weighed = self._write("aten.mul.Tensor", (*places, width), both)
        return self._view(weighed, (math.prod(places), width))

    def _products(self, layer: _Layer, rows: str) -> str:
        """The results [t k, o] of the experts, in the order of the rows."""
        count = self.tensors[rows].shape[0]
        experts = self.tensors[layer.scores].shape[1]
        flat = self._view(layer.chosen, (count,))
        values, places = self._sorted(flat)
        counted = self._write(
            "aten.histc.default", (experts,), {"self": values}, bins=experts, min=0, max=experts - 1
        )
        ends = self._write("aten.cumsum.default", (experts,), {"self": counted}, dim=0)
        token = self._write("aten.floor_divide.default", (count,), {"self": places}, other=1)
        known = {layer.body[0].inputs[0]: self._looked_up(rows, token)}
        for op in layer.body:
            self._inside(op, known, ends)
        back = self._write("aten.argsort.default", (count,), {"self": places})
        return self._looked_up(known[layer.body[-1].outputs[0]], back)

    def _inside(self, op: Operator, known: dict[str, str], ends: str) -> None:
        """Write an operator of the experts for rows of all of them."""
        rows = self.tensors[known[op.inputs[0]]].shape[0]
        shapes = [(rows, self.tensors[name].shape[-1]) for name in op.outputs]
        if op.kind == _PRODUCT:
            given = {"input": known[op.inputs[0]], "weight": op.inputs[1], "offs": ends}
            known[op.outputs[0]] = self._write(_GROUPED, shapes[0], given)
            return
        attributes = {**op.attributes, "dim": -1} if op.kind in PARTED else dict(op.attributes)
        made = [self._declared(*pair) for pair in zip(op.outputs, shapes, strict=True)]
        inputs = tuple(known[name] for name in op.inputs)
        known |= zip(op.outputs, made, strict=True)
        self._add(op.kind, inputs, tuple(made), attributes)

    def _sorted(self, name: str) -> tuple[str, str]:
        """The ascending numbers of a tensor, and their places."""
        shape = self.tensors[name].shape
        values, places = (self._declared(name, shape) for _ in range(2))
        self._add("aten.sort.default", (name,), (values, places), {"self": Ref(0)})
        return values, places

    def _looked_up(self, table: str, index: str) -> str:
        shape = (self.tensors[index].shape[0], self.tensors[table].shape[1])
        made = self._declared(table, shape)
        given: dict[str, Value] = {"self": Ref(0), "indices": (Ref(1),)}
        self._add("aten.index.Tensor", (table, index), (made,), given)
        return made

    def _view(self, name: str, shape: tuple[int, ...]) -> str:
        return self._write("aten.reshape.default", shape, {"self": name}, shape=shape)

    def _write(
        self, kind: str, sizes: tuple[int, ...], given: Mapping[str, str], **attributes: Value
    ) -> str:
        """Add an operator of named tensors, whose first one gives the type of the result."""
        made = self._declared(next(iter(given.values())), sizes)
        refs: dict[str, Value] = {name: Ref(place) for place, name in enumerate(given)}
        self._add(kind, tuple(given.values()), (made,), refs | attributes)
        return made

    def _declared(self, like: str, shape: tuple[int, ...]) -> str:
        name = f"{self.place}.rows.{self.count}:0"
        self.count += 1
        tensor = replace(self.tensors[like], name=name, shape=shape, role=Role.ACTIVATION)
        self.tensors[name] = replace(tensor, trainable=False)
        return name

    def _add(
        self,
        kind: str,
        inputs: tuple[str, ...],
        outputs: tuple[str, ...],
        attributes: dict[str, Value],
    ) -> None:
        self.operators.append(
            Operator(
                name=outputs[0].rpartition(":")[0],
                kind=kind,
                inputs=inputs,
                outputs=outputs,
                attributes=attributes,
            )
        )
