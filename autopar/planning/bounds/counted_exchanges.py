"""Tables without what exchanges of experts hide, or what hides them (see `hidden_exchanges.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from autopar.costmodel.step.covered import SLOWDOWN
from autopar.costmodel.step.mesh_prices import communication_seconds
from autopar.costmodel.step.shared_cores import hides
from autopar.ir import Role
from autopar.planning.space import Multiplicities
from autopar.planning.tables import Tables
from autopar.planning.tables.parameters.traffic import link_weight
from autopar.planning.tables.tables import Choices, Floats, Known

from .exchange_seconds import under_way


@dataclass(frozen=True, kw_only=True, eq=False)
class CountedExchanges:
    """The parts of a step's seconds in tables that count.

    `known`: the parts of the tables. `merged`: the layers of experts whose passes may be merged;
    `recomputed`: the operators that run twice. `alone`: the share of passes that are surely not
    merged. `beside`: the operators that may run beside a layer; `spared`: the share of them that
    does not count.
    """

    tables: Tables
    work: Multiplicities
    known: Known
    merged: frozenset[str]
    recomputed: frozenset[str]
    alone: float
    beside: frozenset[str]
    spared: float

    def counted(self) -> Tables:
        """Return the tables with the seconds that count."""
        # Equal operators stay one object, so that the search still recognises them.
        lessened = dict[object, Choices]()
        offered = list(self.tables.offered)
        for place, variable in enumerate(self.tables.variables):
            members = variable.members
            if not members or not (self.merged or not self.beside.isdisjoint(members)):
                continue
            of_each = tuple(
                (self.tables.analysis.offers[name], *(name in some for some in self._sets))
                for name in members
            )
            count = self.work.counts.operators.get(variable.name, 1)
            key = (offered[place], of_each, count)
            if key not in lessened:
                lessened[key] = self._lessened(members, offered[place])
            offered[place] = lessened[key]
        unary = tuple(choices.seconds for choices in offered)
        graph = replace(self.tables.graph, unary=unary, edges=self._edges())
        return replace(self.tables, graph=graph, offered=tuple(offered))

    @property
    def _sets(self) -> tuple[frozenset[str], ...]:
        return self.merged, self.recomputed, self.beside

    @cached_property
    def _faster(self) -> float:
        """The share of what is sent that does not count: computation may be slowed elsewhere."""
        if not self.merged or not self._hides or not self.work.counted:
            return 0.0
        # Passes under which parameters are sent do not count.
        passes = (1 - self.work.covers) * self.work.passes / self.work.counted
        return (1 - 1 / self._slowdown) * passes

    @property
    def _slowdown(self) -> float:
        return SLOWDOWN[self.tables.prices.cluster.backend]

    @property
    def _hides(self) -> bool:
        return hides(self.tables.prices.cluster)

    def _lessened(self, members: Sequence[str], choices: Choices) -> Choices:
        """Return the choices of operators with the seconds that count."""
        hidden = sum(map(self._hidden, members), np.zeros(1))
        often = self.work.counted * self.work.counts.operators.get(members[0], 1)
        seconds = choices.seconds - often * hidden[choices.rows]
        # Beside a layer all of an operator may hide.
        if self.merged.isdisjoint(members) and not self.beside.isdisjoint(members):
            seconds = (1 - self.spared) * seconds
        if np.array_equal(seconds, choices.seconds):
            return choices
        return replace(choices, seconds=np.maximum(seconds, 0.0))

    def _hidden(self, name: str) -> Floats:
        """Return the seconds of an operator that do not count: array [strategies]."""
        inside, links = self._sent(name)
        hidden = self._faster * inside
        # Half of what is sent inside an operator is of the forward pass.
        if name in self.recomputed:
            hidden = 1.5 * hidden
        alone = self.alone / self._slowdown if self._hides else 0.0
        for link, seconds in links.items():
            seen = alone + self._faster * link_weight(self.tables.prices, link)
            hidden = hidden + (1 - self._faster - seen) * seconds
        return hidden

    def _sent(self, name: str) -> tuple[Floats, Mapping[str, Floats]]:
        """Return the seconds of all that is sent inside an operator, and of exchanges by link.

        Those of exchanges are of layers whose passes may be merged: arrays [strategies].
        """
        offer = self.tables.analysis.offers[name]
        strategies = self.tables.strategies[name]
        merged = name in self.merged

        def seconds() -> tuple[Floats, Mapping[str, Floats]]:
            analysis = self.tables.analysis
            op = next(op for op in analysis.graph.operators if op.name == name)
            gradients = analysis.as_offered(op, analysis.gradients)
            arguments = (offer.call, strategies, self.tables.prices, gradients)
            return communication_seconds(*arguments), under_way(*arguments) if merged else {}

        return self.known.once(("sent", offer, strategies, merged), seconds)

    def _edges(self) -> dict[tuple[int, int], Floats]:
        """Return the edges of the tables, redistributions of values as far as they count."""
        edges = dict(self.tables.graph.edges)
        if not self._faster and not (self.beside and self.spared):
            return edges
        tensors = self.tables.analysis.graph.tensors
        scaled = dict[tuple[int, float], Floats]()
        for (u, v), table in edges.items():
            source, target = (self.tables.variables[place] for place in (u, v))
            if source.name in tensors and tensors[source.name].role is Role.PARAMETER:
                continue
            share = 1 - self._faster
            # What comes to operators beside a layer, or from them, may hide with these.
            if not self.beside.isdisjoint((*source.members, *target.members)):
                share *= 1 - self.spared
            key = (id(table), share)
            if key not in scaled:
                # A forbidden pair of choices stays so.
                scaled[key] = np.where(np.isinf(table), table, share * table)
            edges[u, v] = scaled[key]
        return edges
