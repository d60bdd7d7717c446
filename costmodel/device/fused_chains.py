"""Chains of elementwise operators that one kernel runs, without writing the values inside.

A value stays inside if an elementwise operator makes it and exactly one operator reads it,
elementwise too (the bias, dropout and residual of a transformer). Every compiler fuses at least
these.
"""

from __future__ import annotations

from autopar.sharding.analysis import Analysis
from autopar.sharding.notation import Rule
from autopar.sharding.rules import RULES


def inside_chains(analysis: Analysis) -> frozenset[str]:
    """Names of the values that stay inside fused chains."""
    graph = analysis.graph
    elementwise = {
        op.name
        for op in analysis.warm
        if not RULES[op.kind].view and _is_elementwise(analysis.offers[op.name].rule, op.kind)
    }
    inside = set()
    for op in analysis.warm:
        if op.name in elementwise and len(op.outputs) == 1:
            readers = analysis.readers.get(op.outputs[0], ())
            # Reader -1 is the end of the program: an output is written in any case.
            if (
                len(readers) == 1
                and readers[0][0] >= 0
                and graph.operators[readers[0][0]].name in elementwise
            ):
                inside.add(op.outputs[0])
    return frozenset(inside)


def _is_elementwise(rule: Rule, kind: str) -> bool:
    """Whether every factor is one of the output's, and none is kept whole, reduced or special."""
    if RULES[kind].products or len(rule.outputs) != 1:
        return False
    out = {factor for dim in rule.outputs[0] for factor in dim}
    plain = all(not f.whole and f.reduction is None and f.special is None for f in rule.factors)
    return plain and out == set(range(len(rule.factors)))
