"""A plan under a stated routing: seconds and bytes of the busiest rank of experts.

    step    = predicted + m max over the stages of d + (sum of d - max of d) / chunks of a stage
    bytes_s = predicted_s + (rows over mean - 1) (in flight * saved rows + rows of one layer)

of m micro-batches, where d are the further seconds of a stage's micro-batch: those of its layers'
products and row traffic with the rows of the busiest rank, less those with the mean (`imbalance`).
Both are upper bounds: all layers are busiest on one rank, and nothing hides the wait.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.costmodel import Cluster
from autopar.costmodel.device.imbalance import busiest, worst
from autopar.costmodel.device.operator_seconds import operator_parts
from autopar.costmodel.memory.step_script import made_for_each
from autopar.costmodel.step.mesh_prices import MeshPrices
from autopar.errors import UsageError
from autopar.ir import Graph, Operator
from autopar.order.plan_on_mesh import named_decision
from autopar.order.schedules import in_flight
from autopar.plan import Plan
from autopar.plan_parts import RoutingPlan, mesh_of
from autopar.planning.model.routing import Routing
from autopar.sharding.analysis import Analysis
from autopar.sharding.mesh import Mesh
from autopar.sharding.program import Compute, operator_collectives
from autopar.sharding.redistribution import local_bytes
from autopar.sharding.rules import Call
from autopar.sharding.rules.experts import EXPERTS, per_token
from autopar.sharding.rules.saved_for_backward import Made, backward_scratch, keeps
from autopar.sharding.strategies import Strategies

MULTIPLES = (1.0, 2.0, 4.0)
"""Of the mean rows, at which the bytes are told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """A layer of experts on its stage.

    `imbalance`, `worst`: rows of the busiest rank over the mean, as stated and at most. `further`:
    seconds that the stated ones add to a micro-batch. `saved`, `passing`: bytes of the mean rows
    from the forward to the backward pass, and while the layer is at work.
    """

    stage: int
    imbalance: float
    worst: float
    further: float
    saved: float
    passing: float


def routed(
    plan: Plan, analysis: Analysis, cluster: Cluster, routing: Routing, memory_limit: float
) -> RoutingPlan | None:
    """The plan under a routing; None where no ranks split the experts of a layer.

    `analysis`: of a micro-batch. Counts are those of the layers (see `require_routing`).
    """
    layers = list(_layers(plan, analysis, cluster, routing))
    if not any(layer.worst > 1 for layer in layers):
        return None
    # One figure for the plan: that of its most uneven layer.
    imbalance = max(layer.imbalance for layer in layers)
    fixed, rows = _bytes(plan, layers)

    def needed(multiple: float) -> float:
        return max(own + (multiple - 1) * more for own, more in zip(fixed, rows, strict=True))

    room = [
        max(1 + (memory_limit - own) / more, 0.0)
        for own, more in zip(fixed, rows, strict=True)
        if more
    ]
    most = min(room, default=math.inf)
    return RoutingPlan(
        kind=routing.kind,  # type: ignore[arg-type]
        counts=routing.counts,
        imbalance=imbalance,
        step=plan.predicted.step + _further(plan, layers),
        memory=needed(imbalance),
        at=(needed(MULTIPLES[0]), needed(MULTIPLES[1]), needed(MULTIPLES[2])),
        most=most if most < max(layer.worst for layer in layers) else None,
    )


def require_routing(routing: Routing, graph: Graph) -> None:
    """Raise `UsageError` unless counts are of these layers, and of distinct experts of a token.

    Any routing but an even one needs layers of experts.
    """
    operators = [op for op in graph.operators if op.kind == EXPERTS]
    if routing.kind != "even" and not operators:
        raise UsageError("--routing tells where rows of experts go; the model has no such layer")
    if routing.kind != "counts":
        return
    if len(routing.counts) not in (1, len(operators)):
        raise UsageError(
            f"--routing gives counts of {len(routing.counts)} layers; the model has "
            f"{len(operators)} layers of experts"
        )
    for number, operator in enumerate(operators):
        _require_row(routing.counts[number if len(routing.counts) > 1 else 0], graph, operator)


def _require_row(counts: Sequence[int], graph: Graph, operator: Operator) -> None:
    call = Call.of(graph, operator)
    # Weights of experts lie behind the tokens and the expert of each of their rows.
    experts = call.inputs[2].shape[0]
    if len(counts) != experts:
        raise UsageError(
            f"--routing gives counts of {len(counts)} experts; {operator.name} has {experts}"
        )
    top_k = per_token(call)
    if max(counts) * top_k > sum(counts):
        raise UsageError(
            f"--routing: expert {counts.index(max(counts))} has {max(counts)} of {sum(counts)} "
            f"rows; in {operator.name} each of a token's {top_k} experts is another one, so it "
            f"has at most 1 of {top_k}"
        )


def _layers(plan: Plan, analysis: Analysis, cluster: Cluster, routing: Routing) -> Iterator[_Layer]:
    operators = [op for op in analysis.graph.operators if op.kind == EXPERTS]
    stage_of = _stages(plan)
    recomputed = {name for segment in plan.schedule.recompute for name in segment}
    for number, operator in enumerate(operators):
        stage, mesh = stage_of[operator.name]
        offer = analysis.offers[operator.name]
        strategy = plan.operators[operator.name].strategy
        decision = named_decision(operator.name, offer, strategy, mesh)
        step = Compute(operator=operator, decision=decision)
        most = _worst(step, offer.call, mesh)
        imbalance = min(_imbalance(routing, number, step, mesh, most), most)
        twice = operator.name in recomputed
        further = 0.0
        if imbalance > 1:
            prices = MeshPrices(cluster=cluster, mesh=mesh)
            further = _seconds(step, analysis, prices, imbalance, twice=twice) - _seconds(
                step, analysis, prices, 1.0, twice=twice
            )
        made = keeps(offer.call, (True,) * len(offer.call.inputs)).made
        rows = _made_bytes(step, offer.call, made, mesh)
        scratch = backward_scratch(offer.call) if analysis.train else ()
        # A recomputed layer makes its rows when its backward pass begins.
        saves = analysis.train and not twice
        yield _Layer(
            stage=stage,
            imbalance=imbalance,
            worst=most,
            further=further,
            saved=rows if saves else 0.0,
            passing=_made_bytes(step, offer.call, scratch, mesh) + (0.0 if saves else rows),
        )


def _worst(step: Compute, call: Call, mesh: Mesh) -> float:
    """The most rows of a rank over the mean; 1 where experts are padded to a capacity."""
    if call.get("capacity", default=0):
        return 1.0
    assert step.decision.rule is not None
    return worst(step.decision.rule.size_of(("e",)), per_token(call), _ranks(step, mesh))


def _imbalance(routing: Routing, number: int, step: Compute, mesh: Mesh, most: float) -> float:
    """The stated rows of the busiest rank over the mean in a layer, by its number."""
    if routing.kind == "counts":
        counts = routing.counts[number if len(routing.counts) > 1 else 0]
        return busiest(counts, _ranks(step, mesh))
    return most if routing.kind == "worst" else 1.0


def _stages(plan: Plan) -> dict[str, tuple[int, Mesh]]:
    """The stage (or chunk) of every operator, and its mesh."""
    meshes = [mesh_of(stage.mesh) for stage in plan.stages] or [plan.mesh_]
    return {name: (number, meshes[number]) for name, number in plan.chunks().items()}


def _ranks(step: Compute, mesh: Mesh) -> int:
    """The ranks that split the experts of a layer."""
    rule = step.decision.rule
    assert rule is not None
    return math.prod(
        size
        for option, size in zip(step.decision.options, mesh.shape, strict=True)
        if option.factor >= 0 and rule.factors[option.factor].name == "e"
    )


def _seconds(
    step: Compute, analysis: Analysis, prices: MeshPrices, multiple: float, *, twice: bool
) -> float:
    """Seconds of both passes of a micro-batch through a layer with so many times the mean rows."""
    offer = analysis.offers[step.operator.name]
    # A capacity multiplies the rows of every expert, and so prices a fuller rank.
    attributes = {**offer.call.operator.attributes, "capacity": multiple}
    call = replace(offer.call, operator=replace(offer.call.operator, attributes=attributes))
    options = step.decision.options
    strategies = Strategies(
        rule=offer.rule, options=options, choices=np.arange(len(options))[None, :]
    )
    gradients = analysis.as_offered(step.operator, analysis.gradients)
    parts = operator_parts(call, strategies, prices.mesh.shape, prices.cluster, gradients)
    ahead = float(parts.forward[0])
    back = float(parts.backward[0]) if analysis.train else 0.0
    for collective in operator_collectives(
        analysis.graph, step, prices.mesh.shape, analysis.gradients
    ):
        # Rows travel in all-to-alls; partial sums are of all tokens, wherever rows go.
        travels = multiple if collective.kind == "all_to_all" else 1.0
        carried = replace(collective, nbytes=round(travels * collective.nbytes))
        seconds = prices.collective(carried)
        if collective.phase == "backward":
            back += seconds
        else:
            ahead += seconds
    return ahead * (2.0 if twice else 1.0) + back


def _made_bytes(step: Compute, call: Call, made: Sequence[Made], mesh: Mesh) -> float:
    """Bytes on a rank of buffers that a layer makes for its rows."""
    decision = step.decision
    total = 0.0
    for one in made:
        tensor = (call.outputs if one.output else call.inputs)[one.position]
        layout = (decision.outputs if one.output else decision.inputs)[one.position]
        share = local_bytes(layout, tensor.bytes, mesh.shape) / max(tensor.bytes, 1)
        total += share * tensor.size * made_for_each(decision, one, mesh.shape)
    return total


def _bytes(plan: Plan, layers: Sequence[_Layer]) -> tuple[list[float], list[float]]:
    """The predicted bytes of each stage's device, and those of them that are rows of experts."""
    if not plan.stages:
        chunks = [plan.predicted.memory]
        each = 1
    else:
        chunks = [stage.memory for stage in plan.stages]
        each = plan.schedule.interleave
    stages = len(chunks) // each
    fixed = [sum(chunks[stage::stages]) for stage in range(stages)]
    rows = []
    for stage in range(stages):
        own = [layer for layer in layers if layer.stage % stages == stage]
        flying = 1.0
        if stages > 1:
            flying = in_flight(
                plan.schedule.pipeline, stage, stages, plan.schedule.micro_batches, each
            )
        saved = sum(layer.saved for layer in own)
        rows.append(flying * saved + max((layer.passing for layer in own), default=0.0))
    return fixed, rows


def _further(plan: Plan, layers: Sequence[_Layer]) -> float:
    """Seconds that a step takes longer than with even rows."""
    each = plan.schedule.interleave if plan.stages else 1
    stages = max(len(plan.stages) // each, 1)
    further = [0.0] * stages
    for layer in layers:
        further[layer.stage % stages] += layer.further
    # Every micro-batch waits for the slowest stage, the first one for the others, too.
    slowest = max(further)
    return plan.schedule.micro_batches * slowest + (sum(further) - slowest) / each
