"""Which values autograd keeps from the forward to the backward pass, as shares of the operators that keep them.

A value is kept as its reader uses it: gathered, it is the gathered copy that lives on. A value that k operators keep is one
memory when they use it in the same layout, so each bears 1/k of it; a view's memory is its source's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.ir import Operator, Role
from autopar.sharding.analysis import Analysis
from autopar.sharding.rules import RULES


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one operator bears of a kept value: the tensor at `position` of its inputs (or outputs), times `fraction`."""

    output: bool
    position: int
    fraction: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """`shares` of every operator that keeps something; `weights`: the parameters that are kept as they are used."""

    shares: Mapping[str, tuple[Share, ...]]
    weights: frozenset[str]


def kept_places(operator: Operator) -> list[tuple[bool, int]]:
    """Where an operator with a gradient keeps tensors: (is an output, position)."""
    entry = RULES[operator.kind]
    if entry.view or not entry.saves:
        return []
    output = entry.saves == "output"
    return [(output, i) for i in range(len(operator.outputs if output else operator.inputs))]


def kept_values(analysis: Analysis) -> Kept:
    """The shares of every operator; nothing is kept when not training."""
    roots: dict[str, str] = {}
    places: dict[str, list[tuple[bool, int, str]]] = {}
    for op in analysis.warm if analysis.train else ():
        if RULES[op.kind].view and op.inputs:
            roots.update((name, roots.get(op.inputs[0], op.inputs[0])) for name in op.outputs)
        elif any(name in analysis.gradients for name in op.outputs):
            named = [(output, i, (op.outputs if output else op.inputs)[i]) for output, i in kept_places(op)]
            places[op.name] = [(output, i, roots.get(name, name)) for output, i, name in named]
    count = Counter(root for found in places.values() for _, _, root in found)
    shares = {
        name: tuple(Share(output=output, position=i, fraction=1 / count[root]) for output, i, root in found)
        for name, found in places.items()
    }
    return Kept(shares=shares, weights=frozenset(name for name in count if analysis.graph.tensors[name].role is Role.PARAMETER))
