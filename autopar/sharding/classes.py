"""Sorts factors into four classes: rows, the hidden dim, inner dims and experts.

Rows are batch and sequence; the hidden dim joins the layers; inner dims are heads, feed-forward and
vocabulary. Two dims are of one class when some operator gives them the same factor, closed over the
whole graph (union-find). A class without a dim of a weight matrix or look-up table is a class of
rows. Of the other classes, the hidden dim is the one that a normalisation reduces; the rest are
inner. A dim that a product shares with its weight and keeps in its output counts the experts, and
so does one of whose matrices each row meets one: it numbers matrices and is no dim of a matrix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

from autopar.ir import Graph, Operator

from .notation import Rule
from .rules import RULES, known_rule

# A factor is (operator, -1, factor), a term of a dim (tensor, dim, its place in the dim).
Node = tuple[str, int, int]


class FactorClass(StrEnum):
    """The kind of dim that a factor runs over."""

    ROW = "row"
    HIDDEN = "hidden"
    INNER = "inner"
    EXPERT = "expert"


class _Sets:
    """Disjoint sets of dims and factors (union-find with path compression; Tarjan 1975)."""

    def __init__(self) -> None:
        self.parent: dict[Node, Node] = {}

    def find(self, node: Node) -> Node:
        """The representative of the set that holds `node`."""
        root = node
        while self.parent.setdefault(root, root) != root:
            root = self.parent[root]
        while self.parent[node] != root:
            self.parent[node], node = root, self.parent[node]
        return root

    def join(self, one: Node, other: Node) -> None:
        """Make one set of two."""
        self.parent[self.find(one)] = self.find(other)


def factor_classes(graph: Graph, rules: Mapping[str, Rule]) -> dict[str, tuple[FactorClass, ...]]:
    """For every operator the classes of its factors."""
    operators = [op for op in graph.operators if op.name in rules]
    sets = _Sets()
    weights = set[Node]()
    numbering = set[Node]()
    rows = _rows(graph, rules)
    parameters = {tensor.name for tensor in graph.parameters}
    stored = {tensor.name for tensor in graph.parameters if len(tensor.shape) > 1}
    for op in operators:
        # Results of weights alone (casts, transposes) are weights as well.
        for names in (stored, parameters):
            if names.issuperset(op.inputs):
                names.update(op.outputs)
        rule = rules[op.name]
        for name, dims in [
            *zip(op.inputs, rule.inputs, strict=True),
            *zip(op.outputs, rule.outputs, strict=True),
        ]:
            for index, dim in enumerate(dims):
                for factor in dim:
                    sets.join((op.name, -1, factor), (name, index, dim.index(factor)))
        held, counted = _of_weights(op, rule, stored, parameters)
        weights |= {(op.name, -1, factor) for factor in held}
        numbering |= {(op.name, -1, factor) for factor in counted}
    of_samples = set(map(sets.find, rows))
    owned = _with_parts_of_dims(set(map(sets.find, weights)), of_samples, operators, rules, sets)
    # A parameter that is repeated for every sample is no matrix of it.
    of_parameters = {
        sets.find((tensor.name, dim, 0))
        for tensor in graph.parameters
        for dim in range(len(tensor.shape))
    }
    experts = set(map(sets.find, numbering)) & of_parameters
    normalised = {
        sets.find((op.name, -1, factor))
        for op in operators
        for factor in _normalised(op, rules[op.name])
    }

    def class_of(node: Node) -> FactorClass:
        root = sets.find(node)
        # Matrices have the last word: a dim of one matrix counts no experts elsewhere.
        if root not in owned:
            return FactorClass.EXPERT if root in experts else FactorClass.ROW
        return FactorClass.HIDDEN if root in normalised else FactorClass.INNER

    return {
        name: tuple(class_of((name, -1, i)) for i in range(len(rule.factors)))
        for name, rule in rules.items()
    }


def _rows(graph: Graph, rules: Mapping[str, Rule]) -> set[Node]:
    """The leading dims of the inputs, followed through the operators before all parameters.

    These hold the samples, or the steps of sequences that come with these first.
    """
    rows = {
        (name, dim, 0)
        for name in graph.inputs
        # The second one of two dims of numbers holds features.
        for dim in range(
            1 if graph.tensors[name].is_float and len(graph.tensors[name].shape) < 3 else 2
        )
    }
    for op in graph.operators:
        rule = None if op.name in rules else known_rule(graph, op)
        if rule is None:
            continue
        held = {
            factor
            for name, dims in zip(op.inputs, rule.inputs, strict=True)
            for index, dim in enumerate(dims)
            for place, factor in enumerate(dim)
            if (name, index, place) in rows
        }
        rows |= {
            (name, index, place)
            for name, dims in zip(op.outputs, rule.outputs, strict=True)
            for index, dim in enumerate(dims)
            for place, factor in enumerate(dim)
            if factor in held
        }
    return rows


def _of_weights(
    op: Operator, rule: Rule, stored: set[str], parameters: set[str]
) -> tuple[set[int], set[int]]:
    """The factors of an operator's weights: first those of the matrices or tables.

    Those that number the matrices follow.
    """
    # Only products and look-ups count. A table of positions that is added to the rows has the
    # sequence among its dims, which makes it no weight matrix.
    masked = {i for i, factor in enumerate(rule.factors) if factor.special == "masked"}
    if not RULES[op.kind].products and not masked:
        return set(), set()
    pairs = list(zip(op.inputs, rule.inputs, strict=True))
    held = {factor for name, dims in pairs if name in stored for dim in dims for factor in dim}
    # A residual as an addend has the weight's output dim, and would pass it off as a number of
    # experts.
    rows = [
        dims
        for i, (name, dims) in enumerate(pairs)
        if name not in parameters and i not in rule.addends
    ]
    others = {factor for dims in rows for dim in dims for factor in dim}
    counted = held & others & {factor for dims in rule.outputs for dim in dims for factor in dim}
    # A look-up has the rows of one table; a masked product has a matrix for each place.
    counted |= masked & held if RULES[op.kind].products else set()
    return held - counted, counted


def _with_parts_of_dims(
    owned: set[Node],
    rows: set[Node],
    operators: Sequence[Operator],
    rules: Mapping[str, Rule],
    sets: _Sets,
) -> set[Node]:
    """Add the other parts of dims with a part of the weights: with the heads also the width of a
    head, but no `rows` (the batch, where it shares a dim with the heads).
    """
    compounds = {
        frozenset(sets.find((op.name, -1, factor)) for factor in dim)
        for op in operators
        for dims in (*rules[op.name].inputs, *rules[op.name].outputs)
        for dim in dims
        if len(dim) > 1
    }
    while more := {root for roots in compounds if roots & owned for root in roots - owned - rows}:
        owned = owned | more
    return owned


def _normalised(op: Operator, rule: Rule) -> list[int]:
    """The factors that a normalisation reduces."""
    if RULES[op.kind].products:
        return []
    # A softmax keeps its dim whole as norms do, so their names tell them apart. A norm that is
    # spelled out in small operators shows as a mean.
    norm = "Norm" in op.kind or "_norm" in op.kind
    return [
        i
        for i, factor in enumerate(rule.factors)
        if factor.reduction == "mean" or (factor.whole and norm)
    ]
