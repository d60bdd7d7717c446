"""Says where equal layers of a model are not treated alike: which of them, in what, and what such a mixture is for."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from ..ir import Role
from ..plan import Plan
from ..planning.folding import Run, find_runs
from ..sharding.analysis import Analysis
from .grouping import number_text

Treated = Mapping[tuple[int, str], str]
"""Of a layer: by the place of an operator and what is said of it (how it is split, what is stored, whether it runs again) the word."""
WHY = {
    "split": "operators are split otherwise",
    "stored": "parameters are stored otherwise",
    "again": "operators are recomputed in some only",
    "state": "optimizer state is in host memory for some only",
}


def unequal_lines(plan: Plan, analysis: Analysis) -> list[str]:
    """A sentence for each run of equal layers that are treated in several ways; how the first differs alone is no mixture."""
    again = {name for segment in plan.schedule.recompute for name in segment}
    found = []
    for run in find_runs(analysis.graph):
        treated = [_treated(plan, analysis, layer, again) for layer in run.segments()]
        if len({tuple(sorted(one.items())) for one in treated[1:]}) > 1:
            found.append(_sentence(run, treated))
    return found


def _treated(plan: Plan, analysis: Analysis, layer: range, again: set[str]) -> Treated:
    return dict(_words(plan, analysis, layer, again))


def _words(plan: Plan, analysis: Analysis, layer: range, again: set[str]) -> Iterator[tuple[tuple[int, str], str]]:
    for place, index in enumerate(layer):
        op = analysis.graph.operators[index]
        if op.name not in plan.operators:
            continue
        yield (place, "split"), " ".join(plan.operators[op.name].strategy)
        yield (place, "again"), str(op.name in again)
        held = [plan.parameters[name] for name in op.inputs if analysis.graph.tensors[name].role is Role.PARAMETER]
        yield (place, "stored"), ", ".join(parameter.storage for parameter in held)
        yield (place, "state"), ", ".join(parameter.state for parameter in held)


def _sentence(run: Run, treated: Sequence[Treated]) -> str:
    """The layers of each way, and in what the ways differ."""
    ways: dict[tuple[tuple[tuple[int, str], str], ...], list[int]] = {}
    for number, one in enumerate(treated):
        ways.setdefault(tuple(sorted(one.items())), []).append(number)
    told = [number_text(layers).strip("{}") for layers in sorted(ways.values(), key=len, reverse=True)]
    differ: Counter[str] = Counter()
    for key in treated[0]:
        differ[key[1]] += len({one[key] for one in treated[1:]}) > 1
    words = [f"{WHY[what]} ({count})" for what, count in differ.items() if count]
    pays = "the memory is filled by as many thrifty layers as it takes" if differ["again"] + differ["stored"] + differ["state"] else ""
    pays = pays or "what that saves is more than the redistributions between them cost"
    layers = " | ".join(itertools.islice(told, 4)) + (f" | {len(told) - 4} ways more" if len(told) > 4 else "")
    return f"{run.layers} equal layers are treated in {len(ways)} ways (layers {layers}): {', '.join(words)}; {pays}"
