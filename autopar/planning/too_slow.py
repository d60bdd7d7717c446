"""The candidates that nothing within the memory makes fast enough, by the bound at a price of a byte, before they are solved.

    min { cost(x) : memory(x) <= limit }  >=  L(q) - q limit        L(q) = min over x of  cost(x) + q memory(x)

The best price is mostly near that of the last candidate on the same mesh, so that one or two minima prove it.
"""

from __future__ import annotations

import math

from autopar.search import CostGraph
from autopar.search.bounding import bound_within

from ..sharding.mesh import Mesh
from .candidates import Candidate


class TooSlow:
    """`bounds`: of candidates with modes that were left. `prices`: of a byte, the last on each mesh."""

    def __init__(self) -> None:
        self.bounds: dict[Candidate, float] = {}
        self.prices: dict[tuple[int, int, Mesh], float] = {}

    def proves(self, candidate: Candidate, graph: CostGraph, limit: float, share: float, below: float) -> bool:
        """Whether nothing in a mode of a candidate takes less than `below` seconds within `limit` bytes; noted if so.

        `graph`: its tables. `share`: seconds of the step for each of the tables' sum, at the least.
        """
        if below == math.inf:
            return False
        near = bound_within(graph, limit, price=self.prices.get(candidate.place, 0.0), enough=below / share, or_nothing=True)
        self.prices[candidate.place] = near.price
        if share * near.bound < below:
            return False
        self.bounds[candidate] = min(share * near.bound, self.bounds.get(candidate, math.inf))
        return True
