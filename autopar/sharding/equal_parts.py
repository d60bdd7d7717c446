"""Dims that need a split within equal parts, as those of fused projections do.

A `split` into three, or a view `(b s) h -> b s h`, can pass on a split of an inner factor only if
the tensor is split within the parts of the outer one. Each such rule leaves a hint (dim, parts) on
its tensors. Hints travel up to the parameters through every rule in which the dim is a factor,
until nothing changes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopar.ir import Graph

from .classes import FactorClass
from .notation import Dims, Rule
from .rules import RULES

# The contiguous split and two more: each one multiplies an operator's strategies on every axis.
MAX_VARIANTS = 3
MAX_PARTS = 4
"""Weight dims are split within at most so many parts: fused projections have two to four."""


def keep_useful_factors(
    graph: Graph, rules: Mapping[str, Rule], classes: Mapping[str, tuple[FactorClass, ...]]
) -> dict[str, Rule]:
    """Mark as whole the factors that are useless to split in memory-bound operators.

    A split is useless where all consumers would have to undo it, and inside heads. A dim is useful
    if it leaves the model or some consumer can stay split on it; usefulness is computed from the
    outputs backwards.
    """
    useful = {
        (name, dim) for name in graph.outputs for dim in range(len(graph.tensors[name].shape))
    }
    marked = dict(rules)
    # Readers come before what they read, so each dim's readers have all had their say.
    for operator in reversed([op for op in graph.operators if op.name in rules]):
        rule = rules[operator.name]
        places = {
            factor: [
                (name, d)
                for name, dims in zip(operator.outputs, rule.outputs, strict=True)
                for d, dim in enumerate(dims)
                if factor in dim
            ]
            for factor in range(len(rule.factors))
        }
        heavy = bool(RULES[operator.kind].products)
        dead = {
            f
            for f, where in places.items()
            # A factor without a place in the outputs is reduced, which is of use in itself.
            if where and not heavy and not any(place in useful for place in where)
        }
        dead |= set() if heavy else _inside(rule, classes[operator.name])
        factors = tuple(
            replace(f, whole=True) if i in dead else f for i, f in enumerate(rule.factors)
        )
        marked[operator.name] = replace(rule, factors=factors)
        splittable = marked[operator.name].splittable()
        for name, dims in zip(operator.inputs, rule.inputs, strict=True):
            useful |= {(name, d) for d, dim in enumerate(dims) if not splittable.isdisjoint(dim)}
    return marked


def _inside(rule: Rule, classes: Sequence[FactorClass]) -> set[int]:
    """Factors of weight dims inside many equal parts (each head's width, say); no known scheme
    splits them.
    """
    inside = set()
    for dim in (dim for dims in (*rule.inputs, *rule.outputs) for dim in dims):
        for position, factor in enumerate(dim):
            outer = math.prod(rule.factors[f].size for f in dim[:position])
            if outer > MAX_PARTS and classes[factor] is not FactorClass.ROW:
                inside.add(factor)
    return inside


def split_variants(
    graph: Graph, rules: Mapping[str, Rule]
) -> tuple[dict[str, dict[int, tuple[int, ...]]], dict[str, dict[int, tuple[int, ...]]]]:
    """The parts to offer for each operator's factors, and for each tensor's dims; 1 is in all."""
    tensors: dict[str, set[tuple[int, int]]] = {}
    factors: dict[str, set[tuple[int, int]]] = {name: set() for name in rules}
    users: dict[str, list[str]] = {}
    operators = {op.name: op for op in graph.operators if op.name in rules}
    for op in operators.values():
        for name in (*op.inputs, *op.outputs):
            users.setdefault(name, []).append(op.name)
    # A queue without duplicates, in an order that does not depend on hashes. It runs dry, since
    # hints are only added, and the sizes bound them.
    work = dict.fromkeys(operators)
    while work:
        name = next(iter(work))
        del work[name]
        op = operators[name]
        rule = rules[name]
        sizes = [factor.size for factor in rule.factors]
        pairs = list(zip((*op.inputs, *op.outputs), (*rule.inputs, *rule.outputs), strict=True))
        for tensor, dims in pairs:
            factors[name] |= {
                hit for hint in tensors.get(tensor, ()) if (hit := _to_factor(hint, dims, rule))
            }
        for tensor, dims in pairs:
            fresh = _to_hints(factors[name], dims, rule, sizes) - tensors.get(tensor, set())
            if fresh:
                tensors.setdefault(tensor, set()).update(fresh)
                work.update(dict.fromkeys(users[tensor]))
    return (
        {name: _collect(pairs) for name, pairs in factors.items()},
        {name: _collect(pairs) for name, pairs in tensors.items()},
    )


def _to_factor(hint: tuple[int, int], dims: Dims, rule: Rule) -> tuple[int, int] | None:
    """The factor that a hint (dim, parts) on a tensor cuts inside, and into how many parts.

    The parts cut all terms outside of it into single elements, and this term into what is left of
    them. None: the parts end between two terms, or in no term.
    """
    dim, parts = hint
    outer = 1
    for factor in dims[dim]:
        size = rule.factors[factor].size
        if (
            parts % outer == 0
            and 1 < parts // outer < size
            and size % (parts // outer) == 0
            and not rule.factors[factor].whole
        ):
            return factor, parts // outer
        outer *= size
    return None


def _to_hints(
    wanted: set[tuple[int, int]], dims: Dims, rule: Rule, sizes: Sequence[int]
) -> set[tuple[int, int]]:
    """The hints that a rule leaves on a tensor: parts of its compounds, and the parts `wanted` for
    its factors.
    """
    out = set()
    for index, dim in enumerate(dims):
        for position, factor in enumerate(dim):
            outer = math.prod(sizes[f] for f in dim[:position])
            # What cannot be split asks for no parts.
            if rule.factors[factor].whole or sizes[factor] == 1:
                continue
            out |= {
                (index, outer * parts)
                for parts in (1, *(q for f, q in wanted if f == factor))
                if outer * parts > 1
            }
    return out


def _collect(pairs: set[tuple[int, int]]) -> dict[int, tuple[int, ...]]:
    """Parts by dim or factor, 1 first, at most `MAX_VARIANTS` of them (the smallest: the outermost
    parts).
    """
    collected: dict[int, set[int]] = {}
    for index, parts in pairs:
        collected.setdefault(index, {1}).add(parts)
    return {
        index: tuple(sorted(parts)[:MAX_VARIANTS]) for index, parts in sorted(collected.items())
    }
