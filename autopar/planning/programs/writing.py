"""The best program of a search written down as a `Plan`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace

from autopar import __version__
from autopar.costmodel.frameworks import changes_of
from autopar.costmodel.step.covered import certain_share
from autopar.costmodel.step.mesh_prices import MeshPrices
from autopar.ir import Graph
from autopar.order.scheduled import scheduled
from autopar.order.schedules import schedule_named
from autopar.plan import Plan, as_text
from autopar.plan_parts import (
    AxisSpec,
    CollectivePlan,
    InputSpec,
    ModelSpec,
    OperatorPlan,
    ParameterPlan,
    Provenance,
    RulePlan,
    SchedulePlan,
    StagePlan,
)
from autopar.planning.model import Request
from autopar.planning.stages import StagedProgram
from autopar.planning.stages.parts import Part
from autopar.planning.stages.stage import message_seconds
from autopar.sharding.analysis import Analysis
from autopar.sharding.layout import format_layout
from autopar.sharding.mesh import Mesh
from autopar.sharding.micro_batches import of_whole_batch
from autopar.sharding.model_flops import model_flops
from autopar.sharding.program import Assignment, Program
from autopar.sharding.rules.discovered import found_in
from autopar.sharding.schedule import Schedule

from .predicted_figures import predicted_of
from .priced_program import PricedProgram


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """Seconds that no plan undercuts, and the candidate that holds them ("": not told).

    `complete`: whether the search was left to run to its end.
    """

    lower_bound: float
    held_by: str = ""
    complete: bool = True


def as_plan(
    best: PricedProgram | StagedProgram,
    request: Request,
    *,
    certificate: Certificate,
    analysis: Analysis | None = None,
) -> Plan:
    """Write down the best program as a plan.

    `analysis`: of the global batch, of which the program may run micro-batches.
    """
    whole = analysis or _first(best).tables.analysis
    graph = whole.graph
    operators, assigned = _assigned(best, whole)
    # Fewer devices may be faster; the others stay idle.
    used = best.devices if isinstance(best, StagedProgram) else best.assignment.mesh.devices
    return Plan(
        model=_model(whole, request),
        cluster=request.cluster.name,
        target=request.target,
        framework=request.cluster.framework.name,
        habits=changes_of(request.cluster.framework),
        mesh=_axes(_first(best).assignment.mesh),
        operators=dict(_operators(whole, operators)),
        parameters=dict(_parameters(graph, assigned)),
        outputs=as_text({name: assigned[name].outputs[name] for name in whole.outputs}),
        redistributions=dict(_redistributions(graph, assigned)),
        collectives=tuple(_collectives(best)),
        rules=tuple(RulePlan.model_validate(asdict(rule)) for rule in found_in(graph)),
        replicated=tuple(sorted(graph.replicated)),
        schedule=_schedule(best),
        stages=tuple(_stages(best, whole)) if isinstance(best, StagedProgram) else (),
        unused=request.cluster.devices - used,
        predicted=predicted_of(best),
        provenance=_provenance(best, request, certificate),
    )


def _first(best: PricedProgram | StagedProgram) -> PricedProgram | Part:
    return best.parts[0] if isinstance(best, StagedProgram) else best


def _assigned(
    best: PricedProgram | StagedProgram, whole: Analysis
) -> tuple[dict[str, Assignment], dict[str, Assignment]]:
    """Return the assignments that hold for the operators, and for the tensors.

    A tensor has that of its maker, or else of its first reader.
    """
    part_of = best.part_of() if isinstance(best, StagedProgram) else {}
    parts = best.parts if isinstance(best, StagedProgram) else (best,)
    of_whole = {part: _of_whole(part, whole, best.schedule.micro_batches) for part in parts}
    first = _first(best)
    operators = {op.name: of_whole[part_of.get(op.name, first)] for op in whole.graph.operators}
    tensors = dict.fromkeys(whole.graph.tensors, of_whole[first])
    # In reverse, so that the first reader has the last word; makers come behind it.
    for op in reversed(whole.graph.operators):
        tensors.update(dict.fromkeys(op.inputs, operators[op.name]))
    for op in whole.graph.operators:
        tensors.update(dict.fromkeys(op.outputs, operators[op.name]))
    return operators, tensors


def _of_whole(part: PricedProgram | Part, whole: Analysis, micro_batches: int) -> Assignment:
    """Return the decisions for the global batch."""
    if micro_batches == 1:
        return part.assignment
    return of_whole_batch(part.assignment, whole, part.tables.analysis, micro_batches)


def _model(whole: Analysis, request: Request) -> ModelSpec:
    graph = whole.graph
    return ModelSpec(
        name=graph.name,
        fingerprint=graph.fingerprint(),
        mode="train" if whole.train else "infer",
        optimizer=request.optimizer,
        loss=graph.loss if whole.train else None,
        inputs={
            name: InputSpec(shape=graph.tensors[name].shape, dtype=graph.tensors[name].dtype)
            for name in graph.inputs
        },
        flops=model_flops(whole),
    )


def _parameters(
    graph: Graph, assigned: Mapping[str, Assignment]
) -> Iterator[tuple[str, ParameterPlan]]:
    for tensor in graph.parameters:
        assignment = assigned[tensor.name]
        yield (
            tensor.name,
            ParameterPlan(
                shape=tensor.shape,
                dtype=tensor.dtype,
                storage=format_layout(assignment.storage[tensor.name]),
                state="host" if tensor.name in assignment.host else "device",
            ),
        )


def _operators(
    whole: Analysis, assigned: Mapping[str, Assignment]
) -> Iterator[tuple[str, OperatorPlan]]:
    regions = {name: region for region in whole.regions for name in region.members}
    for op in whole.warm:
        region = regions[op.name]
        decision = assigned[op.name].decisions[op.name]
        yield (
            op.name,
            OperatorPlan(
                kind=op.kind,
                fingerprint=whole.graph.operator_fingerprint(op),
                strategy=tuple(o.name for o in decision.options),
                inputs=tuple(zip(op.inputs, map(format_layout, decision.inputs), strict=True)),
                outputs=tuple(zip(op.outputs, map(format_layout, decision.outputs), strict=True)),
                region=region.name,
                leads=region.lead == op.name,
            ),
        )


def _redistributions(
    graph: Graph, assigned: Mapping[str, Assignment]
) -> Iterator[tuple[str, tuple[tuple[str, ...], ...]]]:
    for name in graph.tensors:
        chains = assigned[name].chains.get(name, ())
        if chains:
            yield name, tuple(tuple(map(format_layout, chain)) for chain in chains)


def _axes(mesh: Mesh) -> tuple[AxisSpec, ...]:
    return tuple(AxisSpec(name=axis.name, size=axis.size, level=axis.level) for axis in mesh.axes)


def _collectives(best: PricedProgram | StagedProgram) -> Iterator[CollectivePlan]:
    """Return the collectives of a step with their prices.

    With stages they are those that one micro-batch has in each stage.
    """
    if isinstance(best, PricedProgram):
        yield from _priced(best.program, best.schedule, best.tables.prices)
        return
    holder = dict(_holders(best))
    # Of a stage the plan lists what one micro-batch sends.
    once = replace(best.schedule, micro_batches=1)
    for part in best.parts:
        yield from (
            c
            for c in _priced(part.program, once, part.tables.prices)
            # Each part prices the whole graph, but runs only the operators of its own stages.
            if holder.get(c.tensor) is part
        )


def _holders(best: StagedProgram) -> Iterator[tuple[str, Part]]:
    """The part of every tensor: that of its maker, of a parameter that of its first reader."""
    part_of = best.part_of()
    operators = best.parts[0].tables.analysis.graph.operators
    for op in reversed(operators):
        yield from ((name, part_of[op.name]) for name in op.inputs)
    for op in operators:
        yield from ((name, part_of[op.name]) for name in op.outputs)


def _priced(program: Program, schedule: Schedule, prices: MeshPrices) -> Iterator[CollectivePlan]:
    for c in scheduled(program, schedule).collectives():
        axis = prices.mesh.name(c.axes)
        yield CollectivePlan(
            phase=c.phase,
            kind=c.kind,
            axis=axis,
            nbytes=c.nbytes,
            seconds=prices.collective(c),
            tensor=c.tensor,
        )


def _schedule(best: PricedProgram | StagedProgram) -> SchedulePlan:
    s = best.schedule
    pipeline = (
        {"pipeline": best.pipeline.schedule, "interleave": best.pipeline.interleave}
        if isinstance(best, StagedProgram)
        else {}
    )
    types = {"master": s.types.master, "reduce": s.types.reduce}
    return SchedulePlan.model_validate(
        {
            "micro_batches": s.micro_batches,
            "recompute": s.recompute,
            "gathered": s.gathered,
            "accumulated": s.accumulated,
        }
        | {"unit_bytes": s.unit_bytes, "prefetch": s.prefetch, "reductions": asdict(s.reductions)}
        | {"overlap_experts": _merges(best)}
        | pipeline
        | types
    )


def _merges(best: PricedProgram | StagedProgram) -> bool:
    """Whether passes of two micro-batches are merged."""
    if isinstance(best, StagedProgram):
        return schedule_named(best.pipeline.schedule).merges
    return best.schedule.overlap_experts


def _stages(best: StagedProgram, whole: Analysis) -> Iterator[StagePlan]:
    several = len({part.group.cluster.name for part in best.parts}) > 1
    # Chunks go around the stages, so their places repeat.
    places = [
        place for part in best.parts for place in part.group.places()
    ] * best.pipeline.interleave
    stages = best.pipeline.stages
    count = best.schedule.micro_batches
    handed = [
        float(part.figures.handed[stage.stop])
        for stage, part in zip(stages, best.parts_of_stages, strict=True)
    ]
    handed[-1] = 0.0
    sends = message_seconds(places, handed)
    for stage, part, size, send in zip(stages, best.parts_of_stages, handed, sends, strict=True):
        yield StagePlan(
            first=whole.graph.operators[stage.start].name,
            mesh=_axes(part.group.mesh),
            cluster=part.group.cluster.name if several else "",
            forward=stage.forward,
            backward=stage.backward,
            memory=stage.memory,
            hidden=stage.hidden,
            moved=count * stage.moved,
            once=stage.once,
            handed=size,
            send=send,
        )


def _provenance(
    best: PricedProgram | StagedProgram, request: Request, certificate: Certificate
) -> Provenance:
    cost = best.cost if isinstance(best, StagedProgram) else best.solution.cost
    step = best.pipeline.step if isinstance(best, StagedProgram) else best.estimate.step
    certain = certain_share(request.cluster.framework.habits)
    bound = min(certain * certificate.lower_bound, step)
    return Provenance(
        autopar=__version__,
        method=request.search,
        seed=request.seed,
        objective=cost,
        lower_bound=bound,
        bound_of=certificate.held_by,
        gap=step / bound - 1 if bound > 0 else None,
        complete=certificate.complete,
        asked_gap=request.gap,
        asked_seconds=request.seconds,
        inside=best.pipeline.inside if isinstance(best, StagedProgram) else 0.0,
    )
