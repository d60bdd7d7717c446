"""The checker's arithmetic: dropped choices, settled and split variables, and the messages of an
elimination, each equal case once.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

import numpy as np

from autopar.search.costgraph import CostGraph, Edge
from autopar.search.tables import Indices, Table

Scope = tuple[int, ...]
Around = tuple[tuple[int, int, int], ...]
"""The edges of a variable: number of the table, which end the variable is, number of the other
end's kept choices.
"""


class Malformed(ValueError):
    """A certificate that does not speak of the graph."""


Array = TypeVar("Array", Table, Indices)


class Numbers(Generic[Array]):
    """Arrays numbered by their content; `arrays` holds each once."""

    def __init__(self) -> None:
        self.arrays: list[Array] = []
        self._objects: dict[int, tuple[Array, int]] = {}
        self._contents: dict[tuple[tuple[int, ...], str, bytes], int] = {}

    def of(self, array: Array) -> int:
        """The array's number."""
        if id(array) not in self._objects:
            content = (
                array.shape,
                array.dtype.str,
                hashlib.blake2b(np.ascontiguousarray(array).data).digest(),
            )
            number = self._contents.setdefault(content, len(self.arrays))
            if number == len(self.arrays):
                self.arrays.append(array)
            self._objects[id(array)] = (array, number)
        return self._objects[id(array)][1]


class Factors:
    """A graph at a price of a byte, without dropped choices; `charged` is what its bound loses by
    that (rounding, if all is right).
    """

    def __init__(
        self,
        graph: CostGraph,
        memory: Sequence[Table] | None,
        price: float,
        substitutes: Sequence[Indices | None],
    ) -> None:
        self.numbers: Numbers[Table] = Numbers()
        self.keeps: Numbers[Indices] = Numbers()
        self.charged = 0.0
        self.price = price
        self.costs = [self.numbers.of(table) for table in graph.unary]
        self.memory = None if memory is None else [self.numbers.of(table) for table in memory]
        tables = {edge: self.numbers.of(table) for edge, table in graph.edges.items()}
        self.keep = [self.keeps.of(np.arange(size)) for size in graph.sizes]
        self._made: dict[object, Table] = {}
        if any(instead is not None for instead in substitutes):
            self._drop(tables, substitutes)
        self.sizes = [len(self.keeps.arrays[keep]) for keep in self.keep]
        self.unary, self.edges = self._fold(tables)

    def _slice(self, table: int, rows: int, columns: int) -> Table:
        key = (table, rows, columns)
        if key not in self._made:
            self._made[key] = self.numbers.arrays[table][
                np.ix_(self.keeps.arrays[rows], self.keeps.arrays[columns])
            ]
        return self._made[key]

    def _drop(self, tables: Mapping[Edge, int], substitutes: Sequence[Indices | None]) -> None:
        """Variable by variable, with what is left of the others by then."""
        incident: list[list[tuple[int, int, int]]] = [[] for _ in self.keep]
        for (u, v), table in tables.items():
            incident[u].append((table, 0, v))
            incident[v].append((table, 1, u))
        judged: dict[object, float] = {}
        for v, instead in enumerate(substitutes):
            if instead is None:
                continue
            around = tuple(sorted((table, side, self.keep[u]) for table, side, u in incident[v]))
            signature = (
                self.costs[v],
                self.memory[v] if self.memory else -1,
                self.keeps.of(instead),
                around,
            )
            if signature not in judged:
                judged[signature] = self._loss(v, instead, around)
            self.charged += judged[signature]
            self.keep[v] = self.keeps.of(np.flatnonzero(instead == np.arange(len(instead))))

    def _loss(self, v: int, instead: Indices, around: Around) -> float:
        """The cost that an assignment may lose when the choices of `v` give way; infinite where
        they may not.
        """
        size = len(self.keeps.arrays[self.keep[v]])
        if (
            instead.shape != (size,)
            or instead.dtype.kind not in "iu"
            or instead.min() < -1
            or instead.max() >= size
        ):
            raise Malformed(f"the substitutes of variable {v} are not choices of it")
        end = instead
        for _ in range(size.bit_length()):
            end = np.where(end >= 0, end[end], -1)
        gone = np.flatnonzero(instead != np.arange(size))
        replaced = gone[instead[gone] >= 0]
        if (instead[end[replaced]] != end[replaced]).any() or (end[replaced] < 0).any():
            raise Malformed(f"the substitutes of variable {v} lead to no choice that is kept")
        possible = np.isfinite(self.numbers.arrays[self.costs[v]])
        advantages = [
            _differences(self.numbers.arrays[self.costs[v]][:, None], replaced, instead[replaced])
        ]
        for table, side, other in around:
            rows = (
                self._slice(table, self.keep[v], other)
                if side == 0
                else self._slice(table, other, self.keep[v]).T
            )
            possible &= np.isfinite(rows.min(axis=1))
            advantages.append(_differences(rows, replaced, instead[replaced]))
        memory = None if self.memory is None else self.numbers.arrays[self.memory[v]]
        if memory is not None and (memory[instead[replaced]] > memory[replaced]).any():
            raise Malformed(f"a substitute of variable {v} needs more memory")
        lossless = np.isinf(np.max(advantages, axis=0))
        losses = -np.sum([np.where(lossless, 0.0, row) for row in advantages], axis=0)
        return math.inf if possible[instead < 0].any() else float(np.maximum(losses, 0.0).sum())

    def _fold(self, tables: Mapping[Edge, int]) -> tuple[list[Table], dict[Edge, Table]]:
        """The tables of the kept choices; an edge with a settled end counts in the other end's
        unary table.
        """
        edges: dict[Edge, Table] = {}
        extra: list[list[tuple[int, int, int]]] = [[] for _ in self.sizes]
        for (u, v), table in tables.items():
            key = (table, self.keep[u], self.keep[v])
            if self.sizes[u] > 1 and self.sizes[v] > 1:
                edges[u, v] = self._slice(*key)
            else:
                extra[u if self.sizes[v] == 1 else v].append(key)
        unary = []
        for v, cost in enumerate(self.costs):
            signature = (
                cost,
                self.memory[v] if self.memory else -1,
                self.keep[v],
                tuple(sorted(extra[v])),
            )
            if signature not in self._made:
                total = self.numbers.arrays[cost][self.keeps.arrays[self.keep[v]]]
                if self.memory is not None:
                    total = (
                        total
                        + self.price
                        * self.numbers.arrays[self.memory[v]][self.keeps.arrays[self.keep[v]]]
                    )
                for key in signature[3]:
                    total = total + self._slice(*key).reshape(-1)
                self._made[signature] = total
            unary.append(self._made[signature])
        return unary, edges

    def split(self, variables: Sequence[int]) -> None:
        """Give each of the variables a copy for each of its edges, in the edges' order: the first
        is itself, the others come last.
        """
        degree = {v: sum(v in edge for edge in self.edges) for v in variables}
        if any(not 0 <= v < len(self.sizes) for v in degree):
            raise Malformed("a split variable is not of the graph")
        shares: dict[tuple[int, int], Table] = {}
        for v, parts in degree.items():
            self.unary[v] = shares.setdefault(
                (self.numbers.of(self.unary[v]), parts), self.unary[v] / max(parts, 1)
            )
        used: set[int] = set()
        edges: dict[Edge, Table] = {}
        for edge in sorted(self.edges):
            ends = list(edge)
            for side, v in enumerate(edge):
                if v in used:
                    ends[side] = len(self.sizes)
                    self.sizes.append(self.sizes[v])
                    self.unary.append(self.unary[v])
                used.update({v} & degree.keys())
            turned = ends[0] > ends[1]
            edges[min(ends), max(ends)] = (
                self._turned(self.edges[edge]) if turned else self.edges[edge]
            )
        self.edges = edges

    def _turned(self, table: Table) -> Table:
        key = ("turned", self.numbers.of(table))
        return self._made.setdefault(key, np.ascontiguousarray(table.T))

    def bound(
        self, order: Sequence[int], numbers: Sequence[int], messages: Sequence[Table]
    ) -> float:
        """The sum of the last messages, less what is charged; every variable goes once."""
        if sorted(order) != list(range(len(self.sizes))) or len(numbers) != len(order):
            raise Malformed(
                f"the order does not take each of the {len(self.sizes)} variables once, with a "
                "message"
            )
        if not all(0 <= number < len(messages) for number in numbers):
            raise Malformed("a message is missing")
        return _Elimination(self, messages).run(order, numbers) - self.charged


class _Elimination:
    """The factors that are left while the variables go."""

    def __init__(self, factors: Factors, messages: Sequence[Table]) -> None:
        self.numbers = factors.numbers
        self.messages = messages
        self.scopes: list[Scope] = []
        self.tables: list[int] = []
        self.around: list[set[int]] = [set() for _ in factors.sizes]
        self.sizes = factors.sizes
        for v, table in enumerate(factors.unary):
            self._add((v,), self.numbers.of(table))
        for edge, table in factors.edges.items():
            self._add(edge, self.numbers.of(table))

    def _add(self, scope: Scope, table: int) -> None:
        for v in scope:
            self.around[v].add(len(self.scopes))
        self.scopes.append(scope)
        self.tables.append(table)

    def run(self, order: Sequence[int], numbers: Sequence[int]) -> float:
        looked: dict[object, float] = {}
        constants = []
        for v, number in zip(order, numbers, strict=True):
            mine = sorted(self.around[v])
            neighbours = sorted({u for factor in mine for u in self.scopes[factor]} - {v})
            label = {u: i for i, u in enumerate(neighbours, 1)} | {v: 0}
            inputs = tuple(
                sorted(
                    (tuple(label[u] for u in self.scopes[factor]), self.tables[factor])
                    for factor in mine
                )
            )
            if (inputs, number) not in looked:
                shape = (self.sizes[v], *(self.sizes[u] for u in neighbours))
                looked[inputs, number] = self._excess(inputs, shape, self.messages[number])
            for factor in mine:
                for u in self.scopes[factor]:
                    self.around[u].discard(factor)
            constants.append(-looked[inputs, number])
            if neighbours:
                self._add(tuple(neighbours), self.numbers.of(self.messages[number]))
            else:
                constants.append(float(self.messages[number]))
        return math.fsum(constants) if all(map(math.isfinite, constants)) else -math.inf

    def _excess(
        self, inputs: Sequence[tuple[Scope, int]], shape: Sequence[int], message: Table
    ) -> float:
        """By how much the message exceeds the least sum of the inputs, at most."""
        if (
            message.shape != tuple(shape[1:])
            or message.dtype != np.float64
            or not (message > -math.inf).all()
        ):
            raise Malformed(
                f"a message has the shape {message.shape}, not {tuple(shape[1:])}, or holds what "
                "is no number"
            )
        laid = [self._laid(labels, table, shape) for labels, table in inputs]
        worst = 0.0
        for choice in range(shape[0]):
            total = np.zeros([1] * (len(shape) - 1))
            for table in laid:
                total = total + table[choice]
            with np.errstate(invalid="ignore"):
                worst = max(
                    worst, float(np.fmax.reduce((message - total).reshape(-1), initial=0.0))
                )
        return worst

    def _laid(self, labels: Scope, table: int, shape: Sequence[int]) -> Table:
        """The table with its axes in the order of the labels, the missing ones of size 1."""
        axes = sorted(range(len(labels)), key=labels.__getitem__)
        whole = [shape[i] if i in labels else 1 for i in range(len(shape))]
        return np.asarray(self.numbers.arrays[table].transpose(axes).reshape(whole))


def _differences(table: Table, ours: Indices, theirs: Indices) -> Table:
    """The least of `table[ours] - table[theirs]` by row, infinite where ours is forbidden."""
    with np.errstate(invalid="ignore"):
        return np.asarray(
            np.where(np.isinf(table[ours]), np.inf, table[ours] - table[theirs]).min(axis=1)
        )
