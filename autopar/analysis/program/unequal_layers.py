"""Equal layers that a plan does not treat alike."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from autopar.ir import Graph, Role
from autopar.plan import Plan
from autopar.planning.model.folding import Run, find_runs
from autopar.sharding.analysis import Analysis

from .equal_layers import number_text

Treated = Mapping[tuple[int, str], str]
"""The words for a layer: for the place of each operator, and for what is said of it (how it is
split, what is stored, whether it is recomputed).
"""
WHY = {
    "mesh": "on stages of other meshes",
    "split": "split otherwise",
    "stored": "with parameters stored otherwise",
    "recomputed": "recomputed in some only",
    "state": "with optimizer state in host memory in some only",
}
SHOWN = 3
"""Operators that are named, and ways of which the layers are."""


def unequal_lines(plan: Plan, analysis: Analysis) -> list[str]:
    """A sentence for each run of equal layers that are treated in several ways.

    The first layer alone may differ: that is no mixture.
    """
    recomputed = {name for segment in plan.schedule.recompute for name in segment}
    sentences = []
    for run in find_runs(analysis.graph):
        treated = [dict(_words(plan, analysis, layer, recomputed)) for layer in run.segments()]
        if len({tuple(sorted(one.items())) for one in treated[1:]}) > 1:
            sentences.append(_sentence(plan, analysis.graph, run, treated))
    return sentences


def _words(
    plan: Plan, analysis: Analysis, layer: range, recomputed: set[str]
) -> Iterator[tuple[tuple[int, str], str]]:
    meshes = (
        dict(_meshes(plan, analysis.graph))
        if len({stage.mesh for stage in plan.stages}) > 1
        else {}
    )
    for place, index in enumerate(layer):
        op = analysis.graph.operators[index]
        if op.name not in plan.operators:
            continue
        if meshes:
            yield (place, "mesh"), meshes[op.name]
        yield (place, "split"), " ".join(plan.operators[op.name].strategy)
        yield (place, "recomputed"), str(op.name in recomputed)
        held = [
            plan.parameters[name]
            for name in op.inputs
            if analysis.graph.tensors[name].role is Role.PARAMETER
        ]
        yield (place, "stored"), ", ".join(parameter.storage for parameter in held)
        yield (place, "state"), ", ".join(parameter.state for parameter in held)


def _meshes(plan: Plan, graph: Graph) -> Iterator[tuple[str, str]]:
    """The mesh of the stage of every operator."""
    for name, chunk in plan.chunks().items():
        mesh = plan.stages[chunk].mesh if plan.stages else plan.mesh
        yield name, " x ".join(f"{axis.name}={axis.size}" for axis in mesh)


def _sentence(plan: Plan, graph: Graph, run: Run, treated: Sequence[Treated]) -> str:
    """The layers of each way, in what the ways differ, and what that pays."""
    ways: dict[tuple[tuple[tuple[int, str], str], ...], list[int]] = {}
    for number, one in enumerate(treated):
        ways.setdefault(tuple(sorted(one.items())), []).append(number)
    told = [
        number_text(layers).strip("{}") for layers in sorted(ways.values(), key=len, reverse=True)
    ]
    layers = " | ".join(itertools.islice(told, SHOWN + 1)) + (
        f" | {len(told) - SHOWN - 1} ways more" if len(told) > SHOWN + 1 else ""
    )
    differ: dict[str, list[int]] = {}
    for place, what in treated[0]:
        if len({one[place, what] for one in treated[1:]}) > 1:
            differ.setdefault(what, []).append(place)
    what = ", ".join(
        f"{_operators(graph, run, differ[what])} {words}"
        for what, words in WHY.items()
        if what in differ
    )
    if "mesh" in differ:
        what = f"they lie {WHY['mesh']}"
    return f"{run.layers} equal layers are treated in {len(ways)} ways (layers {layers}): {what}"


def _operators(graph: Graph, run: Run, places: Sequence[int]) -> str:
    """The operators at some places of a layer, named by the common end of their names.

    Their kind stands for operators without a common end.

    A count stands for all but the first few.
    """
    layers = list(run.segments())
    at = [[graph.operators[layer[place]] for layer in layers[1:]] for place in places]
    names = Counter(_name([op.name for op in same]) or same[0].kind for same in at)
    shown = list(names)[:SHOWN]
    left = len(places) - sum(names[name] for name in shown)
    return ", ".join(shown) + (f" and {left} more" if left else "")


def _name(names: Sequence[str]) -> str:
    """The common end of the names of equal operators, from a whole word on.

    >>> _name(["layers.1.mlp.up", "layers.2.mlp.up", "layers.12.mlp.up"])
    'mlp.up'
    >>> _name(["linear_7", "linear_14"])
    ''
    """
    same = itertools.takewhile(
        lambda letters: len(set(letters)) == 1,
        zip(*(reversed(name) for name in names), strict=False),
    )
    common = "".join(letters[0] for letters in same)[::-1]
    at = min((common.find(mark) for mark in "./" if mark in common), default=-1)
    return common[at + 1 :] if at >= 0 else ""
