"""The search: solvers over tables of costs; nothing here knows an operator, a layout or a cluster."""

from .costgraph import CostGraph, Infeasible, NoAssignment, Solution
from .dynamic_programming import dynamic_programming, nearly
from .exhaustive import exhaustive
from .integer_program import integer_program
from .interruption import Interrupted
from .methods import SEARCHES, Search, solve
from .recursive_programming import recursive_programming
from .relaxation import lagrangian

__all__ = [
    "SEARCHES",
    "CostGraph",
    "Infeasible",
    "Interrupted",
    "NoAssignment",
    "Search",
    "Solution",
    "dynamic_programming",
    "exhaustive",
    "integer_program",
    "lagrangian",
    "nearly",
    "recursive_programming",
    "solve",
]
