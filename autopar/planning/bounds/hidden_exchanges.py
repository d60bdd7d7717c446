"""Exchanges of experts that run under other computation, as far as bounds have to leave them out.

With E the seconds in which rows travel to experts and back, N those of what runs beside a layer of
experts, such as experts that all tokens share, and C those of everything else, a pass takes

    C + N + E     in a pipeline whose schedule merges no passes
    C + E         at the least where only what is beside a layer hides its exchanges

Merged passes are those of some pipeline schedules, and without stages those of two micro-batches or
more. A layer that is recomputed runs in one piece, so that no other micro-batch comes between.

A step whose passes are merged is computation with nothing sent (t), computation while anything is
sent (u), which does 1 / s of its work, and waiting (v), while something is sent, too. Of C + N + E
let W be all computation, H_k the exchanges over link k under which computation may go on, and B all
else that is sent. Then

    W = t + u / s              step = t + u + v = W + (1 - 1 / s) (u + v) + v / s
    u + v >= sum a_k H_k       sum of a_k = 1, as no link sends two things at a time
    v >= B

    step >= W + B / s + (1 - 1 / s) sum a_k H_k

This is a pair of merged passes, too. Without stages the first forward and the last backward pass
have no other micro-batch: there only N runs under H, and takes up to s N. So v is larger by H - s N
of one micro-batch, and the step by H / s - N of it.
"""

from __future__ import annotations

from functools import cached_property

from autopar.ir import Graph
from autopar.order.schedules import SCHEDULES
from autopar.planning.model import FoldedModel, Request
from autopar.planning.space import Candidate, Multiplicities
from autopar.planning.space.schedules import merging, schedules_of
from autopar.planning.tables import Tables
from autopar.planning.tables.tables import Known
from autopar.sharding.rules import RULES
from autopar.sharding.rules.experts import EXPERTS

from .counted_exchanges import CountedExchanges


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
        return bool(self._beside) or self.merged(candidate)

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

    def merged(self, candidate: Candidate) -> bool:
        """Whether the plans of a candidate without stages may have merged passes."""
        return bool(self._layers) and self._merges and candidate.micro_batches > 1

    def carries(self, candidate: Candidate, other: Candidate) -> bool:
        """Whether a bound of a candidate holds for more micro-batches: not if only these merge."""
        several = other.stages == 1 and self.merged(other)
        return not (several and candidate.micro_batches == 1)

    def left_out(
        self,
        tables: Tables,
        work: Multiplicities,
        *,
        stages: int,
        several: bool,
        known: Known,
        alone: bool = True,
    ) -> Tables:
        """Return tables without the seconds that may be hidden, or hide others.

        `several`: whether there are several micro-batches. `known`: the parts of the tables.
        `alone`: whether the exchanges of passes that are surely not merged count; if not, what runs
        beside a layer counts in these passes.
        """
        recomputed = frozenset(name for segment in work.segments for name in segment)
        # What is recomputed before its backward pass leaves no gap for another micro-batch.
        merged = self._layers - recomputed if self._merges and several else frozenset[str]()
        share = 0.0
        if merged and stages == 1 and alone and work.counted:
            share = (1 - work.covers) / work.counted
        return CountedExchanges(
            tables=tables,
            work=work,
            known=known,
            merged=merged,
            recomputed=recomputed,
            alone=share,
            beside=self._beside if stages == 1 else frozenset(),
            spared=share if merged == self._layers else 1.0,
        ).counted()


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
