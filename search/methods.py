"""The table of search methods: one call signature, one short name each."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from .costgraph import CostGraph, Solution
from .solvers.dynamic_programming import dynamic_programming
from .solvers.exhaustive import exhaustive
from .solvers.integer_program import integer_program
from .solvers.recursive_programming import recursive_programming
from .solvers.relaxation import lagrangian


class Search(Protocol):
    """A search method: returns its cheapest assignment within the memory limit in bytes."""

    def __call__(self, graph: CostGraph, *, memory_limit: float | None = None) -> Solution: ...


SEARCHES: Mapping[str, Search] = MappingProxyType(
    {
        "dynamic_programming": dynamic_programming,
        "lagrangian": lagrangian,
        "recursive_programming": recursive_programming,
        "exhaustive": exhaustive,
        "integer_program": integer_program,
    }
)


def solve(
    graph: CostGraph, *, method: str = "dynamic_programming", memory_limit: float | None = None
) -> Solution:
    """Solve `graph` with the method of that name.

    >>> import numpy as np
    >>> solve(CostGraph(sizes=(2,), unary=(np.array([3.0, 1.0]),), edges={})).choices
    (1,)
    """
    if method not in SEARCHES:
        raise ValueError(f"unknown search method {method!r}; valid names: {', '.join(SEARCHES)}")
    return SEARCHES[method](graph, memory_limit=memory_limit)
