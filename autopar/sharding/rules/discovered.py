"""Rules of single calls of an operator: found by executing the call, or absent and replaced by
whole tensors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from autopar.ir import Graph
from autopar.sharding.notation import parse_rule

from .registry import RULES, Call, Entry, preamble, without_rule
from .selection import all_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscoveredRule:
    """The rule of the calls with one `signature`, with the columns of the table as in `Entry`."""

    kind: str
    signature: str
    rule: str
    linear: tuple[tuple[int, ...], ...] = ()
    products: tuple[str, ...] = ()
    differentiable: bool = True
    saves: str = "inputs"

    def __post_init__(self) -> None:
        parse_rule(self.rule)

    @property
    def entry(self) -> Entry:
        """The rule as a row of the table for all calls."""
        return Entry(
            rule=self.rule,
            linear=self.linear,
            products=self.products,
            differentiable=self.differentiable,
            saves=self.saves,
        )


def signature(call: Call) -> str:
    """A digest of all that a found rule depends on.

    It covers the attributes and, for every tensor, its rank, which dims are 1, and whether its
    elements are floats. Sizes are no part of it, so the rule of a small call is also that of a
    large one.
    """
    tensors = [
        (tuple(size == 1 for size in tensor.shape), tensor.is_float)
        for tensor in (*call.inputs, *call.outputs)
    ]
    text = repr(
        (call.operator.kind, sorted(call.operator.attributes.items()), len(call.inputs), tensors)
    )
    # Rules travel in plan files, so that the name must be the same in every process, unlike a hash
    # of Python.
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class _Rules:
    """The found rules of one kind, by signature: a row's rule in the table.

    Calls of other signatures get the whole rule, and are refused unless the user replicates the
    kind.
    """

    rules: Mapping[str, DiscoveredRule]

    def __call__(self, call: Call) -> str:
        rule = self.rules.get(signature(call))
        return rule.rule if rule is not None else all_whole(call)

    def covers(self, call: Call) -> bool:
        return signature(call) in self.rules


def add_found(rules: Iterable[DiscoveredRule]) -> None:
    """Add proven rules to the rules found before; a kind with a rule of the table or of the user
    keeps it.
    """
    for rule in rules:
        if is_open(rule):
            RULES[rule.kind] = _entry({**_found_before(rule.kind), rule.signature: rule})


def is_open(rule: DiscoveredRule) -> bool:
    """Whether the table would take this rule: its kind has no rule but found ones, and not this one
    yet.
    """
    entry = RULES.get(rule.kind)
    # A rule of the table or of the user was written for all calls, a found one only executed on
    # some.
    settled = entry is not None and not entry.stand_in and not isinstance(entry.rule, _Rules)
    return not settled and _found_before(rule.kind).get(rule.signature) != rule


def _found_before(kind: str) -> Mapping[str, DiscoveredRule]:
    entry = RULES.get(kind)
    return entry.rule.rules if entry is not None and isinstance(entry.rule, _Rules) else {}


def _entry(rules: Mapping[str, DiscoveredRule]) -> Entry:
    """One row for several calls: it claims only properties that all of them have."""
    # Gradients and saved tensors are those of any call: too many cost memory, too few are wrong.
    first, *others = rules.values()
    table = _Rules(rules)
    return Entry(
        rule=table,
        linear=tuple(
            members for members in first.linear if all(members in other.linear for other in others)
        ),
        products=first.products
        if all(other.products == first.products for other in others)
        else (),
        differentiable=any(rule.differentiable for rule in rules.values()),
        saves=first.saves if all(other.saves == first.saves for other in others) else "inputs",
        covers=table.covers,
    )


def found_in(graph: Graph) -> tuple[DiscoveredRule, ...]:
    """The found rules that a graph's operators use, by kind and signature."""
    cold = preamble(graph)
    used = {}
    for op in graph.operators:
        entry = RULES.get(op.kind)
        if op.name not in cold and entry is not None and isinstance(entry.rule, _Rules):
            rule = entry.rule.rules.get(signature(Call.of(graph, op)))
            if rule is not None:
                used[rule.kind, rule.signature] = rule
    return tuple(used[key] for key in sorted(used))


def replicate(graph: Graph, kinds: Iterable[str] | None = None) -> Graph:
    """The graph with the operators of `kinds` (default: the kinds without a rule) computed whole on
    every device.
    """
    wanted = (
        frozenset(kinds) if kinds is not None else frozenset(op.kind for op in without_rule(graph))
    )
    for kind in wanted:
        RULES.setdefault(kind, Entry(rule=all_whole, stand_in=True))
    return replace(graph, replicated=graph.replicated | wanted)
