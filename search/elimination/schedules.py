"""Variable elimination: the joins of a graph's tables, each distinct join computed once.

    m_v[x_N(v)] = min over x_v of  sum of the tables that contain v
    x_v         = the choice that attains m_v[x_N(v)]

To eliminate v, sum the tables that contain v and minimise over v; the result is one table over v's
neighbours. In reverse order each variable then takes its best choice given its neighbours. Source:
U. Bertele and F. Brioschi, Nonserial Dynamic Programming, 1972.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from autopar.compiled import assign, eliminate
from autopar.compiled.elimination import Labels, recorded

from ..tables import Table
from .join import merging
from .orders import Round


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """The minimum over label 0 of the sum of `inputs` (labels of the axes, number of the table)."""

    inputs: tuple[tuple[Labels, int], ...]
    size: int
    shape: tuple[int, ...]

    @property
    def work(self) -> float:
        """Additions of the join."""
        return float(self.size) * math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """An eliminated variable, the neighbours that it then had, and its join.

    The neighbours are in the order of the join's labels 1, 2, ...
    """

    variable: int
    neighbours: tuple[int, ...]
    join: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Joins:
    """The joins of a schedule over numbered tables: first the `leaves`, then one for each join.

    They are the same for all graphs whose tables are equal in the same places, whatever the tables
    hold. `program`, `way_back`: what `eliminate` and `assign` read. `variables`: how many there
    are. `work`: additions of all distinct joins.
    """

    leaves: int
    joins: tuple[Join, ...]
    rounds: tuple[tuple[Round, tuple[int, ...]], ...]
    program: array[int] = field(init=False, repr=False)
    way_back: array[int] = field(init=False, repr=False)
    variables: int = field(init=False)
    work: float = field(init=False)

    def __post_init__(self) -> None:
        records = (
            recorded(join.size, join.shape, join.inputs, merging(_labels(join)))
            for join in self.joins
        )
        steps = (
            (variable, join, *around)
            for round_, joins in reversed(self.rounds)
            for variable, around, join in zip(
                round_.variables.tolist(), round_.neighbours.tolist(), joins, strict=True
            )
        )
        object.__setattr__(self, "program", array("q", chain.from_iterable(records)))
        object.__setattr__(self, "way_back", array("q", chain.from_iterable(steps)))
        object.__setattr__(self, "variables", sum(len(joins) for _, joins in self.rounds))
        object.__setattr__(self, "work", sum(join.work for join in self.joins))


def _labels(join: Join) -> tuple[Labels, ...]:
    return tuple([labels for labels, _ in join.inputs])


NONE = Joins(leaves=0, joins=(), rounds=())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Schedule:
    """The tables of the leaves, with their memories or None, and the joins over them."""

    costs: tuple[Table, ...] = ()
    memories: tuple[Table | None, ...] = ()
    of: Joins = NONE
    too_wide: tuple[int, ...] = ()

    @property
    def joins(self) -> tuple[Join, ...]:
        """The distinct joins."""
        return self.of.joins

    @property
    def rounds(self) -> tuple[tuple[Round, tuple[int, ...]], ...]:
        """The rounds of the order, with the join of each variable."""
        return self.of.rounds

    @property
    def work(self) -> float:
        """Additions of all distinct joins."""
        return self.of.work

    @property
    def volume(self) -> float:
        """Entries of all cliques; equal joins count each time."""
        sizes = [join.work for join in self.joins]
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
        wanted = self._priced() if known else b"\1" * len(self.joins)
        for number, join in enumerate(self.joins):
            tables.append(
                np.empty(join.shape) if wanted[number] else known[len(self.costs) + number]
            )
        eliminate(tables, self.of.program, len(self.costs), wanted)
        return tables

    def _priced(self) -> bytes:
        """For each join whether memory has entered it; others are the same at every price."""
        priced = [memory is not None and bool(memory.any()) for memory in self.memories]
        for join in self.joins:
            priced.append(any(priced[table] for _, table in join.inputs))
        return bytes(priced[len(self.costs) :])

    def optimum(self, tables: Sequence[Table]) -> float:
        """Return the least sum, of the constants after each connected component's last variable."""
        roots = [
            join for step, joins in self.rounds if not step.neighbours.shape[1] for join in joins
        ]
        return math.fsum(float(tables[len(self.costs) + join]) for join in roots)

    def assignment(self, tables: list[Table]) -> list[int]:
        """The optimal choices, by back-substitution."""
        choices = np.zeros(self.of.variables, dtype=np.int64)
        assign(tables, self.of.program, len(self.costs), self.of.way_back, choices)
        return choices.tolist()
