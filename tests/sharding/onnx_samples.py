"""Calls of ONNX operators out of onnx's node tests, as they are and with every dim that can be
split grown to a multiple of six.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import torch
from torch import Tensor

from autopar.errors import AutoparError
from autopar.frontends.onnx import import_onnx
from autopar.ir import Graph, Role
from autopar.ir.dtype import cast_graph
from autopar.runtime.models.onnx_module import OnnxModule, to_torch
from autopar.runtime.operators.functions import arguments_of, function_of
from autopar.runtime.operators.local_call import LocalCall
from autopar.runtime.operators.registry import form_of
from autopar.runtime.proof import Sample
from autopar.sharding.notation import Rule
from autopar.sharding.program import Decision
from autopar.sharding.rules import RULES, Call, rule_of
from tests.frontends.onnx.lowering.node_tests import NodeTest

MULTIPLE = 6
MOST_ELEMENTS = 30_000
"""Samples are grown to at most so many elements in all their tensors."""


BITWISE = frozenset({"aten.view.dtype"})
"""Operators whose result depends on the width of the type: they keep it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A node test as a graph, with the values of its inputs and of what it stores."""

    graph: Graph
    values: Mapping[str, Tensor]

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The values of the graph's inputs."""
        return tuple(self.values[name] for name in self.graph.inputs)


def load(test: NodeTest) -> Loaded:
    """Import a node test."""
    model, feeds = test.ready()
    graph = import_onnx(model)
    values = {name: value.detach() for name, value in OnnxModule(graph).named_tensors().items()}
    values.update(zip(graph.inputs, map(to_torch, feeds), strict=True))
    return Loaded(graph=graph, values=values)


def alone(loaded: Loaded, note: str) -> Sample | None:
    """The one operator that a node test comes down to, in double precision; None where there are
    several, or none.
    """
    return next(each(loaded, note)) if len(loaded.graph.operators) == 1 else None


def each(loaded: Loaded, note: str) -> Iterator[Sample]:
    """Every operator of a node test by itself, in double precision."""
    graph = loaded.graph
    if BITWISE.isdisjoint(operator.kind for operator in graph.operators):
        graph = cast_graph(graph, "float64")
    values = {
        name: value.to(getattr(torch, graph.tensors[name].dtype))
        for name, value in loaded.values.items()
    }
    for number, operator in enumerate(graph.operators):
        used = dict.fromkeys((*operator.inputs, *operator.outputs))
        tensors = {
            name: replace(tensor, role=Role.INPUT if name in operator.inputs else Role.ACTIVATION)
            if (tensor := graph.tensors[name]).role is Role.ACTIVATION
            else tensor
            for name in used
        }
        plain = Graph(
            name=operator.kind,
            tensors=tensors,
            operators=(replace(operator, name="op"),),
            inputs=tuple(n for n in used if tensors[n].role is Role.INPUT),
            outputs=operator.outputs,
        )
        given = [values[name] for name in operator.inputs]
        yield Sample(kind=operator.kind, graph=plain, values=tuple(given), note=note)
        if number + 1 < len(graph.operators):
            made = function_of(operator.kind)(
                **arguments_of(
                    function_of(operator.kind), operator.attributes, given, torch.device("cpu")
                )
            )
            results = made if isinstance(made, tuple | list) else (made,)
            values.update(zip(operator.outputs, results, strict=False))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Grown(LocalCall):
    """An operator on its way from the sizes it has to larger ones: rewritings of attributes work in
    this direction too.
    """

    larger: tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]

    def local_input(self, index: int) -> tuple[int, ...]:
        return self.larger[0][index]

    def local_output(self, index: int = 0) -> tuple[int, ...]:
        return self.larger[1][index]

    def split(self, index: int, dim: int) -> int:
        return Fraction(self.inputs[index].shape[dim], max(self.larger[0][index][dim], 1))  # type: ignore[return-value]


def grown(sample: Sample) -> Sample | None:
    """The sample with as many factors as the operator allows grown to multiples of six; None where
    that changes nothing.
    """
    if sample.kind not in RULES:
        return None
    rule = rule_of(Call.of(sample.graph, sample.operator))
    actual: Sample | None = None
    times = [1] * len(rule.factors)
    wanted = [
        MULTIPLE // math.gcd(MULTIPLE, factor.size)
        if index in rule.splittable() and factor.size
        else 1
        for index, factor in enumerate(rule.factors)
    ]
    candidates = [
        wanted,
        *(
            [w if i == one else 1 for i, w in enumerate(wanted)]
            for one in range(len(wanted))
            if wanted[one] > 1
        ),
    ]
    for extra in candidates:
        both = [max(a, b) for a, b in zip(times, extra, strict=True)]
        if both != times and (larger := _grow(sample, rule, both)) is not None:
            actual = larger
            times = both
            if extra == wanted:
                break
    return actual


def _grow(sample: Sample, rule: Rule, times: Sequence[int]) -> Sample | None:
    """The sample with every factor so many times as large, or None where the operator does not work
    out as its rule says.
    """
    sizes = [factor.size * count for factor, count in zip(rule.factors, times, strict=True)]
    larger = tuple(
        tuple(tuple(math.prod(sizes[f] for f in dim) for dim in dims) for dims in tensors)
        for tensors in (rule.inputs, rule.outputs)
    )
    if sum(math.prod(shape) for shapes in larger for shape in shapes) > MOST_ELEMENTS:
        return None
    operator = sample.operator
    tensors = dict(sample.graph.tensors)
    inputs, outputs = (
        tuple(tensors[n] for n in names) for names in (operator.inputs, operator.outputs)
    )
    call = _Grown(
        operator=operator,
        decision=Decision(options=(), rule=None, inputs=(), outputs=()),
        inputs=inputs,
        outputs=outputs,
        mesh=(),
        coordinate=(),
        larger=(larger[0], larger[1]),
    )
    try:
        sizes_of = form_of(operator.kind).sizes
        attributes = {**operator.attributes, **(sizes_of(call) if sizes_of is not None else {})}
        values = tuple(
            _tiled(v, dims, rule, times, seed)
            for seed, (v, dims) in enumerate(zip(sample.values, rule.inputs, strict=True))
        )
        function = function_of(operator.kind)
        results = function(**arguments_of(function, attributes, values, torch.device("cpu")))
        made = [
            tuple(r.shape) for r in (results if isinstance(results, tuple | list) else (results,))
        ][: len(outputs)]
        if made != list(larger[1]) or any(
            tuple(v.shape) != shape for v, shape in zip(values, larger[0], strict=True)
        ):
            return None
        for name, shape in zip(
            (*operator.inputs, *operator.outputs), (*larger[0], *larger[1]), strict=True
        ):
            tensors[name] = replace(tensors[name], shape=shape)
        graph = replace(
            sample.graph, tensors=tensors, operators=(replace(operator, attributes=attributes),)
        )
        rule_of(Call.of(graph, graph.operators[0]))
    except (AutoparError, ValueError, RuntimeError, IndexError, AssertionError):
        return None
    return Sample(kind=sample.kind, graph=graph, values=values, note=f"{sample.note}, grown")


def _tiled(
    value: Tensor, dims: Sequence[Sequence[int]], rule: Rule, times: Sequence[int], seed: int
) -> Tensor:
    """The value with its factors repeated; copies differ, so no shard can stand for another."""
    factors = [factor for dim in dims for factor in dim]
    spread = value.reshape([rule.factors[factor].size for factor in factors])
    for axis, factor in enumerate(factors):
        if times[factor] > 1:
            spread = torch.cat([spread.roll(copy, axis) for copy in range(times[factor])], axis)
    whole = spread.reshape(
        [math.prod(rule.factors[f].size * times[f] for f in dim) for dim in dims]
    )
    if whole.dtype != torch.float64 or whole.numel() == value.numel():
        return whole
    generator = torch.Generator().manual_seed(seed)
    return whole * (1 - 0.05 * torch.rand(whole.shape, dtype=whole.dtype, generator=generator))
