"""Where a step is longer than the computation of its passes: seconds by reason, the largest waits.

    step = computation + sum over the reasons

Without stages both come from the played timeline of a rank. With stages the passes are simulated as
a whole: their collectives hide under nothing there, and gathers and reductions once a step hide as
the cost model's rule has it (`planning.tables.parameters.traffic`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.costmodel import Cluster
from autopar.costmodel.step.covered import SLOWDOWN
from autopar.costmodel.step.issuer import axes_of_stream
from autopar.costmodel.step.reasons import Reason
from autopar.costmodel.step.timeline import Timeline
from autopar.order.times import Floats
from autopar.plan import Plan
from autopar.sharding.analysis import Analysis

from .layer_names import folded_names
from .played_stages import PlayedStages, played_stages, stages_figures
from .timelines import timeline_of_rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """Seconds of a step in which computation waits for transfers that are alike.

    `name`: of a tensor, or of an operator; equal layers are folded. `kind`, `axes`: of the
    collective ("" where several are not told apart). `phase`: of the computation. `late`: the part
    of the seconds that is due to other transfers, on the same stream or link. `times`: number of
    waits.
    """

    name: str
    kind: str
    axes: str
    phase: str
    reason: Reason
    seconds: float
    late: float
    times: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stalls:
    """A step, its computation, and the seconds of each reason between the two.

    `waits`: the longest first. `stages`: those of every stage, whose mean this is then.
    """

    step: float
    computation: float
    reasons: Mapping[Reason, float]
    waits: Sequence[Stall]
    stages: Sequence[Stalls] = ()


def stalls_of(plan: Plan, analysis: Analysis, cluster: Cluster) -> Stalls:
    """The stalls of a plan's step."""
    if plan.stages:
        return _of_stages(played_stages(plan, analysis, cluster), plan, analysis)
    return stalls_of_timeline(timeline_of_rank(plan, analysis, cluster))


def stalls_of_timeline(played: Timeline) -> Stalls:
    """The stalls of a step that was played."""
    by_reason: dict[Reason, list[float]] = {reason: [] for reason in Reason}
    by_reason[Reason.SLOWED] = [played.slowed]
    by_reason[Reason.UPDATE] = [played.update]
    waits = []
    for wait in played.waits:
        by_reason[wait.reason].append(wait.times * wait.seconds)
        event = wait.sent
        waits.append(
            Stall(
                name=event.name,
                kind=event.kind,
                axes=axes_of_stream(event.stream),
                phase=wait.phase,
                reason=wait.reason,
                seconds=wait.times * wait.seconds,
                late=wait.times * wait.late,
                times=wait.times,
            )
        )
    return Stalls(
        step=played.step,
        computation=played.forward + played.backward,
        reasons={reason: math.fsum(seconds) for reason, seconds in by_reason.items()},
        waits=_folded(waits),
    )


def _folded(waits: Iterable[Stall]) -> list[Stall]:
    """The sums of waits for what is alike in all layers, the longest first."""
    alike: dict[tuple[str, ...], list[Stall]] = {}
    for one in waits:
        key = (one.name, one.kind, one.axes, one.phase, one.reason.name)
        alike.setdefault(key, []).append(one)
    folded = []
    for names, (name, *rest) in folded_names(alike):
        own = [one for given in names for one in alike[given, *rest]]
        folded.append(
            replace(
                own[0],
                name=name,
                seconds=math.fsum(one.seconds for one in own),
                late=math.fsum(one.late for one in own),
                times=sum(one.times for one in own),
            )
        )
    return sorted(folded, key=lambda one: -one.seconds)


def _of_stages(played: PlayedStages, plan: Plan, analysis: Analysis) -> Stalls:
    """The stalls of every stage, and their mean."""
    values, gathers, reductions = _inside(played, plan, analysis)
    inside = zip(*map(played.by_stage, (values, gathers, reductions)), strict=True)
    names = [operator.name for operator in analysis.graph.operators]
    ends = [*played.starts[1:], len(names)]
    waits: list[list[Stall]] = [[] for _ in range(played.stages)]
    for chunk, (start, end) in enumerate(zip(played.starts, ends, strict=True)):
        waits[chunk % played.stages] += [
            _value(name, float(seconds), plan.schedule.micro_batches)
            for name, seconds in zip(names[start:end], values[start:end], strict=True)
            if seconds > 0
        ]
    stages = [
        replace(_of_stage(played, stage, seconds), waits=_folded(waits[stage]))
        for stage, seconds in enumerate(inside)
    ]
    count = len(stages)
    return Stalls(
        step=played.seconds,
        computation=math.fsum(one.computation for one in stages) / count,
        reasons={r: math.fsum(one.reasons[r] for one in stages) / count for r in Reason},
        waits=_folded(
            replace(one, seconds=one.seconds / count) for stage in waits for one in stage
        ),
        stages=stages,
    )


def _value(name: str, seconds: float, micro_batches: int) -> Stall:
    """The collectives of values that lead to an operator, or are inside it."""
    return Stall(
        name=name,
        kind="",
        axes="",
        phase="",
        reason=Reason.VALUES,
        seconds=micro_batches * seconds,
        late=0.0,
        times=micro_batches,
    )


def _inside(played: PlayedStages, plan: Plan, analysis: Analysis) -> tuple[Floats, Floats, Floats]:
    """The seconds of collectives in both passes of a micro-batch, by operator.

    Those of values, of gathers and of reductions.
    """
    moved = played.figures.moved
    # With all collectives of parameters once a step, only those of values are left in the passes.
    once = replace(plan.schedule.in_stage, gathered="per_step", accumulated="whole")
    plain = stages_figures(plan, analysis, played.cluster, once)
    passes = 2 if analysis.train else 1
    gathers = passes * (plain.gather - played.figures.gather)
    return plain.moved, gathers, moved - plain.moved - gathers


def _of_stage(played: PlayedStages, stage: int, inside: tuple[float, ...]) -> Stalls:
    """The stalls of one stage; `inside`: seconds of values, gathers, reductions in its passes."""
    count = played.plan.schedule.micro_batches
    once = played.once[stage]
    values, gathers, reductions = (count * seconds for seconds in inside)
    slowdown = SLOWDOWN[played.cluster.backend]
    gathered = once.gather_seen(1.0)
    reduced = once.reduce_seen(1.0)
    passes = count * (once.forward + once.backward)
    reasons = dict.fromkeys(Reason, 0.0)
    reasons |= {
        Reason.GATHERS: gathers + gathered,
        Reason.REDUCTIONS: reductions + reduced,
        Reason.VALUES: values,
        Reason.MESSAGES: played.run.seconds - played.unsent.seconds,
        Reason.SLOWED: once.gather_seen(slowdown) + once.reduce_seen(slowdown) - gathered - reduced,
        Reason.UPDATE: once.update,
    }
    computation = passes - values - gathers - reductions
    # What is left of the step: no pass, and no work once a step.
    bubble = played.seconds - math.fsum([computation, *reasons.values()])
    return Stalls(
        step=played.seconds,
        computation=computation,
        reasons={**reasons, Reason.BUBBLE: bubble},
        waits=(),
    )
