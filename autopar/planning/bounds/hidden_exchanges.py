"""Exchanges of experts that run under other computation, as far as bounds have to leave them out.

With E the seconds in which rows travel to experts and back, N those of what runs beside a layer of
experts, such as experts that all tokens share, and C those of everything else, a pass takes

    C + N + E     in a pipeline whose schedule merges no passes
    C + N         at the least where passes of two micro-batches are merged
    C + E         at the least where only what is beside a layer hides its exchanges

Merged passes are those of some pipeline schedules, and without stages those of two micro-batches or
more. A layer that is recomputed runs in one piece, so that no other micro-batch comes between.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import numpy as np

from autopar.costmodel.step.mesh_prices import communication_seconds
from autopar.ir import Graph, Role
from autopar.order.schedules import SCHEDULES
from autopar.planning.model import FoldedModel, Request
from autopar.planning.space import Candidate, Multiplicities
from autopar.planning.space.schedules import merging, schedules_of
from autopar.planning.tables import Tables
from autopar.planning.tables.tables import Choices, Floats, Known
from autopar.sharding.rules import RULES
from autopar.sharding.rules.experts import EXPERTS


class HiddenExchanges:
    """The exchanges of experts of a model that may hide under a request."""

    def __init__(self, folded: FoldedModel, request: Request) -> None:
        self.folded = folded
        self.request = request
        self._schedules: dict[Candidate, tuple[bool, bool]] = {}

    @cached_property
    def _layers(self) -> frozenset[str]:
        """The layers of experts, by name."""
        graph = self.folded.folding.graph
        return frozenset(op.name for op in graph.operators if op.kind == EXPERTS)

    @cached_property
    def _beside(self) -> frozenset[str]:
        """The operators that may run beside a layer of experts, if any of them multiplies."""
        graph = self.folded.folding.graph
        kinds = {op.name: op.kind for op in graph.operators}
        free = frozenset[str]().union(
            *(kinds.keys() - _joined(graph, layer) for layer in self._layers)
        )
        multiplies = any(kinds[name] in RULES and RULES[kinds[name]].products for name in free)
        return free if multiplies else frozenset()

    @property
    def _merges(self) -> bool:
        """Whether the request leaves it open, or demands, that passes are merged."""
        return self.request.train and self.request.overlap_experts is not False

    @property
    def exist(self) -> bool:
        """Whether the model has layers of experts."""
        return bool(self._layers)

    def possible(self, candidate: Candidate) -> bool:
        """Whether exchanges may hide in plans of a candidate."""
        if not self._layers:
            return False
        if candidate.stages > 1:
            return self._kinds(candidate)[0]
        return bool(self._beside) or (self._merges and candidate.micro_batches > 1)

    def certain(self, candidate: Candidate) -> bool:
        """Whether exchanges may hide in every plan of a candidate."""
        if not self._layers:
            return False
        # Of stages the schedule decides, and without them the request.
        if candidate.stages == 1:
            return bool(self._beside) or bool(self.request.overlap_experts)
        return not self._kinds(candidate)[1]

    def _kinds(self, candidate: Candidate) -> tuple[bool, bool]:
        """Whether a candidate has pipeline schedules that merge passes, and others."""
        if candidate not in self._schedules:
            stages = candidate.stages
            count = candidate.micro_batches
            others = schedules_of(self.folded, self.request, stages, count)
            self._schedules[candidate] = (
                bool(merging(self.folded, self.request, stages, count)),
                any(not SCHEDULES[name].merges for name, _ in others),
            )
        return self._schedules[candidate]

    def carries(self, candidate: Candidate, other: Candidate) -> bool:
        """Whether a bound of a candidate holds for more micro-batches: not if only these merge."""
        several = other.stages == 1 and self._merges and other.micro_batches > 1
        return not (self._layers and several and candidate.micro_batches == 1)

    def left_out(
        self, tables: Tables, work: Multiplicities, *, stages: int, several: bool, known: Known
    ) -> Tables:
        """Return tables without the seconds that may be hidden, or hide others.

        `several`: whether there are several micro-batches. `known`: the parts of the tables.
        """
        recomputed = {name for segment in work.segments for name in segment}
        # What is recomputed before its backward pass leaves no gap for another micro-batch.
        merged = self._layers - recomputed if self._merges and several else frozenset[str]()
        beside = self._beside if stages == 1 and merged != self._layers else frozenset[str]()
        # Equal layers stay one object, so that the search still recognises them.
        lessened = dict[object, Choices]()
        offered = list(tables.offered)
        for place, variable in enumerate(tables.variables):
            if variable.what != "operator" or variable.name not in merged | beside:
                continue
            choices = offered[place]
            often = work.counted * work.counts.operators.get(variable.name, 1)
            key = (choices, tables.analysis.offers[variable.name], variable.name in merged, often)
            if key not in lessened:
                hidden = choices.seconds
                # Beside a layer all of an operator may hide; of a merged layer its exchanges may.
                if variable.name in merged:
                    hidden = often * _exchanged(tables, variable.name, choices, known)
                lessened[key] = replace(choices, seconds=np.maximum(choices.seconds - hidden, 0.0))
            offered[place] = lessened[key]
        unary = tuple(choices.seconds for choices in offered)
        graph = replace(tables.graph, unary=unary, edges=_without(tables, beside))
        return replace(tables, graph=graph, offered=tuple(offered))


def _without(tables: Tables, beside: frozenset[str]) -> dict[tuple[int, int], Floats]:
    """Return the edges of tables, without the seconds in which values come to some operators."""
    edges = dict(tables.graph.edges)
    if not beside:
        return edges
    tensors = tables.analysis.graph.tensors
    for (u, v), table in edges.items():
        source = tables.variables[u]
        target = tables.variables[v]
        is_parameter = source.name in tensors and tensors[source.name].role is Role.PARAMETER
        if target.what == "operator" and target.name in beside and not is_parameter:
            # A forbidden pair of choices stays so.
            edges[u, v] = np.where(np.isinf(table), table, 0.0)
    return edges


def _exchanged(tables: Tables, name: str, choices: Choices, known: Known) -> Floats:
    """Return the seconds in which rows of a layer travel in both passes: array [choices]."""
    strategies = tables.strategies[name]
    offer = tables.analysis.offers[name]

    def seconds() -> Floats:
        op = next(op for op in tables.analysis.graph.operators if op.name == name)
        gradients = tables.analysis.as_offered(op, tables.analysis.gradients)
        sent = communication_seconds(offer.call, strategies, tables.prices, gradients)
        travels = strategies.travel_degree(tables.prices.mesh.shape) > 1
        return np.asarray(np.where(travels, sent, 0.0))

    return np.asarray(known.once(("exchanged", offer, strategies), seconds)[choices.rows])


def _joined(graph: Graph, name: str) -> set[str]:
    """Return the operators that lead to one, and those that it leads to, with itself."""
    operators = graph.operators
    start = next(number for number, op in enumerate(operators) if op.name == name)
    joined = {name}
    # Operators are in topological order: one walk to the front, one to the end.
    wanted = set(operators[start].inputs)
    for op in reversed(operators[:start]):
        if not wanted.isdisjoint(op.outputs):
            joined.add(op.name)
            wanted.update(op.inputs)
    made = set(operators[start].outputs)
    for op in operators[start + 1 :]:
        if not made.isdisjoint(op.inputs):
            joined.add(op.name)
            made.update(op.outputs)
    return joined
