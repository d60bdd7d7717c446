"""Interrupted searches: the best assignment so far and its bound survive a KeyboardInterrupt."""

import math
from collections.abc import Sequence

from ..costgraph import UNPROVEN, CostGraph, Infeasible, NoAssignment, Proof, Solution, solution
from .recursive_programming import recursive_programming


class Interrupted(KeyboardInterrupt):
    """A search was interrupted; `best` is its best solution so far, or None."""

    def __init__(self, best: Solution | None) -> None:
        super().__init__(
            "the search was interrupted"
            + ("" if best is None else f", with a gap of {best.gap:.2%}")
        )
        self.best = best


class Incumbent:
    """The best assignment of a search so far, its cost, and the best bound with its proof."""

    def __init__(self, graph: CostGraph, limit: float | None, method: str) -> None:
        self.graph = graph
        self.limit = limit
        self.method = method
        self.choices: list[int] | None = None
        self.cost = math.inf
        self.bound = -math.inf
        self.proof: Proof = UNPROVEN

    def offer(self, choices: Sequence[int]) -> None:
        """Keep `choices` of the whole graph if they fit the limit and are the cheapest so far."""
        cost = self.graph.cost(choices)
        # Searches offer what a relaxation or a restored part gave them, which may not fit.
        if cost < self.cost and (self.limit is None or self.graph.memory_of(choices) <= self.limit):
            self.choices = list(choices)
            self.cost = cost

    def prove(self, bound: float, proof: Proof) -> None:
        """Keep the bound if it is the highest so far."""
        if bound > self.bound:
            self.bound = bound
            self.proof = proof

    @property
    def gap(self) -> float:
        """The relative distance between cost and bound."""
        return (
            math.inf
            if self.choices is None
            else (self.cost - self.bound) / max(abs(self.cost), 1e-300)
        )

    def solution(self) -> Solution:
        """The best assignment so far, priced, with its bound."""
        assert self.choices is not None
        return solution(
            self.graph,
            self.choices,
            lower_bound=min(self.bound, self.cost),
            method=self.method,
            proof=self.proof,
        )

    def salvage(self) -> Solution | None:
        """Return the best assignment so far with its bound, or else the fast search's.

        Returns None if there is no assignment.
        """
        if self.choices is not None and self.bound > -math.inf:
            return self.solution()
        # Without an assignment or a bound, the fast search gives both in little time.
        try:
            fast = recursive_programming(self.graph, memory_limit=self.limit)
        except (Infeasible, NoAssignment):
            return None if self.choices is None else self.solution()
        self.offer(fast.choices)
        self.prove(fast.lower_bound, fast.proof)
        return self.solution()
