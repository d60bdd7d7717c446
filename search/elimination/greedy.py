"""Elimination of small tables in one pass, with greedy choices where a table would be too wide.

Variables go in the order of least work. Where every join would be too wide, the variable of most
neighbours is decided at once: it takes the choice of which its tables have the least entries. So
the work is linear in the variables, however they are connected.
"""

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..costgraph import Edge
from ..tables import Table

Scope = tuple[int, ...]
"""Variables in ascending order: the axes of a table."""

ALL = slice(None)
WIDTH = 1 << 16
"""Entries of the widest join, with its own variable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A variable that is eliminated, or `decided`.

    `scope`: the variables of its join, of which it is at `place`. `inputs`: the numbers of its
    factors, with the index that gives each the axes of the scope. Factors are the unary tables, the
    edges, and then what the turns leave: one table each, of a decided variable one for each input.
    """

    variable: int
    decided: bool
    scope: Scope
    place: int
    inputs: tuple[tuple[int, tuple[slice | None, ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The turns of all variables, for tables of the unary ones and of the `edges`."""

    edges: tuple[Edge, ...]
    turns: tuple[Turn, ...]

    @property
    def is_exact(self) -> bool:
        """Whether no variable is decided without a look at all assignments."""
        return not any(turn.decided for turn in self.turns)

    def assign(self, unary: Sequence[Table], edges: Mapping[Edge, Table]) -> list[int]:
        """Return choices of little cost, the least if the plan is exact."""
        factors = [*unary, *(edges[edge] for edge in self.edges)]
        choices = [0] * len(unary)
        totals: list[Table] = []
        for turn in self.turns:
            if turn.decided:
                totals.append(_least_entries(turn, factors))
                choice = choices[turn.variable] = int(totals[-1].argmin())
                factors.extend(_at(turn, factors, choice))
            else:
                total = factors[turn.inputs[0][0]][turn.inputs[0][1]]
                for number, index in turn.inputs[1:]:
                    total = total + factors[number][index]
                # The whole sum stays, so that the choice is only looked up on the way back.
                totals.append(total)
                factors.append(np.minimum.reduce(total, axis=turn.place))
        for turn, total in zip(reversed(self.turns), reversed(totals), strict=True):
            if not turn.decided:
                given: list[Any] = [choices[u] for u in turn.scope]
                given[turn.place] = slice(None)
                choices[turn.variable] = int(total[tuple(given)].argmin())
        return choices


def _least_entries(turn: Turn, factors: Sequence[Table]) -> Table:
    """For each choice of the turn's variable the sum of its tables' least entries."""
    others = tuple(axis for axis in range(len(turn.scope)) if axis != turn.place)
    return np.asarray(sum(factors[number][index].min(axis=others) for number, index in turn.inputs))


def _at(turn: Turn, factors: Sequence[Table], choice: int) -> list[Table]:
    """The turn's tables at a choice of its variable."""
    return [
        np.asarray(factors[n].take(choice, sum(axis is not None for axis in index[: turn.place])))
        for n, index in turn.inputs
    ]


def planned(sizes: Sequence[int], edges: Iterable[Edge]) -> Plan:
    """Return a plan for variables of about these sizes."""
    edges = tuple(edges)
    around: list[set[int]] = [set() for _ in sizes]
    for u, v in edges:
        around[u].add(v)
        around[v].add(u)
    scopes: list[Scope] = [*((v,) for v in range(len(sizes))), *edges]
    mine: list[set[int]] = [set() for _ in sizes]
    for number, scope in enumerate(scopes):
        for v in scope:
            mine[v].add(number)
    turns = []
    for v, decided in _order(sizes, around):
        numbers = sorted(mine[v])
        scope = tuple(sorted({u for number in numbers for u in scopes[number]}))
        inputs = tuple(
            [(n, tuple([ALL if u in scopes[n] else None for u in scope])) for n in numbers]
        )
        turns.append(
            Turn(variable=v, decided=decided, scope=scope, place=scope.index(v), inputs=inputs)
        )
        left = [scopes[n] for n in numbers] if decided else [scope]
        for n in numbers:
            for u in scopes[n]:
                mine[u].discard(n)
        for rest in left:
            rest = tuple([u for u in rest if u != v])
            for u in rest:
                mine[u].add(len(scopes))
            scopes.append(rest)
    return Plan(edges=edges, turns=tuple(turns))


def _order(sizes: Sequence[int], around: list[set[int]]) -> Iterator[tuple[int, bool]]:
    """The variables, that of least work first; whether each is decided."""
    # Products of many sizes would exceed any integer of fixed length, so logarithms are added up.
    logs = [math.log2(size) for size in sizes]
    widest = math.log2(WIDTH)
    widths = [logs[v] + sum([logs[u] for u in around[v]]) for v in range(len(sizes))]
    left = set(range(len(sizes)))
    queue = [(width, v) for v, width in enumerate(widths)]
    heapq.heapify(queue)
    while queue:
        width, v = heapq.heappop(queue)
        if v not in left or width != widths[v]:
            continue
        # The least of all joins is too wide, so every one is; a join of two is never avoided.
        decided = width > widest and len(around[v]) > 1
        if decided:
            heapq.heappush(queue, (width, v))
            v = max(left, key=lambda u: (len(around[u]), logs[u], -u))
        left.discard(v)
        neighbours = around[v]
        for u in neighbours:
            around[u].discard(v)
            widths[u] -= logs[v]
            if not decided:
                added = neighbours - around[u] - {u}
                widths[u] += sum([logs[w] for w in sorted(added)])
                around[u] |= added
            heapq.heappush(queue, (widths[u], u))
        yield v, decided
