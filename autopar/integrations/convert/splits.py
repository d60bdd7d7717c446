"""The cuts between the stages of a plan: before an operator of the model, or after one."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable

from autopar.errors import PlanError
from autopar.plan import Plan


def cuts(plan: Plan) -> tuple[tuple[str, bool], ...]:
    """Starts of all stages but the first.

    An operator, and whether the stage begins after it (else before it).
    """
    names = list(plan.operators)
    places = {name: index for index, name in enumerate(names)}
    starts = [places.get(stage.first, -1) for stage in plan.stages[1:]]
    if any(after <= before for before, after in itertools.pairwise([0, *starts])):
        raise PlanError(
            "the plan's stages do not begin at operators of the model, one after the other"
        )
    joined = [plan.operators[names[start]].kind.startswith("autopar.") for start in starts]
    return tuple(
        (names[start - 1], True) if after else (names[start], False)
        for start, after in zip(starts, joined, strict=True)
    )


def held_twice(plan: Plan) -> Iterable[str]:
    """Complaints about parameters that two chunks on the same devices read.

    Each chunk would have its own copy.
    """
    ranks = max(len(plan.stages) // plan.schedule.interleave, 1)
    firsts = {spec.first for spec in plan.stages[1:]}
    stage = 0
    read: dict[str, set[int]] = defaultdict(set)
    for name, operator in plan.operators.items():
        stage += name in firsts
        for tensor, _ in operator.inputs:
            if tensor in plan.parameters:
                read[tensor].add(stage)
    for tensor, stages in read.items():
        if len({stage % ranks for stage in stages}) < len(stages):
            yield (
                f"parameter {tensor!r}, which chunks {', '.join(map(str, sorted(stages)))} on the "
                "same devices read"
            )
