"""The split of an operator on global tensors: that with the least redistribution and computation.

    price(strategy) = sum over inputs of (forward + BACKWARD * backward) + WORK * work / parts

`forward` and `backward` are the prices of the chain from an input's present layout to the
strategy's; the chain is the cheapest of both together, as in plans. `work` counts the passes of the
operator's loops, `parts` the devices that share them. So split tensors stay split, as in OneFlow,
which chooses signatures by the cost of bringing the inputs.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import numpy as np

from autopar.errors import UsageError
from autopar.ir import Graph, Operator, Tensor
from autopar.sharding.candidates import options_of, strategies_of
from autopar.sharding.communication import COMMUNICATIONS
from autopar.sharding.layout import B, Kind, Layout, P, R
from autopar.sharding.mesh import degree_of
from autopar.sharding.notation import Rule
from autopar.sharding.program import Decision
from autopar.sharding.redistribution import StepPrice, chain_price, cheapest_chain, without_gradient
from autopar.sharding.rules import Call, rule_of
from autopar.sharding.rules.registry import has_rule
from autopar.sharding.strategies import Option, Strategies

START = 1e-5
"""Seconds of any collective."""
PER_BYTE = 1e-9
"""Seconds of a byte of a collective."""
BACKWARD = 1e-3
"""The weight of backward costs, which decide between equal forward costs."""
WORK = 1e-18
"""Seconds of one pass of an operator's loops, so little that it decides between equal costs."""
MOST = 4096
"""The most strategies tried; beyond them an operator takes one that splits a single factor."""


@functools.cache
def _price(mesh: tuple[int, ...]) -> StepPrice:
    """The price of a collective on an axis of the mesh."""
    return lambda kind, axes, nbytes: (
        START + PER_BYTE * nbytes if degree_of(axes, mesh) > 1 else 0.0
    )


@functools.lru_cache(maxsize=1 << 14)
def chain(
    source: Layout,
    target: Layout,
    shape: tuple[int, ...],
    itemsize: int,
    mesh: tuple[int, ...],
    gradient: bool,
) -> tuple[Layout, ...]:
    """The cheapest chain between two layouts whose steps are along single axes."""
    return cheapest_chain(
        source,
        target,
        shape,
        itemsize,
        mesh,
        _price(mesh),
        gradient=gradient,
        kinds=(R, B, P),
        apart=True,
    )


@functools.lru_cache(maxsize=1 << 14)
def _seconds(
    source: Layout,
    target: Layout,
    shape: tuple[int, ...],
    itemsize: int,
    mesh: tuple[int, ...],
    gradient: bool,
) -> float:
    """The price of the cheapest chain."""
    steps = chain(source, target, shape, itemsize, mesh, gradient)
    nbytes = math.prod(shape) * itemsize
    forward = chain_price(steps, nbytes, mesh, _price(mesh), gradient=False)
    both = chain_price(steps, nbytes, mesh, _price(mesh), gradient=gradient)
    return forward + BACKWARD * (both - forward)


def decide(
    graph: Graph,
    operator: Operator,
    layouts: tuple[Layout, ...],
    mesh: tuple[int, ...],
    flows: tuple[bool, ...],
) -> Decision:
    """The cheapest decision for an operator with inputs in `layouts`.

    `flows`: which inputs carry a gradient.
    """
    call = Call.of(graph, operator)
    if not has_rule(graph, operator):
        if all(_is_whole(layout) for layout in layouts):
            return _whole(call, mesh)
        raise UsageError(
            f"{operator.kind} has no sharding rule: bring its inputs to sbp.broadcast first, or "
            "give it one (autopar.register_rule)"
        )
    rule = rule_of(call)
    carrying = {name for name, flow in zip(operator.inputs, flows, strict=True) if flow}
    gradients = frozenset({*carrying, *(operator.outputs if carrying else ())})
    candidates = _candidates(rule, options_of(call, rule, gradients, {}), mesh)
    if len(candidates.choices) > MOST:
        raise UsageError(
            f"{operator.kind}: {len(candidates.choices)} ways to split it over "
            f"{'x'.join(map(str, mesh))}; take fewer axes"
        )
    work = math.prod(factor.size for factor in rule.factors)
    cost = WORK * work / np.maximum(candidates.degrees(mesh).prod(axis=1), 1)
    for position, (tensor, source) in enumerate(zip(call.inputs, layouts, strict=True)):
        targets = [
            tuple(candidates.options[option].inputs[position] for option in choice)
            for choice in candidates.choices
        ]
        cost = cost + _moves(tensor, source, targets, mesh, flows[position])
    # Rounded, so that costs of equal strategies are equal on every rank and the first one is taken.
    best = int(np.argmin(np.round(cost, 24)))
    inputs, outputs = candidates.layouts(best)
    return Decision(
        options=tuple(candidates.options[option] for option in candidates.choices[best]),
        rule=rule,
        inputs=inputs,
        outputs=outputs,
    )


def _is_whole(layout: Layout) -> bool:
    return all(place.kind in (Kind.REPLICATED, Kind.BROADCAST) for place in layout)


def _candidates(rule: Rule, options: tuple[Option, ...], mesh: tuple[int, ...]) -> Strategies:
    """The strategies of an operator that differ on this mesh and can be run on global tensors."""
    candidates = strategies_of(rule, options, mesh)
    candidates = replace(
        candidates, choices=candidates.choices[_talks_along_axes(candidates, mesh)]
    )
    # On an axis of one device every option is the same: one of them is enough.
    nothing = np.array([option.name == "R" for option in options])
    different = (nothing[candidates.choices] | (np.array(mesh) > 1)).all(axis=1)
    return replace(candidates, choices=candidates.choices[different])


def _moves(
    tensor: Tensor, source: Layout, targets: list[Layout], mesh: tuple[int, ...], flows: bool
) -> np.ndarray:
    """The prices of bringing one input to each layout; `flows`: it carries a gradient."""
    itemsize = tensor.bytes // max(tensor.size, 1)
    if not flows:
        source = without_gradient(source)
        targets = [without_gradient(target) for target in targets]
    return np.array(
        [_seconds(source, target, tensor.shape, itemsize, mesh, flows) for target in targets]
    )


def _talks_along_axes(candidates: Strategies, mesh: tuple[int, ...]) -> np.ndarray:
    """The strategies in which no option communicates over several axes at once.

    Ranks ascend along each axis alone.
    """
    talks = np.array(
        [
            option.communication is not None and not COMMUNICATIONS[option.communication].stacks
            for option in candidates.options
        ]
    )
    taken = candidates.choices[:, :, None] == np.flatnonzero(talks)
    return np.asarray(((taken & (np.array(mesh) > 1)[:, None]).sum(axis=1) <= 1).all(axis=1))


def _whole(call: Call, mesh: tuple[int, ...]) -> Decision:
    """Computed redundantly."""
    inputs = (R,) * len(call.inputs)
    outputs = (R,) * len(call.outputs)
    option = Option(name="R", factor=-1, parts=1, inputs=inputs, outputs=outputs)
    whole = (R,) * len(mesh)
    return Decision(
        options=(option,) * len(mesh),
        rule=None,
        inputs=(whole,) * len(inputs),
        outputs=(whole,) * len(outputs),
    )
