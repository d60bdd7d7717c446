"""The elimination order: the variables of each round, from the numbers of tables alone.

    cost of a round = (product of the sizes of the variable and its neighbours  +  OVERHEAD)
                      / variables of the round

The name of a join is its inputs: the tables, with their axes relative to the variable's neighbours.
Joins of equal layers thus have equal names. Each round eliminates all variables of one name that
are not adjacent to one another, the cheapest name first. L equal layers shrink in step to one
variable each, and every further round halves their chain.

A best order is NP-hard to find (S. Arnborg et al., Complexity of Finding Embeddings in a k-Tree,
1987). Least work and least fill are two of the usual greedy choices (U. Kjaerulff, Triangulation of
Graphs, 1990).

An order is a pure function of its arguments. Without `sizes` every variable counts as `TYPICAL`
choices. Such an order is the same for every mesh of a model, so a cache of a few orders serves all
meshes but the first.
"""

import functools
import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.compiled.elimination import Labels

from ..tables import Indices

Name = tuple[tuple[Labels, int], ...]
Score = tuple[bool, float, float]

OVERHEAD = float(1 << 14)
"""The fixed cost of one join, in additions."""
TYPICAL = 64
"""Choices of a variable if sizes are omitted."""
CACHED_ORDERS = 16
"""Orders in the cache: those of a model, with and without a memory limit, and of a few other
models.
"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Round:
    """Variables that are eliminated together, one row of each array a variable.

    `neighbours`: its neighbours. `inputs`: the factors of its join, with axes `labels`. `outputs`:
    the resulting factor.
    """

    variables: Indices
    neighbours: Indices
    labels: tuple[Labels, ...]
    inputs: Indices
    outputs: Indices


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Order:
    """Rounds over numbered factors: unary tables, edges, then one for each eliminated variable.

    `work`: additions. `too_wide`: the variables to fix first.
    """

    rounds: tuple[Round, ...]
    factors: int
    too_wide: tuple[int, ...]
    work: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """The arguments of an order: variables, the edges' ends, and a number for each table.

    `tables`: the variables' tables first, then the edges'; equal numbers are equal tables.
    """

    count: int
    ends: bytes
    tables: bytes
    sizes: tuple[int, ...] = ()


@functools.lru_cache(maxsize=CACHED_ORDERS)
def order(structure: Structure, *, max_entries: float = math.inf, by_fill: bool = False) -> Order:
    """Return an order with little work.

    Its `too_wide` are the variables to fix first, so that no table exceeds `max_entries`.
    `by_fill`: the variable that adds the smallest new tables goes first, instead of the one of
    least work.
    """
    return _Planner(structure, max_entries, by_fill=by_fill).run()


def _rank(score: Score, members: int) -> Score:
    """The rank of a class: work for each eliminated variable, as one join serves all members."""
    wide, fill, work = score
    return wide, fill, (work + OVERHEAD) / members


class _Planner:
    """The state of one symbolic elimination: the tables left, over their variables.

    A class is the variables of equal score and name. The queue holds classes lazily: an entry may
    be out of date, and is corrected when it is taken.
    """

    def __init__(self, structure: Structure, max_entries: float, *, by_fill: bool) -> None:
        count = structure.count
        self.sizes = structure.sizes or (TYPICAL,) * count
        self.max_entries = max_entries
        self.by_fill = by_fill
        self.scopes: list[tuple[int, ...]] = []
        self.tables: list[int] = []
        self.buckets: list[set[int]] = [set() for _ in range(count)]
        self.adjacent: list[set[int]] = [set() for _ in range(count)]
        self.around: dict[int, tuple[list[int], list[int]]] = {}
        self.joins: dict[Name, int] = {}
        self.work = 0.0
        self.rounds: list[Round] = []
        self.too_wide: list[int] = []
        self.queue: list[tuple[Score, int, Score, Name]] = []
        self.filed: dict[int, tuple[Score, Name]] = {}
        self.classes: dict[tuple[Score, Name], set[int]] = {}
        tables = np.frombuffer(structure.tables, dtype=np.int64).tolist()
        ends = np.frombuffer(structure.ends, dtype=np.int64).reshape(-1, 2).tolist()
        for table, scope in zip(
            tables, [*((v,) for v in range(count)), *map(tuple, ends)], strict=True
        ):
            self._add(table, scope)
        self.fresh = max(tables, default=-1) + 1

    def _add(self, table: int, scope: tuple[int, ...]) -> None:
        for v in scope:
            self.buckets[v].add(len(self.scopes))
            self.adjacent[v].update(scope)
            self.adjacent[v].discard(v)
        self.scopes.append(scope)
        self.tables.append(table)

    def run(self) -> Order:
        """Take rounds until no variable is left."""
        for v in range(len(self.sizes)):
            self._file(v)
        while self.queue:
            rank, _, score, name = heapq.heappop(self.queue)
            members = sorted(self.classes.get((score, name), ()))
            if not members:
                continue
            # The class has lost members since, so its rank has grown: back into the queue.
            if rank < _rank(score, len(members)):
                self._enqueue(members[0], score, name)
            # The least rank is too wide, so every class is.
            elif score[0]:
                self._enqueue(members[0], score, name)
                self._give_up()
            else:
                del self.classes[score, name]
                self._round(members, score, name)
        return Order(
            rounds=tuple(self.rounds),
            factors=len(self.scopes),
            too_wide=tuple(self.too_wide),
            work=self.work,
        )

    def _file(self, v: int) -> None:
        """Put `v` into the class of its score and name."""
        key = self._score(v)
        self.filed[v] = key
        members = self.classes.get(key)
        if members is None:
            members = self.classes[key] = set()
        members.add(v)
        heapq.heappush(self.queue, (_rank(key[0], len(members)), v, *key))

    def _enqueue(self, v: int, score: Score, name: Name) -> None:
        heapq.heappush(self.queue, (_rank(score, len(self.classes[score, name])), v, score, name))

    def _unfile(self, v: int) -> None:
        self.classes.get(self.filed.pop(v), set()).discard(v)

    def _score(self, v: int) -> tuple[Score, Name]:
        neighbours = sorted(self.adjacent[v])
        entries = 1.0
        for u in neighbours:
            entries *= self.sizes[u]
        if entries > self.max_entries:
            return (True, 0.0, 0.0), (
                ((v,), -1),
            )  # their order is irrelevant: `_give_up` chooses among all
        # The sizes of the tables that the elimination would add between neighbours not yet
        # adjacent.
        fill = 0.0
        if self.by_fill:
            pairs = ((a, b) for i, a in enumerate(neighbours) for b in neighbours[i + 1 :])
            fill = float(
                sum(self.sizes[a] * self.sizes[b] for a, b in pairs if b not in self.adjacent[a])
            )
        label = {u: i for i, u in enumerate(neighbours, 1)}
        label[v] = 0
        scopes = self.scopes
        tables = self.tables
        # Sorted by labels and tables, so that the name does not depend on the factors' numbers, in
        # which equal layers differ.
        inputs = sorted(
            [(tuple([label[u] for u in scopes[f]]), tables[f], f) for f in self.buckets[v]]
        )
        self.around[v] = neighbours, [factor for _, _, factor in inputs]
        return (False, fill, entries * self.sizes[v]), tuple(
            [(labels, table) for labels, table, _ in inputs]
        )

    def _round(self, members: Sequence[int], score: Score, name: Name) -> None:
        """Eliminate the members of one class that are not adjacent to one another."""
        near: set[int] = set()
        gone = []
        neighbours = []
        inputs = []
        first = len(self.scopes)
        if name not in self.joins:
            self.joins[name] = self.fresh + len(self.joins)
            self.work += score[2]
        for v in members:
            if v not in near:
                # None of its neighbours was eliminated since it was filed, so its neighbours and
                # factors still hold.
                around, factors = self.around[v]
                gone.append(v)
                neighbours.append(around)
                inputs.append(factors)
                self._remove(v)
                self._add(self.joins[name], tuple(around))
                near.update(around)
        shape = (len(gone), -1)
        self.rounds.append(
            Round(
                variables=np.array(gone),
                neighbours=np.array(neighbours, dtype=np.int64).reshape(
                    len(gone), len(neighbours[0])
                ),
                labels=tuple(labels for labels, _ in name),
                inputs=np.array(inputs).reshape(shape),
                outputs=np.arange(first, len(self.scopes)),
            )
        )
        # New edges change the fill of the neighbours' neighbours, too.
        for u in list(near) if self.by_fill else ():
            near |= self.adjacent[u]
        self._refile(near)

    def _refile(self, near: set[int]) -> None:
        for u in sorted(near):
            self._unfile(u)
        for u in sorted(near):
            self._file(u)

    def _remove(self, v: int) -> None:
        self._unfile(v)
        for u in self.adjacent[v]:
            self.adjacent[u].discard(v)
            self.buckets[u] -= self.buckets[v]

    def _give_up(self) -> None:
        """Take the variable of most neighbours out of the graph, to be fixed.

        All that are left are too wide.
        """
        victim = max(self.filed, key=lambda v: (len(self.adjacent[v]), self.sizes[v], -v))
        self.too_wide.append(victim)
        neighbours = set(self.adjacent[victim])
        remaining = [
            tuple(u for u in self.scopes[f] if u != victim) for f in sorted(self.buckets[victim])
        ]
        self._remove(victim)
        for scope in remaining:
            if scope:
                # A new negative number: the table of a choice fixed later equals no known one.
                self._add(-len(self.scopes) - 2, scope)
        self._refile(neighbours)
