"""Reads equal work on the equal parts of a tensor as one operator on all of them.

Towers of images take a batch apart, compute each image by operators of its own, and join the
results: `cat([f(x) for x in split(xs)])` is `flatten(f(stack(xs)))`, if `f` treats its samples one
by one. The parts become a dim in front of the others, which is split as the batch is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.ir import Graph, Operator, Ref, Tensor, Value, needed_operators

from .views import JOIN, TAKEN_APART

_RESHAPE = "aten.reshape.default"
_PERMUTE = "aten.permute.default"
_SLICE = "aten.slice.Tensor"
_RESHAPED = frozenset(
    {
        "aten.view.default",
        "aten.reshape.default",
        "aten._unsafe_view.default",
        "aten.flatten.using_ints",
        "aten.unsqueeze.default",
        "aten.squeeze.dim",
        "aten.squeeze.dims",
        "aten.squeeze.default",
    }
)
_UNCHANGED = frozenset({"aten.contiguous.default", "aten.clone.default", "aten.alias.default"})
_BATCHED = frozenset({"aten.scaled_dot_product_attention.default", "aten.im2col.default"})
"""Operators that take several samples at once; each part is one sample."""


def _permuted(operator: Operator, rank: int) -> list[int]:
    dims = operator.attributes["dims"]
    assert isinstance(dims, tuple)
    return [int(str(dim)) % rank for dim in dims]


def _transposed(operator: Operator, rank: int) -> list[int]:
    one, other = (int(str(operator.attributes[name])) % rank for name in ("dim0", "dim1"))
    order = list(range(rank))
    order[one] = other
    order[other] = one
    return order


def _reversed(operator: Operator, rank: int) -> list[int]:
    return list(reversed(range(rank)))


_PERMUTED: Mapping[str, Callable[[Operator, int], list[int]]] = {
    _PERMUTE: _permuted,
    "aten.transpose.int": _transposed,
    "aten.t.default": _reversed,
    "aten.numpy_T.default": _reversed,
}
"""Operators that reorder dims, and the order that they give them."""
_RULES = _RESHAPED | _UNCHANGED | _BATCHED | {_SLICE} | set(_PERMUTED)


def read_parts_together(graph: Graph) -> Graph:
    """Make one operator of the equal ones that compute parts of a tensor and are joined again."""
    if not any(operator.kind == JOIN for operator in graph.operators):
        return graph
    writer = _Writer(graph)
    for operator in graph.operators:
        writer.add(operator)
    needed = {*graph.outputs, *graph.updates.values(), *((graph.loss,) if graph.loss else ())}
    operators = needed_operators(writer.operators, needed)
    return replace(graph, tensors=writer.tensors, operators=operators)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lanes:
    """A tensor of parts in front, `size` of them, each of `shape`."""

    name: str
    size: int
    shape: tuple[int, ...]


class _Writer:
    def __init__(self, graph: Graph) -> None:
        self.tensors = dict(graph.tensors)
        self.producers = {name: op for op in graph.operators for name in op.outputs}
        self.operators: list[Operator] = []
        self.names = {operator.name for operator in graph.operators}
        self.known: dict[tuple[str, ...], _Lanes | None] = {}

    def add(self, operator: Operator) -> None:
        """Add an operator; a join of equal work becomes a reshape of the work on all parts."""
        if operator.kind == JOIN and len(operator.inputs) > 1 and self._is_work(operator):
            lanes = self._together(operator.inputs)
            if lanes is not None:
                self._join(operator, lanes)
                return
        self.operators.append(operator)

    def _is_work(self, operator: Operator) -> bool:
        """Whether parts are computed: parts that are only joined again are a view already."""
        maker = self.producers.get(operator.inputs[0])
        return maker is not None and maker.kind not in TAKEN_APART

    def _together(self, names: Sequence[str]) -> _Lanes | None:
        """All parts as one tensor, if all are made by equal operators of parts."""
        key = tuple(names)
        if key not in self.known:
            self.known[key] = self._stacked(key)
        return self.known[key]

    def _stacked(self, names: tuple[str, ...]) -> _Lanes | None:
        makers = [self.producers.get(name) for name in names]
        first = makers[0]
        if first is None or len({self.tensors[name].shape for name in names}) > 1:
            return None
        if first.kind in TAKEN_APART:
            whole = first.outputs == names
            return self._taken_apart(first) if whole else None
        if not all(_alike(maker, first) for maker in makers) or not _has_rule(first, self.tensors):
            return None
        given = []
        for place in range(len(first.inputs)):
            lanes = self._together([maker.inputs[place] for maker in makers if maker is not None])
            if lanes is None:
                return None
            given.append(lanes)
        return self._computed(first, given)

    def _taken_apart(self, maker: Operator) -> _Lanes:
        """The parts of a tensor: the dim of the parts goes to the front."""
        source = self.tensors[maker.inputs[0]]
        along = int(str(maker.attributes.get("dim", 0))) % len(source.shape)
        size = len(maker.outputs)
        shape = self.tensors[maker.outputs[0]].shape
        part = source.shape[along] // size
        own = () if maker.kind == "aten.unbind.int" else (part,)
        seen = (*source.shape[:along], size, *own, *source.shape[along + 1 :])
        name = self._reshape(maker, source.name, seen)
        order = [along, *(d for d in range(len(seen)) if d != along)]
        return _Lanes(name=self._permute(maker, name, order), size=size, shape=shape)

    def _computed(self, maker: Operator, given: Sequence[_Lanes]) -> _Lanes:
        """The work of an operator on all parts."""
        own = self.tensors[maker.outputs[0]]
        size = given[0].size
        source = given[0].name
        if maker.kind in _RESHAPED:
            name = self._reshape(maker, source, (size, *own.shape))
        elif maker.kind in _PERMUTED:
            order = _PERMUTED[maker.kind](maker, len(own.shape))
            name = self._permute(maker, source, [0, *(1 + d for d in order)])
        elif maker.kind in _BATCHED:
            inputs = [self._reshape(maker, one.name, (size, *one.shape[1:])) for one in given]
            name = self._write(maker, inputs, (size, *own.shape[1:]), dict(maker.attributes))
            name = self._reshape(maker, name, (size, *own.shape))
        else:
            attributes = dict(maker.attributes)
            if maker.kind == _SLICE:
                attributes["dim"] = 1 + _along(maker, len(own.shape))
            name = self._write(maker, [source], (size, *own.shape), attributes)
        return _Lanes(name=name, size=size, shape=own.shape)

    def _join(self, operator: Operator, lanes: _Lanes) -> None:
        """Write the result of a join: the dim of the parts becomes the outer part of another."""
        rank = len(lanes.shape)
        along = _along(operator, rank)
        order = [*range(1, along + 1), 0, *range(along + 1, rank + 1)]
        name = self._permute(operator, lanes.name, order)
        shape = self.tensors[operator.outputs[0]].shape
        self.operators.append(
            replace(
                operator, kind=_RESHAPE, inputs=(name,), attributes={"self": Ref(0), "shape": shape}
            )
        )

    def _reshape(self, maker: Operator, source: str, shape: tuple[int, ...]) -> str:
        if self.tensors[source].shape == shape:
            return source
        return self._write(maker, [source], shape, {"self": Ref(0), "shape": shape}, _RESHAPE)

    def _permute(self, maker: Operator, source: str, order: list[int]) -> str:
        shape = self.tensors[source].shape
        moved = tuple(shape[d] for d in order)
        # Dims of one element may pass each other without a copy.
        if [d for d in order if shape[d] > 1] == [d for d, size in enumerate(shape) if size > 1]:
            return self._reshape(maker, source, moved)
        attributes: dict[str, Value] = {"self": Ref(0), "dims": tuple(order)}
        return self._write(maker, [source], moved, attributes, _PERMUTE)

    def _write(
        self,
        maker: Operator,
        inputs: Sequence[str],
        shape: tuple[int, ...],
        attributes: dict[str, Value],
        kind: str | None = None,
    ) -> str:
        """Add an operator, named by the first of those in whose place it is; give its result."""
        called = next(
            name for n in itertools.count() if (name := f"{maker.name}.all.{n}") not in self.names
        )
        self.names.add(called)
        like = self.tensors[maker.outputs[0]]
        out = replace(like, name=f"{called}:0", shape=shape)
        self.tensors[out.name] = out
        self.operators.append(
            Operator(
                name=called,
                kind=kind or maker.kind,
                inputs=tuple(inputs),
                outputs=(out.name,),
                attributes=attributes,
            )
        )
        return out.name


def _along(operator: Operator, rank: int) -> int:
    """The dim along which an operator works."""
    return int(str(operator.attributes.get("dim", 0))) % rank


def _alike(one: Operator | None, other: Operator) -> bool:
    """Whether two operators do the same with their inputs."""
    return (
        one is not None
        and one.kind == other.kind
        and one.attributes == other.attributes
        and len(one.outputs) == len(other.outputs) == 1
    )


def _has_rule(operator: Operator, tensors: Mapping[str, Tensor]) -> bool:
    """Whether an operator can do its work on all parts; batches are of one sample each."""
    if operator.kind in _BATCHED:
        return all(
            tensors[name].shape[:1] == (1,) for name in (*operator.inputs, *operator.outputs)
        )
    return operator.kind in _RULES and len(operator.inputs) == 1
