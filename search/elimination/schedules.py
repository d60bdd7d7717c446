"""Variable elimination: the joins of a graph's tables, each distinct join computed once.

    m_v[x_N(v)] = min over x_v of  sum of the tables that contain v
    x_v         = the choice that attains m_v[x_N(v)]

To eliminate v, sum the tables that contain v and minimise over v; the result is one table over v's
neighbours. In reverse order each variable then takes its best choice given its neighbours. Source:
U. Bertele and F. Brioschi, Nonserial Dynamic Programming, 1972.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..tables import Table
from .join import Labels, eliminate
from .orders import Round


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """The minimum over label 0 of the sum of `inputs` (labels of the axes, number of the table)."""

    inputs: tuple[tuple[Labels, int], ...]
    size: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """An eliminated variable, the neighbours that it then had, and its join.

    The neighbours are in the order of the join's labels 1, 2, ...
    """

    variable: int
    neighbours: tuple[int, ...]
    join: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Schedule:
    """Joins over numbered tables: first the leaves, then one table for each join.

    A leaf has costs, and memories or None.
    """

    costs: tuple[Table, ...]
    memories: tuple[Table | None, ...]
    joins: tuple[Join, ...]
    rounds: tuple[tuple[Round, tuple[int, ...]], ...]
    too_wide: tuple[int, ...] = ()

    @property
    def work(self) -> float:
        """Additions of all distinct joins."""
        return sum(float(join.size) * math.prod(join.shape) for join in self.joins)

    @property
    def volume(self) -> float:
        """Entries of all cliques; equal joins count each time."""
        sizes = [float(join.size) * math.prod(join.shape) for join in self.joins]
        return math.fsum(sizes[join] for _, joins in self.rounds for join in joins)

    @property
    def widest(self) -> int:
        """Entries of the largest table that results from a join."""
        return max((math.prod(join.shape) for join in self.joins), default=1)

    @property
    def steps(self) -> list[Step]:
        """The rounds, variable by variable."""
        return [
            Step(variable=v, neighbours=tuple(around), join=join)
            for step, joins in self.rounds
            for v, around, join in zip(
                step.variables.tolist(), step.neighbours.tolist(), joins, strict=True
            )
        ]

    def evaluate(self, price: float = 0.0, known: Sequence[Table] = ()) -> list[Table]:
        """Return all tables at `price` per byte.

        `known`: the tables at another price; those without memory in them are used again.
        """
        leaves = list(zip(self.costs, self.memories, strict=True))
        tables = [cost if memory is None else cost + price * memory for cost, memory in leaves]
        priced = [memory is not None and bool(memory.any()) for _, memory in leaves]
        for number, join in enumerate(self.joins, len(tables)):
            # A join into which no memory has entered is the same at every price.
            priced.append(any(priced[table] for _, table in join.inputs))
            if known and not priced[number]:
                tables.append(known[number])
            else:
                tables.append(
                    eliminate(
                        [(labels, tables[table]) for labels, table in join.inputs], join.shape
                    )
                )
        return tables

    def optimum(self, tables: Sequence[Table]) -> float:
        """Return the least sum, of the constants after each connected component's last variable."""
        roots = [
            join for step, joins in self.rounds if not step.neighbours.shape[1] for join in joins
        ]
        return math.fsum(float(tables[len(self.costs) + join]) for join in roots)

    def assignment(self, tables: Sequence[Table]) -> list[int]:
        """The optimal choices, by back-substitution; equal cases are computed once."""
        choices = np.zeros(sum(len(joins) for _, joins in self.rounds), dtype=np.int64)
        known: dict[tuple[int, ...], int] = {}
        for step, joins in reversed(self.rounds):
            attained = []
            for join, chosen in zip(joins, choices[step.neighbours].tolist(), strict=True):
                case = (join, *chosen)
                if case not in known:
                    known[case] = int(conditional(self.joins[join], tables, chosen).argmin())
                attained.append(known[case])
            choices[step.variables] = attained
        return [int(choice) for choice in choices]


def conditional(join: Join, tables: Sequence[Table], chosen: Sequence[int]) -> Table:
    """The cost of each choice of the eliminated variable, given its neighbours' `chosen` ones."""
    total = np.zeros(join.size)
    for labels, table in join.inputs:
        total = (
            total
            + tables[table][
                tuple(slice(None) if label == 0 else chosen[label - 1] for label in labels)
            ]
        )
    return total
