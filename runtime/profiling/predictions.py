"""A plan's predictions of the parts of a step on a rank, of the whole model or of its stage.

A plan holds seconds of each stage's passes, S_f and S_b of a micro-batch, and of the slowest stage
its update U. Of m micro-batches,

    forward = m S_f      backward = m S_b
    waiting = step - forward - backward - U - (exposed collectives that run once a step)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Foretold:
    """Predicted seconds of a step by part.

    `forward`, `backward`: computation. `update`: None: the plan knows only the slowest stage's.
    `waiting`: for other stages (None: there are none). `collectives`: of all collectives. `memory`:
    bytes of a device at the peak; `beside`: those of them that are neither parameters nor optimizer
    state (None if the plan does not separate these).
    """

    step: float
    forward: float
    backward: float
    update: float | None
    waiting: float | None
    collectives: float
    memory: float
    beside: float | None


def foretold(plan: Plan, stage: int | None) -> Foretold:
    """The predictions for a rank of this stage; without stages they are the same for every rank."""
    figures = plan.predicted
    if not plan.stages:
        return Foretold(
            step=figures.step,
            forward=figures.forward,
            backward=figures.backward,
            update=figures.update,
            waiting=None,
            collectives=figures.communication - figures.overlapped,
            memory=figures.memory,
            beside=math.fsum(
                size
                for name, size in figures.memory_parts.items()
                if name not in ("parameters", "optimizer")
            ),
        )
    assert stage is not None
    count = len(plan.stages) // plan.schedule.interleave
    own = plan.stages[stage::count]
    slowest = max(range(count), key=lambda number: _busy(plan, number, count))
    passes = [
        plan.schedule.micro_batches * math.fsum(getattr(part, name) for part in own)
        for name in ("forward", "backward")
    ]
    moved, once = (math.fsum(getattr(part, name) for part in own) for name in ("moved", "once"))
    computed = 1 - moved / sum(passes) if moved else 1.0
    # A plan knows how much the slowest stage hides of its collectives once a step; other stages are
    # taken to hide the same share.
    once_of_slowest = math.fsum(part.once for part in plan.stages[slowest::count])
    seen = once * (1 - figures.overlapped / once_of_slowest) if figures.overlapped else once
    return Foretold(
        step=figures.step,
        forward=computed * passes[0],
        backward=computed * passes[1],
        update=figures.update if stage == slowest else None,
        waiting=max(0.0, figures.step - sum(passes) - seen - figures.update),
        collectives=moved + seen,
        memory=math.fsum(part.memory for part in own),
        beside=None,
    )


def _busy(plan: Plan, stage: int, count: int) -> float:
    """Seconds of a step in which one of so many stages computes and communicates."""
    own = plan.stages[stage::count]
    return math.fsum(
        plan.schedule.micro_batches * (part.forward + part.backward) + part.once for part in own
    )
