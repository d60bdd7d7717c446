"""The bytes of parameters on a device, by which a plan's losses are told with what they cost."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection

from autopar.ir import DTYPE_BYTES
from autopar.plan import Plan
from autopar.sharding.layout import parse_layout

from .axis_work import is_split


def elements(plan: Plan, whole: Collection[int] = ()) -> dict[str, float]:
    """The elements of parameters on a device of the fullest stage, by their type.

    `whole`: axes on which they are counted whole, though they may be stored split there.
    """
    firsts = {stage.first for stage in plan.stages[1:]}
    stages = max(len(plan.stages) // plan.schedule.interleave, 1)
    chunk = 0
    held: dict[int, set[str]] = {}
    for name, operator in plan.operators.items():
        chunk += name in firsts
        names = {tensor for tensor, _ in operator.inputs if tensor in plan.parameters}
        held.setdefault(chunk % stages, set()).update(names)
    counted = [_counted(plan, names, whole) for names in held.values()]
    return max(counted, key=lambda one: sum(one.values()), default={})


def _counted(plan: Plan, names: Collection[str], whole: Collection[int]) -> dict[str, float]:
    counts = defaultdict[str, float](float)
    for name in sorted(names):
        parameter = plan.parameters[name]
        places = enumerate(parse_layout(parameter.storage))
        parts = math.prod(
            plan.mesh[index].size
            for index, place in places
            if is_split(place) and index not in whole
        )
        counts[parameter.dtype] += math.prod(parameter.shape) / parts
    return counts


def bytes_of(counts: dict[str, float], dtype: str | None = None) -> float:
    """The bytes of elements, in their own types or in another one."""
    return sum(count * DTYPE_BYTES[dtype or own] for own, count in counts.items())
