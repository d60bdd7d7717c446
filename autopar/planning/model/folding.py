"""Runs of equal layers, found by operators and connections, and folded to first and last layer.

A run has r layers of P operators. For every operator i behind the first layer, operator i - P does
the same, and each input of i corresponds to that of i - P:

    the same tensor               a mask or a table that all layers share
    a value made as far back      handed on between layers
    a parameter of its own        of the same shape

In the folded graph the last layer follows the first. It represents all layers behind the first, and
counts r - 1 times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autopar.ir import Graph, Operator, Role

from .counts import Counts

Ints = NDArray[np.int64]
PERIODS = 64
"""The most periods to try in a stretch of operators: the most frequent distances between equal
ones.
"""
SHORTEST = 4
"""The least number of operators of a layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """`layers` equal layers of `period` operators each, from operator `start` on."""

    start: int
    period: int
    layers: int

    @property
    def stop(self) -> int:
        """The number of the operator behind the last layer."""
        return self.start + self.period * self.layers

    def segments(self) -> Iterator[range]:
        """The operators of each layer."""
        for layer in range(self.layers):
            yield range(self.start + layer * self.period, self.start + (layer + 1) * self.period)


@dataclass(frozen=True, slots=True, kw_only=True)
class Folding:
    """A short `graph` that represents a long one.

    `operators`, `tensors`: from each operator and tensor of the long graph to its representative in
    the short one. `handed`: from each value that a run's first layer hands on to the corresponding
    value of the last layer, which represents the layers between.
    """

    graph: Graph
    operators: Mapping[str, str]
    tensors: Mapping[str, str]
    handed: Mapping[str, str]

    @property
    def counts(self) -> Counts:
        """The numbers of operators and tensors that those of the short graph represent."""
        return Counts(
            operators=Counter(self.operators.values()),
            tensors=Counter(self.tensors.values()),
            handed=self.handed,
        )


def find_runs(graph: Graph) -> tuple[Run, ...]:
    """The runs of at least three equal layers in a graph, in order and without overlap."""
    finder = _Finder(graph)
    return tuple(sorted(finder.runs(0, len(graph.operators)), key=lambda run: run.start))


def fold(graph: Graph, runs: tuple[Run, ...] | None = None) -> Folding:
    """Keep the first and the last layer of every run."""
    operators = {op.name: op.name for op in graph.operators}
    tensors = {name: name for name in graph.tensors}
    readers = {name: index for index, op in enumerate(graph.operators) for name in op.inputs}
    wraps: dict[str, str] = {}
    short: list[Operator] = []
    at = 0
    for run in find_runs(graph) if runs is None else runs:
        short += graph.operators[at : run.start + run.period]
        short += _fold_run(graph, run, operators, tensors, readers, wraps)
        at = run.stop
    short += graph.operators[at:]
    gone = {name for name, other in tensors.items() if name != other}
    folded = replace(
        graph,
        operators=tuple(short),
        inputs=tuple(name for name in graph.inputs if name not in gone),
        tensors={name: tensor for name, tensor in graph.tensors.items() if name not in gone},
        constants={name: value for name, value in graph.constants.items() if name not in gone},
        updates={name: value for name, value in graph.updates.items() if name not in gone},
    )
    return Folding(graph=folded, operators=operators, tensors=tensors, handed=wraps)


def _fold_run(
    graph: Graph,
    run: Run,
    operators: dict[str, str],
    tensors: dict[str, str],
    readers: Mapping[str, int],
    wraps: dict[str, str],
) -> list[Operator]:
    """Map the layers between the first and the last onto the last.

    Returns the last layer's operators, which now read the first layer's values. `wraps`: see
    `Folding.handed`.
    """
    last = run.stop - run.period
    handed: dict[str, str] = {}
    for index in range(run.start + run.period, last):
        place = (index - run.start) % run.period
        first, source, target = (
            graph.operators[at + place] for at in (run.start, index - place, last)
        )
        operators[source.name] = target.name
        tensors.update(
            (mine, other)
            for mine, other in zip(source.inputs, target.inputs, strict=True)
            if _is_own(graph, mine, other)
        )
        for mine, before, behind in zip(source.outputs, first.outputs, target.outputs, strict=True):
            # A value handed on has a reader in the next layer. In the folded graph only the first
            # layer has a next one, so the first layer's value represents it.
            tensors[mine] = (
                before if readers.get(mine, -1) >= index - place + run.period else behind
            )
            handed[mine] = before
            if tensors[mine] == before:
                wraps[before] = behind
    return [
        replace(op, inputs=tuple(handed.get(name, name) for name in op.inputs))
        for op in graph.operators[last : run.stop]
    ]


def _is_own(graph: Graph, name: str, other: str) -> bool:
    """Whether both tensors are stored, differ, and are alike in kind, shape and type."""
    mine = graph.tensors[name]
    theirs = graph.tensors[other]
    alike = (mine.role, mine.shape, mine.dtype, mine.narrow, mine.trainable) == (
        theirs.role,
        theirs.shape,
        theirs.dtype,
        theirs.narrow,
        theirs.trainable,
    )
    return name != other and mine.role is not Role.ACTIVATION and alike


class _Finder:
    """Finds the runs of equal layers in a graph.

    `numbers`: of the operators; two operators are equal if their numbers are.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        # Equal numbers compare faster than fingerprints.
        known: dict[str, int] = {}
        prints = [graph.operator_fingerprint(op) for op in graph.operators]
        self.numbers = np.array(
            [known.setdefault(text, len(known)) for text in prints], dtype=np.int64
        )
        self.producer = {
            name: index for index, op in enumerate(graph.operators) for name in op.outputs
        }
        self.crossing = crossing_bytes(graph)
        self.readers: dict[str, list[int]] = {}
        for index, op in enumerate(graph.operators):
            for name in op.inputs:
                self.readers.setdefault(name, []).append(index)

    def runs(self, start: int, stop: int) -> list[Run]:
        """Return the run that folds most operators of a stretch, with the runs on its two sides."""
        best: Run | None = None
        for period in self._periods(start, stop):
            # The best run is the one that saves most operators, not the longest.
            for stretch in self._stretches(start, stop, period):
                run = self._verified(*stretch, period)
                if run is not None and (
                    best is None or run.period * (run.layers - 2) > best.period * (best.layers - 2)
                ):
                    best = run
            if best is not None and best.period * best.layers > (stop - start) // 2:
                break
        if best is None:
            return []
        return [*self.runs(start, best.start), best, *self.runs(best.stop, stop)]

    def _periods(self, start: int, stop: int) -> list[int]:
        """Return the distances between equal operators, by falling frequency, then by length."""
        numbers = self.numbers[start:stop]
        order = np.argsort(numbers, kind="stable")
        ordered = numbers[order]
        distances: Counter[int] = Counter()
        # A layer may hold several equal operators, so more than the next equal one is compared.
        for apart in (1, 2, 3, 4, 6, 8):
            same = (
                ordered[apart:] == ordered[:-apart]
                if len(ordered) > apart
                else np.zeros(0, dtype=bool)
            )
            distances.update((order[apart:] - order[:-apart])[same].tolist())
        ranked = sorted(
            (period for period in distances if period >= SHORTEST),
            key=lambda period: (-distances[period], period),
        )
        return ranked[:PERIODS]

    def _stretches(self, start: int, stop: int, period: int) -> Iterator[tuple[int, int]]:
        """The maximal stretches of at least three periods that repeat their first period."""
        numbers = self.numbers[start:stop]
        if len(numbers) <= period:
            return
        same = np.concatenate(([False], numbers[period:] == numbers[:-period], [False])).astype(
            np.int8
        )
        edges = np.diff(same)
        for first, last in zip(
            np.flatnonzero(edges == 1).tolist(), np.flatnonzero(edges == -1).tolist(), strict=True
        ):
            if last - first >= 2 * period:
                yield start + first, start + last + period

    def _verified(self, start: int, stop: int, period: int) -> Run | None:
        """Return the longest run of equally connected layers in the stretch.

        It begins where few bytes are handed on.
        """
        offsets = sorted(
            range(period), key=lambda offset: (self.crossing[start + offset + period], offset)
        )
        # A run that begins elsewhere in the period has another layer boundary: one is enough.
        for offset in offsets[:3]:
            begin = start + offset
            layers = (stop - begin) // period
            # The last layers may hand on differently, as before a final norm.
            while layers >= 3 and not self._joined(begin, period, layers):
                layers -= 1
            if layers >= 3:
                return Run(start=begin, period=period, layers=layers)
        return None

    def _joined(self, start: int, period: int, layers: int) -> bool:
        """Whether the layers are connected alike, and hand their tensors only to the next layer."""
        stop = start + period * layers
        if not all(self._alike(index, period, start) for index in range(start + period, stop)):
            return False
        leaving = {
            *self.graph.outputs,
            *self.graph.updates.values(),
            *((self.graph.loss,) if self.graph.loss else ()),
        }
        for index in range(start + period, stop - period):
            op = self.graph.operators[index]
            before = self.graph.operators[index - period]
            limit = start + ((index - start) // period + 2) * period
            own = [
                name
                for name, other in zip(op.inputs, before.inputs, strict=True)
                if _is_own(self.graph, name, other)
            ]
            for name in (*op.outputs, *own):
                first = start + (index - start) // period * period
                if name in leaving or not all(
                    first <= reader < limit for reader in self.readers.get(name, ())
                ):
                    return False
        return True

    def _alike(self, index: int, period: int, start: int) -> bool:
        """Whether operator `index` is connected as the one a period before.

        The first layer may read the handed values from anywhere.
        """
        graph = self.graph
        first = index < start + 2 * period
        for name, other in zip(
            graph.operators[index].inputs, graph.operators[index - period].inputs, strict=True
        ):
            if name == other or _is_own(graph, name, other):
                continue
            at = self.producer.get(name)
            before = self.producer.get(other)
            # A value handed on comes from the same layer or from the one before.
            handed = at is not None and start <= at and index - at <= 2 * period
            alike = before is not None and at is not None and index - at == index - period - before
            if not handed or not (alike or (first and (before is None or before < start))):
                return False
        return True


def crossing_bytes(graph: Graph) -> Ints:
    """Bytes of the values made before operator i and read by it or later: array [operators + 1]."""
    last: dict[str, int] = {}
    for index, op in enumerate(graph.operators):
        for name in op.inputs:
            last[name] = index
    change = np.zeros(len(graph.operators) + 2, dtype=np.int64)
    for index, op in enumerate(graph.operators):
        for name in op.outputs:
            if name in last:
                change[index + 1] += graph.tensors[name].bytes
                change[last[name] + 1] -= graph.tensors[name].bytes
    return np.cumsum(change)[: len(graph.operators) + 1]
