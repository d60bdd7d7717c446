"""The split of an operator on global tensors: the one with the cheapest redistribution of inputs and computation.

    price(strategy) = sum over inputs of (forward + BACKWARD * backward) + WORK * work / (parts of it)

`forward` and `backward` are the prices of the chain from an input's present layout to the strategy's; the chain is the
cheapest of both together, as in plans. So split tensors stay split, as in OneFlow, which chooses signatures by the cost
of bringing the inputs.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import numpy as np

from autopar.errors import UsageError
from autopar.ir import Graph, Operator
from autopar.sharding.candidates import Option, Strategies, options_of, strategies_of
from autopar.sharding.communication import COMMUNICATIONS
from autopar.sharding.layout import B, Kind, Layout, P, R
from autopar.sharding.mesh import degree_of
from autopar.sharding.program import Decision
from autopar.sharding.redistribution import StepPrice, chain_price, cheapest_chain, without_gradient
from autopar.sharding.rules import Call, rule_of
from autopar.sharding.rules.registry import has_rule

START, PER_BYTE, BACKWARD, WORK = 1e-5, 1e-9, 1e-3, 1e-18
"""Seconds of any collective, and of a byte of it; the weight of backward costs, and of one pass of the loops."""
MOST = 4096
"""The most strategies tried; beyond them an operator takes one that splits a single factor."""


@functools.cache
def _price(mesh: tuple[int, ...]) -> StepPrice:
    """The price of a collective on an axis of the mesh."""
    return lambda kind, axes, nbytes: START + PER_BYTE * nbytes if degree_of(axes, mesh) > 1 else 0.0


@functools.lru_cache(maxsize=1 << 14)
def chain(
    source: Layout, target: Layout, shape: tuple[int, ...], itemsize: int, mesh: tuple[int, ...], gradient: bool
) -> tuple[Layout, ...]:
    """The cheapest chain between two layouts, axis by axis, as ranks ascend along each axis alone."""
    return cheapest_chain(source, target, shape, itemsize, mesh, _price(mesh), gradient=gradient, kinds=(R, B, P), apart=True)


@functools.lru_cache(maxsize=1 << 14)
def _seconds(source: Layout, target: Layout, shape: tuple[int, ...], itemsize: int, mesh: tuple[int, ...], gradient: bool) -> float:
    found = chain(source, target, shape, itemsize, mesh, gradient)
    ahead, both = (chain_price(found, math.prod(shape) * itemsize, mesh, _price(mesh), gradient=g) for g in (False, gradient))
    return ahead + BACKWARD * (both - ahead)


def decide(graph: Graph, operator: Operator, layouts: tuple[Layout, ...], mesh: tuple[int, ...], flows: tuple[bool, ...]) -> Decision:
    """The cheapest decision for an operator with inputs in `layouts`; `flows`: which inputs carry a gradient."""
    call = Call.of(graph, operator)
    if not has_rule(graph, operator):
        if all(placement.kind in (Kind.REPLICATED, Kind.BROADCAST) for layout in layouts for placement in layout):
            return _whole(call, mesh)
        raise UsageError(
            f"{operator.kind} has no sharding rule: bring its inputs to sbp.broadcast first, or give it one (autopar.register_rule)"
        )
    rule = rule_of(call)
    carrying = {name for name, flow in zip(operator.inputs, flows, strict=True) if flow}
    gradients = frozenset({*carrying, *(operator.outputs if carrying else ())})
    options = options_of(call, rule, gradients, {})
    found = strategies_of(rule, options, mesh)
    found = replace(found, choices=found.choices[_talks_along_axes(found, mesh)])
    nothing = np.array([option.name == "R" for option in options])
    found = replace(found, choices=found.choices[(nothing[found.choices] | (np.array(mesh) > 1)).all(axis=1)])
    if len(found.choices) > MOST:
        raise UsageError(f"{operator.kind}: {len(found.choices)} ways to split it over {'x'.join(map(str, mesh))}; take fewer axes")
    work = math.prod(factor.size for factor in rule.factors)
    cost = WORK * work / np.maximum(found.degrees(mesh).prod(axis=1), 1)
    for position, (tensor, source) in enumerate(zip(call.inputs, layouts, strict=True)):
        itemsize = tensor.bytes // max(tensor.size, 1)
        cost = cost + _moves(found, position, source, tensor.shape, itemsize, mesh, flows[position])
    best = int(np.argmin(np.round(cost, 24)))
    inputs, outputs = found.layouts(best)
    return Decision(options=tuple(found.options[i] for i in found.choices[best]), rule=rule, inputs=inputs, outputs=outputs)


def _moves(
    found: Strategies, position: int, source: Layout, shape: tuple[int, ...], itemsize: int, mesh: tuple[int, ...], flows: bool
) -> np.ndarray:
    """For every strategy the price of bringing one input there."""
    wanted = [[found.options[i].inputs[position] for i in row] for row in found.choices]
    start = source if flows else without_gradient(source)
    ends = [tuple(layout) if flows else without_gradient(tuple(layout)) for layout in wanted]
    return np.array([_seconds(start, end, shape, itemsize, mesh, flows) for end in ends])


def _talks_along_axes(found: Strategies, mesh: tuple[int, ...]) -> np.ndarray:
    """The strategies in which no option communicates over several axes at once: ranks ascend along each axis alone."""
    talks = np.array([o.communication is not None and not COMMUNICATIONS[o.communication].stacks for o in found.options])
    taken = found.choices[:, :, None] == np.flatnonzero(talks)
    return np.asarray(((taken & (np.array(mesh) > 1)[:, None]).sum(axis=1) <= 1).all(axis=1))


def _whole(call: Call, mesh: tuple[int, ...]) -> Decision:
    """Computed redundantly."""
    inputs, outputs = (R,) * len(call.inputs), (R,) * len(call.outputs)
    option = Option(name="R", factor=-1, parts=1, inputs=inputs, outputs=outputs)
    whole = (R,) * len(mesh)
    return Decision(options=(option,) * len(mesh), rule=None, inputs=(whole,) * len(inputs), outputs=(whole,) * len(outputs))
