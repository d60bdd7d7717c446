"""The search: solvers over tables of costs, which know no operator, no layout and no cluster.

A `CostGraph` comes in, a `Solution` with a certified bound goes out. `elimination/` minimises a sum
of tables, `memory/` prices the bytes of a limit on top of it, and `solvers/` makes methods of both;
imports run in this order. Other folders import from here alone:

- `solve`: a graph by the name of a method of the table `SEARCHES`; each method by itself;
- `nearly`: a solution as near the optimum as the caller wants; `bound_within`: only a bound;
- `least_memory`: the solution of least memory;
- `condition`: a graph with some variables decided; `solution`: a given assignment, priced;
- `partition`, `balance`, `interval_sums`, `least_bottleneck`, `least_worst`: pipeline stages;
- `sharing_orders`, `forget_orders`, `distinct_joins`, `shared_map`: work shared by equal tables.
"""

from .costgraph import CostGraph, Infeasible, NoAssignment, Solution, solution
from .elimination.derived_graphs import condition
from .elimination.order_choice import forget_orders
from .elimination.shared_orders import sharing_orders
from .memory.bounding import bound_within
from .memory.lagrangian import least_memory
from .methods import SEARCHES, Search, solve
from .solvers.dynamic_programming import distinct_joins, dynamic_programming, nearly
from .solvers.exhaustive import exhaustive
from .solvers.integer_program import NotSolved, integer_program
from .solvers.interruption import Interrupted
from .solvers.recursive_programming import recursive_programming
from .solvers.relaxation import lagrangian
from .stages import balance, interval_sums, least_bottleneck, least_worst, partition
from .tables import shared_map

__all__ = [
    "SEARCHES",
    "CostGraph",
    "Infeasible",
    "Interrupted",
    "NoAssignment",
    "NotSolved",
    "Search",
    "Solution",
    "balance",
    "bound_within",
    "condition",
    "distinct_joins",
    "dynamic_programming",
    "exhaustive",
    "forget_orders",
    "integer_program",
    "interval_sums",
    "lagrangian",
    "least_bottleneck",
    "least_memory",
    "least_worst",
    "nearly",
    "partition",
    "recursive_programming",
    "shared_map",
    "sharing_orders",
    "solution",
    "solve",
]
