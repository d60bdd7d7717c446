"""A plan for inputs of other sizes: a shorter last batch, another length of the sequence.

Every operator keeps its strategy where that divides the other sizes, and is computed whole on the
mesh axes where it does not; parameters stay stored as they are. The batch is cut into as many
micro-batches as divide it. Such a plan is right, and not the fastest for its sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopar.errors import AutoparError, PlanError
from autopar.ir import Operator
from autopar.order.execution import Execution
from autopar.order.plan_on_mesh import named_decision
from autopar.order.schedules import schedule_for
from autopar.plan import Plan
from autopar.plan_parts import OperatorPlan, mesh_of
from autopar.sharding.analysis import Analysis
from autopar.sharding.layout import Kind, R, format_layout, is_valid, parse_layout
from autopar.sharding.mesh import Mesh

_WHOLE = "R"


def execution_at(plan: Plan, analysis: Analysis) -> Execution:
    """The execution of a plan's model with inputs of other sizes than it was planned for.

    Raises `PlanError` where the model has other operators then, or cannot be cut so.
    """
    resized = _resized(plan, analysis)
    most = plan.schedule.micro_batches
    reason: AutoparError | None = None
    for count in (n for n in range(most, 0, -1) if most % n == 0):
        schedule = plan.schedule.model_copy(update={"micro_batches": count})
        try:
            made = resized.model_copy(update={"schedule": schedule}).execution(analysis)
            if plan.stages:
                schedule_for(made.pipeline, made.stages, count, made.interleave)
            return made
        except AutoparError as error:
            reason = reason or error
    raise PlanError(f"the plan does not run at these sizes: {reason}") from reason


def as_planned_at(plan: Plan, analysis: Analysis) -> Execution:
    """The execution at other sizes at which every operator has its planned strategy.

    Raises `PlanError` where one has not.
    """
    resized = _resized(plan, analysis)
    for name, operator in resized.operators.items():
        planned = plan.operators.get(name)
        if planned is None or planned.strategy != operator.strategy:
            raise PlanError(f"{name!r} is not split as planned at small sizes")
    return resized.execution(analysis)


def _resized(plan: Plan, analysis: Analysis) -> Plan:
    """The plan with strategies and outputs that divide the sizes of the analysed graph."""
    operators = {
        op.name: _strategy(plan, op, mesh, analysis)
        for op, mesh in _placed(plan, analysis)
        if op.name not in analysis.cold
    }
    tensors = analysis.graph.tensors
    # A copy with fewer layers has fewer parameters.
    parameters = {name: stored for name, stored in plan.parameters.items() if name in tensors}
    mesh = plan.mesh_.shape
    outputs = {}
    for name, text in plan.outputs.items():
        layout = parse_layout(text)
        tensor = tensors.get(name)
        if tensor is not None and not is_valid(layout, tensor.shape, mesh):
            layout = tuple(R if place.kind is Kind.SPLIT else place for place in layout)
        outputs[name] = format_layout(layout)
    return plan.model_copy(
        update={
            "operators": operators,
            "parameters": parameters,
            "outputs": outputs,
            "redistributions": {},
        }
    )


def _placed(plan: Plan, analysis: Analysis) -> Iterator[tuple[Operator, Mesh]]:
    """The operators with the mesh of their stage."""
    meshes = {stage.first: mesh_of(stage.mesh) for stage in plan.stages}
    mesh = mesh_of(plan.stages[0].mesh) if plan.stages else plan.mesh_
    for operator in analysis.graph.operators:
        mesh = meshes.get(operator.name, mesh)
        yield operator, mesh


def _strategy(plan: Plan, operator: Operator, mesh: Mesh, analysis: Analysis) -> OperatorPlan:
    """An operator's strategy: as planned on as many axes as its sizes allow."""
    offer = analysis.offers[operator.name]
    known = {option.name for option in offer.options}
    old = plan.operators.get(operator.name)
    planned: Sequence[str] = old.strategy if old is not None else (_WHOLE,) * len(mesh.axes)
    strategy = [name if name in known else _WHOLE for name in planned]
    for axis in reversed(range(len(strategy))):
        try:
            named_decision(operator.name, offer, strategy, mesh)
            break
        except PlanError:
            strategy[axis] = _WHOLE
    return OperatorPlan(kind=operator.kind, fingerprint="", strategy=tuple(strategy))
