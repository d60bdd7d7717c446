"""What was found, written down as a `Plan`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace

from autopar.costmodel.step.estimate import collective_seconds
from autopar.costmodel.step.pricing import MeshPrices

from .. import __version__
from ..ir import Graph
from ..order.scheduled import scheduled
from ..plan import Plan, as_text
from ..plan_parts import (
    AxisSpec,
    CollectivePlan,
    InputSpec,
    MixturePlan,
    ModelSpec,
    OperatorPlan,
    ParameterPlan,
    Predicted,
    Provenance,
    RulePlan,
    SchedulePlan,
    StagePlan,
)
from ..sharding.analysis import Analysis
from ..sharding.layout import format_layout
from ..sharding.mesh import Axes, Mesh
from ..sharding.micro_batches import of_whole_batch
from ..sharding.program import Assignment, Program
from ..sharding.rules.discovered import found_in
from ..sharding.schedule import Schedule
from .alike import Mixture
from .pipeline_parts import message_seconds, once_of
from .pipeline_search import Part, StagedProgram
from .priced_program import PricedProgram
from .request import Request


def as_plan(
    found: PricedProgram | StagedProgram, request: Request, *, lower_bound: float, analysis: Analysis | None = None, complete: bool = True,
    mixtures: Sequence[Mixture] = (),
) -> Plan:  # fmt: skip
    """Write down what was found; `analysis`: of the global batch, where what was found is a plan of its micro-batches.

    `complete`: whether the search was left to run to its end. `mixtures`: of strategies among equal layers.
    """
    whole = analysis or _first(found).tables.analysis
    graph = whole.graph
    inputs = {name: InputSpec(shape=graph.tensors[name].shape, dtype=graph.tensors[name].dtype) for name in graph.inputs}
    operators, assigned = _assigned(found, whole)
    predicted = _of_stages(found) if isinstance(found, StagedProgram) else _of_one(found)
    used = found.devices if isinstance(found, StagedProgram) else found.assignment.mesh.devices
    return Plan(
        model=ModelSpec(
            name=graph.name, fingerprint=graph.fingerprint(), mode="train" if whole.train else "infer", optimizer=request.optimizer,
            loss=graph.loss if whole.train else None, inputs=inputs,
        ),
        cluster=request.cluster.name,
        mesh=_axes(_first(found).assignment.mesh),
        operators=dict(_operators(whole, operators)),
        parameters={
            t.name: ParameterPlan(
                shape=t.shape, dtype=t.dtype, storage=format_layout(assigned[t.name].storage[t.name]),
                state="host" if t.name in assigned[t.name].host else "device",
            )
            for t in graph.parameters
        },
        outputs=as_text({name: assigned[name].outputs[name] for name in whole.outputs}),
        redistributions=dict(_redistributions(graph, assigned)),
        collectives=tuple(_collectives(found)),
        rules=tuple(RulePlan.model_validate(asdict(rule)) for rule in found_in(graph)),
        replicated=tuple(sorted(graph.replicated)),
        schedule=_schedule(found),
        stages=tuple(_stages(found, whole)) if isinstance(found, StagedProgram) else (),
        unused=request.cluster.devices - used,
        predicted=predicted,
        mixtures=tuple(MixturePlan(**asdict(mixture)) for mixture in mixtures),
        provenance=_provenance(found, request, lower_bound, complete),
    )  # fmt: skip


def _first(found: PricedProgram | StagedProgram) -> PricedProgram | Part:
    return found.parts[0] if isinstance(found, StagedProgram) else found


def _assigned(found: PricedProgram | StagedProgram, whole: Analysis) -> tuple[dict[str, Assignment], dict[str, Assignment]]:
    """The assignments that hold for the operators, and for the tensors: for a tensor that of its maker, else of its first reader."""
    part_of = found.part_of() if isinstance(found, StagedProgram) else {}
    parts = found.parts if isinstance(found, StagedProgram) else (found,)
    of_whole = {id(part): _of_whole(part, whole, found.schedule.micro_batches) for part in parts}
    first = _first(found)
    operators = {op.name: of_whole[id(part_of.get(op.name, first))] for op in whole.graph.operators}
    tensors = dict.fromkeys(whole.graph.tensors, of_whole[id(first)])
    for op in reversed(whole.graph.operators):
        tensors.update(dict.fromkeys(op.inputs, operators[op.name]))
    for op in whole.graph.operators:
        tensors.update(dict.fromkeys(op.outputs, operators[op.name]))
    return operators, tensors


def _of_whole(part: PricedProgram | Part, whole: Analysis, micro_batches: int) -> Assignment:
    """The decisions for the global batch."""
    return of_whole_batch(part.assignment, whole, part.tables.analysis, micro_batches) if micro_batches > 1 else part.assignment


def _operators(whole: Analysis, assigned: Mapping[str, Assignment]) -> Iterator[tuple[str, OperatorPlan]]:
    for op in whole.warm:
        decision = assigned[op.name].decisions[op.name]
        yield (
            op.name,
            OperatorPlan(
                kind=op.kind,
                fingerprint=whole.graph.operator_fingerprint(op),
                strategy=tuple(o.name for o in decision.options),
                inputs=tuple(zip(op.inputs, map(format_layout, decision.inputs), strict=True)),
                outputs=tuple(zip(op.outputs, map(format_layout, decision.outputs), strict=True)),
            ),
        )


def _redistributions(graph: Graph, assigned: Mapping[str, Assignment]) -> Iterator[tuple[str, tuple[tuple[str, ...], ...]]]:
    for name in graph.tensors:
        chains = assigned[name].chains.get(name, ())
        if chains:
            yield name, tuple(tuple(map(format_layout, chain)) for chain in chains)


def _axes(mesh: Mesh) -> tuple[AxisSpec, ...]:
    return tuple(AxisSpec(name=axis.name, size=axis.size, level=axis.level) for axis in mesh.axes)


def _collectives(found: PricedProgram | StagedProgram) -> Iterator[CollectivePlan]:
    """The collectives of a step with their prices; of stages, those that one micro-batch has in each."""
    if isinstance(found, PricedProgram):
        yield from _priced(found.program, found.schedule, found.tables.prices)
        return
    holder = dict(_holders(found))
    once = replace(found.schedule, micro_batches=1)
    for part in found.parts:
        yield from (c for c in _priced(part.program, once, part.tables.prices) if holder.get(c.tensor) is part)


def _holders(found: StagedProgram) -> Iterator[tuple[str, Part]]:
    """The part of every tensor: that of its maker, of a parameter that of its first reader."""
    part_of = found.part_of()
    operators = found.parts[0].tables.analysis.graph.operators
    for op in reversed(operators):
        yield from ((name, part_of[op.name]) for name in op.inputs)
    for op in operators:
        yield from ((name, part_of[op.name]) for name in op.outputs)


def _priced(program: Program, schedule: Schedule, prices: MeshPrices) -> Iterator[CollectivePlan]:
    known: dict[tuple[str, Axes, int], float] = {}
    for c in scheduled(program, schedule).collectives():
        axis = prices.mesh.name(c.axes)
        key = (c.kind, c.axes, c.nbytes)
        if key not in known:
            known[key] = collective_seconds(c, prices)
        yield CollectivePlan(phase=c.phase, kind=c.kind, axis=axis, nbytes=c.nbytes, seconds=known[key], tensor=c.tensor)


def _schedule(found: PricedProgram | StagedProgram) -> SchedulePlan:
    s = found.schedule
    pipeline = {"pipeline": found.pipeline.schedule, "interleave": found.pipeline.interleave} if isinstance(found, StagedProgram) else {}
    types = {"master": s.types.master, "reduce": s.types.reduce}
    return SchedulePlan.model_validate(
        {"micro_batches": s.micro_batches, "recompute": s.recompute, "gathered": s.gathered, "accumulated": s.accumulated}
        | {"unit_bytes": s.unit_bytes, "prefetch": s.prefetch, "reductions": asdict(s.reductions)}
        | pipeline
        | types
    )


def _stages(found: StagedProgram, whole: Analysis) -> Iterator[StagePlan]:
    several = len({part.group.cluster.name for part in found.parts}) > 1
    places = [place for part in found.parts for place in part.group.places()] * found.pipeline.interleave
    stages, count = found.pipeline.stages, found.schedule.micro_batches
    handed = [float(part.figures.handed[stage.stop]) for stage, part in zip(stages, found.parts_of_stages, strict=True)]
    handed[-1] = 0.0
    sends = message_seconds(places, handed)
    for stage, part, size, send in zip(stages, found.parts_of_stages, handed, sends, strict=True):
        yield StagePlan(
            first=whole.graph.operators[stage.start].name, mesh=_axes(part.group.mesh), cluster=part.group.cluster.name if several else "",
            forward=stage.forward, backward=stage.backward, memory=stage.memory, moved=count * stage.moved, once=stage.once, handed=size,
            send=send,
        )  # fmt: skip


def _of_one(found: PricedProgram) -> Predicted:
    figures = found.estimate
    return Predicted(
        step=figures.step, forward=figures.forward, backward=figures.backward, update=figures.update, communication=figures.communication,
        overlapped=figures.overlapped, memory=figures.memory.total, memory_parts=figures.memory.parts, host_memory=figures.memory.host,
        streamed=figures.streamed,
    )  # fmt: skip


def _of_stages(found: StagedProgram) -> Predicted:
    """Figures of the slowest stage; what it waits for others is the bubble."""
    pipeline, count = found.pipeline, found.schedule.micro_batches
    stages = found.stages
    parts = dict(zip(pipeline.stages, found.parts_of_stages, strict=True))
    groups = [pipeline.stages[number::stages] for number in range(stages)]
    slowest = max(groups, key=lambda group: sum(count * (s.forward + s.backward) + s.once + s.update for s in group))
    fullest = max(groups, key=lambda group: sum(s.memory for s in group))
    moved = count * sum(s.moved for s in slowest)
    forward, backward = (count * sum(getattr(s, name) for s in slowest) for name in ("forward", "backward"))
    update = sum(s.update for s in slowest)
    exposed = sum(s.once for s in slowest) - once_of(slowest, found.schedule.unit_bytes, found.parts[0].group.cluster).hidden
    once = sum(s.once for s in slowest)
    stored = sum(float(parts[s].figures.stored[s.start : s.stop].sum()) for s in fullest)
    memory = sum(s.memory for s in fullest)
    hosts = [float(part.figures.host[s.start : s.stop].sum()) for s, part in parts.items()]
    busy = forward + backward + update + exposed
    computed = 1 - moved / (forward + backward) if moved else 1.0
    return Predicted(
        step=pipeline.step, forward=computed * forward, backward=computed * backward, update=update, communication=moved + once,
        overlapped=once - exposed, bubble=max(pipeline.step - busy, 0.0), memory=memory,
        memory_parts={"stored": stored, "activations": memory - stored}, host_memory=max(sum(hosts[k::stages]) for k in range(stages)),
        streamed=sum(float(parts[s].figures.streamed[s.start : s.stop].sum()) for s in slowest),
    )  # fmt: skip


def _provenance(found: PricedProgram | StagedProgram, request: Request, lower_bound: float, complete: bool) -> Provenance:
    cost = found.cost if isinstance(found, StagedProgram) else found.solution.cost
    step = found.pipeline.step if isinstance(found, StagedProgram) else found.estimate.step
    bound = min(lower_bound, step)
    return Provenance(
        autopar=__version__, method=request.method, seed=request.seed, objective=cost, lower_bound=bound,
        gap=step / bound - 1 if bound > 0 else None, complete=complete,
    )  # fmt: skip
