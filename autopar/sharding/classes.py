"""Sorts factors into rows (batch, sequence), the hidden dim that joins the layers, inner dims (heads, feed-forward, vocabulary), experts.

Two dims are of one class when some operator gives them the same factor, closed over the whole graph (union-find). A class
that holds no dim of a weight matrix or look-up table is one of rows; of the others, those that a normalisation reduces are
the hidden dim, and the rest are inner. A dim that a product shares with its weight and keeps counts its experts: it numbers
matrices, and is no dim of one.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from ..ir import Graph
from .notation import Rule
from .rules import RULES

Node = tuple[str, int, int]


class FactorClass(StrEnum):
    """What a factor runs over."""

    ROW = "row"
    HIDDEN = "hidden"
    INNER = "inner"
    EXPERT = "expert"


def factor_classes(graph: Graph, rules: Mapping[str, Rule]) -> dict[str, tuple[FactorClass, ...]]:
    """For every operator the classes of its factors."""
    parent: dict[Node, Node] = {}

    def find(node: Node) -> Node:
        root = node
        while parent.setdefault(root, root) != root:
            root = parent[root]
        while parent[node] != root:
            parent[node], node = root, parent[node]
        return root

    weights: list[Node] = []
    numbering: list[Node] = []
    parameters = {tensor.name for tensor in graph.parameters}
    stored = {tensor.name for tensor in graph.parameters if len(tensor.shape) > 1}
    for op in graph.operators:
        if op.name not in rules:
            continue
        entry = RULES[op.kind]
        if stored.issuperset(op.inputs):
            stored.update(op.outputs)
        if parameters.issuperset(op.inputs):
            parameters.update(op.outputs)
        pairs = list(zip(op.inputs, rules[op.name].inputs, strict=True))
        for name, dims in [*pairs, *zip(op.outputs, rules[op.name].outputs, strict=True)]:
            for index, dim in enumerate(dims):
                for factor in dim:
                    parent[find((op.name, -1, factor))] = find((name, index, dim.index(factor)))
        if entry.products or any(f.special == "masked" for f in rules[op.name].factors):
            held = {factor for name, dims in pairs if name in stored for dim in dims for factor in dim}
            others = {
                f
                for i, (name, dims) in enumerate(pairs)
                if name not in parameters and i not in rules[op.name].addends
                for d in dims
                for f in d
            }
            shared = held & others & {factor for dims in rules[op.name].outputs for dim in dims for factor in dim}
            numbering += [(op.name, -1, factor) for factor in sorted(shared)]
            weights += [(op.name, -1, factor) for factor in sorted(held - shared)]
    owned = {find(node) for node in weights}
    compounds = {
        frozenset(find((op.name, -1, factor)) for factor in dim)
        for op in graph.operators
        if op.name in rules
        for dims in (*rules[op.name].inputs, *rules[op.name].outputs)
        for dim in dims
        if len(dim) > 1
    }
    # All parts of a dim that holds heads are of the weights, the width of a head too.
    while more := {root for roots in compounds if roots & owned for root in roots - owned}:
        owned |= more
    normal = {
        find((op.name, -1, i))
        for op in graph.operators
        if op.name in rules and not RULES[op.kind].products
        for i, factor in enumerate(rules[op.name].factors)
        if factor.reduction == "mean" or (factor.whole and "Norm" in op.kind.replace("_norm", "Norm"))
    }

    experts = {find(node) for node in numbering}

    def class_of(node: Node) -> FactorClass:
        root = find(node)
        if root not in owned:
            return FactorClass.EXPERT if root in experts else FactorClass.ROW
        return FactorClass.HIDDEN if root in normal else FactorClass.INNER

    return {name: tuple(class_of((name, -1, i)) for i in range(len(rule.factors))) for name, rule in rules.items()}
