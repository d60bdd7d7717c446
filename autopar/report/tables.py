"""Plans as sentences and tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from autopar.analysis.program.account import Account
from autopar.analysis.program.equal_layers import Group
from autopar.analysis.program.strategy_words import COLLECTIVES
from autopar.analysis.program.throughput import Budget
from autopar.costmodel import Cluster
from autopar.ir.recipes import RECIPES
from autopar.order.owners import Owners
from autopar.plan import Plan
from autopar.plan_parts import Provenance
from autopar.schemes import Named, stages_of
from autopar.sharding.program import Collective
from autopar.units import bytes_text, seconds_text

from .frameworks import target_lines
from .printing import Table as Table
from .printing import show as show
from .throughput import batch_line, speed_lines, warning_lines

EVEN = 1.005
"""Largest work of a rank over the least possible that is told as even."""


def summary_lines(
    plan: Plan,
    sentence: str,
    named: Named | None = None,
    cluster: Cluster | None = None,
    budget: Budget | None = None,
) -> list[str]:
    """The main figures of a plan: cluster, batch, mesh, time, speed, memory and gap.

    `cluster`: for MFU. `budget`: the run that is asked about.
    """
    predicted = plan.predicted
    mesh = " x ".join(f"{axis.name}={axis.size} ({axis.level})" for axis in plan.mesh)
    parts = ", ".join(
        f"{name} {bytes_text(size)}" for name, size in predicted.memory_parts.items() if size
    )
    made = plan.provenance
    step = "step" if plan.model.mode == "train" else "inference"
    parts_of_time = ("forward", "backward", "update", "communication", "bubble")
    times = [
        f"{name} {seconds_text(getattr(predicted, name))}"
        for name in parts_of_time
        if getattr(predicted, name)
    ]
    if predicted.overlapped:
        times.append(f"of which {seconds_text(predicted.overlapped)} hidden under computation")
    lines = [
        sentence,
        *target_lines(plan),
        f"model {plan.model.name}, {plan.model.mode}"
        + (f" with {plan.model.optimizer}" if plan.model.mode == "train" else ""),
        *([batch_line(plan)] if plan.model.inputs else []),
        *_types_lines(plan),
        *warning_lines(plan),
        _mesh_line(plan, mesh),
        f"{step} {seconds_text(predicted.step)}: " + ", ".join(times),
        *speed_lines(plan, cluster, budget),
        f"memory {bytes_text(predicted.memory)} per device: {parts}",
        f"search {made.method}: {gap_text(plan)}" + _stopped_text(made),
    ]
    lines += _routing_lines(plan)
    lines += _schedule_lines(plan) + _host_lines(plan)
    if plan.replicated:
        lines.append(
            f"computed whole on every device, having no rule: {', '.join(plan.replicated)}"
        )
    lines += [f"rule found by execution: {rule.kind}: {rule.rule}" for rule in plan.rules]
    if named is not None:
        lines.append(scheme_line(named))
        if len(named.axes) > 1:
            lines += [f"axis {axis}: {name}" for axis, name in named.axes.items()]
    return lines


def _routing_lines(plan: Plan) -> list[str]:
    """The routing of tokens to experts, and what the busiest rank needs."""
    routing = plan.routing
    if routing is None:
        return []
    stated = {"even": "even", "worst": "worst case", "counts": "by counts"}[routing.kind]
    busiest = ""
    if routing.kind != "even":
        busiest = (
            f", up to {routing.imbalance:.2f} times the mean rows on a rank: step at most "
            f"{seconds_text(routing.step)}, memory {bytes_text(routing.memory)}"
        )
    at = ", ".join(
        f"{multiple}x {bytes_text(size)}"
        for multiple, size in zip((1, 2, 4), routing.at, strict=True)
    )
    ends = "any routing fits"
    if routing.most is not None:
        ends = f"fits up to {routing.most:.2f}x" if routing.most >= 1 else "even rows do not fit"
    return [
        f"routing of experts {stated}{busiest}",
        f"memory by rows of a rank, as multiples of the mean: {at}; {ends}",
    ]


def _stopped_text(made: Provenance) -> str:
    """The end of a search that did not run to its own."""
    if made.complete:
        asked = made.asked_gap
        return "" if asked is None or made.gap is None else f"; asked for at most {asked:.2%}"
    if made.asked_seconds is None:
        return "; interrupted, the best plan so far"
    return (
        f"; ended by --seconds {made.asked_seconds:g} or interrupted, the best plan so far: the "
        "same request may lead to another plan next time"
    )


def gap_text(plan: Plan) -> str:
    """The largest possible distance of the predicted step from the best."""
    made = plan.provenance
    if made.gap is None:
        return "not bounded"
    return (
        f"no plan takes less than {seconds_text(made.lower_bound)}, so that this one is at most "
        f"{made.gap:.2%} above the best"
    )


def scheme_line(named: Named) -> str:
    """The name and the meaning of the plan.

    The name is called a scheme only if `--scheme` takes it.
    """
    recipe = f", {named.recipe}" if named.recipe not in ("", named.name) else ""
    called = f"scheme {named.name}" if named.scheme else named.called
    return f"{called}{recipe}: {named.sentence}"


def _mesh_line(plan: Plan, mesh: str) -> str:
    stages = f" for each of {stages_of(plan)} stages" if plan.stages else ""
    idle = ""
    if plan.unused:
        be = "is" if plan.unused == 1 else "are"
        idle = f"; {plan.unused} {be} left idle, which is faster"
        idle += "" if plan.stages else f" (--mesh {plan.devices + plan.unused} uses all)"
    return f"mesh {mesh}{stages}: {plan.devices} device" + ("s" if plan.devices > 1 else "") + idle


def _types_lines(plan: Plan) -> list[str]:
    """A line with the recipe of products and the types of stored parameters and gradients.

    There is none if they are those of the computation.
    """
    types = plan.schedule.types
    said = [_recipe_text(plan)] if plan.model.precision else []
    said += [f"trained parameters stored and updated in {types.master}"] if types.master else []
    if types.reduce:
        said.append(f"gradients added up in {types.reduce}")
    return [f"precision {', '.join(said)}"] if said else []


def _recipe_text(plan: Plan) -> str:
    """The recipe of the products, and the share of their FLOPs that follow it."""
    flops = plan.model.flops
    total = sum(flops.values())
    narrow = sum(amount for kind, amount in flops.items() if kind in KERNELS)
    share = f" in {narrow / total:.0%} of the FLOPs of products" if total and narrow else ""
    return f"{plan.model.precision}{share}"


KERNELS = frozenset(recipe.kernel for recipe in RECIPES.values())
"""The types of products of all recipes."""


def _schedule_lines(plan: Plan) -> list[str]:
    """Micro-batches, the order of the stages, and recomputation, if there are any."""
    schedule = plan.schedule
    said = [f"{schedule.micro_batches} micro-batches"] if schedule.micro_batches > 1 else []
    if schedule.overlap_experts:
        said.append("passes of two merged to hide exchanges of experts")
    if plan.stages:
        chunks = f" with {schedule.interleave} chunks a stage" if schedule.interleave > 1 else ""
        said.append(f"stages in the order {schedule.pipeline}{chunks}")
    if schedule.recompute:
        recomputed = sum(map(len, schedule.recompute))
        said.append(
            f"{recomputed} operators in {len(schedule.recompute)} segments are recomputed in the "
            "backward pass"
        )
    return [f"schedule {', '.join(said)}"] if said else []


def _host_lines(plan: Plan) -> list[str]:
    """A line with the number of parameters with state in host memory, and its cost.

    There is none without such parameters.
    """
    held = sum(parameter.state == "host" for parameter in plan.parameters.values())
    predicted = plan.predicted
    if not held:
        return []
    cost = (
        f"{bytes_text(predicted.host_memory)} beside each device, "
        f"{seconds_text(predicted.streamed)} of the update for the way there and back"
    )
    return [
        f"optimizer state of {held} of {len(plan.parameters)} parameters in host memory: {cost}"
    ]


def collective_text(counts: Counter[str]) -> str:
    """The number of collectives of each kind."""
    return (
        " + ".join(
            f"{count} {COLLECTIVES.get(kind, kind)}" for kind, count in sorted(counts.items())
        )
        or "-"
    )


def _amounts(nbytes: int, seconds: float) -> tuple[str, str]:
    return (bytes_text(nbytes), seconds_text(seconds)) if nbytes or seconds else ("-", "-")


def operators_table(groups: Sequence[Group], whole: Account) -> Table:
    """Operators in rows of equal strategy, each with its collectives of one step."""
    rows = [
        (
            g.name,
            str(len(g.operators)),
            g.strategy,
            collective_text(g.collectives),
            *_amounts(g.nbytes, g.seconds),
        )
        for g in groups
    ]
    if whole.shared:
        rows.append(("(parameters)", "", _units_text(whole), *_issued(whole.shared)))
    if whole.owners:
        rows.append(("(matrices)", "", _owners_text(whole.owners), *_issued(whole.updates)))
    total = sum(g.nbytes for g in groups)
    total += sum(c.nbytes for c, _ in (*whole.shared, *whole.updates))
    name = "total of all stages" if whole.plan.stages else "total"
    rows.append((name, str(len(whole.operators)), "", "", *_amounts(total, whole.communication)))
    columns = ("operators", ">ops", "strategy", "collectives per step", ">bytes", ">time")
    return Table(title="Operators", columns=columns, rows=tuple(rows))


def _issued(issued: Sequence[tuple[Collective, float]]) -> tuple[str, str, str]:
    """Collectives with their bytes and seconds."""
    kinds = Counter(c.kind for c, _ in issued)
    return (
        collective_text(kinds),
        *_amounts(sum(c.nbytes for c, _ in issued), sum(s for _, s in issued)),
    )


def _owners_text(owners: Sequence[Owners]) -> str:
    """The number of whole matrices, and how evenly their owners share the work."""
    count = sum(sum(load.values()) for one in owners for load in one.loads)
    worst = max(one.imbalance for one in owners)
    even = "evenly" if worst < EVEN else f"the slowest within {worst - 1:.0%} of the least possible"
    return f"{count} updated whole by their owners, {even}"


def _units_text(whole: Account) -> str:
    """The gathers and sums of gradients in words, with the numbers of parameters and units."""
    said = []
    units = [unit for unit in whole.units if unit.collectives]
    for words, gathers in (("gathered", True), ("gradients summed", False)):
        issued = [
            (u, c.axes)
            for u in units
            for c, _ in u.collectives
            if (c.kind == "all_gather") is gathers
        ]
        axes = [whole.over(axes) for axes in sorted({axes for _, axes in issued})]
        if issued:
            said.append(f"{words} over {', '.join(axes)}")
    names = len({name for unit in units for name in unit.parameters})
    several = "s" if len(units) > 1 else ""
    return f"{names} parameters in {len(units)} unit{several}: {', '.join(said)}"
