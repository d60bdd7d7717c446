"""Candidates that are certainly too slow within the memory, proven before they are solved.

With q the price in seconds of a byte,

    min { cost(x) : memory(x) <= limit }  >=  L(q) - q limit
    L(q) = min over x of  cost(x) + q memory(x)

The best price is mostly near that of the last candidate on the same mesh, so one or two minima are
enough for a proof.
"""

from __future__ import annotations

import math

from autopar.planning.space import Candidate
from autopar.search import CostGraph, bound_within
from autopar.sharding.mesh import Mesh


class TooSlow:
    """Proves modes of candidates too slow; `prices`: of a byte, the last one on each mesh."""

    def __init__(self) -> None:
        self.prices: dict[tuple[int, int, Mesh], float] = {}

    def proves(
        self, candidate: Candidate, graph: CostGraph, limit: float, share: float, below: float
    ) -> bool:
        """Return whether nothing in a mode takes less than `below` seconds within `limit` bytes.

        `graph`: the tables of the mode. `share`: the least seconds of a step for each second of the
        tables' sum.
        """
        if below == math.inf:
            return False
        near = bound_within(
            graph,
            limit,
            price=self.prices.get(candidate.place, 0.0),
            enough=below / share,
            or_nothing=True,
        )
        self.prices[candidate.place] = near.price
        return share * near.bound >= below
