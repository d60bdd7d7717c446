"""A plan in the words of MindSpore's strategy checkpoints.

It holds operators with weights, and the layouts in which these weights are used.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from autopar.errors import UsageError
from autopar.ir import Graph
from autopar.plan import Plan
from autopar.plan_parts import OperatorPlan
from autopar.sharding.layout import Kind, Layout, format_layout, parse_layout

from .records import OperatorStrategy, ParameterLayout, Strategies

NAMES = {
    "linear": "MatMul",
    "matmul": "MatMul",
    "mm": "MatMul",
    "addmm": "MatMul",
    "MatMul": "MatMul",
    "Gemm": "MatMul",
}
"""MindSpore's names of operators; others keep their own."""


def strategies_of_plan(plan: Plan, graph: Graph) -> Strategies:
    """The strategy checkpoint of a plan; `UsageError` for a layout that it cannot express.

    An operator is called by its kind and the first of its parameters: `MatMul_fc1.weight`.
    """
    operators: dict[str, OperatorStrategy] = {}
    parameters: dict[str, ParameterLayout] = {}
    for stage, operator in _in_stages(plan):
        own = [
            (name, parse_layout(text)) for name, text in operator.inputs if name in plan.parameters
        ]
        if not own:
            continue
        kind = operator.kind.split(".")[1] if "." in operator.kind else operator.kind
        cuts = tuple(
            _cuts(plan, parse_layout(text), len(graph.tensors[name].shape))
            for name, text in operator.inputs
        )
        operators.setdefault(
            f"{NAMES.get(kind, kind)}_{own[0][0]}", OperatorStrategy(cuts=cuts, stage=stage)
        )
        for name, layout in own:
            parameters.setdefault(name, _layout(plan, name, layout))
    return Strategies(operators=operators, parameters=parameters)


def _in_stages(plan: Plan) -> Iterator[tuple[int, OperatorPlan]]:
    """Every operator with its stage; an interleaved chunk has the stage of its devices."""
    count = max(len(plan.stages) // plan.schedule.interleave, 1)
    for name, chunk in plan.chunks().items():
        yield chunk % count, plan.operators[name]


def _cuts(plan: Plan, layout: Layout, rank: int) -> tuple[int, ...]:
    """The number of parts of each dim."""
    pairs = list(zip(layout, plan.mesh, strict=True))
    return tuple(
        math.prod(a.size for p, a in pairs if p.kind is Kind.SPLIT and p.dim == dim)
        for dim in range(rank)
    )


def _layout(plan: Plan, name: str, used: Layout) -> ParameterLayout:
    """The used layout of a parameter, with the further division of its storage."""
    shape = plan.parameters[name].shape
    refused = (
        f"{name!r} is used as [{format_layout(used)}], which MindSpore's tensor map cannot say"
    )
    if any(placement.parts > 1 for placement in used):
        raise UsageError(f"{refused}: it is split within parts; the nearest is the plan's own file")
    pairs = zip(used, plan.mesh, strict=True)
    owners = [
        (placement.dim if placement.kind is Kind.SPLIT else -1, axis.size)
        for placement, axis in pairs
        if axis.size > 1
    ]
    runs = [
        (owner, math.prod(size for _, size in run))
        for owner, run in itertools.groupby(owners, lambda pair: pair[0])
    ]
    named = [owner for owner, _ in runs if owner >= 0]
    if len(named) != len(set(named)):
        raise UsageError(
            f"{refused}: a dim has one axis, and these two are apart; the nearest is the plan's "
            "own file"
        )
    places = {owner: len(runs) - 1 - number for number, (owner, _) in enumerate(runs)}
    size, step = _divided(plan, parse_layout(plan.parameters[name].storage), used)
    return ParameterLayout(
        device_matrix=tuple(count for _, count in runs) or (1,),
        tensor_map=tuple(places.get(dim, -1) for dim in range(len(shape))),
        shape=shape,
        step=step,
        size=size,
    )


def _divided(plan: Plan, stored: Layout, used: Layout) -> tuple[int, int]:
    """The number of devices with further parts of a parameter, and the step between their ranks.

    Both are 0 if its storage is not divided further than its use.
    """
    sizes = [axis.size for axis in plan.mesh]
    kinds = [(s.kind, u.kind) for s, u in zip(stored, used, strict=True)]
    axes = [
        a
        for a, (s, u) in enumerate(kinds)
        if s is Kind.SPLIT and u is not Kind.SPLIT and sizes[a] > 1
    ]
    return (math.prod(sizes[a] for a in axes), math.prod(sizes[axes[-1] + 1 :])) if axes else (0, 0)
